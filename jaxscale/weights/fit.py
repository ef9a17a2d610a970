"""Adapt arrays from a file to a model with a different image size or number of channels.

The rules are timm's (`resample_abs_pos_embed`, `adapt_input_conv`). Position embeddings for a
different number of patches are resized as an image. A stem for three colours becomes one
for one channel by summing its kernels over the channels, which is exact for gray images.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import numpy as np

Shape = tuple[int, ...]
Fit = tuple[Callable[[np.ndarray], np.ndarray], str]  # the change, and its description
_STEMS = "params/Conv_0/kernel", "params/stem_0/kernel"  # in a ResNet and a ConvNeXt


def fit(ours: str, how: str, old: Shape, new: Shape) -> Fit | None:
  """Return the change that makes an array of a file fit a model; None if there is none.

  Args:
    ours: the path of the leaf.
    how: the leaf's key in `names.ARRANGEMENTS`.
    old: the shape of the array in the file.
    new: the shape that the array should have in the file.

  Example:
    >>> _, words = fit("params/embed/position", "tokens", (1, 197, 8), (1, 577, 8))
    >>> words
    'position embeddings resized from 14x14 to 24x24 patches'
  """
  if len(old) != len(new):
    return None
  if how == "tokens" and (old[0], old[2]) == (new[0], new[2]) and old[1] > 0:
    return _positions(old[1], new[1])
  is_same = (old[0], *old[2:]) == (new[0], *new[2:])
  if (how == "patch" or ours in _STEMS) and is_same and {old[1], new[1]} == {1, 3}:
    change = functools.partial(_channels, how=how, first=old[1], last=new[1])
    return change, f"kernels of {old[1]} channels converted to {new[1]}"
  return None


def _positions(old_count: int, new_count: int) -> Fit | None:
  """Resize the positions of square images, with or without a class token in front."""
  for prefix in (0, 1):
    old, new = math.isqrt(old_count - prefix), math.isqrt(new_count - prefix)
    if old * old + prefix == old_count and new * new + prefix == new_count and old:
      change = functools.partial(resize_positions, prefix=prefix, new=new)
      words = f"position embeddings resized from {old}x{old} to {new}x{new} patches"
      return change, words
  return None


def resize_positions(x: np.ndarray, *, prefix: int, new: int) -> np.ndarray:
  """Resize [prefix + old * old, width] to [prefix + new * new, width] bicubically.

  Args:
    x: the position embeddings, with patches in row order.
    prefix: the number of leading positions that belong to no patch, which do not change.
    new: the number of rows and of columns of patches.
  """
  old, width = math.isqrt(len(x) - prefix), x.shape[1]
  grid = x[prefix:].astype(np.float32).reshape(old, old, width)
  # With Keys' kernel (1981, a = -1/2), widened when pixels become fewer, as in Pillow and
  # PyTorch's `antialias=True`.
  grid = np.asarray(jax.image.resize(grid, (new, new, width), "cubic"))
  return np.concatenate([x[:prefix], grid.reshape(new * new, width).astype(x.dtype)])


def _channels(x: np.ndarray, *, how: str, first: int, last: int) -> np.ndarray:
  """Sum over channels, or divide one channel's kernel equally among channels."""
  x4 = x.reshape(-1, 1, first, x.shape[-1]) if how == "patch" else x
  x4 = np.repeat(x4.sum(axis=2, keepdims=True) / last, last, axis=2)
  return x4.reshape(-1, x.shape[-1]) if how == "patch" else x4
