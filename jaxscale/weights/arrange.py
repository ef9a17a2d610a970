"""From the layout of an array in a file to ours, and back: transposed, as patches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Arrangement(NamedTuple):
  """How an array in a file becomes ours, and ours becomes the file's.

  Attributes:
    shape: shape of ours -> shape in the file.
    ours: array in the file -> ours; a view where possible.
    theirs: (ours, shape in the file) -> array for the file.
  """

  shape: Callable[[Shape], Shape]
  ours: Callable[[np.ndarray], np.ndarray]
  theirs: Callable[[np.ndarray, Shape], np.ndarray]


def _patch_shape(shape: Shape) -> Shape:
  """[p * p * channels, width] -> [width, channels, p, p]; 3 channels, or else 1.

  Unambiguous: no number is both a square and three times a square.
  """
  rows, width = shape
  for channels in (3, 1):
    side = math.isqrt(rows // channels)
    if side * side * channels == rows:
      return (width, channels, side, side)
  return (width, rows, 1, 1)


ARRANGEMENTS = {
  "same": Arrangement(lambda s: s, lambda a: a, lambda a, _: a),
  # [in, out]; PyTorch's Linear is [out, in].
  "linear": Arrangement(lambda s: s[::-1], lambda a: a.T, lambda a, _: a.T),
  # [height, width, in, out]; PyTorch's Conv2d is [out, in, height, width].
  "conv": Arrangement(
    lambda s: (s[3], s[2], s[0], s[1]),
    lambda a: a.transpose(2, 3, 1, 0),
    lambda a, _: a.transpose(3, 2, 0, 1),
  ),
  # A Conv2d whose stride is its kernel's size, as a matrix that takes flattened
  # patches: a row of it is (row, column, channel) of a patch.
  "patch": Arrangement(
    _patch_shape,
    lambda a: a.transpose(2, 3, 1, 0).reshape(-1, len(a)),
    lambda a, s: a.reshape(s[2], s[3], s[1], s[0]).transpose(3, 2, 0, 1),
  ),
  # [tokens, width] and [width]; timm adds a batch dim, and a token's.
  "tokens": Arrangement(lambda s: (1, *s), lambda a: a[0], lambda a, _: a[None]),
  "token": Arrangement(
    lambda s: (1, 1, *s), lambda a: a[0, 0], lambda a, _: a[None, None]
  ),
}
