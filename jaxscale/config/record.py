"""A run's settings as JSON, and back: the config.json in its directory.

A built-in class is recorded by its name; a user's as `module:Class`, with the file that
it came from, of which the run keeps a copy in `code/`.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import importlib
import inspect
import json
import re
import shutil
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from jaxscale.config.choice import Choice
from jaxscale.config.config import Config
from jaxscale.config.files import load_file
from jaxscale.config.own_code import OwnCode, is_own, module_name, own_code, source_hash
from jaxscale.config.validation import (
  alternatives,
  hints,
  item_type,
  nearest,
  settings_classes,
)
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import mismatch, replacing, require_json, who_else_writes

FORMAT = 2  # of config.json; 1 was jaxscale 0.1's, which had other names
# What may not be missing in a config.json, as `files.mismatch` takes it.
RUN = {"config": {"model": {"class": str}}, "data": {"name": str}}
# What data may have there.
_DATA = dict.fromkeys(("vocab_size", "num_classes", "sequence_length"), int)
_DATA |= {"mean": [float], "std": [float], "image_shape": [int], "class_names": [str]}


def to_plain(node: Any) -> Any:
  """A settings tree as JSON; "class" tells which alternative was chosen.

  What JSON has no form for, such as a function, has "object", its name, and what tells
  two of them apart: such a config cannot be made again from the JSON.

  Raises:
    ConfigError: a value has no form, and no `identity`.
  """
  return _Conversion().convert(node, "config")


def check_forms(config: Config) -> None:
  """Refuse values whose change a resumed run could not recognize.

  Raises:
    ConfigError: as `to_plain`; arrays are not summed.
  """
  _Conversion(sums=False).convert(config, "config")


def code_of(config: Any) -> OwnCode:
  """Return the user's own code that a config uses."""
  conversion = _Conversion(sums=False)
  conversion.convert(config, "config")
  return own_code(conversion.own)


def shared_texts(config: Config) -> dict[str, str]:
  """Settings and own code of a config as texts, by what an error calls them."""
  texts = {"config": json.dumps(to_plain(config), sort_keys=True)}
  for key, code in code_of(config).hashes.items():
    name = f"own code {key.partition(':')[0]}"
    texts[name] = f"{texts.get(name, '')} {key}={code}"
  return texts


class _Conversion:
  """From settings to JSON.

  Attributes:
    own: the user's classes and functions on the way.
  """

  def __init__(self, *, sums: bool = True):
    self.own: list[Any] = []
    self._sums = sums
    self._inside: list[int] = []  # a function may be in its own closure

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
      return checksum(node, where) if self._sums else None
    return {"object": _name(kind)} | self._contents(node, where)

  def _fields(self, node: Any, where: str) -> dict[str, Any]:
    """The fields of a dataclass; a module of Flax hides its parent from `repr`."""
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
    """What tells two objects of a class without a form in JSON apart."""
    for name in ("identity", "_fingerprint"):  # the latter is a `datasets.Dataset`'s
      if isinstance(identity := getattr(node, name, None), str):
        return {name.strip("_"): identity}
    if isinstance(node, (list, tuple)):
      return {"values": self.convert(list(node), where)}
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
    raise invalid(
      where, node, f"({_name(type(node))}) has no form in JSON, so that a run could "
      "not tell whether it has changed when it resumes", "give it, or the settings "
      "that hold it, an attribute `identity`, a text that changes whenever it does"
    )  # fmt: skip

  def _callable(self, node: Any, where: str) -> dict[str, Any] | None:
    """A function, a class or a method: its name, source and what it has bound."""
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


# Values of the standard library that their `repr` tells apart.
_BY_REPR = (
  complex, range, slice, datetime.date, datetime.time, datetime.timedelta,
  decimal.Decimal, fractions.Fraction, uuid.UUID, re.Pattern, type(...),
)  # fmt: skip


def _content(cell: Any) -> Any:
  try:
    return cell.cell_contents
  except ValueError:  # not bound yet
    return None


def _name(value: Any) -> str:
  name = getattr(value, "__qualname__", None) or value.__name__
  return f"{module_name(str(getattr(value, '__module__', '')))}:{name}"


def checksum(values: Any, where: str) -> dict[str, Any]:
  """Shape, dtype and SHA-256 of an array."""
  import numpy as np

  try:
    array = np.ascontiguousarray(values)
  except TypeError:  # JAX's random keys
    array = np.array(None)
  if array.dtype.hasobject:
    fix = "give numbers, or an attribute `identity`"
    raise invalid(where, ..., "is an array of objects, which has no checksum", fix)
  digest = hashlib.sha256(array.view(np.uint8).data).hexdigest()
  return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """A tree of settings by dotted name.

  Example:
    >>> flat({"class": "Config", "model": {"class": "MLP"}})
    {'class': 'Config', 'model.class': 'MLP'}
  """
  found = {}
  for name, value in node.items():
    is_leaf = not isinstance(value, Mapping)
    found |= {prefix + name: value} if is_leaf else flat(value, f"{prefix}{name}.")
  return found


def class_name(cls: type) -> str:
  """`Class` of a built-in one, `module:Class` of a user's."""
  if not issubclass(cls, Choice) or cls.__module__.startswith("jaxscale."):
    return cls.__name__
  return f"{module_name(cls.__module__)}:{cls.__name__}"


