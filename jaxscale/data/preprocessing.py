"""Preprocessing of images as a pretrained model's folder describes it. Imports no JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.errors import invalid, remedy_for
from jaxscale.files import expand, read_json, require_json

_VIEWS = {2: "bilinear", 3: "bicubic"}  # by Pillow's number of the filter


def preprocessing_of(path: str | os.PathLike) -> dict[str, Any]:
  """Return the settings of `ImageFolder` and `TFDS` with which a model was pretrained.

  They are `image_size`, `mean`, `std`, `eval_view` and `eval_crop`, from `pretrained_cfg` in
  timm's config.json or from Hugging Face's preprocessor_config.json. Images that these
  stretch to a square are cropped to one instead.

  Args:
    path: the folder of the model.

  Raises:
    ConfigError: the folder has neither, or jaxscale has no such preprocessing.

  Example:
    >>> Path("/tmp/model").mkdir(exist_ok=True)
    >>> fields = '{"pretrained_cfg": {"input_size": [3, 224, 224], "mean": [0.5], "std": [0.5]}}'
    >>> Path("/tmp/model/config.json").write_text(fields) > 0
    True
    >>> preprocessing_of("/tmp/model")["mean"]
    (127.5,)
  """
  folder = Path(expand(path))
  where, read = folder / "config.json", _of_timm
  if (fields := read_json(where).get("pretrained_cfg")) is None:
    where, read = folder / "preprocessor_config.json", _of_hugging_face
    fix = remedy_for(path, "give a folder of timm or Hugging Face, or set mean, std and image_size")
    fields = require_json(where, {}, fix)
  try:
    (height, width), crop, view, mean, std = read(fields)
    if height != width or view not in _VIEWS.values():
      raise ValueError(f"has images of {height}x{width} pixels and interpolation={view!r}")
    scaled = {n: tuple(round(255 * x, 4) for x in v) for n, v in (("mean", mean), ("std", std))}
    return scaled | {"image_size": height, "eval_view": view, "eval_crop": crop}
  except (KeyError, TypeError, ValueError) as e:
    problem = f"lacks {e}" if isinstance(e, KeyError) else str(e)
    fix = "set image_size, mean, std, eval_view and eval_crop yourself"
    raise invalid(str(where), ..., problem, fix) from None


def _of_timm(fields: Any) -> tuple[Any, ...]:
  """Return (height, width), crop, interpolation, mean and standard deviation."""
  crop, view = fields.get("crop_pct", 0.875), fields.get("interpolation", "bicubic")
  return fields["input_size"][1:], crop, view, fields["mean"], fields["std"]


def _of_hugging_face(fields: Any) -> tuple[Any, ...]:
  """Return the values of `_of_timm` from a preprocessor_config.json."""
  resized = fields["size"] if isinstance(fields["size"], dict) else {"height": fields["size"]}
  size = fields["crop_size"] if fields.get("do_center_crop") else resized
  size = size if isinstance(size, dict) else {"height": size}
  height = size["height"]
  crop = height / resized.get("shortest_edge", height)
  view = _VIEWS.get(fields.get("resample", 2), "")
  return (height, size.get("width", height)), crop, view, fields["image_mean"], fields["image_std"]


def eval_resize(settings: Mapping[str, Any]) -> tuple[str, float]:
  """Return interpolation and crop of validation images, as timm's `crop_pct`.

  Args:
    settings: the settings of the data as JSON; images of data without `eval_view` are whole.

  Example:
    >>> eval_resize({"eval_view": "bicubic"}), eval_resize({"class": "Digits"})
    (('bicubic', 0.875), ('bilinear', 1.0))
  """
  if (view := settings.get("eval_view")) is None:
    return "bilinear", 1.0
  crop = settings.get("eval_crop") or 0.875
  return "bicubic" if view == "bicubic" else "bilinear", crop
