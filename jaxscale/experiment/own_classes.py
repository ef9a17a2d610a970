"""Parts that settings build: by built-in classes, and by a user's own, whose faults are named.

A fault in code of the user's becomes one line with its file, line and class.
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


def build(settings: Any, *context: Any, kind: Any, wanted: str) -> Any:
  """Return `settings.build(*context)`.

  Args:
    settings: of a `Choice`, such as `Config.model`.
    context: the arguments of its `build`.
    kind: the type of what it must return, types, or a function that tells whether it fits.
    wanted: the type in words, for the error.

  Raises:
    ConfigError: by a built-in class itself; for any fault in a user's; or `build`
      returned something else.
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
    raise ConfigError(f"{name}.build: gave {gave}; return {wanted}")
  return part


def guarded(settings: Any, doing: str, function: Any) -> Any:
  """Return a function of a user's own class with its faults in one line (`user_errors`)."""
  if is_built_in(type(settings)):
    return function

  def call(*args: Any, **kwargs: Any) -> Any:
    with user_errors(settings, doing):
      return function(*args, **kwargs)

  return call


def guarded_parts(settings: Any, doing: str, parts: Any) -> Any:
  """Return a NamedTuple of functions with each `guarded`; "{}" in `doing` is its name."""
  functions = parts._asdict().items()
  return parts._replace(**{n: f and guarded(settings, doing.format(n), f) for n, f in functions})


@contextlib.contextmanager
def user_errors(settings: Any, doing: str) -> Generator[None, None, None]:
  """Turn any fault in a user's own class into one line with its place.

  Args:
    settings: the settings whose code runs.
    doing: what, as it follows the name of the class.

  Raises:
    ConfigError: that line. What a built-in class raises stays.
  """
  try:
    yield
  except Exception as e:
    if is_built_in(type(settings)):
      raise
    home = sys.modules.get(type(settings).__module__)
    file, frames = getattr(home, "__file__", None), traceback.walk_tb(e.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    code = getattr(type(settings).build, "__code__", None)
    if not lines and code is not None and code.co_filename == file:
      lines = [code.co_firstlineno]
    where = f"{file}:{lines[-1]}: " if lines else ""
    message = message_of(e) or f"in {traceback.extract_tb(e.__traceback__)[-1].name}()"
    what = message if isinstance(e, ConfigError) else f"{type(e).__name__}: {message}"
    raise ConfigError(f"{where}{type(settings).__name__}{doing}: {what}") from e
