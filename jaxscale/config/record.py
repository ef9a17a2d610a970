"""A run's settings as JSON, and back: the config.json in its directory.

A built-in class is recorded by its name; a user's as `module:Class`, with the file that
it came from, of which the run keeps a copy in `code/`.
"""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config.choice import Choice
from jaxscale.config.config import Config
from jaxscale.config.config_file import load_file
from jaxscale.config.plain import class_name as class_name
from jaxscale.config.plain import code_of
from jaxscale.config.plain import to_plain as to_plain
from jaxscale.config.validation import alternatives, hints, item_type, nearest, settings_classes
from jaxscale.errors import ConfigError
from jaxscale.files import mismatch, replacing, require_json, who_else_writes

FORMAT = 2  # of config.json; 1 was jaxscale 0.1's, which had other names
# What may not be missing in a config.json, as `files.mismatch` takes it.
RUN = {"config": {"model": {"class": str}}, "data": {"name": str}}
# What data may have there.
_DATA = dict.fromkeys(("vocab_size", "num_classes", "sequence_length"), int)
_DATA |= {"mean": [float], "std": [float], "image_shape": [int], "class_names": [str]}


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
    """Return the config itself, with the default of `log`.

    What a run logs changes nothing that it made, and other versions log other things.

    Raises:
      ConfigError: it is of another version of jaxscale, which had other settings.
    """
    try:
      plain = {name: value for name, value in self.config.items() if name != "log"}
      return from_plain(Config, plain, self.workdir)
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
