"""Config files as modules: run once for each of their contents."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from jaxscale.errors import ConfigError

# Modules of config files are called this, a digest, and the name of the file.
FILE_MODULE = "_jaxscale_config_"


def load_file(file: Path) -> ModuleType:
  """A Python file as a module, run once for each of its contents.

  Its classes are so the same however often it is loaded, and its annotations can be
  resolved. It can import modules from its folder.

  Raises:
    ConfigError: it is no Python file. What it raises itself is raised.
  """
  if file.suffix != ".py":
    raise ConfigError(f"{file}: not a Python file, give one that ends in .py")
  file = file.absolute()
  digest = hashlib.sha256(os.fsencode(file) + file.read_bytes()).hexdigest()
  name = f"{FILE_MODULE}{digest[:12]}_{file.stem}"
  if name not in sys.modules:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:  # at the end: it hides nothing installed
      sys.path.append(str(file.parent))
    try:
      spec.loader.exec_module(module)
    except BaseException:
      del sys.modules[name]
      raise
  return sys.modules[name]
