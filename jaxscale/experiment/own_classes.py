"""Build parts from settings classes, and report errors in users' classes in one line.

The line contains the file, line and class of the user's code.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import traceback
from collections.abc import Generator
from typing import Any

from jaxscale.config.choice import Choice, is_built_in
from jaxscale.errors import ConfigError, message_of


def build(settings: Any, *context: Any, kind: Any, expected: str) -> Any:
  """Return `settings.build(*context)`.

  Args:
    settings: settings of a `Choice`, such as `Config.model`.
    context: the arguments of `build`.
    kind: the required type or types of the result, or a function that checks it.
    expected: description of the required type, for the error.

  Raises:
    ConfigError: raised by a built-in class, or for any exception in a user's class; or
      `build` returned something else.
  """
  with user_errors(settings, ".build"):
    try:
      inspect.signature(settings.build).bind(*context)
    except TypeError as e:
      base = next(c for c in type(settings).__mro__ if Choice in c.__bases__)
      documented = re.search(r"`build\((.*?)\)`", base.__doc__ or "")
      names = f"self, {documented[1]}".removesuffix(", ") if documented else "self, *context"
      raise ConfigError(f"{e}; write def build({names})") from None
    part = settings.build(*context)
  if not (isinstance(part, kind) if isinstance(kind, type | tuple) else kind(part)):
    name, gave = type(settings).__name__, type(part).__name__
    raise ConfigError(f"{name}.build returned {gave}; return {expected}")
  return part


def guarded(settings: Any, doing: str, function: Any) -> Any:
  """Wrap a function of a user's class to report its errors in one line (`user_errors`)."""
  if is_built_in(type(settings)):
    return function

  def call(*args: Any, **kwargs: Any) -> Any:
    with user_errors(settings, doing):
      return function(*args, **kwargs)

  return call


def guarded_parts(settings: Any, doing: str, parts: Any) -> Any:
  """Apply `guarded` to each function in nested NamedTuples; "{}" in `doing` is its name."""

  def part(name: str, function: Any) -> Any:
    if isinstance(function, tuple):
      return guarded_parts(settings, doing, function)
    return function and guarded(settings, doing.format(name), function)

  return parts._replace(**{name: part(name, x) for name, x in parts._asdict().items()})


@contextlib.contextmanager
def user_errors(settings: Any, doing: str) -> Generator[None, None, None]:
  """Turn an exception in a user's class into a ConfigError with file and line.

  Args:
    settings: the settings whose code runs.
    doing: description of the code, which follows the name of the class in the error.

  Raises:
    ConfigError: the one-line error. Exceptions of built-in classes are not changed.
  """
  try:
    yield
  except Exception as e:
    if is_built_in(type(settings)):
      raise
    module, frames = type(settings).__module__, traceback.walk_tb(e.__traceback__)
    home = None if module.startswith("jaxscale.") else sys.modules.get(module)
    code = getattr(settings, "user_code", None)
    file = code.co_filename if code else getattr(home, "__file__", None)
    code = code or getattr(getattr(type(settings), "build", None), "__code__", None)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    if not lines and code is not None and code.co_filename == file:
      lines = [code.co_firstlineno]
    where = f"{file}:{lines[-1]}: " if lines else ""
    message = message_of(e) or f"in {traceback.extract_tb(e.__traceback__)[-1].name}()"
    what = message if isinstance(e, ConfigError) else f"{type(e).__name__}: {message}"
    raise ConfigError(f"{where}{type(settings).__name__}{doing}: {what}") from e
