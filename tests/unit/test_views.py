"""The published evaluation views, against dense float64 matrices."""

import io

import numpy as np
import pytest
from PIL import Image

from jaxscale import data
from jaxscale.data import jpeg
from jaxscale.data.augment import centered_crop, shorter_side
from jaxscale.errors import ConfigError


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
  linear = lambda d: max(1 - d, 0)  # noqa: E731
  rows = matrix(np.arange(tall) * height / tall, height, linear, 1)
  columns = matrix(np.arange(wide) * width / wide, width, linear, 1)
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


# (height, width, size, crop_pct): (height, width) resized to and (top, left), as
# torchvision 0.28 and timm 1.0.31 have them (tests/others/test_eval_views.py).
CENTERED = {
  (375, 500, 224, 0.875): (256, 341, 16, 58),  # 58.5, to even
  (500, 333, 224, 0.95): (352, 235, 64, 6),
  (90, 120, 96, 1.0): (96, 128, 0, 16),
  (256, 256, 224, 224 / 232): (232, 232, 4, 4),
}


@pytest.mark.parametrize("case", CENTERED)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_view_of_torchvision_and_timm_is_that_of_pillow(photo, case, interpolation):
  """From the file on: Pillow's decoder, filter and rounding."""
  height, width, size, share = case
  tall, wide, top, left = CENTERED[case]
  assert centered_crop(height, width, size, share) == CENTERED[case]
  image = Image.fromarray(np.resize(photo, (height, width, 3)))
  file = io.BytesIO()
  image.save(file, "JPEG", quality=85)
  resized = Image.open(file).resize((wide, tall), Image.Resampling[interpolation.upper()])
  wanted = np.asarray(resized)[top : top + size, left : left + size]
  view = data.CenterCrop(interpolation, share)
  got, kind = jpeg.decode_view(file.getvalue(), size, 3, None, view)
  assert kind == "JPEG"
  np.testing.assert_array_equal(got, wanted)


def test_views_of_other_channels(photo):
  image, crop = photo[:40, :60], data.CenterCrop("bilinear")
  plain = jpeg.view(image, 16, None, crop)
  for channels in ([0], [0, 1, 2, 0]):
    view = jpeg.view(np.ascontiguousarray(image[..., channels]), 16, None, crop)
    assert view.shape == (16, 16, len(channels))
    if len(channels) == 1:
      np.testing.assert_array_equal(view, plain[..., channels])


def test_the_setting_of_the_evaluation_view(tmp_path, photo):
  for split in ("train", "val"):
    (tmp_path / split / "a").mkdir(parents=True)
    Image.fromarray(photo[:90, :120]).save(tmp_path / split / "a" / "1.png")
  views = {}
  for name, crop in [("mlperf", None), ("bicubic", None), ("bicubic", 0.5)]:
    chosen = data.ImageFolder(path=str(tmp_path), image_size=32, eval_view=name, eval_crop=crop)
    views[name, crop] = chosen.build()[1].load(np.array([0]), None)["image"][0]
  for (name, crop), got in views.items():
    view = name if name == "mlperf" else data.CenterCrop("bicubic", crop or 0.875)
    np.testing.assert_array_equal(got, jpeg.view(photo[:90, :120], 32, None, view))
  assert len({v.tobytes() for v in views.values()}) == 3
  with pytest.raises(ConfigError, match=r"ImageFolder.eval_crop=0.9: .*'bicubic'"):
    data.ImageFolder(path="x", eval_crop=0.9)
  with pytest.raises(ConfigError, match=r"TFDS.eval_crop=0.9: eval_view='google'"):
    data.TFDS(name="x", eval_view="google", eval_crop=0.9)
