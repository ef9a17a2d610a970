"""jaxscale: train neural networks at very large batch on HPC clusters.

    import jaxscale as jxs
    config = jxs.Config(model=jxs.models.MLP(), data=jxs.data.Digits(), ...)
    jxs.fit(config, "runs/digits")

The public names are those in `__init__.pyi`. They are imported on first access, so that
`--help` and errors in a config do not wait for the import of JAX.
"""

import importlib.util
import os
import sys

# The only place of the version: pyproject.toml reads it from here, and a source tree that is
# only on PYTHONPATH has no package metadata.
__version__ = "0.3.0"

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_is_command = sys.argv[:1] == ["-m"] and "jaxscale" in sys.orig_argv[-len(sys.argv)]
if _is_command and not sys.flags.safe_path:
  # `python -m jaxscale` puts the current directory first on the path, so that a random.py in
  # it, which anybody may have written, would be imported. Only a source tree stays, at the end.
  sys.path[:] = sys.path[1:] + [path for path in sys.path[:1] if path == _ROOT]

if sys.argv[:1] == ["-m"] and not importlib.util.find_spec("jax"):
  # A newcomer may run `python3 -m jaxscale` with a Python that lacks the packages.
  remedy = "run `make env`, and use .venv/bin/python"
  print(f"error: {sys.executable} lacks jaxscale's packages; {remedy}", file=sys.stderr)
  raise SystemExit(2)

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
