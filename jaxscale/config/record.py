"""Conversion between a run's settings and the config.json in its workdir.

A built-in class is recorded by its name, a user's class as `module:Class` with its file,
of which the run keeps a copy in `code/`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.cluster.detect import detect
from jaxscale.config.bases import Data, Optimizer
from jaxscale.config.choice import Choice
from jaxscale.config.config import Config
from jaxscale.config.config_file import StopLoadingError, load_classes
from jaxscale.config.plain import class_name as class_name
from jaxscale.config.plain import code_of
from jaxscale.config.plain import to_plain as to_plain
from jaxscale.config.validation import alternatives, hints, item_type, nearest, settings_classes
from jaxscale.errors import ConfigError, printable
from jaxscale.files import mismatch, replacing, require_json
from jaxscale.owners import unsafe_owner

FORMAT = 2  # Of config.json; jaxscale 0.1 wrote format 1, whose settings had other names.
# Required contents of a config.json, in the form of `files.mismatch`.
RUN = {"config": {"model": {"class": str}}, "data": {"name": str}}
# Optional contents of "data".
_DATA = dict.fromkeys(("vocab_size", "num_classes", "sequence_length"), int)
_DATA |= {"mean": [float], "std": [float], "image_shape": ([int], None), "class_names": [str]}


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Return a tree of settings as a flat dict by dotted name.

  Example:
    >>> flat({"class": "Config", "model": {"class": "MLP"}})
    {'class': 'Config', 'model.class': 'MLP'}
  """
  result = {}
  for name, value in node.items():
    is_leaf = not isinstance(value, Mapping)
    result |= {prefix + name: value} if is_leaf else flat(value, f"{prefix}{name}.")
  return result


def copy_own_files(config: Config, workdir: Path) -> dict[str, dict[str, str]]:
  """Copy the files of the user's code of a config; return their paths by module."""
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


def from_plain(
  annotation: Any, node: Any, folder: Path | None = None, *, trust: bool = False
) -> Any:
  """Return the settings tree that JSON describes.

  Args:
    annotation: the type of the result: a settings class, a base, or a field's type.
    node: {"class": name, field: …} for a settings class, else the value.
    folder: the workdir of the run, with copies of the files of the user's classes; None for
      JSON that this program made itself.
    trust: whether to execute code of the run although others could have written it.

  Raises:
    ConfigError: a class or field does not exist, a value is invalid, or a class is code that
      others could have written.

  Example:
    >>> from jaxscale.config import SGD, Optimizer
    >>> from_plain(Optimizer, {"class": "SGD", "lr": 0.1}) == SGD(lr=0.1)
    True
  """
  if isinstance(node, dict) and ("object" in node or {"shape", "dtype"} <= node.keys()):
    if function := _own_function(node, folder, trust):
      return function
    if "source" in node:
      problem = "a function that is not at the top level of a file, which config.json cannot store"
      raise ConfigError(f"{node['object']}: {problem}; define it by def in the config file")
    raise _not_stored(node.get("object") or f"{node['dtype']}{node['shape']}")
  if isinstance(node, list):
    return [from_plain(item_type(annotation), item, folder, trust=trust) for item in node]
  if isinstance(node, dict) and "class" not in node:
    kind = item_type(annotation)
    return {name: from_plain(kind, v, folder, trust=trust) for name, v in node.items()}
  if not isinstance(node, dict):
    if isinstance(node, str) and Path in alternatives(annotation):
      return Path(node)
    return node
  fields, classes = dict(node), settings_classes(annotation)
  name = str(fields.pop("class"))
  cls = _own_class(name, folder, trust) if ":" in name else classes.get(name)
  if cls is None and ("function" in fields or not classes):  # `PythonLoss`, a module of Flax
    raise _not_stored(name)
  if cls is None:
    raise ConfigError(f"{name}: no such settings class, {nearest(name, classes)}")
  kinds = hints(cls)
  values = {k: from_plain(kinds.get(k, Any), v, folder, trust=trust) for k, v in fields.items()}
  for field in ("cache_dir", "uri"):
    # Files would be created, and metrics and MLflow's password be sent, where another user chose.
    if values.get(field) and folder and not trust and (others := unsafe_code(folder)):
      unused = f"{name}.{field}={values[field]} is not used, since {others}"
      print_note(f"{unused}; add --trust to use it")
      values[field] = None
  return cls(**values)


