"""Settings of a model from the config.json in a folder of Hugging Face or timm. Imports no JAX."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxscale.errors import ConfigError, invalid, remedy_for
from jaxscale.files import expand
from jaxscale.models import hf_config, settings, timm_config
from jaxscale.models.config_json import Comparison, read_config_json
from jaxscale.models.hf_config import check_llama, check_vit
from jaxscale.models.timm_config import check_timm, is_timm_config


def from_folder(path: str | os.PathLike) -> Any:
  """Return the settings of the model that a folder of pretrained weights describes.

  The result is a plain `Transformer`, `ViT` or `ResNet`, which config.json records, so that
  a run does not need the folder again for it. Number of classes and vocabulary size come
  from the data. Set `Config.init_from` to the folder to load its weights, too. Nothing is
  downloaded.

  Args:
    path: a folder with a config.json of Hugging Face (llama, mistral, qwen2, qwen3, vit) or
      timm (ResNets and ViTs).

  Raises:
    ConfigError: there is no config.json, it is damaged, or jaxscale has no such model.

  Example:
    >>> Path("/tmp/resnet").mkdir(exist_ok=True)
    >>> Path("/tmp/resnet/config.json").write_text('{"architecture": "resnet18"}') > 0
    True
    >>> from_folder("/tmp/resnet")
    ResNet(depth=18, bn_epsilon=1e-05)
  """
  folder = Path(expand(path))
  where = folder / "config.json"
  if (fields := read_config_json(where)) is None:
    problem = "has no config.json" if folder.is_dir() else "is not a folder"
    fix = remedy_for(path, "give a folder with the config.json of Hugging Face or timm")
    raise invalid(str(path), ..., problem, fix)
  is_timm = is_timm_config(fields) and "model_type" not in fields
  try:
    kind, values = (timm_config if is_timm else hf_config).settings_of(fields)
    model = getattr(settings, kind)(**values)
    problems = compare_settings(fields, model, None, (), new_head=True).problems
  except KeyError as e:
    raise invalid(str(where), ..., f"lacks {e}", "copy it again") from None
  except (TypeError, ValueError) as e:
    raise ConfigError(f"{where}: {e}") from None
  if problems:
    raise ConfigError(f"{where}: jaxscale has no such model: {'; '.join(problems)}")
  return model


def compare_settings(
  fields: Mapping[str, Any], model: Any, info: Any, names: Collection[str], new_head: bool
) -> Comparison:
  """Compare a config.json with the settings of a model; see `check_llama` and `check_timm`."""
  if hasattr(model, "rope_theta"):
    return check_llama(fields, model, info, names, new_head)
  if hasattr(model, "patch") and not is_timm_config(fields):
    return check_vit(fields, model)
  return check_timm(fields, model, info)
