"""What a config.json of Hugging Face's says of a language model or a ViT, and ours.

Every field that changes results is compared with a setting, or refused where no setting
has it. Fields are of transformers 5.23.0, models/*/configuration_*.py, and of the forms
that older versions wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.weights.config_json import (
  OURS,
  Comparison,
  different,
  unknown,
  unsupported,
)

# `model_type`s whose layers are ours, with the defaults of fields that are missing.
_DEFAULTS = {"num_attention_heads": 32, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
_QWEN = _DEFAULTS | {"num_key_value_heads": 32, "sliding_window": 4096}
_KINDS: dict[str, dict[str, Any]] = {
  "llama": _DEFAULTS,
  "mistral": _QWEN | {"num_key_value_heads": 8},
  "qwen2": _QWEN,
  "qwen3": _QWEN | {"head_dim": 128},
}
# Fields that no setting changes: the values with which a network is ours.
_FIXED = {
  "model_type": tuple(_KINDS),
  "hidden_act": ("silu", "swish"),
  "hidden_activation": ("silu", "swish"),
  "attention_bias": (False,),  # of the output too, which is not Qwen2's
  "mlp_bias": (False,),
  "partial_rotary_factor": (1.0,),
  "rotary_pct": (1.0,),
  "quantization_config": (None,),
}
_ROPE_TYPES = ("default", "llama3")
# Of the rotary positions: field -> our setting.
_ROPE = {
  "factor": "rope_factor",
  "low_freq_factor": "rope_low",
  "high_freq_factor": "rope_high",
  "original_max_position_embeddings": "rope_length",
}
# Sizes that shapes show, what only training or generation uses, and words about it.
_HARMLESS = OURS | {
  "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype",
  "eos_token_id", "hidden_size", "id2label", "initializer_range", "intermediate_size",
  "label2id", "layer_types", "max_position_embeddings", "max_window_layers",
  "num_hidden_layers", "num_labels", "pad_token_id", "pretraining_tp", "problem_type",
  "rope_parameters", "rope_scaling", "sliding_window", "tie_word_embeddings",
  "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
  "use_sliding_window", "vocab_size", "_name_or_path", "_attn_implementation",
}  # fmt: skip
_VIT_FIXED = {
  "model_type": ("vit",),
  "hidden_act": ("gelu",),
  "qkv_bias": (True,),
}
_VIT_HARMLESS = _HARMLESS | {
  "attention_probs_dropout_prob", "encoder_stride", "hidden_dropout_prob", "image_size",
  "num_channels", "patch_size", "pooler_act", "pooler_output_size",
}  # fmt: skip


def transformer_settings(found: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
  """What a config.json says of our settings: setting -> (its field, value).

  Example:
    >>> stated = transformer_settings({"model_type": "llama", "rms_norm_eps": 1e-5})
    >>> stated["norm_eps"]
    ('rms_norm_eps', 1e-05)
  """
  kind, there, rope = str(found.get("model_type")), _complete(found), _rope(found)
  there |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
  stated = {
    setting: (field, there[field])
    for setting, field in (
      ("num_heads", "num_attention_heads"),
      ("num_kv_heads", "num_key_value_heads"),
      ("head_width", "head_dim"),
      ("rope_theta", "rope_theta"),
      ("norm_eps", "rms_norm_eps"),
    )
    if there.get(field) is not None
  }
  if _rope_type(rope) == "llama3":
    stated |= {setting: (f, rope[f]) for f, setting in _ROPE.items() if f in rope}
  elif there:
    stated["rope_factor"] = "rope_scaling", None
  if kind in _KINDS:
    stated["qkv_bias"] = "model_type", kind == "qwen2"
    stated["qk_norm"] = "model_type", kind == "qwen3"
  return stated


def _complete(found: Mapping[str, Any]) -> dict[str, Any]:
  """The fields, and what transformers takes for those that a known model lacks."""
  kind = str(found.get("model_type"))
  there = _KINDS.get(kind, {}) | dict(found)
  heads, size = there.get("num_attention_heads"), there.get("hidden_size")
  if kind in _KINDS and isinstance(heads, int) and heads > 0:
    derived = {"num_key_value_heads": heads}
    derived |= {"head_dim": size // heads} if isinstance(size, int) else {}
    there |= {k: v for k, v in derived.items() if there.get(k) is None}
  return there


def check_llama(
  found: Mapping[str, Any],
  model: Any,
  info: Any,
  names: Collection[str],
  new_head: bool,
) -> Comparison:
  """Compare a config.json with a model of language.

  Args:
    found: its fields.
    model: settings with the fields of `config.Transformer`.
    info: of the data: `sequence_length`.
    names: of all arrays in the file.
    new_head: the file's head is not used.
  """
  here, problems = _here(model), []
  for setting, (field, there) in transformer_settings(found).items():
    if there != here[setting] and field == "model_type":
      why = f"{field} is {found[field]!r} there"
      problems.append(f"{why}, set Transformer.{setting}={there!r}")
    elif there != here[setting]:
      place = f"Transformer.{setting}"
      problems.append(different(field, there, here[setting], place))
  problems += [*unsupported(found, _FIXED), *_unsupported_rope(found)]
  window = _complete(found).get("sliding_window")
  length = getattr(info, "sequence_length", 0)
  if isinstance(window, int | float) and 0 < window < length and _slides(found):
    problems.append(
      f"sliding_window is {window!r} there and attention is to all tokens here, "
      f"give {window} tokens or fewer as sequence_length"
    )
  # Of the known models, the head is untied where the field is missing.
  is_known = str(found.get("model_type")) in _KINDS
  is_tied = found.get("tie_word_embeddings", not is_known)
  if is_tied is False and not new_head and "lm_head.weight" not in names:
    problems.append(
      "tie_word_embeddings is False there and the file has no lm_head.weight, "
      "copy it again or set init_head=True"
    )
  compared = {field for field, _ in transformer_settings(found).values()}
  notes = unknown(found, _HARMLESS | compared | set(_FIXED))
  if is_tied and not new_head and "lm_head.weight" in names:
    notes.append(
      "tie_word_embeddings is True there, but the file has an lm_head.weight of its "
      "own, which is used, as transformers 5 does"
    )
  return Comparison(problems, notes)


def check_vit(found: Mapping[str, Any], model: Any) -> Comparison:
  """Compare a config.json with settings that have the fields of `config.ViT`."""
  found = {"layer_norm_eps": 1e-12} | dict(found)
  compared = {"num_attention_heads": "num_heads", "layer_norm_eps": "norm_eps"}
  problems = [
    different(field, found[field], getattr(model, setting), f"ViT.{setting}")
    for field, setting in compared.items()
    if field in found and found[field] != getattr(model, setting)
  ]
  problems += unsupported(found, _VIT_FIXED)
  known = _VIT_HARMLESS | set(compared) | set(_VIT_FIXED)
  return Comparison(problems, unknown(found, known))


def _rope(found: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of rotary positions: transformers 5 has one place for them, 4 two."""
  places = (found.get("rope_scaling"), found.get("rope_parameters"))
  first, second = (x if isinstance(x, dict) else {} for x in places)
  both = {"rope_theta": found.get("rope_theta")} | first | second
  return {k: v for k, v in both.items() if v is not None}


