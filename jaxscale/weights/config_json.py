"""The config.json next to a file of parameters: how it is read, compared and written.

Names and shapes do not distinguish numbers of heads, rotary angles, epsilons, poolings
or filters without parameters: parameters of another network may fit silently. What a
config.json says of them is compared with our settings, field by field, in `hf_config`
and `timm_config`.
"""

from __future__ import annotations

import os
import types
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.files import read_json, require_json, write_json

_FILE = "jaxscale_file"  # in those that we write: name of the file of parameters
OURS = frozenset({_FILE, "jaxscale"})  # fields that only we write


class Comparison(NamedTuple):
  """What a comparison found, each a clause of a line.

  Attributes:
    problems: why it is another network.
    notes: what may make it one, as far as is known here.
  """

  problems: list[str]
  notes: list[str]


def read_config_json(path: Path) -> dict[str, Any] | None:
  """Its fields; None: there is none.

  Raises:
    ConfigError: it is no JSON object.
  """
  if not path.exists():
    return None
  return require_json(path, {}, "copy it again, or remove it")


def compare(
  there: Mapping[str, Any],
  model: Any,
  settings: Mapping[str, tuple[str, Any]],
  fixed: Mapping[str, tuple] = types.MappingProxyType({}),
) -> Iterator[str]:
  """Yield a clause for each field that makes another network.

  Args:
    there: fields of a file; what is missing is not compared.
    model: settings, for the name of their class.
    settings: name and value of the setting of ours that a field is.
    fixed: for fields that no setting changes, the values with which a network is ours.
  """
  for field, (name, value) in settings.items():
    if field in there and there[field] != value:
      setting = f"{type(model).__name__}.{name}={there[field]!r}"
      yield f"{field} is {there[field]!r} there and {value!r} here, set {setting}"
  for field, values in fixed.items():
    if field in there and there[field] not in values:
      ours = " or ".join(map(repr, values))
      both = f"{field} is {there[field]!r} there and {ours} here"
      yield f"{both}, which no setting changes"


def unknown(found: Mapping[str, Any], known: Collection[str]) -> list[str]:
  """A note with the fields whose meaning is not known, if there are any."""
  left = sorted(k for k, v in found.items() if k not in known and v is not None)
  some = ", ".join(left[:5]) + f" and {len(left) - 5} more" * (len(left) > 5)
  return [f"not compared, as their meaning is not known: {some}"] if left else []


def config_json_path(path: str | os.PathLike) -> Path:
  """Where the config.json of a file that is to be written goes.

  Raises:
    ConfigError: there is one of another file: a run's, or another model's.
  """
  where = Path(path).parent / "config.json"
  if not where.exists() or read_json(where).get(_FILE) == Path(path).name:
    return where
  why = f"and {where} is of another file; give a file in a folder of its own"
  raise ConfigError(f"{path}: a config.json is written next to it, {why}")


def write_config_json(path: str | os.PathLike, fields: dict[str, Any]) -> None:
  """Write the config.json of a file; an earlier one of the same file is replaced.

  Raises:
    ConfigError: as `config_json_path`.
    OSError: the disk failed or is full.
  """
  ours = {_FILE: Path(path).name, "jaxscale": metadata.version("jaxscale")}
  write_json(config_json_path(path), fields | ours)
