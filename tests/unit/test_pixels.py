"""One picture in many files: every reader gives the same pixels."""

import contextlib
import io
import json
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from jaxscale import data
from jaxscale.data import jpeg, partial_jpeg
from jaxscale.data.augment import centered_crop, shorter_side, uniform
from jaxscale.errors import ConfigError
from support.images import example, write_tfds

# Blocks of colours that lossy codecs keep to a level.
BLOCKS = np.random.default_rng(2206).integers(0, 256, (3, 5, 3)).astype(np.uint8)
COLOUR = BLOCKS.repeat(16, axis=0).repeat(16, axis=1)
GREY = np.asarray(Image.fromarray(COLOUR).convert("L"))
DRAWS = uniform(0, np.arange(4))


def exif(orientation):
  tags = Image.Exif()
  tags[0x0112] = orientation
  return tags.tobytes()


def by_pillow(kind, change=lambda image: image, **options):
  def encode(picture, orientation):
    out = io.BytesIO()
    image = change(Image.fromarray(picture))
    image.save(out, kind, exif=exif(orientation), **options)
    return out.getvalue()

  return encode


def quantized(image):
  return image.convert("RGB").quantize(256)


def opaque(image):
  image.putalpha(255)
  return image


def chunk(name, content):
  body = name + content
  return len(content).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def deep_png(picture, orientation):
  pixels = picture[..., ::-1] if picture.ndim == 3 else picture
  png = cv2.imencode(".png", pixels.astype(np.uint16) * 257)[1].tobytes()
  content = exif(orientation).removeprefix(b"Exif\0\0")
  return png[:33] + chunk(b"eXIf", content) + png[33:]


def deep_ppm(most):
  def encode(picture, orientation):
    height, width = picture.shape[:2]
    pixels = np.rint(picture / 255 * most).astype(">u2")
    magic = b"P6" if picture.ndim == 3 else b"P5"
    return magic + b"\n# a\n%d %d\n%d\n" % (width, height, most) + pixels.tobytes()

  return encode


def tiff(scale, dtype, order="<", white=1):
  """TIFFs that Pillow cannot write: deep colours, big-endian, 0 for white."""

  def encode(picture, orientation):
    pixels = picture if white else 255 - picture
    pixels = (pixels * np.float64(scale)).astype(f"{order}{dtype}")
    count = picture.shape[2] if picture.ndim == 3 else 1
    kinds = {"u": 1, "i": 2, "f": 3}
    magic = b"II*\0\x08\0\0\0" if order == "<" else b"MM\0*\0\0\0\x08"
    tags = TiffImagePlugin.ImageFileDirectory_v2(magic)
    tags[256], tags[257] = picture.shape[1], picture.shape[0]
    tags[258] = (8 * pixels.dtype.itemsize,) * count
    tags[259], tags[262] = 1, 2 if count == 3 else white
    tags[273], tags.tagtype[273] = 0, 4
    tags[274], tags[277], tags[278] = orientation, count, picture.shape[0]
    tags[279] = pixels.nbytes
    tags[339] = (kinds[pixels.dtype.kind],) * count
    return magic + tags.tobytes(8) + pixels.tobytes()

  return encode


# Encoding -> (its encoder, the levels that its pixels may be away, its format).
LOSSY = {"quality": 100, "subsampling": 0}
FILES = {
  "JPEG": (by_pillow("JPEG", **LOSSY), 1, "JPEG"),
  "progressive JPEG": (by_pillow("JPEG", progressive=True, **LOSSY), 1, "JPEG"),
  "PNG": (by_pillow("PNG"), 0, "PNG"),
  "palette PNG": (by_pillow("PNG", quantized), 0, "PNG"),
  "PNG with alpha": (by_pillow("PNG", opaque), 0, "PNG"),
  "16-bit PNG": (deep_png, 0, "16-bit PNG"),
  "WebP": (by_pillow("WEBP", lossless=True), 0, "WEBP"),
  "GIF": (by_pillow("GIF", quantized), 0, "GIF"),
  "BMP": (by_pillow("BMP"), 0, "BMP"),
  "PPM": (by_pillow("PPM"), 0, "PPM"),
  "16-bit PPM": (deep_ppm(65535), 0, "16-bit PPM"),
  "12-bit PPM": (deep_ppm(4095), 0, "16-bit PPM"),
  "AVIF": (by_pillow("AVIF", quality=100, subsampling="4:4:4"), 1, "AVIF"),
  "TIFF": (by_pillow("TIFF", compression="tiff_lzw"), 0, "TIFF"),
  "16-bit TIFF": (tiff(257, "u2"), 0, "16-bit TIFF"),
  "16-bit TIFF, big-endian": (tiff(257, "u2", ">"), 0, "16-bit TIFF"),
  "32-bit TIFF": (tiff(0x01010101, "u4"), 0, "32-bit TIFF"),
  "32-bit TIFF, signed": (tiff(0x00808080, "i4"), 0, "32-bit TIFF"),
  "float TIFF": (tiff(1 / 255, "f4"), 0, "float TIFF"),
  "double TIFF": (tiff(1 / 255, "f8"), 0, "float TIFF"),
}


