"""Names of a package that are imported on first use, as listed in its `__init__.pyi`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach_stub(
  package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
  """Return the `__getattr__`, `__dir__` and `__all__` of a package.

  A name must not be that of the module that defines it: importing the module would
  replace the name in the package.

  Args:
    package: name of the package, its `__name__`.
    file: path of its `__init__.py`, its `__file__`.

  Example:
    >>> import jaxscale.metrics
    >>> "MLflow" in dir(jaxscale.metrics)
    True
  """
  stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
  # Not by `ast.parse`, which no two threads may call at once; see metrics/tracking.py.
  homes = {name: home for home, name in re.findall(r"(?m)^from \.(\S*) import \w+ as (\w+)", stub)}
  names = sorted(homes)

  def find(name: str) -> Any:
    if name not in homes:
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    home = homes[name]
    module = import_module(f"{package}.{home or name}")
    value = getattr(module, name) if home else module
    setattr(sys.modules[package], name, value)  # The next access does not come here.
    return value

  return find, lambda: [*names], names