@functools.cache
def print_note(line: str) -> None:
  """Print a line once, in process 0 only."""
  with contextlib.suppress(ConfigError):  # The start of the run reports this error.
    if detect().process_id:
      return
  print(printable(f"note: {line}"), file=sys.stderr)


def _not_stored(what: str) -> ConfigError:
  problem = "an object from a notebook or script, which config.json cannot store"
  return ConfigError(f"{what}: {problem}; build the config there, or in a config file")


def _own_function(node: Mapping[str, Any], folder: Path | None, trust: bool) -> Any:
  """Load a user's function from the run's copy of its file; None if no copy has this function."""
  module, _, name = str(node.get("object")).partition(":")
  copies = folder / "code" if folder and "source" in node and name.isidentifier() else None
  if copies is None or not (copies / f"{module}.py").is_file():
    return None
  function = _own_code(f"{module}:{name}", folder, trust)
  return function if to_plain(function) == node else None


def _own_class(name: str, folder: Path | None, trust: bool) -> type:
  """Load a user's class from the run's copy of its file, else from its module."""
  owner = _own_code(name, folder, trust)
  # A tampered config.json must not make us call another function, e.g. os.system.
  if not (isinstance(owner, type) and issubclass(owner, Choice)):
    raise ConfigError(f"{name} is not a settings class; give the config file that defines it")
  return owner


def unsafe_code(workdir: Path) -> str | None:
  """Describe which other user could have written a run's settings or code; None if none.

  The settings select the code that is executed, and a file in `code/` can import all others
  and what Python has compiled of them.
  """
  folder = workdir / "code"
  files = [path for path in (workdir / "config.json", folder) if os.path.lexists(path)]
  try:
    for path in (*files, *folder.rglob("*")):
      is_folder = path.is_dir() and not path.is_symlink()
      if others := unsafe_owner(path, is_folder=is_folder):
        return others
  except OSError as e:
    return f"{e.filename or workdir}: {e.strerror}"
  return None


def _refuse_code(what: str, folder: Path | None, trust: bool) -> None:
  """Raise ConfigError if others could have written the code of a run that is not trusted."""
  if folder is not None and not trust and (others := unsafe_code(folder)):
    problem = f"code that is not executed, since {others}"
    fix = "add --trust (trust=True in Python) if you trust them, or give your own --config FILE"
    raise ConfigError(f"{what}, {problem}; {fix}")


def _own_code(name: str, folder: Path | None, trust: bool) -> Any:
  """Load a class or function from the run's copy of its file, else from its module."""
  _refuse_code(name, folder, trust)
  module, _, own = name.partition(":")
  copy = folder / "code" / f"{module}.py" if folder else None
  try:
    if not re.fullmatch(r"[\w.]+", module):
      raise ConfigError(f"{module} is not the name of a module")
    if copy is not None and copy.is_file():
      return getattr(load_classes(copy, own), own)
    return getattr(importlib.import_module(module), own)
  except (Exception, StopLoadingError) as e:
    if module == "__main__" and not (copy and copy.is_file()):
      raise _not_stored(name) from None
    problem = f"cannot be loaded from {copy or module} ({type(e).__name__}: {e})"
    remedy = "give the config file that defines it"
    raise ConfigError(f"{name}: {problem}; {remedy}") from None


class MissingData(Data):
  """Data that config.json cannot store, such as arrays of a notebook.

  Attributes:
    reason: the error of `build`.
  """

  reason: str

  def build(self) -> Any:
    """Refuse to build."""
    raise ConfigError(f"{self.reason}; give other data by --data PATH or --config.data")


class MissingOptimizer(Optimizer):
  """Optimizer that config.json cannot store, such as a function of a notebook.

  Attributes:
    reason: the error of `build`.
  """

  reason: str
  lr: float = 1.0

  def build(self, *context: Any) -> Any:
    """Refuse to build."""
    raise ConfigError(self.reason)


