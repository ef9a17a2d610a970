"""Stateless augmentation: randomness is a function of an example's position.

The draws of an example depend on the seed and its position in the stream of training
examples. They are therefore the same however the batch is split over hosts, and after any
restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

AugmentName = Literal["none", "flip", "shift_flip", "crop"]
NUM_DRAWS = 24  # the largest number of uniform draws per example


class CenterCrop(NamedTuple):
  """Evaluation crop of torchvision and timm; `centered_crop` has the equations.

  Attributes:
    interpolation: Pillow's filter, which averages when it shrinks an image.
    share: the part of the resized shorter side that is kept, timm's `crop_pct`; 224 / 256
      in torchvision's first weights, 224 / 232 in its second.
  """

  interpolation: Literal["bilinear", "bicubic"]
  share: float = 0.875


EvalView = Literal["mlperf"] | CenterCrop


class Augment(NamedTuple):
  """Random change of decoded images.

  Attributes:
    apply: a function of (images uint8 [n, h, w, c], draws [n, num_draws]) -> images.
    num_draws: the number of uniform draws per example.
  """

  apply: Callable[[np.ndarray, np.ndarray], np.ndarray]
  num_draws: int


def uniform(seed: int, positions: np.ndarray, num_draws: int = NUM_DRAWS) -> np.ndarray:
  """Return numbers in [0, 1) by position, float64 [n, num_draws].

  The keys of `pipeline.shuffled` use the same counters, so a position's draws are also the
  order keys of other examples. No effect of this is known, and a separate key would change the
  augmentation of runs that resume.

  Args:
    seed: a non-negative integer.
    positions: the positions in the stream of examples, int [n].
    num_draws: the number of a position's NUM_DRAWS to return.
  """
  counters = positions.astype(np.uint64)[:, None] * np.uint64(NUM_DRAWS)
  bits = uniform_bits(seed, counters + np.arange(num_draws, dtype=np.uint64))
  return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform_bits(seed: int, counters: np.ndarray) -> np.ndarray:
  """Return random uint64 by counter: SplitMix64's finaliser with a key from the seed.

  Steele, Lea and Flood, "Fast splittable pseudorandom number generators"
  (OOPSLA 2014).
  """
  key = _splitmix64(np.array([seed], np.uint64))
  return _splitmix64(counters.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)


def _splitmix64(x: np.ndarray) -> np.ndarray:
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def flip() -> Augment:
  """Mirror half of the images from left to right."""

  def apply(images, draws):
    mirrored = draws[:, 0] < 0.5
    images = images.copy()
    images[mirrored] = images[mirrored, :, ::-1]
    return images

  return Augment(apply, num_draws=1)


def shift(pixels: int) -> Augment:
  """Move each image by up to `pixels` in both dims, and fill with 0.

  The shift of each dim is uniform over -pixels … pixels.
  """

  def apply(images, draws):
    n, height, width, channels = images.shape
    wide = width + 2 * pixels
    padded = np.zeros((n, height + 2 * pixels, wide, channels), images.dtype)
    padded[:, pixels : pixels + height, pixels : pixels + width] = images
    top, left = (draws * (2 * pixels + 1)).astype(np.int64).T
    # Index of each output pixel in the array of all padded images.
    image = np.arange(n) * padded[0, ..., 0].size
    corner = image + top * wide + left
    inside = np.arange(height)[:, None] * wide + np.arange(width)
    positions = corner[:, None, None] + inside
    return padded.reshape(-1, channels).take(positions, axis=0)

  return Augment(apply, num_draws=2)


def compose(first: Augment, second: Augment) -> Augment:
  """Apply one augmentation after the other, each with its own draws."""
  split = first.num_draws

  def apply(images, draws):
    return second.apply(first.apply(images, draws[:, :split]), draws[:, split:])

  return Augment(apply, split + second.num_draws)


def augment_of(name: AugmentName, height: int) -> Augment | None:
  """Return the augmentation of decoded images of a height; crops happen during decoding."""
  if name == "shift_flip":
    return compose(flip(), shift(max(height // 14, 1)))
  return flip() if name == "flip" else None


def crop_box(height: int, width: int, draws: np.ndarray) -> tuple[int, int, int, int]:
  """Return the box of a random resized crop: (top, left, height, width) in pixels.

  This is Inception's crop (arXiv:1409.4842, §6): 8 % to 100 % of the area and a log-uniform
  aspect of 3/4 to 4/3. After ten failed attempts the box is the largest centred one with an
  allowed aspect. It uses draws 1 to 22 of [NUM_DRAWS]; draw 0 is for a flip.
  """
  areas = height * width * (0.08 + 0.92 * draws[1:11])
  aspects = np.exp(np.log(4 / 3) * (2 * draws[11:21] - 1))
  widths = np.rint(np.sqrt(areas * aspects)).astype(int)
  heights = np.rint(np.sqrt(areas / aspects)).astype(int)
  fits = (widths <= width) & (heights <= height) & (widths > 0) & (heights > 0)
  if fits.any():
    first = int(fits.argmax())
    h, w = int(heights[first]), int(widths[first])
    top = int(draws[21] * (height - h + 1))
    return top, int(draws[22] * (width - w + 1)), h, w
  h = min(height, round(width * 4 / 3))
  w = min(width, round(height * 4 / 3))
  return (height - h) // 2, (width - w) // 2, h, w


def shorter_side(height: int, width: int, size: int) -> tuple[int, int]:
  """Return the size (height, width) to resize to before MLPerf's centre crop of `size`.

  The shorter side becomes 256 / 224 of the crop, and the other side keeps the aspect, both in
  float32 and rounded down, as in the reference (mlcommons/training,
  image_classification/tensorflow2/imagenet_preprocessing.py, `_smallest_size_at_least`). So
  256 can become 255.
  """
  target = np.float32(round(size * 256 / 224))
  scale = target / np.float32(min(height, width))
  tall, wide = (int(np.float32(length) * scale) for length in (height, width))
  return max(tall, size), max(wide, size)


def centered_crop(height: int, width: int, size: int, share: float) -> tuple[int, int, int, int]:
  """Return the (height, width) to resize to and the (top, left) of the central crop.

  The crop is a square with side `size`. The shorter side becomes size / share, and the other
  side keeps the aspect ratio, both rounded down. The crop's corner is rounded half to even
  (torchvision 0.28 transforms/functional.py, `_compute_resized_output_size` and `center_crop`;
  timm 1.0.31 data/transforms_factory.py, `transforms_imagenet_eval`).
  """
  side, shorter = math.floor(size / share), min(height, width)
  sizes = height, width
  tall, wide = (side if s == shorter else int(side * s / shorter) for s in sizes)
  return tall, wide, round((tall - size) / 2), round((wide - size) / 2)
