"""Settings that can be one of several classes, a user's own among them.

A field of `Config` that is annotated with a base (`model: Model`) takes any class that
extends it. The built-in ones stand in `settings.py` of the package that they build;
a user's stand in a config file or a notebook, and nothing tells them apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from jaxscale.config.validation import settings
from jaxscale.errors import ConfigError, message_of

# Where the built-in alternatives of each base are. By name: config is imported before
# what it configures, and without JAX.
_HOMES = """Model:models Data:data Optimizer:optim Schedule:optim Exchange:exchange
  Sync:exchange Loss:training Tracker:metrics"""
_PAIRS = (pair.split(":") for pair in _HOMES.split())
HOMES = {base: f"jaxscale.{package}.settings" for base, package in _PAIRS}


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Choice:
  """A class of settings with a `build`; subclasses are frozen dataclasses."""

  # Not in vars(self), which are fields. `set_explicitly`: names of the fields that
  # were given when the object was made, which are not always other than the default.
  __slots__ = ("set_explicitly",)
  if TYPE_CHECKING:  # else it were a field's annotation
    set_explicitly: tuple[str, ...]

  not_shared: ClassVar[tuple[str, ...]] = ()  # fields with another meaning elsewhere

  def __init_subclass__(cls) -> None:
    super().__init_subclass__()
    settings(cls)

  def __new__(cls, *args: Any, **values: Any):
    """Remember which fields are set."""
    self = super().__new__(cls)
    caller = sys._getframe(1)
    if caller.f_globals.get("__name__") == "dataclasses":  # replace() gives all fields
      old = next(iter(caller.f_locals.values()))
      changed = {n for n, v in values.items() if v is not getattr(old, n, v)}
      values = {n: values[n] for n in values if n in {*old.set_explicitly, *changed}}
    object.__setattr__(self, "set_explicitly", tuple(values))
    return self

  def __reduce__(self):  # copies and pickles know what was set, too
    return functools.partial(type(self), **self._explicit_values()), ()

  def __repr__(self) -> str:
    values = (f"{n}={v!r}" for n, v in self._explicit_values().items())
    return f"{type(self).__name__}({', '.join(values)})"

  def _explicit_values(self) -> dict[str, Any]:
    return {name: getattr(self, name) for name in self.set_explicitly}

  def build(self, *context: Any) -> Any:
    """What the settings stand for; each base says what it is given and returns."""
    raise ConfigError(f"{type(self).__name__}: has no build(), define one")

  @classmethod
  def built_in(cls) -> dict[str, type]:
    """The package's own alternatives, where `cls` is a base."""
    if Choice not in cls.__bases__ or cls.__name__ not in HOMES:
      return {cls.__name__: cls}
    home = importlib.import_module(HOMES[cls.__name__])
    members = {name: getattr(home, name) for name in home.__all__}
    return {name: c for name, c in members.items() if issubclass(c, cls)}


def chosen(node: Any) -> Iterator[Choice]:
  """Every choice in a tree of settings, those in tuples included."""
  if isinstance(node, Choice):
    yield node
  inner = node if isinstance(node, tuple) else ()
  if dataclasses.is_dataclass(node):
    inner = [getattr(node, field.name) for field in dataclasses.fields(node)]
  for value in inner:
    yield from chosen(value)


def own_choices(namespace: dict[str, Any]) -> dict[str, type]:
  """The settings classes of a config file's namespace that are not built in."""
  classes = {name: c for name, c in namespace.items() if isinstance(c, type)}
  return {n: c for n, c in classes.items() if issubclass(c, Choice) and not is_built_in(c)}


def is_built_in(kind: type) -> bool:
  """Whether a settings class is of the package."""
  return kind.__module__.startswith("jaxscale.")


def build(chosen: Any, *context: Any) -> Any:
  """`chosen.build(*context)`; a fault in a user's own is one line with its place.

  Raises:
    ConfigError: by a built-in class itself, or for any fault in a user's.
  """
  with faults_of(chosen, ".build"):
    try:
      inspect.signature(chosen.build).bind(*context)
    except TypeError as e:
      base = next(c for c in type(chosen).__mro__ if Choice in c.__bases__)
      found = re.search(r"`build\((.*?)\)`", base.__doc__ or "")
      names = f"self, {found[1]}".removesuffix(", ") if found else "self, *context"
      raise ConfigError(f"{e}; write def build({names})") from None
    return chosen.build(*context)


def guarded(chosen: Any, doing: str, function: Any) -> Any:
  """A function of a user's own class, whose faults become one line (`faults_of`)."""
  if is_built_in(type(chosen)):
    return function

  def call(*args: Any, **kwargs: Any) -> Any:
    with faults_of(chosen, doing):
      return function(*args, **kwargs)

  return call


@contextlib.contextmanager
def faults_of(chosen: Any, doing: str) -> Iterator[None]:
  """Any fault in a user's own class becomes one line with its place.

  Args:
    chosen: the settings whose code runs.
    doing: what, as it follows the name of the class.

  Raises:
    ConfigError: that line. What a built-in class raises stays.
  """
  try:
    yield
  except Exception as e:
    if is_built_in(type(chosen)):
      raise
    home = sys.modules.get(type(chosen).__module__)
    file, frames = getattr(home, "__file__", None), traceback.walk_tb(e.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    code = getattr(type(chosen).build, "__code__", None)
    if not lines and code is not None and code.co_filename == file:
      lines = [code.co_firstlineno]
    where = f"{file}:{lines[-1]}: " if lines else ""
    message = message_of(e) or f"in {traceback.extract_tb(e.__traceback__)[-1].name}()"
    what = message if isinstance(e, ConfigError) else f"{type(e).__name__}: {message}"
    raise ConfigError(f"{where}{type(chosen).__name__}{doing}: {what}") from e


def wrong_product(chosen: Any, made: Any, wanted: str) -> ConfigError:
  """The error of a `build` that returned something else than its base says."""
  name, kind = type(chosen).__name__, type(made).__name__
  return ConfigError(f"{name}.build: gave {kind}; return {wanted}")