def views(encoded, channels, folder):
  """Return the evaluation view and training crops."""
  seen = [None, *DRAWS]
  return np.stack([jpeg.decode_view(encoded, 32, channels, d)[0] for d in seen])


def without_library(encoded, channels, folder):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(partial_jpeg, "library", lambda: partial_jpeg.Library(None, ""))
    return views(encoded, channels, folder)


def with_library(encoded, channels, folder):
  if partial_jpeg.library().decode is None:
    pytest.skip("the library for crops cannot be built")
  return views(encoded, channels, folder)


def in_a_folder(encoded, channels, folder):
  path = folder / "train" / "a" / "picture"
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(encoded)
  made = data.image_folder(folder / "train", image_size=32, channels=channels)
  loaded = made.load(np.arange(1), None)["image"]
  assert made.damaged.count == 0
  return loaded


def as_stored(encoded, channels, folder):
  pixels = jpeg.decode(encoded, channels, exact=True)[0]
  fast = jpeg.decode(encoded, channels)[0]
  return np.stack([pixels, fast])


def in_tfds(encoded, channels, folder):
  pytest.importorskip("tensorflow_datasets")
  record = example(encoded, 1)
  name = f"p{zlib.crc32(encoded)}_{channels}"
  if (folder / name).exists():  # BMP has no orientation
    return data.tfds_images(name, "train", data_dir=str(folder)).load(np.arange(1), None)["image"]
  made = write_tfds(folder, name, "tfrecord", {"train": [[record]]})
  features = json.loads((made / "features.json").read_text())
  image = features["featuresDict"]["features"]["image"]["image"]
  image["encodingFormat"] = "png"
  image["shape"]["dimensions"] = [*map(str, COLOUR.shape[:2]), str(channels)]
  (made / "features.json").write_text(json.dumps(features))
  stored = data.tfds_images(name, "train", data_dir=str(folder))
  loaded = stored.load(np.arange(1), None)["image"]
  assert stored.damaged.count == 0
  return loaded


READERS = (as_stored, without_library, with_library, in_a_folder, in_tfds)


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
  """Build the library for crops if possible."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with contextlib.suppress(ConfigError):
      partial_jpeg.build()
    partial_jpeg.library.cache_clear()
    yield
  partial_jpeg.library.cache_clear()


@pytest.mark.filterwarnings("ignore")  # protobuf and TFDS warn of each other
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_picture_has_the_same_pixels_in_every_file(name, reader, tmp_path):
  """Whatever its orientation says, its depth and its colours."""
  encode, away, kind = FILES[name]
  for picture in (COLOUR, GREY):
    plain = by_pillow("PNG")(picture, 1)
    for channels in (1, 3, 4):
      expected = reader(plain, channels, tmp_path / "plain").astype(int)
      # Files of a folder and of TFDS are decoded by what the others test.
      few = reader in (in_a_folder, in_tfds)
      for orientation in (1, 6) if few else range(1, 9):
        encoded = encode(picture, orientation)
        seen = reader(encoded, channels, tmp_path / "other")
        assert seen.shape == expected.shape
        most = int(np.abs(seen - expected).max())
        assert most <= away, (channels, orientation)
        assert jpeg.decode(encoded, channels)[1] == kind
  mode = {1: "L", 3: "RGB", 4: "RGBA"}
  for channels in (1, 3, 4):  # and they are those of the picture
    known = np.asarray(Image.fromarray(COLOUR).convert(mode[channels]))
    pixels = jpeg.decode(encode(COLOUR, 6), channels)[0]
    assert np.abs(pixels.reshape(known.shape).astype(int) - known).max() <= away


LOST = [(tiff(1, "u2"), "black"), (tiff(1, "i4"), "black"), (tiff(1, "f4"), "from 0 to 1")]
LOST += [(tiff(-1, "f4"), "from 0 to 1"), (tiff(-100, "i2"), "to 32767")]


@pytest.mark.parametrize("encode, message", LOST, ids=range(5))
def test_pixels_that_would_be_lost_are_no_picture(encode, message, tmp_path):
  encoded = encode(COLOUR, 1)
  with pytest.raises(ValueError, match=message):
    jpeg.decode(encoded, 3)
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "1.tif").write_bytes(encoded)
  (tmp_path / "a" / "2.png").write_bytes(deep_png(COLOUR, 1))
  made = data.image_folder(tmp_path, image_size=16)
  made.load(np.arange(2), None)
  assert made.damaged.names == ["a/1.tif"]
  assert made.damaged.unusual == {"16-bit PNG": 1}


def test_grey_where_0_is_white_and_two_channels():
  for dtype, scale in (("u1", 1), ("u2", 257), ("u4", 0x01010101)):
    encoded = tiff(scale, dtype, white=0)(GREY, 1)
    np.testing.assert_array_equal(jpeg.decode(encoded, 1)[0][..., 0], GREY)


# The published evaluation views, against dense float64 matrices.


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
  with pytest.raises(ConfigError, match=r"TFDS.eval_crop=0.9: eval_view='mlperf'"):
    data.TFDS(name="x", eval_view="mlperf", eval_crop=0.9)
