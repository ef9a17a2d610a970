"""Which settings of ours have the names and shapes that a file has, if any do.

For the message where a file does not fit the model that it was to be read into:
settings are advised only where the file is of a network that is among ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxscale import models
from jaxscale.models.resnet import DEPTHS
from jaxscale.optim.tree_paths import path_name
from jaxscale.weights.names import Naming, Shape, Shapes, naming_of, table_of

_Found = tuple[str, Any]  # what to set, and the shapes of that model


def settings_of(
  naming: str, stored: Mapping[str, Shape], num_classes: int | None = None
) -> str | None:
  """Settings whose model has exactly these names and shapes; None: there are none.

  Args:
    naming: of the file, one of `NAMINGS`.
    stored: shapes of all its arrays, by name.
    num_classes: classes or words of the data, where they are known.

  Returns:
    E.g. "ResNet(depth=50, width=64)". Numbers of heads are not in the arrays.
  """
  try:
    if "layer1.0.conv1.weight" in stored:
      found, shapes = _resnet(stored)
    elif "model.embed_tokens.weight" in stored:
      found, shapes = _transformer(_theirs(naming, "params/embed/table", stored), num_classes)
    else:
      found, shapes = _vit(_theirs(naming, "params/embed/patch/kernel", stored))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    ours = {path_name(path): leaf.shape for path, leaf in leaves}
    return found if _has(naming_of(naming, ours), ours, stored) else None
  except Exception:  # of ours or of JAX, for shapes that nothing like ours has
    return None


def _has(names: Naming, ours: Shapes, stored: Mapping[str, Shape]) -> bool:
  """Whether a file has the arrays of a model, and no others."""
  wanted = {x.theirs: x.shape_in_file(ours[x.ours]) for x in names.links}
  tied = {x.theirs for x in names.links if x.or_else}
  left = {
    name: shape
    for name, shape in stored.items()
    if name not in names.counters and not name.endswith(names.derived)
  }
  same = {name: wanted[name] for name in wanted if name in left or name not in tied}
  return same == left


def _resnet(stored: Mapping[str, Shape]) -> _Found:
  width, channels, kernel, _ = stored["conv1.weight"]
  blocks = tuple(_count(stored, f"layer{i}.{{}}.conv1.weight") for i in range(1, 5))
  is_bottleneck = "layer1.0.conv3.weight" in stored
  (depth,) = (n for n, kind in DEPTHS.items() if kind == (blocks, is_bottleneck))
  stem = {7: "imagenet", 3: "small"}[kernel]
  options: Any = {"num_classes": stored["fc.weight"][0], "width": width, "stem": stem}
  module = models.make_resnet(depth, **options)
  init = models.functions(module, (32, 32, channels)).init
  params, state = models.init_shapes(init)
  text = f"ResNet(depth={depth}, width={width}, stem={stem!r})"
  return text, {"params": params, **state}


def _vit(stored: Mapping[str, Shape]) -> _Found:
  width, channels, patch, _ = stored["embed/patch/kernel"]
  has_token = "embed/class_token" in stored
  side = math.isqrt(stored["embed/position"][1] - has_token)
  sizes = {
    "patch": patch,
    "width": width,
    "num_layers": _count(stored, "layers/up/kernel/{}"),
    "hidden": stored["layers/up/kernel/0"][0],
    "pool": "token" if has_token else "mean",
  }
  shape, classes = (side * patch, side * patch, channels), stored["head/kernel"][0]
  options: Any = {"image_shape": shape, "num_classes": classes, "num_heads": 1}
  stack = models.make_vit(**options, **sizes)
  text = f"ViT({_text(sizes)}) and images of {side * patch} pixels"
  return text, {"params": models.init_shapes(stack.init)}


def _transformer(stored: Mapping[str, Shape], num_words: int | None) -> _Found:
  vocab_size, width = stored["embed/table"]
  queries, keys = (stored[f"layers/{x}/kernel/0"][0] for x in "qk")
  has_norm = "layers/q_norm/scale/0" in stored
  each = stored["layers/q_norm/scale/0"][0] if has_norm else math.gcd(queries, keys)
  sizes = {
    "num_layers": _count(stored, "layers/q/kernel/{}"),
    "width": width,
    "hidden": stored["layers/up/kernel/0"][0],
    "qk_norm": has_norm,
    "qkv_bias": "layers/q/bias/0" in stored,
  }
  heads = {"num_heads": queries // each, "num_kv_heads": keys // each}
  options: Any = {"vocab_size": vocab_size, "head_width": each, "pad_vocab_to": 1}
  stack = models.make_transformer(**options, **heads, **sizes)
  text = f"Transformer({_text(sizes)}) and {vocab_size} words"
  if num_words is not None and num_words < vocab_size:  # as Qwen's tables
    text = f"Transformer({_text(sizes | {'pad_vocab_to': vocab_size})})"
  return text, {"params": models.init_shapes(stack.init)}


def _theirs(naming: str, member: str, stored: Mapping[str, Shape]) -> dict[str, Shape]:
  """Shapes in the file by our paths; of a stacked one by path/layer."""
  found = {}
  for row in table_of(naming, member):
    is_stacked = "{}" in row.theirs
    for i in range(_count(stored, row.theirs) if is_stacked else row.theirs in stored):
      path = f"{row.ours}/{i}" if is_stacked else row.ours
      found[path] = stored[row.theirs.format(i)]
  return found


def _count(stored: Mapping[str, Shape], name: str) -> int:
  """How many layers or blocks there are, by a name with {} in it."""
  return next(i for i in itertools.count() if name.format(i) not in stored)


def _text(sizes: Mapping[str, Any]) -> str:
  return ", ".join(f"{k}={v!r}" for k, v in sizes.items())
