"""The config.json beside a file of parameters: what it says of them, and ours.

Shapes do not tell heads from one another, nor rotary angles and epsilons: parameters
of another model may fit without a word. Hugging Face's and timm's folders say such
things in a config.json; what is certain in it is compared with the model's settings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxscale import config as cfg
from jaxscale.errors import ConfigError

# Models of transformers' whose layers are ours, by `model_type`: what follows from
# nothing said there (transformers 5.23.0, models/*/configuration_*.py).
_KINDS = {
  kind: {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
  for kind in ("llama", "mistral", "qwen2", "qwen3")
}
_KINDS["qwen3"]["head_dim"] = 128
_SILU = ("silu", "swish")
# timm's plain ViTs: (width, heads); its timm/models/vision_transformer.py.
_VITS = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}
_VIT = re.compile(r"(?:vit|deit)_(tiny|small|base|large)_patch\d+_\d+")
_FILE = "jaxscale_file"  # in ours: the file that it is of


def check_beside(
  path: str | os.PathLike,
  naming: str,
  names: Collection[str],
  config: cfg.Config,
  *,
  num_classes: int | None = None,
  init_head: bool = False,
) -> None:
  """Compare a config.json beside a file, if there is one, with a run's settings.

  Args:
    path: of the file, or of its folder.
    naming: of the file.
    names: of all arrays in it.
    config: of the run.
    num_classes: of its data.
    init_head: the classifier in the file is not used.

  Raises:
    ConfigError: it cannot be read, or is of another model; one line has each field,
      both values and the setting.
  """
  folder = Path(path) if Path(path).is_dir() else Path(path).parent
  model, where = config.model, folder / "config.json"
  if naming == "huggingface" and isinstance(model, cfg.Transformer):
    said = _read(where)
    length = getattr(config.data, "sequence_length", None)
    found = [*_of_llama(said, model), *_without_setting(said, length)]
    if not init_head and "lm_head.weight" not in names:
      found += _untied(said)
  elif naming == "timm":
    said = _read(where)
    found = [*_of_vit(said, model)]
    there = said.get("num_classes")
    if not init_head and None not in (there, num_classes) and there != num_classes:
      found.append(
        f"num_classes is {there!r} there and {num_classes} here, init_head=True starts "
        "the classifier anew"
      )
  else:
    return
  if found:
    raise ConfigError(f"{where}: of another model: {'; '.join(found)}")


def _read(path: Path) -> dict[str, Any]:
  try:
    said = json.loads(path.read_text())
  except FileNotFoundError:
    return {}
  except (OSError, ValueError):
    said = None
  if not isinstance(said, dict):
    raise ConfigError(f"{path}: unreadable; copy it again, or take it away")
  return said


def _rope(said: dict[str, Any]) -> dict[str, Any]:
  """Of rotary positions: transformers 5 has them in one place, 4 in two."""
  found = {}
  for field in ("rope_scaling", "rope_parameters"):
    inner = said.get(field)
    found |= inner if isinstance(inner, dict) else {}
  return {"rope_theta": said.get("rope_theta")} | found


def _of_llama(said: dict[str, Any], model: cfg.Transformer) -> Iterator[str]:
  """What some setting would change."""
  kind, heads = said.get("model_type"), said.get("num_attention_heads")
  known = dict(_KINDS.get(str(kind), {}))
  if known and isinstance(heads, int) and heads > 0:
    if kind == "llama":
      known["num_key_value_heads"] = heads
    if isinstance(size := said.get("hidden_size"), int):
      known.setdefault("head_dim", size // heads)
  there = known | {k: v for k, v in said.items() if v is not None}
  if (theta := _rope(said)["rope_theta"]) is not None:
    there["rope_theta"] = theta
  ours = {
    "num_attention_heads": ("num_heads", model.num_heads),
    "num_key_value_heads": ("num_kv_heads", model.num_kv_heads or model.num_heads),
    "head_dim": ("head_width", model.head_width or model.width // model.num_heads),
    "rope_theta": ("rope_theta", model.rope_theta),
    "rms_norm_eps": ("norm_eps", model.norm_eps),
  }
  for field, (setting, here) in ours.items():
    if field in there and there[field] != here:
      value = there[field]
      yield (
        f"{field} is {value!r} there and {here!r} here, set "
        f"Transformer.{setting}={value!r}"
      )


def _without_setting(said: dict[str, Any], length: int | None) -> Iterator[str]:
  """What the model here does not do, whatever its settings."""

  def line(field: str, here: str) -> str:
    return f"{field} is {said[field]!r} there and {here} here, which no setting changes"

  kind = said.get("model_type")
  if kind is not None and kind not in _KINDS:
    yield line("model_type", f"one of {', '.join(_KINDS)}")
  rope = _rope(said)
  if rope.get("rope_type", rope.get("type", "default")) != "default":
    field = "rope_scaling" if said.get("rope_scaling") else "rope_parameters"
    yield line(field, "'default'")
  for field in ("hidden_act", "hidden_activation"):
    if said.get(field) is not None and said[field] not in _SILU:
      yield line(field, "'silu'")
  for field in ("attention_bias", "mlp_bias"):
    if said.get(field):
      yield line(field, "False")
  window = said.get("sliding_window")
  # Qwen's files have a window also where it is not used.
  slides = said.get("use_sliding_window", not str(kind).startswith("qwen"))
  if window and slides and length is not None and length > window:
    yield (
      f"sliding_window is {window!r} there and attention is to all tokens here, give "
      f"{window} tokens or fewer as sequence_length"
    )


def _untied(said: dict[str, Any]) -> Iterator[str]:
  """Of a file without a head, which is then the table."""
  is_known = said.get("model_type") in _KINDS  # where nothing said is untied
  if said.get("tie_word_embeddings", not is_known) is False:
    yield (
      "tie_word_embeddings is False there and the file has no lm_head.weight, copy it "
      "again or set init_head=True"
    )


def _of_vit(said: dict[str, Any], model: Any) -> Iterator[str]:
  name = str(said.get("architecture")).partition(".")[0]
  found = _VIT.fullmatch(name)
  if found is None or not isinstance(model, cfg.ViT):
    return
  width, heads = _VITS[found[1]]
  if model.width == width and model.num_heads != heads:
    yield (
      f"architecture is {name!r} there, whose heads are {heads}, and {model.num_heads} "
      f"here, set ViT.num_heads={heads}"
    )


def llama_config(
  model: cfg.Transformer,
  *,
  hidden: int,
  vocab_size: int,
  sequence_length: int,
  dtype: str,
  separator: int | None = None,
) -> dict[str, Any]:
  """What transformers has to know to load parameters of ours.

  Args:
    model: whose they are.
    hidden: units of its MLP.
    vocab_size: words, without what only pads.
    sequence_length: of the text that it was trained on.
    dtype: of the parameters in the file, e.g. "bfloat16".
    separator: the token between documents; None: not known.

  Example:
    >>> found = llama_config(
    ...   cfg.Transformer(), hidden=768, vocab_size=256, sequence_length=64,
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
    "num_attention_heads": model.num_heads,
    "num_key_value_heads": model.num_kv_heads or model.num_heads,
    "head_dim": model.head_width or model.width // model.num_heads,
    "hidden_act": "silu",
    "max_position_embeddings": sequence_length,
    "rms_norm_eps": model.norm_eps,
    "rope_theta": model.rope_theta,
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


def place_beside(path: str | os.PathLike) -> Path:
  """Where the config.json of a file that is to be written goes.

  Raises:
    ConfigError: there is one, and not of this file: a run's, or another model's.
  """
  where = Path(path).parent / "config.json"
  try:
    there = json.loads(where.read_text())
  except FileNotFoundError:
    return where
  except (OSError, ValueError):
    there = None
  if not isinstance(there, dict) or there.get(_FILE) != Path(path).name:
    raise ConfigError(
      f"{path}: a config.json goes beside it, and {where} is another's; give a file in "
      "a folder of its own"
    )
  return where


def write_beside(path: str | os.PathLike, said: dict[str, Any]) -> None:
  """Write the config.json of a file; one of it that is there is replaced.

  Raises:
    ConfigError: as `place_beside`.
    OSError: the disk failed or is full.
  """
  where = place_beside(path)
  said = said | {_FILE: Path(path).name, "jaxscale": metadata.version("jaxscale")}
  scratch = where.with_name(f".{where.name}.tmp-{os.getpid()}")
  try:
    scratch.write_text(json.dumps(said, indent=2) + "\n")
    scratch.replace(where)
  finally:
    scratch.unlink(missing_ok=True)
