"""Settings classes: frozen, keyword-only dataclasses that check their values.

An unknown name, a wrong type or a value out of bounds gives one line that says what to
write instead.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import math
import operator
import os
import re
import sys
import types
import typing
from typing import Any, Literal, dataclass_transform

from jaxscale.errors import ConfigError, hide_credentials, invalid
from jaxscale.files import expand

_SHOWN = 40  # Choices that one line lists; some settings have a thousand.


def closest(name: str, choices: typing.Iterable[str]) -> str | None:
  """Return the choice that is closest to a misspelt `name`, or None.

  Example:
    >>> closest("--batch-size", ["--batch-sizes", "--help"])
    '--batch-sizes'
    >>> closest("--drop", ["--batch-sizes", "--help"])
  """
  # Leading dashes would make all options look alike.
  plain = {choice.lstrip("-").lower(): choice for choice in choices}
  close = difflib.get_close_matches(name.lstrip("-").lower(), plain, n=1, cutoff=0.6)
  return plain[close[0]] if close else None


def nearest(name: str, choices: typing.Iterable[str]) -> str:
  """Return the hint of an error: the closest choice, or the list of choices."""
  choices = sorted(choices)
  if close := closest(name, choices):
    return f"did you mean {close!r}?"
  shown, more = choices[:_SHOWN], len(choices) - _SHOWN
  return f"give one of {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")


class UnsetError(ConfigError):
  """Error for a required field that is not set."""


@functools.cache
def hints(cls: type) -> dict[str, Any]:
  """Return the type of every field of a settings class."""
  types = typing.get_type_hints(cls)
  return {field.name: types[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def bounds(cls: type) -> dict[str, str]:
  """Return the bound of every field that has one, `Annotated[float, "> 0"]`.

  A class that changes the default of a field, and repeats only its type, keeps the bound
  of the class that it extends.
  """
  result = {}
  for c in reversed(cls.__mro__):
    for name, annotation in typing.get_type_hints(c, include_extras=True).items():
      if hasattr(annotation, "__metadata__"):
        result[name] = annotation.__metadata__[0]
  return result


def field_docs(cls: type) -> dict[str, str]:
  """Return the text of each entry under `Attributes:`, base classes included."""
  docs: dict[str, str] = {}
  for c in reversed(cls.__mro__):
    _, _, section = (c.__doc__ or "").partition("Attributes:")
    name = ""
    for line in inspect.cleandoc(section).splitlines() if section else []:
      if not line.startswith(" ") and ":" in line:
        name, _, text = line.partition(":")
        docs[name] = text.strip()
      elif name:
        docs[name] += " " + line.strip()
  return docs


_BOUND = re.compile(r"(>=|>|<=|<) (\S+)|in ([\[(])(\S+), (\S+)([\])])")
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def within(value: Any, bound: str) -> bool:
  """Return whether a number, or each number of a tuple, is finite and in a bound.

  Args:
    value: a number, a tuple of numbers, or None or a text, which is always in the bound.
    bound: the bound, e.g. ">= 1", "< 2.5" or "in [0, 1)".

  Raises:
    ConfigError: the bound is malformed.
  """
  if (m := _BOUND.fullmatch(bound)) is None:
    raise ConfigError(f"Annotated bound {bound!r}: write e.g. '>= 1' or 'in [0, 1)'")
  sign, number, opens, low, high, closes = m.groups()
  limits = [(">=" if opens == "[" else ">", low), ("<=" if closes == "]" else "<", high)]
  limits = [(sign, number)] if sign else limits
  values = value if isinstance(value, tuple) else (value,)
  numbers = [x for x in values if x is not None and not isinstance(x, str)]
  # `math.isfinite` overflows for an int that is larger than any float.
  is_finite = all(isinstance(x, int) or math.isfinite(x) for x in numbers)
  return is_finite and all(_COMPARE[s](x, float(n)) for x in numbers for s, n in limits)


def alternatives(annotation: Any) -> tuple[Any, ...]:
  """Return the members of a union, or the annotation itself."""
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    return typing.get_args(annotation)
  return (annotation,)


def item_type(annotation: Any) -> Any:
  """Return the item type of the tuple or dict among the alternatives; Any without one."""
  several = [a for a in alternatives(annotation) if typing.get_origin(a) in (tuple, dict)]
  return typing.get_args(several[0])[is_named(annotation)] if several else Any


def is_named(annotation: Any) -> bool:
  """Return whether a type is a dict by name, such as `dict[str, float]`."""
  return typing.get_origin(annotation) is dict


def is_plain(annotation: Any) -> bool:
  """Return whether a value may be a text as well as a number, as in `Config.compiler_options`."""
  return {str, float} <= {*alternatives(annotation)}


def settings_classes(annotation: Any) -> dict[str, Any]:
  """Return the settings classes among the alternatives, by name.

  A base class such as `Model` stands for its built-in classes.
  """
  classes: dict[str, Any] = {}
  for c in alternatives(annotation):
    if hasattr(c, "built_in"):
      classes |= c.built_in()
    elif dataclasses.is_dataclass(c):
      classes[c.__name__] = c  # pyright: ignore[reportAttributeAccessIssue]
  return classes


def type_name(annotation: Any) -> str:
  """Return a type as errors and the help show it."""
  if typing.get_origin(annotation) is Literal:
    return " | ".join(repr(v) for v in typing.get_args(annotation))
  if len(alternatives(annotation)) > 1:
    return " | ".join(type_name(a) for a in alternatives(annotation))
  if annotation is bool or annotation is type(None):
    return "True or False" if annotation is bool else "None"
  if hasattr(annotation, "built_in") and len(names := annotation.built_in()) > 1:
    own = f"a class of yours that extends {annotation.__name__}"
    return f"{' | '.join(names)}, or {own}"
  if is_named(annotation):
    return f"dict from names to {type_name(item_type(annotation))}"
  if typing.get_origin(annotation) is tuple:
    item = typing.get_args(annotation)[0]
    name = type_name(item)
    return f"tuple of ({name})" if len(alternatives(item)) > 1 else f"tuple of {name}"
  return getattr(annotation, "__name__", str(annotation))


def shown(value: Any) -> str:
  """Return a value as errors quote it: one line of at most 80 characters."""
  text = " ".join(repr(value).split())
  return text if len(text) <= 80 else f"{text[:77]}..."


def coerce(annotation: Any, value: Any) -> Any:
  """Return `value` as the annotated type, or raise `TypeError`."""
  for choice in alternatives(annotation):
    if choice is Any:
      return value
    origin, args = typing.get_origin(choice), typing.get_args(choice)
    if origin is Literal and any(value == a and type(value) is type(a) for a in args):
      return value
    if origin is tuple and isinstance(value, (tuple, list)):
      return tuple(coerce(args[0], v) for v in value)
    if origin is dict and isinstance(value, dict) and all(isinstance(k, str) for k in value):
      return {k: coerce(args[1], v) for k, v in value.items()}
    if origin is collections.abc.Callable and callable(value):
      return value
    if origin is None:
      if choice is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
      if choice is str and isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)  # A "~" without a "/" is a separator, not a home directory.
        return expand(text) if "/" in text else text
      wrap = getattr(choice, "wrap", None)
      if wrap is not None and (wrapped := wrap(value)) is not None:
        return wrapped
      if isinstance(value, choice) and not (choice in (int, float) and isinstance(value, bool)):
        return float(value) if choice is float else value  # pyright: ignore[reportArgumentType]
  # `tolist` converts numbers and arrays of NumPy and JAX exactly.
  plain = getattr(value, "tolist", lambda: value)()
  if type(plain) is type(value):
    raise TypeError
  return coerce(annotation, plain)


def no_such_field(cls: type, name: str) -> str:
  """Return the error text for the name of a field that does not exist."""
  own, value = cls.__name__, vars(cls).get(name)
  if isinstance(value, (bool, int, float, str, tuple)):
    kind = type(value).__name__
    return f"{own}.{name} has no type, write `{name}: {kind} = {value!r}` in the class"
  if known := hints(cls):
    return f"{own} has no field {name!r}, {nearest(name, known)}"
  return f"{own} has no fields, write e.g. `{name}: int = 3` in the class"


def _instance_hint(annotation: Any, value: Any) -> str:
  """Return the hint for a class, or the name of one, given instead of an object; or ""."""
  classes = settings_classes(annotation)
  name = closest(value, classes) if isinstance(value, str) else None
  # `apply` is a method of Linen modules.
  if isinstance(value, type) and (hasattr(value, "built_in") or hasattr(value, "apply")):
    return f"; give an instance, {value.__name__}()" * bool(classes)
  return f", did you mean {name}()?" if name and classes else ""


def _has_credentials(value: Any) -> bool:
  """Return whether a value, or an item of it, is an address with credentials."""
  items = value.values() if isinstance(value, dict) else value
  items = items if isinstance(value, (dict, tuple)) else (value,)
  return any(
    isinstance(x, str) and "://" in x.partition(" ")[0] and hide_credentials(x) != x for x in items
  )


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(cls: type) -> type:
  """Make a class a frozen, keyword-only dataclass that refuses unknown names and bad values."""
  if "__init__" in vars(cls):
    problem = "is not allowed in settings; write fields with types, as `width: int = 3`, "
    raise ConfigError(f"{cls.__name__}.__init__ {problem}and check them in __post_init__")
  repr_ = cls.__repr__ is object.__repr__
  cls = dataclasses.dataclass(frozen=True, kw_only=True, repr=repr_)(cls)
  init, owner = cls.__init__, cls.__name__

  def checked_init(self, *args, **values):
    if args:
      value, names = shown(args[0]), [f.name for f in dataclasses.fields(cls)]
      example = [f"fields are given by name, as in {owner}({n}={value})" for n in names]
      raise ConfigError(f"{owner}({value}): {[*example, 'it has no fields'][0]}")
    for name in values:
      if name not in hints(cls):
        hint = no_such_field(cls, name)
        raise ConfigError(f"{owner}.{name}={shown(values[name])}: {hint}")
    for field in dataclasses.fields(cls):
      name, annotation = field.name, hints(cls)[field.name]
      if name not in values:
        if field.default_factory is not dataclasses.MISSING:
          continue
        if field.default is dataclasses.MISSING:
          raise UnsetError(f"{owner}.{name} is not set: expected {type_name(annotation)}")
        values[name] = field.default
      try:
        values[name] = coerce(annotation, values[name])
      except TypeError:
        value, expected = shown(values[name]), type_name(annotation)
        expected += _instance_hint(annotation, values[name])
        raise ConfigError(f"{owner}.{name}={value}: expected {expected}") from None
      if _has_credentials(values[name]):
        problem = "contains a user, password or token, which config.json would record"
        fix = "give the address without it, and the credentials in the variables of the service"
        raise invalid(f"{owner}.{name}", ..., problem, fix)
      bound = bounds(cls).get(name)
      if bound is not None and not within(values[name], bound):
        finite = "finite " * (values[name] in (math.inf, -math.inf))
        raise ConfigError(f"{owner}.{name}={values[name]!r}: give a {finite}value {bound}")
    init(self, **values)

  cls.__init__ = checked_init
  return cls
