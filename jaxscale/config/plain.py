"""Conversion of settings to JSON, for config.json and for comparisons."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any, cast

from jaxscale.config.choice import Choice
from jaxscale.config.own_code import OwnCode, is_own, module_name, own_code, source_hash
from jaxscale.errors import ConfigError, invalid


def class_name(cls: type) -> str:
  """Return `Class` for a built-in class, `module:Class` for a user's class."""
  if not issubclass(cls, Choice) or cls.__module__.startswith("jaxscale."):
    return cls.__name__
  return f"{module_name(cls.__module__)}:{cls.__name__}"


def to_plain(node: Any) -> Any:
  """Return a settings tree as JSON, with the chosen alternative as "class".

  A value without a JSON form, such as a function, becomes "object" with its name and its
  contents or source hash; a config with such a value cannot be rebuilt from the JSON.

  Raises:
    ConfigError: a value has no JSON form and no `identity`.
  """
  return _Conversion().convert(node, "config")


def check_forms(config: Any) -> None:
  """Refuse values whose change a resumed run could not detect, without reading arrays.

  Raises:
    ConfigError: a value has no JSON form and no `identity`.
  """
  _Conversion(sums=False).convert(config, "config")


def code_of(config: Any) -> OwnCode:
  """Return the user's own code that a config uses."""
  conversion = _Conversion(sums=False)
  conversion.convert(config, "config")
  return own_code(conversion.own)


def shared_texts(config: Any) -> dict[str, str]:
  """Return the settings and the user's code of a config as texts, by name for errors."""
  texts = {"config": json.dumps(to_plain(config), sort_keys=True)}
  for key, code in code_of(config).hashes.items():
    name = f"own code in {key.partition(':')[0]}"
    texts[name] = f"{texts.get(name, '')} {key}={code}"
  return texts


