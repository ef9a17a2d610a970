"""The published evaluation views, against dense float64 matrices."""

import numpy as np
import pytest

from jaxscale.data import jpeg
from jaxscale.data.augment import shorter_side


def matrix(places, length, kernel, reach):
  """Row i has the weights of the input pixels at places[i]; edges repeat."""
  rows = np.zeros((len(places), length))
  for i, x in enumerate(places):
    for j in range(int(np.floor(x)) - reach + 1, int(np.floor(x)) + reach + 1):
      rows[i, min(max(j, 0), length - 1)] += kernel(abs(x - j))
  return rows


def resized(image, rows, columns):
  tall = np.tensordot(rows, image.astype(np.float64), 1)
  return np.einsum("ixc,jx->ijc", tall, columns, optimize=True)


SHAPES = [(375, 500), (500, 333), (256, 256), (90, 120), (400, 150), (213, 189)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [224, 128])
def test_the_mlperf_view_is_resize_then_centre_crop(photo, shape, size):
  image = photo[: min(shape[0], 400), : shape[1]]
  height, width, _ = image.shape
  tall, wide = shorter_side(height, width, size)
  rows, columns = (
    matrix(np.arange(n) * m / n, m, lambda d: max(1 - d, 0), 1)
    for n, m in ((tall, height), (wide, width))
  )
  known = resized(image, rows, columns)  # all of it, as the reference does
  top, left = (tall - size) // 2, (wide - size) // 2
  known = known[top : top + size, left : left + size]
  view = jpeg.view(image, size, None)
  assert view.shape == (size, size, 3)
  assert np.abs(view - known).max() <= 0.501  # rounding to uint8, and float32


@pytest.mark.parametrize("shape", SHAPES)
def test_the_google_view_is_the_centre_by_keys_cubic(photo, shape):
  image = photo[: min(shape[0], 400), : shape[1]]
  side = min(image.shape[:2]) * 7 // 8
  top, left = ((n - side + 1) // 2 for n in image.shape[:2])
  centre = image[top : top + side, left : left + side]

  def keys(d):
    if d <= 1:
      return 1.5 * d**3 - 2.5 * d**2 + 1
    return -0.5 * d**3 + 2.5 * d**2 - 4 * d + 2 if d < 2 else 0.0

  places = (np.arange(96) + 0.5) * side / 96 - 0.5
  rows = matrix(places, side, keys, 2)
  inner = slice(3, -3)  # at the edge TensorFlow drops taps, this repeats pixels
  known = resized(centre, rows, rows)[inner, inner].clip(0, 255)
  view = jpeg.view(image, 96, None, "google")
  assert np.abs(view[inner, inner] - known).max() <= 0.501


def test_the_shorter_side_is_rounded_as_in_the_reference():
  assert shorter_side(375, 500, 224) == (256, 341)
  assert shorter_side(500, 333, 224) == (384, 256)
  lost = [n for n in range(224, 600) if min(shorter_side(n, n + 100, 224)) == 255]
  assert len(lost) > 20  # float32 and truncation; the crop has room for it
  assert shorter_side(3, 5, 2) == (2, 3)
