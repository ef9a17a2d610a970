"""Names of packages that are imported on first use."""

import ast
import importlib

import pytest

from jaxscale import lazy
from support.paths import ROOT

STUBS = sorted((ROOT / "jaxscale").rglob("__init__.pyi"))


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.parent.name)
def test_no_name_is_that_of_its_module_and_each_is_found(stub):
  package = importlib.import_module(".".join(stub.parent.relative_to(ROOT).parts))
  imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
  for node in imports:
    for alias in node.names:
      assert node.module is None or alias.name != node.module.split(".")[0]
      value = getattr(package, alias.name)
      home = node.module or alias.name
      module = importlib.import_module(f"{package.__name__}.{home}")
      assert value is (getattr(module, alias.name) if node.module else module)
  assert package.__all__ == sorted(a.name for node in imports for a in node.names)


def test_other_names_are_an_attribute_error(tmp_path):
  (tmp_path / "__init__.pyi").write_text("from .a import b as b\n")
  find, names, listed = lazy.attach_stub("mine", str(tmp_path / "__init__.py"))
  assert names() == listed == ["b"]
  with pytest.raises(AttributeError, match="module 'mine' has no attribute 'c'"):
    find("c")