class _Conversion:
  """Conversion of one settings tree to JSON.

  Attributes:
    own: the user's classes and functions in the tree.
  """

  def __init__(self, *, sums: bool = True):
    self.own: list[Any] = []
    self._sums = sums
    self._inside: list[int] = []  # Detects recursion: a function can be in its own closure.

  def convert(self, node: Any, where: str) -> Any:
    if node is None or isinstance(node, (bool, int, float, str)):
      return node.value if isinstance(node, enum.Enum) else node
    if isinstance(node, Path):
      return str(node)
    if id(node) in self._inside:
      return {"object": "recursive"}
    self._inside.append(id(node))
    try:
      return self._convert(node, where)
    finally:
      self._inside.pop()

  def _convert(self, node: Any, where: str) -> Any:
    kind: Any = type(node)
    self.own += [kind] * is_own(kind.__module__)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
      return {"class": class_name(kind)} | self._fields(node, where)
    if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
      return [self.convert(value, f"{where}[{i}]") for i, value in enumerate(node)]
    if isinstance(node, dict) and all(isinstance(key, str) for key in node):
      return {key: self.convert(v, f"{where}.{key}") for key, v in node.items()}
    if callable(node) and (plain := self._callable(node, where)):
      return plain
    numpy, value = sys.modules.get("numpy"), cast(Any, node)
    if numpy and isinstance(node, numpy.generic) and value.dtype.kind in "biuf":
      return value.item()
    if hasattr(node, "__array__") and hasattr(node, "dtype"):
      is_summed = self._sums or getattr(value.dtype, "hasobject", True)
      return checksum(node, where) if is_summed else None
    return {"object": _name(kind)} | self._contents(node, where)

  def _fields(self, node: Any, where: str) -> dict[str, Any]:
    """Return the fields of a dataclass without those hidden from `repr` (Flax's parent)."""
    if as_plain := getattr(node, "as_plain", None):
      values = as_plain()
    else:
      fields = [f for f in dataclasses.fields(node) if f.repr]
      values = {f.name: getattr(node, f.name) for f in fields}
    identity = values.get("identity") or getattr(node, "identity", None)
    plain = {}
    for name, value in values.items():
      try:
        plain[name] = self.convert(value, f"{where}.{name}")
      except ConfigError:
        if not isinstance(identity, str):
          raise
        plain[name] = {"object": _name(type(value)), "identity": identity}
    return plain

  def _contents(self, node: Any, where: str) -> dict[str, Any]:
    """Return the identity or contents of an object without a JSON form."""
    for name in ("identity", "_fingerprint"):  # `_fingerprint` is that of a `datasets.Dataset`.
      if isinstance(identity := getattr(node, name, None), str):
        return {name.strip("_"): identity}
    if isinstance(node, (list, tuple)):
      return {"values": self.convert(list(node), where)}
    if type(node) is object:  # a marker, which has no contents
      return {}
    if any(c.__module__.startswith("flax.nnx.") for c in type(node).__mro__):
      values = {n: v for n, v in vars(node).items() if not n.startswith("_")}
      return {"values": self.convert(values, where)}
    if isinstance(node, (set, frozenset)):
      values = self.convert(list(node), where)
      return {"values": sorted(values, key=lambda v: json.dumps(v, sort_keys=True))}
    if isinstance(node, dict):
      return {"values": self.convert([*node.items()], where)}
    if isinstance(node, (bytes, bytearray)):
      return {"sha256": hashlib.sha256(node).hexdigest()}
    if isinstance(node, enum.Enum):
      return {"value": node.name}
    if isinstance(node, functools.partial):
      return {"values": self.convert([node.func, node.args, node.keywords], where)}
    if isinstance(node, _BY_REPR) or _name(type(node)).startswith("numpy.dtype"):
      return {"value": repr(node)}
    problem = "has no JSON form, so a resumed run could not detect a change"
    fix = "give it, or the settings that hold it, an attribute `identity`, a text that "
    fix += "changes with it"
    raise invalid(where, node, f"({_name(type(node))}) {problem}", fix)

  def _callable(self, node: Any, where: str) -> dict[str, Any] | None:
    """Return name, source hash and bound values of a function, class or method."""
    if isinstance(identity := getattr(node, "identity", None), str):
      return {"object": _name(node), "identity": identity}
    if isinstance(node, functools.partial) or not hasattr(node, "__name__"):
      return None
    plain: dict[str, Any] = {"object": _name(node)}
    function = inspect.unwrap(getattr(node, "__func__", node))
    owner = getattr(node, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
      plain["self"] = self.convert(owner, f"{where}.__self__")
    if is_own(getattr(function, "__module__", None)):
      self.own.append(function)
      plain["source"] = source_hash(function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = map(_content, getattr(function, "__closure__", None) or ())
    bound: dict[str, Any] = dict(zip(names, cells, strict=False))
    for name in ("__defaults__", "__kwdefaults__"):
      if value := getattr(function, name, None):
        bound[name] = value
    bound = {n: self.convert(v, f"{where}.{n}") for n, v in bound.items()}
    return plain | ({"bound": bound} if bound else {})


# Types of the standard library whose `repr` shows the whole value.
_BY_REPR = complex, range, slice, datetime.date, datetime.time, datetime.timedelta
_BY_REPR += decimal.Decimal, fractions.Fraction, uuid.UUID, re.Pattern, type(...)


def _content(cell: Any) -> Any:
  try:
    return cell.cell_contents
  except ValueError:  # The variable is not bound yet.
    return None


def _name(value: Any) -> str:
  name = getattr(value, "__qualname__", None) or value.__name__
  return f"{module_name(str(getattr(value, '__module__', '')))}:{name}"


def checksum(values: Any, where: str) -> dict[str, Any]:
  """Return shape, dtype and SHA-256 of an array."""
  import numpy as np

  if str(values.dtype).startswith("key<"):  # JAX's random keys are no NumPy arrays.
    from jax import random

    values = random.key_data(values[...])
  array = np.ascontiguousarray(values)
  if array.dtype.hasobject:
    fix = "give numbers, or an attribute `identity`"
    raise invalid(where, ..., "is an array of objects, which has no checksum", fix)
  digest = hashlib.sha256(array.view(np.uint8).data).hexdigest()
  return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}
