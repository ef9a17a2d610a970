"""Compare and write Hugging Face config.json files of language models and ViTs.

Every field that changes results is compared with a setting, or must have a fixed value if no
setting corresponds to it. Fields are those of transformers 5.23.0
(models/*/configuration_*.py), and of older versions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.models.config_json import OURS, Comparison, compare, unknown

# Supported `model_type`s, with the defaults of missing fields.
_DEFAULTS = {"num_attention_heads": 32, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
_QWEN = _DEFAULTS | {"num_key_value_heads": 32, "sliding_window": 4096}
_KINDS: dict[str, dict[str, Any]] = {"llama": _DEFAULTS}
_KINDS |= {"mistral": _QWEN | {"num_key_value_heads": 8}}
_KINDS |= {"qwen2": _QWEN, "qwen3": _QWEN | {"head_dim": 128}}
# Scaled rotary positions of Llama 3.1: the setting for each field.
_ROPE = {"factor": "rope_factor", "low_freq_factor": "rope_low", "high_freq_factor": "rope_high"}
_ROPE |= {"original_max_position_embeddings": "rope_length"}
# Required values of fields that no setting corresponds to. Unlike Qwen2's, biases of attention
# in these models include one of the output.
_FIXED = {"model_type": tuple(_KINDS), "rope_type": ("default", "llama3")}
_FIXED |= dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "swish"))
_FIXED |= dict.fromkeys(("attention_bias", "mlp_bias"), (False,))
_FIXED |= dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1.0,))
_FIXED |= {"quantization_config": (None,)}
# Fields that are visible in shapes, only matter in training or generation, or are descriptive.
_HARMLESS = OURS.union(
  """architectures attention_dropout auto_map bos_token_id dtype eos_token_id hidden_size id2label
  initializer_range intermediate_size label2id layer_types max_position_embeddings
  max_window_layers num_hidden_layers num_labels pad_token_id pretraining_tp problem_type
  sliding_window tie_word_embeddings tokenizer_class torch_dtype transformers_version use_cache
  use_sliding_window vocab_size _name_or_path _attn_implementation""".split()
)
_VIT_FIXED = {"model_type": ("vit",), "hidden_act": ("gelu",), "qkv_bias": (True,)}
_VIT_HARMLESS = _HARMLESS.union(
  """attention_probs_dropout_prob encoder_stride hidden_dropout_prob image_size num_channels
  patch_size pooler_act pooler_output_size""".split()
)


def completed(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Return all fields of a language model in one dict, with transformers' defaults.

  The result has the fields of rotary positions, which transformers 5 keeps in
  `rope_parameters` and 4 in `rope_scaling`. Without the scaling of Llama 3.1, `rope_scaling`
  is None.

  Example:
    >>> completed({"model_type": "llama", "rms_norm_eps": 1e-5})["rope_theta"]
    10000.0
  """
  saved = {**_KINDS.get(str(fields.get("model_type")), {}), **fields}
  for key in ("rope_scaling", "rope_parameters"):
    if isinstance(rope := saved.pop(key, None), dict):
      saved |= {k: v for k, v in rope.items() if v is not None}
  saved.setdefault("rope_type", saved.pop("type", "default"))
  if saved["rope_type"] != "llama3":
    saved = {k: v for k, v in saved.items() if k not in _ROPE} | {"rope_scaling": None}
  heads, size = saved.get("num_attention_heads"), saved.get("hidden_size")
  if str(fields.get("model_type")) in _KINDS and isinstance(heads, int) and heads > 0:
    derived = {"num_key_value_heads": heads}
    derived |= {"head_dim": size // heads} if isinstance(size, int) else {}
    saved |= {k: v for k, v in derived.items() if saved.get(k) is None}
  return {k: v for k, v in saved.items() if v is not None or k == "rope_scaling"}


def check_llama(
  fields: Mapping[str, Any], model: Any, info: Any, names: Collection[str], new_head: bool
) -> Comparison:
  """Compare a config.json with a language model.

  Args:
    fields: the fields of the config.json.
    model: settings with the fields of `config.Transformer`.
    info: the data's fields, with `sequence_length`.
    names: the names of all arrays in the file.
    new_head: True if the file's head is not used.
  """
  saved, settings = completed(fields), _settings(model)
  problems = [*compare(saved, model, settings, _FIXED)]
  if saved["rope_type"] == "llama3":
    problems += [f"the file lacks {x}, copy it again" for x in _ROPE if x not in saved]
  window = saved.get("sliding_window")
  length = getattr(info, "sequence_length", 0)
  if isinstance(window, int | float) and 0 < window < length and _slides(saved):
    fix = f"set sequence_length to {window} or less"
    both = f"sliding_window is {window!r} in the file and the model attends to all tokens"
    problems.append(f"{both}, {fix}")
  # For the supported models, a missing field means an untied head.
  is_known = str(fields.get("model_type")) in _KINDS
  is_tied = fields.get("tie_word_embeddings", not is_known)
  if is_tied is False and not new_head and "lm_head.weight" not in names:
    fix = "copy it again or set init_head=True"
    problems.append(f"tie_word_embeddings is False, but the file has no lm_head.weight, {fix}")
  notes = unknown(saved, {*_HARMLESS, *settings, *_FIXED})
  if is_tied and not new_head and "lm_head.weight" in names:
    problem = "but the file has an lm_head.weight, which is used, as in transformers 5"
    notes.append(f"tie_word_embeddings is True, {problem}")
  return Comparison(problems, notes)


def check_vit(fields: Mapping[str, Any], model: Any) -> Comparison:
  """Compare a config.json with settings that have the fields of `config.ViT`."""
  saved = {"layer_norm_eps": 1e-12} | {k: v for k, v in fields.items() if v is not None}
  settings = {"num_attention_heads": ("num_heads", model.num_heads)}
  settings |= {"layer_norm_eps": ("norm_eps", model.norm_eps)}
  notes = unknown(saved, {*_VIT_HARMLESS, *settings, *_VIT_FIXED})
  return Comparison([*compare(saved, model, settings, _VIT_FIXED)], notes)


def _slides(fields: Mapping[str, Any]) -> bool:
  """Return whether any layer attends to a sliding window."""
  if isinstance(layers := fields.get("layer_types"), list):
    return "sliding_attention" in layers
  # Qwen's files have a window even if it is not used.
  is_qwen = str(fields.get("model_type")).startswith("qwen")
  return bool(fields.get("use_sliding_window", not is_qwen))


def _settings(model: Any) -> dict[str, tuple[str, Any]]:
  """Return the name and value of the setting for each field of transformers."""
  kv_heads = model.num_kv_heads or model.num_heads
  width = model.head_width or model.width // model.num_heads
  names = {"rope_theta": "rope_theta", "rms_norm_eps": "norm_eps", "rope_scaling": "rope_factor"}
  fields = {field: (name, getattr(model, name)) for field, name in (names | _ROPE).items()}
  heads = {"num_attention_heads": ("num_heads", model.num_heads)}
  heads |= {"num_key_value_heads": ("num_kv_heads", kv_heads), "head_dim": ("head_width", width)}
  return heads | fields


def llama_config(
  model: Any,
  *,
  hidden: int,
  vocab_size: int,
  sequence_length: int,
  dtype: str,
  separator: int | None = None,
) -> dict[str, Any]:
  """Return the config.json with which transformers loads exported parameters.

  Args:
    model: settings with the fields of `config.Transformer`.
    hidden: the hidden units of the MLP.
    vocab_size: the size of the vocabulary without padding.
    sequence_length: the sequence length in training, in tokens.
    dtype: the dtype of the parameters in the file, e.g. "bfloat16".
    separator: the token between documents; None if it is not known.

  Raises:
    ConfigError: transformers does not support this model.

  Example:
    >>> found = llama_config(
    ...   config.Transformer(), hidden=768, vocab_size=256, sequence_length=64,
    ...   dtype="float32",
    ... )
    >>> found["architectures"], found["head_dim"]
    (['LlamaForCausalLM'], 64)
  """
  if model.qk_norm and model.qkv_bias:
    problem = "transformers has no model with both; use --naming jaxscale"
    raise ConfigError(f"Transformer.qk_norm and qkv_bias: {problem}")
  is_qwen = "Qwen3" if model.qk_norm else "Qwen2" if model.qkv_bias else None
  name = is_qwen or "Llama"
  fields = {field: value for field, (_, value) in _settings(model).items()}
  scaled = {"rope_type": "llama3"} | {field: fields.pop(field) for field in _ROPE}
  fields["rope_scaling"] = None if model.rope_factor is None else scaled
  biases = {} if is_qwen == "Qwen2" else {"attention_bias": False, "mlp_bias": False}
  sizes = {"vocab_size": vocab_size, "hidden_size": model.width, "intermediate_size": hidden}
  sizes |= {"num_hidden_layers": model.num_layers, "max_position_embeddings": sequence_length}
  # The separator both begins and ends a document.
  ends = {"bos_token_id": separator, "eos_token_id": separator, "torch_dtype": dtype}
  kind = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
  plain = {"hidden_act": "silu", "attention_dropout": 0.0, "tie_word_embeddings": False}
  return kind | sizes | fields | plain | biases | ends


def vit_config(model: Any, info: Mapping[str, Any], *, hidden: int, dtype: str) -> dict[str, Any]:
  """Return the config.json with which transformers loads an exported ViT.

  Args:
    model: settings with the fields of `config.ViT`, with a class token.
    info: the data's fields: `image_shape`, `num_classes` and optionally `class_names`.
    hidden: the hidden units of the MLP.
    dtype: the dtype of the parameters in the file.

  Example:
    >>> info = {"image_shape": (32, 32, 3), "num_classes": 10}
    >>> vit_config(config.ViT(), info, hidden=1536, dtype="float32")["num_labels"]
    10
  """
  height, width, channels = info["image_shape"]
  names = info.get("class_names") or ()
  fields: dict[str, Any] = {"id2label": {str(i): name for i, name in enumerate(names)}}
  fields |= {"label2id": {name: i for i, name in enumerate(names)}}
  fields = fields if names else {}
  fields |= {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
  fields |= {"hidden_size": model.width, "intermediate_size": hidden, "hidden_act": "gelu"}
  fields |= {"num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads}
  fields |= {"layer_norm_eps": model.norm_eps, "qkv_bias": True, "patch_size": model.patch}
  fields |= {"image_size": height if height == width else [height, width]}
  fields |= {"num_channels": channels, "num_labels": info["num_classes"]}
  return fields | {"torch_dtype": dtype}
