"""Check that a file's parameters belong to the model that they are loaded into."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.files import json_objects
from jaxscale.models.config_json import Comparison, compare, read_config_json
from jaxscale.models.pretrained_folder import compare_settings
from jaxscale.models.timm_config import is_timm_config
from jaxscale.weights.safetensors import read_metadata

# Settings that change results but appear neither in names nor in shapes.
_UNSEEN = ("num_heads", "norm_eps", "bn_epsilon")
# Such settings that are changed on purpose, for longer texts.
_POSITIONS = ("rope_theta", "rope_factor", "rope_low", "rope_high", "rope_length")
_HIDDEN = "numbers of heads, rotary positions, pooling, anti-aliasing and epsilons"
_UNKNOWN = "no config.json next to the file describes its model; names and shapes do not show "
_UNKNOWN += f"{_HIDDEN}, so compare these yourself"


def check_source(
  path: str | os.PathLike,
  naming: str,
  names: Collection[str],
  model: Any,
  info: Any,
  *,
  init_head: bool = False,
) -> list[str]:
  """Compare a model's settings with the description in and next to a file.

  `jaxscale export` writes the model's settings into the file; other files have a config.json
  next to them.

  Args:
    path: the path of the file, or of its folder.
    naming: the naming of the file.
    names: the names of all arrays in the file.
    model: the settings; those of `config.Transformer`, `config.ViT` and `config.ResNet` are
      compared.
    info: the fields of the data's `data.TextInfo` or `data.DatasetInfo`.
    init_head: True if the classifier in the file is not used.

  Returns:
    Notes for the user: what could not be compared.

  Raises:
    ConfigError: the description cannot be read, or belongs to a different model. The message
      has each field, both values and, if there is one, the setting to change.
  """
  where = Path(path)
  where = (where if where.is_dir() else where.parent) / "config.json"
  says = naming in ("timm", "huggingface")
  fields = read_config_json(where) if says else None
  if naming == "timm" and fields is not None and not is_timm_config(fields):
    fields = None  # the config.json of a run
  if fields is None:
    written = read_metadata(where := Path(path)).get("model", "")  # by `jaxscale export`
    if (own := next(iter(json_objects([written])), None)) is None:
      return [] if naming == "jaxscale" else [f"{path}: {_UNKNOWN}"]
    problems = _own_differences(own, model, _UNSEEN)
    outcome = Comparison(problems, _own_differences(own, model, _POSITIONS))
  else:
    try:
      outcome = compare_settings(fields, model, info, names, init_head)
    except (TypeError, ValueError) as e:  # For example, a number is text.
      problem = f"a field has an unexpected type ({e})"
      raise ConfigError(f"{where}: {problem}; copy the file again, or remove it") from None
  if outcome.problems:
    raise ConfigError(f"{where}: belongs to a different model: {'; '.join(outcome.problems)}")
  return [f"{where}: {note}" for note in outcome.notes]


def _own_differences(saved: dict[str, Any], model: Any, fields: Collection[str]) -> list[str]:
  if saved.get("class") != type(model).__name__:
    return []
  settings = {x: (x, getattr(model, x)) for x in fields if hasattr(model, x)}
  return [*compare(saved, model, settings)]