def _rope_type(rope: Mapping[str, Any]) -> Any:
  return rope.get("rope_type", rope.get("type", "default"))


def _unsupported_rope(found: Mapping[str, Any]) -> Iterator[str]:
  """Rotary positions that no setting gives."""
  rope = _rope(found)
  field = "rope_scaling" if found.get("rope_scaling") else "rope_parameters"
  if _rope_type(rope) not in _ROPE_TYPES:
    both = f"{found[field]!r} there and one of {', '.join(_ROPE_TYPES)} here"
    yield f"{field} is {both}, which no setting changes"
  elif _rope_type(rope) == "llama3" and (left := [f for f in _ROPE if f not in rope]):
    yield f"{field} has no {left[0]} there, copy it again"
  whole = {"partial_rotary_factor": (1.0,)}
  yield from unsupported(rope, whole, f"{field}.")


def _slides(found: Mapping[str, Any]) -> bool:
  """Whether attention is to a window in any layer."""
  if isinstance(layers := found.get("layer_types"), list):
    return "sliding_attention" in layers
  # Qwen's files have a window even where it is not used.
  is_qwen = str(found.get("model_type")).startswith("qwen")
  return bool(found.get("use_sliding_window", not is_qwen))


def _here(model: Any) -> dict[str, Any]:
  """Our settings by name, as `transformer_settings` has them."""
  own = ("num_heads", "rope_theta", "norm_eps", "qkv_bias", "qk_norm", *_ROPE.values())
  return {name: getattr(model, name) for name in own} | {
    "num_kv_heads": model.num_kv_heads or model.num_heads,
    "head_width": model.head_width or model.width // model.num_heads,
  }


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

  Raises:
    ConfigError: transformers has no such model.

  Example:
    >>> found = llama_config(
    ...   config.Transformer(), hidden=768, vocab_size=256, sequence_length=64,
    ...   dtype="float32",
    ... )
    >>> found["architectures"], found["head_dim"]
    (['LlamaForCausalLM'], 64)
  """
  if model.qk_norm and model.qkv_bias:
    raise ConfigError(
      "Transformer.qk_norm and qkv_bias: transformers has no model with both; use "
      "--naming jaxscale"
    )
  is_qwen = "Qwen3" if model.qk_norm else "Qwen2" if model.qkv_bias else None
  name, here = is_qwen or "Llama", _here(model)
  scaled = {"rope_type": "llama3"} | {f: here[setting] for f, setting in _ROPE.items()}
  return {
    "architectures": [f"{name}ForCausalLM"],
    "model_type": name.lower(),
    "vocab_size": vocab_size,
    "hidden_size": model.width,
    "intermediate_size": hidden,
    "num_hidden_layers": model.num_layers,
    "num_attention_heads": here["num_heads"],
    "num_key_value_heads": here["num_kv_heads"],
    "head_dim": here["head_width"],
    "rope_theta": here["rope_theta"],
    "rms_norm_eps": here["norm_eps"],
    "hidden_act": "silu",
    "max_position_embeddings": sequence_length,
    "rope_scaling": None if model.rope_factor is None else scaled,
    "attention_dropout": 0.0,
    **({} if is_qwen == "Qwen2" else {"attention_bias": False, "mlp_bias": False}),
    "tie_word_embeddings": False,
    # A document begins and ends with the same token.
    "bos_token_id": separator,
    "eos_token_id": separator,
    "torch_dtype": dtype,
  }


def vit_config(
  model: Any, info: Mapping[str, Any], *, hidden: int, dtype: str
) -> dict[str, Any]:
  """The config.json with which transformers loads an exported ViT.

  Args:
    model: settings with the fields of `config.ViT`, with a class token.
    info: of the data: `image_shape`, `num_classes` and perhaps `class_names`.
    hidden: units of its MLP.
    dtype: of the parameters in the file.

  Example:
    >>> info = {"image_shape": (32, 32, 3), "num_classes": 10}
    >>> vit_config(config.ViT(), info, hidden=1536, dtype="float32")["num_labels"]
    10
  """
  height, width, channels = info["image_shape"]
  names = info.get("class_names") or ()
  labels: dict[str, Any] = {"id2label": {str(i): name for i, name in enumerate(names)}}
  labels |= {"label2id": {name: i for i, name in enumerate(names)}}
  return (labels if names else {}) | {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": model.width,
    "intermediate_size": hidden,
    "num_hidden_layers": model.num_layers,
    "num_attention_heads": model.num_heads,
    "layer_norm_eps": model.norm_eps,
    "hidden_act": "gelu",
    "qkv_bias": True,
    "image_size": height if height == width else [height, width],
    "patch_size": model.patch,
    "num_channels": channels,
    "num_labels": info["num_classes"],
    "torch_dtype": dtype,
  }
