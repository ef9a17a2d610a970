"""Settings that can be one of several classes, built-in or defined by the user.

A field of `Config` that is annotated with a base (`model: Model`) takes any class that
extends the base. Built-in classes are in `settings.py` of the package that they build;
a user's classes are in a config file or a notebook and are treated alike.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from jaxscale.config.validation import settings
from jaxscale.errors import ConfigError

# The package with the built-in alternatives of each base. It is given by name, because
# config is imported before the packages that it configures, and without JAX.
_HOMES = """Model:models Data:data Optimizer:optim Schedule:optim Exchange:exchange
  Sync:exchange Loss:training Metric:training Tracker:metrics Callback:run
  Growth:run Parametrization:optim"""
_PAIRS = (pair.split(":") for pair in _HOMES.split())
HOMES = {base: f"jaxscale.{package}.settings" for base, package in _PAIRS}


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Choice:
  """Settings with a `build` method; subclasses are frozen dataclasses."""

  # A slot is not in vars(self), which holds only fields. `set_explicitly` has the names of
  # the fields that were given when the object was made, even if equal to the default.
  __slots__ = ("set_explicitly",)
  if TYPE_CHECKING:  # At run time the annotation would make it a field.
    set_explicitly: tuple[str, ...]

  not_shared: ClassVar[tuple[str, ...]] = ()  # Fields whose meaning differs in other classes.

  def __init_subclass__(cls) -> None:
    super().__init_subclass__()
    settings(cls)

  def __new__(cls, *args: Any, **values: Any):
    """Record the names of the fields that are given."""
    self = super().__new__(cls)
    caller = sys._getframe(1)
    if caller.f_globals.get("__name__") == "dataclasses":  # replace() passes all fields.
      old = next(iter(caller.f_locals.values()))
      changed = {n for n, v in values.items() if v is not getattr(old, n, v)}
      values = {n: values[n] for n in values if n in {*old.set_explicitly, *changed}}
    object.__setattr__(self, "set_explicitly", tuple(values))
    return self

  def __reduce__(self):  # Copies and pickles keep `set_explicitly`.
    return functools.partial(type(self), **self._explicit_values()), ()

  def __repr__(self) -> str:
    values = self._explicit_values().items()  # A function's own form has its address in memory.
    values = (f"{n}={getattr(v, '__qualname__', None) or repr(v)}" for n, v in values)
    return f"{type(self).__name__}({', '.join(values)})"

  def _explicit_values(self) -> dict[str, Any]:
    return {name: getattr(self, name) for name in self.set_explicitly}

  def build(self, *context: Any) -> Any:
    """Build the object that the settings describe; each base documents its arguments."""
    raise ConfigError(f"{type(self).__name__}: has no build(); define it")

  @classmethod
  def built_in(cls) -> dict[str, type]:
    """Return the built-in alternatives of a base, by name; of another class itself."""
    if Choice not in cls.__bases__ or cls.__name__ not in HOMES:
      return {cls.__name__: cls}
    home = importlib.import_module(HOMES[cls.__name__])
    members = {name: getattr(home, name) for name in home.__all__}
    return {name: c for name, c in members.items() if issubclass(c, cls)}


def chosen(node: Any) -> Iterator[Choice]:
  """Yield every choice in a tree of settings, also from tuples."""
  if isinstance(node, Choice):
    yield node
  inner = node if isinstance(node, tuple) else ()
  inner = node.values() if isinstance(node, dict) else inner
  if dataclasses.is_dataclass(node):
    inner = [getattr(node, field.name) for field in dataclasses.fields(node)]
  for value in inner:
    yield from chosen(value)


def own_choices(namespace: dict[str, Any]) -> dict[str, type]:
  """Return the settings classes of a config file's namespace that are not built in."""
  classes = {name: c for name, c in namespace.items() if isinstance(c, type)}
  return {n: c for n, c in classes.items() if issubclass(c, Choice) and not is_built_in(c)}


def is_built_in(kind: type) -> bool:
  """Return whether a settings class is part of jaxscale, and holds no code of the user."""
  return kind.__module__.startswith("jaxscale.") and not getattr(kind, "holds_user_code", False)
