"""Compare and write timm config.json files of ResNets and ViTs.

timm builds a model from `architecture` and `model_args`. Supported architectures are listed;
every argument is compared, known not to change results, or rejected. Names and arguments are
those of timm 1.0.31, timm/models/resnet.py, vision_transformer.py and deit.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxscale.files import mismatch
from jaxscale.models.config_json import OURS, Comparison, compare, unknown

_RESNET = re.compile(r"(?:tv_)?resnet(18|34|50|101|152)")
_SIZES = "tiny|small|base|large|huge|giant|gigantic"
_VIT = re.compile(rf"(?:vit|deit)_({_SIZES})_patch\d+(_gap)?_\d+")
_HEADS = {"tiny": 3, "small": 6, "base": 12}  # 16 for large and larger ones
_NORM_EPS, _BN_EPSILON = 1e-6, 1e-5  # the same for all; no field has them
# Arguments that are visible in shapes, or that only matter in training.
_HARMLESS = set(
  """attn_drop_rate channels depth drop_block_rate drop_path_rate drop_rate dynamic_img_size
  embed_dim fix_init img_size in_chans mlp_ratio num_classes patch_drop_rate patch_size
  pos_drop_rate proj_drop_rate strict_img_size weight_init zero_init_last
  class_token fc_norm""".split()  # The last two are part of global_pool in `_vit_fields`.
)
# Required values of arguments that no setting corresponds to.
_FIXED: dict[str, tuple] = dict.fromkeys(("avg_down", "replace_stem_pool"), (False,))
_FIXED |= dict.fromkeys(("block_reduce_first", "cardinality", "down_kernel_size"), (1,))
_FIXED |= dict.fromkeys(("base_width", "stem_width"), (64,))
_FIXED |= dict.fromkeys(("aa_layer", "stem_type"), ("",))
_FIXED |= {"act_layer": ("relu",), "output_stride": (32,), "global_pool": ("avg", "fast")}
# The setting for each pooling of a ViT, as `_vit_fields` returns it.
_POOLS = {"token, class_token=True, fc_norm=False": "token"}
_POOLS |= {"avg, class_token=False, fc_norm=False": "mean"}
_VIT_OFF = """dynamic_img_pad no_embed_class pool_include_prefix pre_norm qk_norm
  scale_attn_norm scale_mlp_norm"""
_VIT_FIXED: dict[str, tuple] = dict.fromkeys(_VIT_OFF.split(), (False,))
_VIT_FIXED |= dict.fromkeys(("final_norm", "proj_bias", "qkv_bias"), (True,))
_VIT_FIXED |= {"global_pool": tuple(_POOLS), "act_layer": ("gelu",)}
_VIT_FIXED |= {"pos_embed": ("learn",), "reg_tokens": (0,)}
# The second half are fields of `pretrained_cfg`, which older versions wrote at this level.
_FIELDS = OURS.union(
  """architecture global_pool label_descriptions label_names license model_args num_classes
  num_features pretrained_cfg tags
  classifier crop_mode crop_pct custom_load first_conv fixed_input_size hf_hub_id input_size
  interpolation labels mean min_input_size paper_ids pool_size source std tag url""".split()
)


def is_timm_config(fields: Mapping[str, Any]) -> bool:
  """Return whether a config.json is in timm's format."""
  return not {"architecture", "pretrained_cfg", "num_classes"}.isdisjoint(fields)


def check_timm(fields: Mapping[str, Any], model: Any, info: Any) -> Comparison:
  """Compare a config.json with an image model.

  Args:
    fields: the fields of the config.json.
    model: settings with the fields of `config.ResNet` or `config.ViT`.
    info: the data's fields, with `mean` and `std`.
  """
  args = fields.get("model_args")
  args = args if isinstance(args, dict) else {}
  saved = {k: v for k, v in args.items() if v is not None}
  name = str(fields.get("architecture", "")).partition(".")[0]
  if hasattr(model, "patch"):
    match, ours, fixed = _VIT.fullmatch(name), "plain ViT and DeiT", _VIT_FIXED
    saved |= _vit_fields(match, args, fields)
    names = {x: x for x in ("num_heads", "pool")} | {"LayerNorm's epsilon": "norm_eps"}
  else:
    match, ours, fixed = _RESNET.fullmatch(name), "resnet18 to resnet152", _FIXED
    saved |= _resnet_fields(match, args, fields)
    names = {"depth": "depth", "BatchNorm's epsilon": "bn_epsilon"}
  problems = []
  if name and not match:
    problems.append(f"architecture is {name!r}, but jaxscale only supports {ours}")
  settings = {field: (name, getattr(model, name, None)) for field, name in names.items()}
  problems += compare(saved, model, settings, fixed)
  for field in sorted(saved.keys() - _HARMLESS - settings.keys() - fixed.keys()):
    problems.append(f"{field} is {saved[field]!r}, which jaxscale does not know")
  return Comparison(problems, [*_image_notes(fields, info), *unknown(fields, _FIELDS)])


