"""Augmentation without state: every example's randomness has an address.

The draws of an example depend on the seed and on its position in the stream of
training examples, so they are the same however the batch is split over
hosts, and after any restart.
"""

from __future__ import annotations

import numpy as np

from jaxscale.data.dataset import NUM_DRAWS, Augment


def uniform(seed: int, positions: np.ndarray) -> np.ndarray:
  """Numbers in [0, 1) by position, float64 [n, NUM_DRAWS].

  Counter-based: the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014)
  of the counter, keyed by the finalised seed.

  Args:
    seed: any non-negative int.
    positions: int [n], places in the stream of examples.
  """
  counters = positions.astype(np.uint64)[:, None] * np.uint64(NUM_DRAWS)
  counters = counters + np.arange(NUM_DRAWS, dtype=np.uint64)
  key = _splitmix64(np.array([seed], np.uint64))
  bits = _splitmix64(counters * np.uint64(0x9E3779B97F4A7C15) + key)
  return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: np.ndarray) -> np.ndarray:
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def flip(images: np.ndarray, draws: np.ndarray) -> np.ndarray:
  """Mirror half of the images, left to right; uses draw 0."""
  mirrored = draws[:, 0] < 0.5
  images = images.copy()
  images[mirrored] = images[mirrored, :, ::-1]
  return images


def shift(pixels: int) -> Augment:
  """Move each image by up to `pixels` in both dims, filling with 0.

  The shift of each dim is uniform over -pixels … pixels; uses draws 1 and 2.
  """

  def augment(images, draws):
    n, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
    top, left = (draws[:, 1:3] * (2 * pixels + 1)).astype(np.int64).T
    rows = top[:, None] + np.arange(height)  # [n, h]
    cols = left[:, None] + np.arange(width)  # [n, w]
    return padded[np.arange(n)[:, None, None], rows[:, :, None], cols[:, None, :]]

  return augment


def shift_flip(pixels: int) -> Augment:
  """`flip`, then `shift`."""
  move = shift(pixels)
  return lambda images, draws: move(flip(images, draws), draws)


def crop_box(height: int, width: int, draws: np.ndarray) -> tuple[int, int, int, int]:
  """The box of a random resized crop: (top, left, height, width).

  Inception's crop (arXiv:1409.4842, §6): 8 % to 100 % of the area, aspect
  3/4 to 4/3 (log-uniform), ten attempts, then the largest centred box of an
  allowed aspect. Uses draws 1 to 22.

  Args:
    height: of the image, in pixels.
    width: of the image, in pixels.
    draws: [NUM_DRAWS] in [0, 1).
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


def center_box(height: int, width: int) -> tuple[int, int, int, int]:
  """The evaluation view: the centred square of 7/8 of the shorter side.

  224 of 256: the view that published ImageNet accuracies are of.
  """
  side = round(min(height, width) * 7 / 8)
  return (height - side) // 2, (width - side) // 2, side, side
