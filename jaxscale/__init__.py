"""jaxscale: train neural networks at very large batch on HPC clusters.

    import jaxscale as jxs
    config = jxs.Config(model=jxs.models.MLP(), data=jxs.data.Digits(), ...)
    jxs.fit(config, "runs/digits")

The names of `__init__.pyi` are the public ones. Each is imported when it is first asked
for, so that `--help`, or a typo in a config, is answered without waiting for JAX.
"""

import contextlib
import os
import sys

if sys.argv[:1] == ["-m"] and "jaxscale" in sys.orig_argv[-len(sys.argv)]:
  # The current directory is first on the path of `python -m jaxscale`: a random.py in
  # it would be imported in place of Python's. At the end it hides nothing.
  if not sys.flags.safe_path:
    del sys.path[0]
  with contextlib.suppress(OSError):  # it was deleted
    sys.path.append(os.getcwd())

try:
  import lazy_loader
except ModuleNotFoundError:
  if sys.argv[:1] != ["-m"]:
    raise
  # A newcomer's `python3 -m jaxscale` with a Python that has none of the packages.
  remedy = "run `make env`, and use .venv/bin/python"
  print(f"error: {sys.executable} lacks jaxscale's packages; {remedy}", file=sys.stderr)
  raise SystemExit(2) from None

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