def _resnet_fields(
  match: re.Match | None, args: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
  """Return the fields that an architecture implies, and its pooling."""
  pool = args.get("global_pool", fields.get("global_pool"))
  saved = {} if pool is None else {"global_pool": pool}
  if match:
    saved |= {"depth": int(match[1]), "BatchNorm's epsilon": _BN_EPSILON}
  return saved


def _vit_fields(
  match: re.Match | None, args: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
  """Return the fields that an architecture implies, and its pooling, as VisionTransformer does."""
  is_gap, saved = bool(match and match[2]), {}
  if match:
    saved["LayerNorm's epsilon"] = _NORM_EPS
    saved["num_heads"] = 16 if is_gap else _HEADS.get(match[1], 16)
  if args.get("num_heads") is not None:
    saved["num_heads"] = args["num_heads"]
  # Without arguments, the field itself has the pooling.
  pool = args.get("global_pool", fields.get("global_pool", "avg" if is_gap else None))
  if match or pool is not None:
    norm = args.get("fc_norm", False if is_gap else None)
    has_norm = pool == "avg" if norm is None else norm
    has_token = args.get("class_token", not is_gap)
    form = f"{pool or 'token'}, class_token={has_token}, fc_norm={has_norm}"
    saved["global_pool"] = form
    if form in _POOLS:
      saved["pool"] = _POOLS[form]
  return saved


def _image_notes(fields: Mapping[str, Any], info: Any) -> Iterator[str]:
  """Yield a note if images are normalised differently, which only fine-tuning compensates."""
  cfg = fields.get("pretrained_cfg", fields)
  if not isinstance(cfg, dict) or getattr(info, "dtype", None) != "uint8":
    return
  for field in ("mean", "std"):
    saved, expected = cfg.get(field, []), np.array(getattr(info, field)) / 255
    if mismatch(saved, [float]) or len(saved) not in (1, len(expected)):
      continue  # The number of channels differs.
    if not np.allclose(saved, expected, atol=1e-3):
      mine = [round(x, 4) for x in expected.tolist()]
      yield f"images had {field} {saved} in the file and have {mine} in the data"


def timm_config(model: Any, info: Mapping[str, Any]) -> dict[str, Any] | None:
  """Return the config.json with which timm builds the model of exported parameters.

  Args:
    model: settings; timm supports those with the fields of `config.ResNet` or `config.ViT`.
    info: the fields of the data's `data.DatasetInfo`.

  Returns:
    The fields, or None if timm has no such model.

  Example:
    >>> info = {"image_shape": (32, 32, 3), "num_classes": 10, "dtype": "uint8"}
    >>> info |= {"mean": (127.5,), "std": (127.5,)}
    >>> timm_config(config.ResNet(depth=18), info)["architecture"]
    'resnet18'
  """
  height, width, channels = info["image_shape"]
  is_vit, classes = hasattr(model, "patch"), info["num_classes"]
  if is_vit and model.norm_eps == _NORM_EPS:
    architecture, features, args = "vit_base_patch16_224", model.width, _vit_args(model)
    args |= {"img_size": [height, width]}
  elif hasattr(model, "depth") and _is_plain(model):
    architecture, features, args = f"resnet{model.depth}", 2048 if model.depth >= 50 else 512, {}
  else:
    return None
  cfg: dict[str, Any] = {"input_size": [channels, height, width], "fixed_input_size": is_vit}
  cfg |= {"first_conv": "patch_embed.proj" if is_vit else "conv1", "num_classes": classes}
  cfg |= {"classifier": "head" if is_vit else "fc"}
  if info["dtype"] == "uint8":  # timm's mean and std are of images in [0, 1].
    for name in ("mean", "std"):
      cfg[name] = (np.broadcast_to(info[name], channels) / 255).tolist()
  fields = {"architecture": architecture, "num_classes": classes, "num_features": features}
  fields |= {"label_names": list(info["class_names"])} if info.get("class_names") else {}
  fields |= {"model_args": args | {"num_classes": classes, "in_chans": channels}}
  return fields | {"global_pool": args.get("global_pool", "avg"), "pretrained_cfg": cfg}


def _is_plain(model: Any) -> bool:
  """Return whether timm has this ResNet."""
  return (model.width, model.stem, model.bn_epsilon) == (64, "imagenet", _BN_EPSILON)


def _vit_args(model: Any) -> dict[str, Any]:
  # timm rounds the hidden units down.
  ratio = 4.0 if model.hidden is None else (model.hidden + 0.5) / model.width
  args = {"patch_size": model.patch, "embed_dim": model.width, "depth": model.num_layers}
  args |= {"num_heads": model.num_heads, "mlp_ratio": ratio, "fc_norm": False}
  has_token = model.pool == "token"
  return args | {"class_token": has_token, "global_pool": "token" if has_token else "avg"}
