"""The examples in docstrings do what they say.

An example may use the names of its module and of its package, and those of `COMMON`.
One that needs a reader's own data or mesh ends in `# doctest: +SKIP`.
"""

import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import config
from support.paths import ROOT

COMMON = {"config": config, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
# Their examples compile whole models, which takes some 15 s; the tests of each do too.
COMPILING = {"jaxscale.models.cached", "jaxscale.models.stack", "jaxscale.run.generate"}


def modules_with_examples():
  for path in sorted((ROOT / "jaxscale").rglob("*.py")):
    if ">>> " in path.read_text():
      name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
      name = name.removesuffix(".__init__")
      marks = pytest.mark.slow if name in COMPILING else ()
      yield pytest.param(name, marks=marks, id=name.removeprefix("jaxscale."))


def public(module):
  """Return the names that a module's package exports."""
  package = importlib.import_module(module.__package__)
  return {name: getattr(package, name) for name in getattr(package, "__all__", ())}


@pytest.mark.parametrize("name", [*modules_with_examples()])
def test_examples_do_what_they_say(name, tmp_path, monkeypatch, capsys):
  module = importlib.import_module(name)
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  monkeypatch.chdir(tmp_path)
  names = COMMON | public(module) | vars(module)
  runner = doctest.DocTestRunner()
  for test in doctest.DocTestFinder().find(module, globs=names):
    runner.run(test)
  failed, _ = runner.summarize(verbose=False)
  assert not failed, capsys.readouterr().out
