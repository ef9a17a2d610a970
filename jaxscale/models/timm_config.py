"""Compare and write timm config.json files of ResNets, ViTs and ConvNeXts.

timm builds a model from `architecture` and `model_args`. Supported architectures are listed;
every argument is compared, known not to change results, or rejected. Names and arguments are
those of timm 1.0.31, timm/models/resnet.py, vision_transformer.py, deit.py and convnext.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxscale.errors import invalid
from jaxscale.files import mismatch
from jaxscale.models.config_json import OURS, Comparison, compare, unknown

_RESNET = re.compile(r"(?:tv_)?resnet(18|34|50|101|152)")
# Width, layers, heads, and hidden units divided by the width.
_SIZES: dict[str, tuple[int, int, int, float]] = {"tiny": (192, 12, 3, 4), "small": (384, 12, 6, 4)}
_SIZES |= {"base": (768, 12, 12, 4), "large": (1024, 24, 16, 4), "huge": (1280, 32, 16, 4)}
_SIZES |= {"giant": (1408, 40, 16, 48 / 11), "gigantic": (1664, 48, 16, 64 / 13)}
_VIT = re.compile(rf"(?:vit|deit)_({'|'.join(_SIZES)})_patch(\d+)(_gap)?_\d+")
# Depths and first width of the ConvNeXts; the width doubles at each stage.
_CONVNEXTS: dict[str, tuple] = {"tiny": ((3, 3, 9, 3), 96), "small": ((3, 3, 27, 3), 96)}
_CONVNEXTS |= {"base": ((3, 3, 27, 3), 128), "large": ((3, 3, 27, 3), 192)}
_CONVNEXTS |= {"xlarge": ((3, 3, 27, 3), 256)}
_CONVNEXT = re.compile(rf"convnext_({'|'.join(_CONVNEXTS)})")
_NORM_EPS, _BN_EPSILON = 1e-6, 1e-5  # the same for all; no field has them
# Arguments that are visible in shapes, or that only matter in training.
_HARMLESS = set(
  """attn_drop_rate channels drop_block_rate drop_path_rate drop_rate dynamic_img_size
  fix_init img_size in_chans mlp_ratio num_classes patch_drop_rate
  pos_drop_rate proj_drop_rate strict_img_size weight_init zero_init_last
  head_init_scale ls_init_value
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
_CONVNEXT_FIXED: dict[str, tuple] = {"act_layer": ("gelu",), "conv_bias": (True,)}
_CONVNEXT_FIXED |= dict.fromkeys(("conv_mlp", "head_norm_first", "use_grn"), (False,))
_CONVNEXT_FIXED |= {"global_pool": ("avg",), "kernel_sizes": (7,)}
_CONVNEXT_FIXED |= {"output_stride": (32,), "stem_type": ("patch",)}
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


class _Family(NamedTuple):
  """Architectures of one settings class.

  Attributes:
    pattern: the names of the architectures.
    title: their description in messages.
    fixed: the required values of arguments that no setting corresponds to.
    settings: the setting for each other argument, and for each field of `read`.
    read: a function of (match of `pattern`, `model_args` with the field `global_pool`) that
      returns the arguments with what an architecture implies.
  """

  pattern: re.Pattern
  title: str
  fixed: dict[str, tuple]
  settings: dict[str, str]
  read: Callable[[re.Match | None, dict[str, Any]], dict[str, Any]]


def check_timm(fields: Mapping[str, Any], model: Any, info: Any) -> Comparison:
  """Compare a config.json with an image model.

  Args:
    fields: the fields of the config.json.
    model: settings with the fields of `config.ResNet`, `config.ViT` or `config.ConvNeXt`.
    info: the data's fields, with `mean` and `std`; None compares no images.
  """
  kinds = [cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _FAMILIES]
  family = _FAMILIES[kinds[0] if kinds else "ResNet"]
  match, saved = _read(family, fields)
  problems = []
  if (name := _architecture(fields)) and not match:
    problems.append(f"architecture is {name!r}, but jaxscale only supports {family.title}")
  settings = {x: (name, getattr(model, name, None)) for x, name in family.settings.items()}
  if "hidden units" in settings and model.hidden is None:
    settings["hidden units"] = ("hidden", 4 * model.width)
  problems += compare(saved, model, settings, family.fixed)
  for field in sorted(saved.keys() - _HARMLESS - settings.keys() - family.fixed.keys()):
    problems.append(f"{field} is {saved[field]!r}, which jaxscale does not know")
  return Comparison(problems, [*_image_notes(fields, info), *unknown(fields, _FIELDS)])


