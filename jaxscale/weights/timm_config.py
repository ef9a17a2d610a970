"""What a config.json of timm's says of a ResNet or a ViT, and ours.

timm makes its network from `architecture` and `model_args`. The architectures that are
ours are listed; every argument is compared, or known to change no results, or refused.
Names and arguments are of timm 1.0.31, timm/models/resnet.py, vision_transformer.py
and deit.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxscale.files import mismatch
from jaxscale.weights.config_json import (
  OURS,
  Comparison,
  different,
  unknown,
  unsupported,
)

_RESNET = re.compile(r"(?:tv_)?resnet(18|34|50|101|152)")
_SIZES = "tiny|small|base|large|huge|giant|gigantic"
_VIT = re.compile(rf"(?:vit|deit)_({_SIZES})_patch\d+(_gap)?_\d+")
_HEADS = {"tiny": 3, "small": 6, "base": 12}  # 16 from large on
_NORM_EPS, _BN_EPSILON = 1e-6, 1e-5  # of all of them; no field has it
# Arguments of its networks that shapes show, or that only training uses.
_HARMLESS = {
  "attn_drop_rate", "channels", "depth", "drop_block_rate", "drop_path_rate",
  "drop_rate", "dynamic_img_size", "embed_dim", "fix_init", "img_size", "in_chans",
  "mlp_ratio", "num_classes", "patch_drop_rate", "patch_size", "pos_drop_rate",
  "proj_drop_rate", "strict_img_size", "weight_init", "zero_init_last",
}  # fmt: skip
# Those that no setting changes: the values with which a network is ours.
_FIXED = {
  "act_layer": ("relu",), "aa_layer": ("",), "avg_down": (False,),
  "base_width": (64,), "block_reduce_first": (1,), "cardinality": (1,),
  "down_kernel_size": (1,), "output_stride": (32,), "replace_stem_pool": (False,),
  "stem_type": ("",), "stem_width": (64,), "global_pool": ("avg", "fast"),
}  # fmt: skip
_VIT_FIXED = {
  "act_layer": ("gelu",), "dynamic_img_pad": (False,), "final_norm": (True,),
  "no_embed_class": (False,), "pool_include_prefix": (False,), "pos_embed": ("learn",),
  "pre_norm": (False,), "proj_bias": (True,), "qk_norm": (False,), "qkv_bias": (True,),
  "reg_tokens": (0,), "scale_attn_norm": (False,), "scale_mlp_norm": (False,),
}  # fmt: skip
_POOLING = {"num_heads", "global_pool", "class_token", "fc_norm"}  # compared below
_FIELDS = OURS | {
  "architecture", "global_pool", "label_descriptions", "label_names", "model_args",
  "num_classes", "num_features", "pretrained_cfg", "tags", "license",
  # Of `pretrained_cfg`, which older versions wrote out here.
  "classifier", "crop_mode", "crop_pct", "custom_load", "first_conv",
  "fixed_input_size", "hf_hub_id", "input_size", "interpolation", "labels", "mean",
  "min_input_size", "paper_ids", "pool_size", "source", "std", "tag", "url",
}  # fmt: skip


def is_timm_config(found: Mapping[str, Any]) -> bool:
  """Whether a config.json is timm's: a run's has other fields."""
  return not {"architecture", "pretrained_cfg", "num_classes"}.isdisjoint(found)


def check_timm(
  found: Mapping[str, Any], model: Any, info: Any, new_head: bool
) -> Comparison:
  """Compare a config.json with a model of images.

  Args:
    found: its fields.
    model: settings, with the fields of `config.ResNet` or `config.ViT`.
    info: of the data: `num_classes`, `mean`, `std`.
    new_head: the file's classifier is not used.
  """
  args = found.get("model_args")
  args = args if isinstance(args, dict) else {}
  name = str(found.get("architecture", "")).partition(".")[0]
  if hasattr(model, "patch"):
    problems, fixed = [*_vit_problems(name, args, found, model)], _VIT_FIXED
  else:
    problems, fixed = [*_resnet_problems(name, found, model)], _FIXED
  problems += unsupported(args, fixed, "model_args.")
  for field in sorted(set(args) - _HARMLESS - _POOLING - set(fixed)):
    if args[field] is not None:
      given = f"model_args.{field} is {args[field]!r} there"
      problems.append(f"{given}, which is not known here")
  there, here = found.get("num_classes"), getattr(info, "num_classes", None)
  if not new_head and None not in (there, here) and there != here:
    problems.append(
      f"num_classes is {there!r} there and {here} here, init_head=True starts "
      "the classifier anew"
    )
  return Comparison(problems, [*_image_notes(found, info), *unknown(found, _FIELDS)])


def _resnet_problems(name: str, found: Mapping[str, Any], model: Any) -> Iterator[str]:
  match = _RESNET.fullmatch(name)
  if name and not match:
    ours = "resnet18, resnet34, resnet50, resnet101 and resnet152"
    yield f"architecture is {name!r} there, and only {ours} are like our ResNet"
  elif match and int(match[1]) != (depth := getattr(model, "depth", None)):
    yield different("depth", int(match[1]), depth, "ResNet.depth")
  if match and (eps := getattr(model, "bn_epsilon", None)) != _BN_EPSILON:
    yield different("BatchNorm's epsilon", _BN_EPSILON, eps, "ResNet.bn_epsilon")
  yield from unsupported(found, {"global_pool": _FIXED["global_pool"]})


def _vit_problems(
  name: str, args: Mapping[str, Any], found: Mapping[str, Any], model: Any
) -> Iterator[str]:
  match = _VIT.fullmatch(name)
  if name and not match:
    ours = "plain ViT and DeiT"
    yield f"architecture is {name!r} there, and only {ours} are like our ViT"
  if match and model.norm_eps != _NORM_EPS:
    here = model.norm_eps
    yield different("LayerNorm's epsilon", _NORM_EPS, here, "ViT.norm_eps")
  is_gap = bool(match and match[2])
  heads = args.get("num_heads")
  if match and heads is None:
    heads = 16 if is_gap else _HEADS.get(match[1], 16)
  if heads is not None and heads != model.num_heads:
    yield different("num_heads", heads, model.num_heads, "ViT.num_heads")
  # As timm's VisionTransformer decides; by itself the field says what it decided.
  pool = args.get("global_pool", found.get("global_pool", "avg" if is_gap else None))
  has_token = args.get("class_token", not is_gap)
  norm = args.get("fc_norm", False if is_gap else None)
  is_after = (pool == "avg") if norm is None else norm
  if pool is None and not match:
    return
  form = pool or "token", has_token, is_after
  kinds = (("token", True, False), "token"), (("avg", False, False), "mean")
  kind = next((kind for wanted, kind in kinds if form == wanted), None)
  if kind is None:
    yield (
      f"global_pool is {pool!r} there, with class_token={has_token} and "
      f"fc_norm={is_after}, which no setting gives (ours: 'token', or 'avg' with "
      "class_token=False and fc_norm=False)"
    )
  elif kind != model.pool:
    yield different("pool", kind, model.pool, "ViT.pool")


def _image_notes(found: Mapping[str, Any], info: Any) -> Iterator[str]:
  """Another normalisation of images: fine-tuning learns it, evaluation does not."""
  cfg = found.get("pretrained_cfg", found)
  if not isinstance(cfg, dict) or getattr(info, "dtype", None) != "uint8":
    return
  for field in ("mean", "std"):
    there, here = cfg.get(field, []), np.array(getattr(info, field)) / 255
    if mismatch(there, [float]) or len(there) not in (1, len(here)):
      continue  # of other channels
    if not np.allclose(there, here, atol=1e-3):
      mine = [round(x, 4) for x in here.tolist()]
      yield f"images had {field} {there} there and have {mine} here"


def timm_config(model: Any, info: Mapping[str, Any]) -> dict[str, Any] | None:
  """The config.json with which timm makes the network of exported parameters.

  Args:
    model: settings; with the fields of `config.ResNet` or `config.ViT` it is timm's.
    info: of the data: the fields of `data.DatasetInfo`.

  Returns:
    Its fields; None: timm has no such network.

  Example:
    >>> info = {"image_shape": (32, 32, 3), "num_classes": 10, "dtype": "uint8"}
    >>> info |= {"mean": (127.5,), "std": (127.5,)}
    >>> timm_config(config.ResNet(depth=18), info)["architecture"]
    'resnet18'
  """
  height, width, channels = info["image_shape"]
  made = _timms_vit(model, height, width) if hasattr(model, "patch") else None
  if hasattr(model, "depth"):
    made = _timms_resnet(model)
  if made is None:
    return None
  classes, (architecture, features, args) = info["num_classes"], made
  cfg: dict[str, Any] = {
    "input_size": [channels, height, width],
    "fixed_input_size": hasattr(model, "patch"),
    "num_classes": classes,
    "first_conv": "patch_embed.proj" if hasattr(model, "patch") else "conv1",
    "classifier": "head" if hasattr(model, "patch") else "fc",
  }
  if info["dtype"] == "uint8":  # timm's are of images in [0, 1]
    for name in ("mean", "std"):
      cfg[name] = (np.broadcast_to(info[name], channels) / 255).tolist()
  names = {"label_names": list(info["class_names"])} if info.get("class_names") else {}
  return {
    "architecture": architecture,
    "num_classes": classes,
    **names,
    "num_features": features,
    "global_pool": args.get("global_pool", "avg"),
    "model_args": args | {"num_classes": classes, "in_chans": channels},
    "pretrained_cfg": cfg,
  }


_Made = tuple[str, int, dict[str, Any]]  # architecture, features, arguments


def _timms_resnet(model: Any) -> _Made | None:
  if (model.width, model.stem, model.bn_epsilon) != (64, "imagenet", _BN_EPSILON):
    return None
  features = 2048 if model.depth >= 50 else 512
  return f"resnet{model.depth}", features, {}


def _timms_vit(model: Any, height: int, width: int) -> _Made | None:
  if model.norm_eps != _NORM_EPS:
    return None
  args = {
    "img_size": [height, width],
    "patch_size": model.patch,
    "embed_dim": model.width,
    "depth": model.num_layers,
    "num_heads": model.num_heads,
    # timm rounds down.
    "mlp_ratio": 4.0 if model.hidden is None else (model.hidden + 0.5) / model.width,
    "class_token": model.pool == "token",
    "global_pool": "token" if model.pool == "token" else "avg",
    "fc_norm": False,
  }
  return "vit_base_patch16_224", model.width, args
