"""The config.json next to a file of parameters: compared with our settings; written.

Shapes do not distinguish numbers of heads, rotary angles and epsilons: parameters of
another model may fit silently. Folders of Hugging Face and timm have such values in a
config.json; where their meaning is certain, they are compared with the settings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.metrics import write_json

# `model_type`s of transformers whose layers are ours, with the defaults of fields
# that are missing (transformers 5.23.0, models/*/configuration_*.py).
_KINDS = {
  kind: {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
  for kind in ("llama", "mistral", "qwen2", "qwen3")
}
_KINDS["qwen3"]["head_dim"] = 128
# timm's plain ViTs: (width, heads); its timm/models/vision_transformer.py.
_VITS = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}
_VIT = re.compile(r"(?:vit|deit)_(tiny|small|base|large)_patch\d+_\d+")
_FILE = "jaxscale_file"  # in those that we write: name of the file of parameters


def check_hf_config(
  path: str | os.PathLike,
  naming: str,
  names: Collection[str],
  model: Any,
  *,
  sequence_length: int | None = None,
  num_classes: int | None = None,
  init_head: bool = False,
) -> None:
  """Compare the config.json next to a file, if there is one, with a model's settings.

  Args:
    path: of the file, or of its folder.
    naming: of the file.
    names: of all arrays in it.
    model: settings with the fields of `config.Transformer` or `config.ViT`; others
      are compared by `num_classes` alone.
    sequence_length: of the data, where they are text.
    num_classes: of the data.
    init_head: the classifier in the file is not used.

  Raises:
    ConfigError: it is unreadable, or describes another model; one line has each
      field, both values and the setting to change.
  """
  folder = Path(path) if Path(path).is_dir() else Path(path).parent
  where, problems = folder / "config.json", []
  if naming == "huggingface" and hasattr(model, "rope_theta"):
    found = _read(where)
    problems = [*_llama_differences(found, model), *_unsupported(found)]
    window = found.get("sliding_window", 0)
    # Qwen's files have a window even where it is not used.
    is_qwen = str(found.get("model_type")).startswith("qwen")
    slides = window and found.get("use_sliding_window", not is_qwen)
    if slides and sequence_length is not None and sequence_length > window:
      problems.append(
        f"sliding_window is {window!r} there and attention is to all tokens here, "
        f"give {window} tokens or fewer as sequence_length"
      )
    # Of the known models, the head is untied where the field is missing.
    is_tied = found.get("tie_word_embeddings", found.get("model_type") not in _KINDS)
    if is_tied is False and not init_head and "lm_head.weight" not in names:
      problems.append(
        "tie_word_embeddings is False there and the file has no lm_head.weight, "
        "copy it again or set init_head=True"
      )
  elif naming == "timm":
    found = _read(where)
    problems = [*_vit_differences(found, model)]
    there = found.get("num_classes")
    if not init_head and None not in (there, num_classes) and there != num_classes:
      problems.append(
        f"num_classes is {there!r} there and {num_classes} here, init_head=True starts "
        "the classifier anew"
      )
  if problems:
    raise ConfigError(f"{where}: of another model: {'; '.join(problems)}")


def _read(path: Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text())
  except FileNotFoundError:
    return {}
  except (OSError, ValueError):
    found = None
  if not isinstance(found, dict):
    raise ConfigError(f"{path}: unreadable; copy it again, or remove it")
  return found


def _rope(found: dict[str, Any]) -> dict[str, Any]:
  """The settings of rotary positions: transformers 5 has one place for them, 4 two."""
  places = (found.get("rope_scaling"), found.get("rope_parameters"))
  first, second = (x if isinstance(x, dict) else {} for x in places)
  return {"rope_theta": found.get("rope_theta")} | first | second


def _llama_fields(model: Any) -> dict[str, tuple[str, Any]]:
  """Field of transformers -> (our setting, its value)."""
  return {
    "num_attention_heads": ("num_heads", model.num_heads),
    "num_key_value_heads": ("num_kv_heads", model.num_kv_heads or model.num_heads),
    "head_dim": ("head_width", model.head_width or model.width // model.num_heads),
    "rope_theta": ("rope_theta", model.rope_theta),
    "rms_norm_eps": ("norm_eps", model.norm_eps),
  }


def _llama_differences(found: dict[str, Any], model: Any) -> Iterator[str]:
  """Differences that a setting resolves."""
  kind, heads = found.get("model_type"), found.get("num_attention_heads")
  there = dict(_KINDS.get(str(kind), {}))
  if there and isinstance(heads, int) and heads > 0:
    if kind == "llama":
      there["num_key_value_heads"] = heads
    if isinstance(size := found.get("hidden_size"), int):
      there.setdefault("head_dim", size // heads)
  there |= {k: v for k, v in found.items() if v is not None}
  if (theta := _rope(found)["rope_theta"]) is not None:
    there["rope_theta"] = theta
  for field, (setting, here) in _llama_fields(model).items():
    if field in there and (value := there[field]) != here:
      both = f"{value!r} there and {here!r} here"
      yield f"{field} is {both}, set Transformer.{setting}={value!r}"


def _unsupported(found: dict[str, Any]) -> Iterator[str]:
  """What our transformer does not do, whatever its settings."""
  kind, rope = found.get("model_type"), _rope(found)
  rope_type = rope.get("rope_type", rope.get("type", "default"))
  activations = (None, "silu", "swish")
  rope_field = "rope_scaling" if found.get("rope_scaling") else "rope_parameters"
  for field, differs, here in (
    ("model_type", kind not in (None, *_KINDS), f"one of {', '.join(_KINDS)}"),
    (rope_field, rope_type != "default", "'default'"),
    ("hidden_act", found.get("hidden_act") not in activations, "'silu'"),
    ("hidden_activation", found.get("hidden_activation") not in activations, "'silu'"),
    ("attention_bias", found.get("attention_bias"), "False"),
    ("mlp_bias", found.get("mlp_bias"), "False"),
  ):
    if differs:
      both = f"{found[field]!r} there and {here} here"
      yield f"{field} is {both}, which no setting changes"


def _vit_differences(found: dict[str, Any], model: Any) -> Iterator[str]:
  name = str(found.get("architecture")).partition(".")[0]
  if (match := _VIT.fullmatch(name)) and hasattr(model, "patch"):
    width, heads = _VITS[match[1]]
    if model.width == width and model.num_heads != heads:
      yield (
        f"architecture is {name!r} there, whose heads are {heads}, and "
        f"{model.num_heads} here, set ViT.num_heads={heads}"
      )


def llama_config(
  model: Any,
  *,
  hidden: int,
  vocab_size: int,
  sequence_length: int,
  dtype: str,
  separator: int | None = None,
) -> dict[str, Any]:
  """The config.json with which transformers loads exported parameters.

  Args:
    model: settings with the fields of `config.Transformer`.
    hidden: units of its MLP.
    vocab_size: words, without padding.
    sequence_length: of the text that it was trained on.
    dtype: of the parameters in the file, e.g. "bfloat16".
    separator: the token between documents; None: not known.

  Example:
    >>> found = llama_config(
    ...   config.Transformer(), hidden=768, vocab_size=256, sequence_length=64,
    ...   dtype="float32",
    ... )
    >>> found["architectures"], found["head_dim"]
    (['LlamaForCausalLM'], 64)
  """
  name, kind = ("Qwen3", "qwen3") if model.qk_norm else ("Llama", "llama")
  return {
    "architectures": [f"{name}ForCausalLM"],
    "model_type": kind,
    "vocab_size": vocab_size,
    "hidden_size": model.width,
    "intermediate_size": hidden,
    "num_hidden_layers": model.num_layers,
    **{field: value for field, (_, value) in _llama_fields(model).items()},
    "hidden_act": "silu",
    "max_position_embeddings": sequence_length,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    # A document begins and ends with the same token.
    "bos_token_id": separator,
    "eos_token_id": separator,
    "torch_dtype": dtype,
  }


def hf_config_path(path: str | os.PathLike) -> Path:
  """Where the config.json of a file that is to be written goes.

  Raises:
    ConfigError: there is one of another file: a run's, or another model's.
  """
  where = Path(path).parent / "config.json"
  try:
    if json.loads(where.read_text())[_FILE] == Path(path).name:
      return where
  except FileNotFoundError:
    return where
  except (OSError, ValueError, KeyError, TypeError):
    pass
  raise ConfigError(
    f"{path}: a config.json is written next to it, and {where} is of another file; "
    "give a file in a folder of its own"
  )


def write_hf_config(path: str | os.PathLike, fields: dict[str, Any]) -> None:
  """Write the config.json of a file; an earlier one of the same file is replaced.

  Raises:
    ConfigError: as `hf_config_path`.
    OSError: the disk failed or is full.
  """
  ours = {_FILE: Path(path).name, "jaxscale": metadata.version("jaxscale")}
  write_json(hf_config_path(path), fields | ours)
