"""Read, compare and write the config.json next to a file of parameters.

Names and shapes do not show the number of heads, rotary angles, epsilons, pooling or filters
without parameters, so parameters of a different model may fit silently. The fields of a
config.json are therefore compared with the model's settings in `hf_config` and `timm_config`.
"""

from __future__ import annotations

import os
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale import __version__
from jaxscale.errors import ConfigError
from jaxscale.files import read_json, require_json, write_json

_FILE = "jaxscale_file"  # the field with the name of the parameters' file
OURS = frozenset({_FILE, "jaxscale"})  # fields that only jaxscale writes


class Comparison(NamedTuple):
  """Result of a comparison; each entry is a clause of a message.

  Attributes:
    problems: the differences that show that the file holds a different model.
    notes: the differences that may change results, or fields that could not be compared.
  """

  problems: list[str]
  notes: list[str]


def read_config_json(path: Path) -> dict[str, Any] | None:
  """Read the fields of a config.json; None if the file does not exist.

  Raises:
    ConfigError: the file is not a JSON object.
  """
  if not path.exists():
    return None
  return require_json(path, {}, "copy it again, or remove it")


def compare(
  saved: Mapping[str, Any],
  model: Any,
  settings: Mapping[str, tuple[str, Any]],
  fixed: Mapping[str, tuple] = types.MappingProxyType({}),
) -> Iterator[str]:
  """Yield a clause for each field that makes a different model.

  Args:
    saved: the fields of the file; missing fields are not compared.
    model: the settings, for the name of their class.
    settings: the name and value of the setting for each field.
    fixed: the required values of fields that have no setting.
  """
  for field, (name, value) in settings.items():
    if field in saved and saved[field] != value:
      setting = f"{type(model).__name__}.{name}={saved[field]!r}"
      yield f"{field} is {saved[field]!r} in the file and {value!r} in the model, set {setting}"
  for field, values in fixed.items():
    if field in saved and saved[field] not in values:
      ours = " or ".join(map(repr, values))
      both = f"{field} is {saved[field]!r} in the file and {ours} in the model"
      yield f"{both}, which no setting changes"


def unknown(fields: Mapping[str, Any], known: Collection[str]) -> list[str]:
  """Return a note with the fields whose meaning is unknown, if there are any."""
  left = sorted(k for k, v in fields.items() if k not in known and v is not None)
  some = ", ".join(left[:5]) + f" and {len(left) - 5} more" * (len(left) > 5)
  return [f"not compared, as their meaning is unknown: {some}"] if left else []


def config_json_path(path: str | os.PathLike) -> Path:
  """Return the path of the config.json for a file that is to be written.

  Raises:
    ConfigError: a config.json of another file exists there.
  """
  where = Path(path).parent / "config.json"
  if not where.exists() or read_json(where).get(_FILE) == Path(path).name:
    return where
  problem = f"but {where} belongs to another file; write to a folder of its own"
  raise ConfigError(f"{path}: a config.json is written next to the file, {problem}")


def write_config_json(path: str | os.PathLike, fields: dict[str, Any]) -> None:
  """Write the config.json of a file, and replace an earlier one of the same file.

  Raises:
    ConfigError: as for `config_json_path`.
    OSError: the disk failed or is full.
  """
  ours = {_FILE: Path(path).name, "jaxscale": __version__}
  write_json(config_json_path(path), fields | ours)