def settings_of(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
  """Return the settings that a config.json describes.

  Returns:
    The name of the settings class, and the values of its fields.

  Raises:
    ConfigError: jaxscale has no such model.

  Example:
    >>> settings_of({"architecture": "resnet18"})
    ('ResNet', {'depth': 18, 'bn_epsilon': 1e-05})
  """
  for kind, family in _FAMILIES.items():
    match, saved = _read(family, fields)
    if match:
      return kind, {name: saved[x] for x, name in family.settings.items() if x in saved}
  titles = ", ".join(family.title for family in _FAMILIES.values())
  raise invalid("architecture", _architecture(fields), "is not supported", f"use {titles}")


def _architecture(fields: Mapping[str, Any]) -> str:
  return str(fields.get("architecture", "")).partition(".")[0]


def _read(family: _Family, fields: Mapping[str, Any]) -> tuple[re.Match | None, dict[str, Any]]:
  """Return the match of the architecture, and the arguments with what it implies."""
  args = fields.get("model_args")
  args = {"global_pool": fields.get("global_pool")} | (args if isinstance(args, dict) else {})
  match = family.pattern.fullmatch(_architecture(fields))
  return match, family.read(match, {k: v for k, v in args.items() if v is not None})


def _convnext_fields(match: re.Match | None, args: dict[str, Any]) -> dict[str, Any]:
  if match:
    depths, width = _CONVNEXTS[match[1]]
    implied = {"depths": depths, "dims": tuple(width * 2**i for i in range(len(depths)))}
    args = {"norm_eps": _NORM_EPS} | implied | args
  return args | {name: tuple(args[name]) for name in ("depths", "dims") if name in args}


def _resnet_fields(match: re.Match | None, args: dict[str, Any]) -> dict[str, Any]:
  return args | ({"depth": int(match[1]), "BatchNorm's epsilon": _BN_EPSILON} if match else {})


def _vit_fields(match: re.Match | None, args: dict[str, Any]) -> dict[str, Any]:
  """Return arguments with what an architecture implies, and the pooling of VisionTransformer."""
  is_gap = bool(match and match[3])
  if match:
    sizes = zip(("embed_dim", "depth", "num_heads", "mlp_ratio"), _SIZES[match[1]], strict=True)
    implied = dict(sizes) | ({"num_heads": 16} if is_gap else {})
    args = {"LayerNorm's epsilon": _NORM_EPS, "patch_size": int(match[2])} | implied | args
    args["hidden units"] = int(args["embed_dim"] * args["mlp_ratio"])
  pool = args.get("global_pool", "avg" if is_gap else "token")
  if match or "global_pool" in args:
    has_norm = args.get("fc_norm", pool == "avg" and not is_gap)
    has_token = args.get("class_token", not is_gap)
    args |= {"global_pool": f"{pool or 'token'}, class_token={has_token}, fc_norm={has_norm}"}
    args |= {"pool": _POOLS[args["global_pool"]]} if args["global_pool"] in _POOLS else {}
  return args


_RESNET_SETTINGS = {"depth": "depth", "BatchNorm's epsilon": "bn_epsilon"}
_VIT_SETTINGS = {"num_heads": "num_heads", "pool": "pool", "LayerNorm's epsilon": "norm_eps"}
_VIT_SETTINGS |= {"embed_dim": "width", "depth": "num_layers", "patch_size": "patch"}
_VIT_SETTINGS |= {"hidden units": "hidden"}
_FAMILIES = {
  "ResNet": _Family(_RESNET, "resnet18 to resnet152", _FIXED, _RESNET_SETTINGS, _resnet_fields),
  "ViT": _Family(_VIT, "plain ViT and DeiT", _VIT_FIXED, _VIT_SETTINGS, _vit_fields),
  "ConvNeXt": _Family(
    _CONVNEXT,
    "convnext_tiny to convnext_xlarge",
    _CONVNEXT_FIXED,
    {"depths": "depths", "dims": "dims", "norm_eps": "norm_eps"},
    _convnext_fields,
  ),
}


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
    model: settings; timm supports those with the fields of `config.ResNet`, `config.ViT` or
      `config.ConvNeXt`.
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
  first, head = ("patch_embed.proj", "head") if is_vit else ("conv1", "fc")
  if is_vit and model.norm_eps == _NORM_EPS:
    architecture, features, args = "vit_base_patch16_224", model.width, _vit_args(model)
    args |= {"img_size": [height, width]}
  elif hasattr(model, "depth") and _is_plain(model):
    architecture, features, args = f"resnet{model.depth}", 2048 if model.depth >= 50 else 512, {}
  elif len(getattr(model, "dims", ())) == 4:
    architecture, features, (first, head) = "convnext_tiny", model.dims[-1], ("stem.0", "head.fc")
    args = {name: getattr(model, name) for name in ("depths", "dims", "norm_eps")}
  else:
    return None
  cfg: dict[str, Any] = {"input_size": [channels, height, width], "fixed_input_size": is_vit}
  cfg |= {"first_conv": first, "num_classes": classes, "classifier": head}
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
