"""How an array of a file lies beside ours: transposed, as patches, with dims of 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Arrangement(NamedTuple):
  """One way, there and back.

  Attributes:
    shape: of ours -> of theirs.
    ours: theirs -> laid out as ours, a view where that can be.
    theirs: (ours, shape of theirs) -> laid out as theirs.
  """

  shape: Callable[[Shape], Shape]
  ours: Callable[[np.ndarray], np.ndarray]
  theirs: Callable[[np.ndarray, Shape], np.ndarray]


def _patch_shape(shape: Shape) -> Shape:
  """[p * p * channels, width] -> [width, channels, p, p]; 3 channels, or else 1.

  No number is three times a square and a square as well.
  """
  rows, width = shape
  for channels in (3, 1):
    side = math.isqrt(rows // channels)
    if side * side * channels == rows:
      return (width, channels, side, side)
  return (width, rows, 1, 1)


ARRANGEMENTS = {
  "same": Arrangement(
    shape=lambda s: s,
    ours=lambda a: a,
    theirs=lambda a, _: a,
  ),
  # [in, out]; PyTorch's Linear is [out, in].
  "linear": Arrangement(
    shape=lambda s: s[::-1],
    ours=lambda a: a.T,
    theirs=lambda a, _: a.T,
  ),
  # [height, width, in, out]; PyTorch's Conv2d is [out, in, height, width].
  "conv": Arrangement(
    shape=lambda s: (s[3], s[2], s[0], s[1]),
    ours=lambda a: a.transpose(2, 3, 1, 0),
    theirs=lambda a, _: a.transpose(3, 2, 0, 1),
  ),
  # A Conv2d whose stride is its size, as a matrix that takes flattened patches: a
  # row of it is (row, column, channel) of a patch.
  "patch": Arrangement(
    shape=_patch_shape,
    ours=lambda a: a.transpose(2, 3, 1, 0).reshape(-1, len(a)),
    theirs=lambda a, s: a.reshape(s[2], s[3], s[1], s[0]).transpose(3, 2, 0, 1),
  ),
  # [tokens, width]; timm has room for a batch, [1, tokens, width].
  "tokens": Arrangement(
    shape=lambda s: (1, *s),
    ours=lambda a: a[0],
    theirs=lambda a, _: a[None],
  ),
  # [width]; likewise [1, 1, width].
  "token": Arrangement(
    shape=lambda s: (1, 1, *s),
    ours=lambda a: a[0, 0],
    theirs=lambda a, _: a[None, None],
  ),
}
