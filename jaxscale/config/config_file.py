"""Import of config files as modules, once per content of a file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from jaxscale.errors import ConfigError

# The name of a config file's module is this prefix, a digest and the name of the file.
FILE_MODULE = "_jaxscale_config_"


_loads_classes = False  # True while a run's copy of a script is loaded for its classes


class StopLoadingError(BaseException):
  """Raised by `fit` and `submit` in a script that is loaded for its classes; ends the loading.

  It is no `Exception`, because a script may catch those of a run and go on with the next.
  """


def check_not_loading(does: str) -> None:
  """End the loading of a script for its classes; called before a script trains or submits.

  Args:
    does: what the script does, for the error, e.g. "trains".

  Raises:
    StopLoadingError: a script is being loaded for its classes.
  """
  if _loads_classes:
    raise StopLoadingError(f"{does} before it defines the class; define classes first")


def load_classes(file: Path, name: str) -> ModuleType:
  """Import a run's copy of a file for a class, as `load_file` does.

  A script without a `__main__` guard ends where it would train; errors below the class, such
  as those of its own command line, do not matter.
  """
  global _loads_classes
  before, _loads_classes = _loads_classes, True
  try:
    return load_file(file, needed=name)
  finally:
    _loads_classes = before  # The script can load another run.


def load_file(file: Path, needed: str = "") -> ModuleType:
  """Import a Python file as a module, once per content of the file.

  The classes of the module therefore stay the same however often it is loaded, and its
  annotations can be resolved. The file can import modules from its folder.

  Args:
    file: the file.
    needed: a name that the module must define; errors after its definition are ignored.

  Raises:
    ConfigError: the file is not a Python file. Errors of the file itself pass through.
  """
  if file.suffix != ".py":
    raise ConfigError(f"{file}: not a Python file, give one that ends in .py")
  named, file = file, file.absolute()
  digest = hashlib.sha256(os.fsencode(file) + file.read_bytes()).hexdigest()
  name = f"{FILE_MODULE}{digest[:12]}_{file.stem}"
  if name not in sys.modules:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:  # At the end, so that it hides no installed package.
      sys.path.append(str(file.parent))
    try:
      with running(named):
        spec.loader.exec_module(module)
    except BaseException as e:
      if not (isinstance(e, (Exception, StopLoadingError)) and hasattr(module, needed)):
        del sys.modules[name]
        raise
  return sys.modules[name]


@contextlib.contextmanager
def running(file: Path) -> Iterator[None]:
  """Run code of a config file, shielded from the command line and from `sys.exit`.

  Raises:
    ConfigError: the code calls `sys.exit`, or changes the working directory, to which
      relative paths of the command line refer.
  """
  argv, folder = sys.argv, os.stat(".")
  sys.argv = [str(file)]
  try:
    yield
  except SystemExit as e:
    names = {Path(f.filename).stem for f in traceback.extract_tb(e.__traceback__)}
    code = "" if e.code is None else repr(e.code)
    what = f"calls sys.exit({code}); remove it"
    if "argparse" in names:
      what = "parses a command line; use get_config(arg) instead, whose argument is ARG of "
      what += "--config FILE:ARG"
    raise ConfigError(f"{position(file, e)}: {what}") from e
  finally:
    sys.argv = argv
  if not os.path.samestat(folder, os.stat(".")):
    fix = "remove os.chdir, and build paths from Path(__file__).parent"
    raise ConfigError(f"{file}: changes the working directory to {os.getcwd()}; {fix}")


def position(file: Path, error: BaseException) -> str:
  """Return `FILE:LINE` of the line in a config file that raised an error."""
  frames = traceback.extract_tb(error.__traceback__)
  lines = [f.lineno for f in frames if Path(f.filename) == file.absolute()]
  return f"{file}:{lines[-1]}" if lines else str(file)