class Described(NamedTuple):
  """Contents of a run's config.json; `describe_run` reads it.

  Attributes:
    workdir: the workdir of the run.
    config: the settings as JSON.
    data: the description of images (`data.DatasetInfo`) or text (`data.TextInfo`) as JSON.
    code: the hashes of the user's own code by `module:name`.
    trust: whether `settings` executes code of the run although others could have written it.
  """

  workdir: Path
  config: dict[str, Any]
  data: dict[str, Any]
  code: dict[str, str]
  trust: bool = False

  @property
  def is_text(self) -> bool:
    """True if the run trains on text."""
    return "vocab_size" in self.data

  @property
  def num_classes(self) -> int | None:
    """Number of classes, or size of the vocabulary, without padding."""
    return self.data.get("vocab_size" if self.is_text else "num_classes")

  def settings(self, *, log: bool = False, partial: bool = False, **given: Any) -> Config:
    """Return the `Config`.

    Args:
      log: False uses the defaults of `log` and `callbacks`: the trained parameters no longer
        depend on them, and settings of logs change between versions.
      partial: True needs only what evaluates the model. `MissingData` and
        `MissingOptimizer` replace what config.json cannot store, the loss of the config that
        of `fit(..., loss_fn=...)`, and defaults the rest.
      given: settings that replace those of the file, by field.

    Raises:
      ConfigError: a version of jaxscale with other settings wrote the file, a class or value
        is not stored in it, or it needs code that others could have written.
    """
    unread, kinds, values = {"class", *given}, hints(Config), dict(given)
    unread |= set() if log else {"log", "callbacks"}
    try:
      if log and self.config.get("compiler_options"):  # They can name programs to run.
        _refuse_code("compiler_options", self.workdir, self.trust)
      for name in (n for n in self.config if n not in unread):
        node = self.config[name]
        if partial and mismatch(node, {"function": {}, "replaces": {}}) is None:
          node = node["replaces"]  # of `PythonLoss`, whose function is not stored
        try:
          kind = kinds.get(name, Any)
          values[name] = from_plain(kind, node, self.workdir, trust=self.trust)
        except ConfigError as e:
          if not partial or name in ("model", "loss", "metrics"):
            raise
          missing = {"data": MissingData, "optimizer": MissingOptimizer}.get(name)
          if missing is not None:
            reason = f"the run's {name} cannot be built again ({e})"
            values[name] = missing(reason=reason)
      return Config(**values)
    except ConfigError as e:
      raise ConfigError(f"{self.workdir}: its config.json has {e}") from None


def check_format(described: dict[str, Any], workdir: str | Path) -> None:
  """Refuse the config.json of an earlier version, whose settings had other names."""
  if described.get("format") != FORMAT:
    known = mismatch(described, {"versions": {"jaxscale": str}}) is None
    version = described["versions"]["jaxscale"] if known else "0.1"
    problem = f"config.json was written by jaxscale {version}, whose settings have other "
    problem += "names (CHANGELOG.md); use that version, or a new workdir"
    raise ConfigError(f"{workdir}: {problem}")


def describe_run(workdir: str | Path, *, trust: bool = False) -> Described:
  """Read the config.json of a run; data and devices are not accessed, and nothing is executed.

  Args:
    workdir: the workdir of the run.
    trust: whether `Described.settings` may execute code of the run that others could have
      written.

  Raises:
    ConfigError: the directory is not the workdir of a run.
  """
  path, remedy = Path(workdir) / "config.json", "give the directory of a run of "
  remedy += "jaxscale train"
  if not path.exists():
    raise ConfigError(f"{workdir}: no config.json there; {remedy}")
  described = require_json(path, {"config": {}, "data": {}}, remedy)
  check_format(described, workdir)
  there = {name: shape for name, shape in _DATA.items() if name in described["data"]}
  if problem := mismatch(described, RUN) or mismatch(described["data"], there, "data"):
    raise ConfigError(f"{path}: {problem}; {remedy}")
  identity = described.get("identity")
  code = {} if mismatch(identity, {"code": {str: str}}) else identity["code"]
  return Described(Path(workdir), described["config"], described["data"], code, trust)