def copy_own_files(config: Config, workdir: Path) -> dict[str, dict[str, str]]:
  """Copy the files of a config's own code; what config.json says, by module."""
  described = {}
  for module, file in code_of(config).files.items():
    is_package = file.name == "__init__.py"
    name = f"{module.replace('.', '/')}{'/__init__' * is_package}{file.suffix}"
    copy = workdir / "code" / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    if file.resolve() != copy.resolve():
      with open(file, "rb") as source, replacing(copy) as target:
        shutil.copyfileobj(source, target)
    described[module] = {"file": str(file), "copy": f"code/{name}"}
  return described


def from_plain(annotation: Any, node: Any, folder: Path | None = None) -> Any:
  """A settings tree from the JSON that describes it.

  Args:
    annotation: of what is described: a settings class, a base, or any type of a field.
    node: {"class": name, field: …} of a settings class; of others the value.
    folder: of the run, with copies of the files of a user's own classes.

  Raises:
    ConfigError: a class or field that there is not, or a value that cannot be.

  Example:
    >>> from jaxscale.config import SGD, Optimizer
    >>> from_plain(Optimizer, {"class": "SGD", "lr": 0.1}) == SGD(lr=0.1)
    True
  """
  if isinstance(node, dict) and "object" in node:
    why = "an object from a notebook, which a file cannot hold; make the config there "
    raise ConfigError(f"{node['object']}: {why}again")
  if isinstance(node, list):
    return [from_plain(item_type(annotation), item, folder) for item in node]
  if not isinstance(node, dict) or "class" not in node:
    if isinstance(node, str) and Path in alternatives(annotation):
      return Path(node)
    return node
  fields, classes = dict(node), settings_classes(annotation)
  name = str(fields.pop("class"))
  cls = _own_class(name, folder) if ":" in name else classes.get(name)
  if cls is None:
    raise ConfigError(f"{name}: there are no such settings, {nearest(name, classes)}")
  values = {k: from_plain(hints(cls).get(k, Any), v, folder) for k, v in fields.items()}
  return cls(**values)


def _own_class(name: str, folder: Path | None) -> type:
  """A user's class: from the run's copy of its file, or the module it is in."""
  module, _, cls = name.partition(":")
  copy = folder / "code" / f"{module}.py" if folder else None
  try:
    if not re.fullmatch(r"[\w.]+", module):
      raise ConfigError("not the name of a module")
    if copy is not None and copy.is_file():
      if others := who_else_writes(copy, group=False):
        raise ConfigError(others)
      found = getattr(load_file(copy), cls)
    else:
      found = getattr(importlib.import_module(module), cls)
    # Anything else would be called with what the file says: os.system, say.
    if not (isinstance(found, type) and issubclass(found, Choice)):
      raise ConfigError("no class of settings")
    return found
  except Exception as e:
    why = f"cannot be loaded from {copy or module} ({type(e).__name__}: {e})"
    remedy = "give the config file that has the class"
    raise ConfigError(f"{name}: {why}; {remedy}") from None


class Described(NamedTuple):
  """What the config.json of a run says; `describe_run` reads it.

  Attributes:
    workdir: of the run.
    config: its settings, as JSON.
    data: of its images (`data.DatasetInfo`) or its text (`data.TextInfo`), likewise.
  """

  workdir: Path
  config: dict[str, Any]
  data: dict[str, Any]

  @property
  def is_text(self) -> bool:
    """Whether the run is of text."""
    return "vocab_size" in self.data

  @property
  def num_classes(self) -> int | None:
    """Classes, or words of the vocabulary, without padding."""
    return self.data.get("vocab_size" if self.is_text else "num_classes")

  def settings(self) -> Config:
    """The config itself.

    Raises:
      ConfigError: it is of another version of jaxscale, which had other settings.
    """
    try:
      return from_plain(Config, self.config, self.workdir)
    except ConfigError as e:
      raise ConfigError(f"--workdir={self.workdir}: its config.json has {e}") from None


def check_format(described: dict[str, Any], workdir: str | Path) -> None:
  """Refuse the config.json of an earlier version, whose settings had other names."""
  if described.get("format") != FORMAT:
    known = mismatch(described, {"versions": {"jaxscale": str}}) is None
    version = described["versions"]["jaxscale"] if known else "0.1"
    why = f"config.json was written by jaxscale {version}, whose settings have other "
    why += "names (CHANGELOG.md); use that version, or a new --workdir"
    raise ConfigError(f"--workdir={workdir}: {why}")


def describe_run(workdir: str | Path) -> Described:
  """What a run was of, by its config.json; neither data nor devices are looked at.

  Raises:
    ConfigError: it is not a run's directory.
  """
  path, remedy = Path(workdir) / "config.json", "give the directory of a run of "
  remedy += "jaxscale train"
  if not path.exists():
    raise ConfigError(f"--workdir={workdir}: no config.json there; {remedy}")
  described = require_json(path, {"config": {}, "data": {}}, remedy)
  check_format(described, workdir)
  there = {name: shape for name, shape in _DATA.items() if name in described["data"]}
  if why := mismatch(described, RUN) or mismatch(described["data"], there, "data"):
    raise ConfigError(f"{path}: {why}; {remedy}")
  return Described(Path(workdir), described["config"], described["data"])
