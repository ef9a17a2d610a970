"""Decode, crop, resize and flip encoded images, one at a time.

simplejpeg (libjpeg-turbo) and OpenCV's resize release the GIL, so threads scale; Pillow reads
the other formats. All give the same pixels for the same picture: EXIF orientation is not
applied, as in torchvision and timm, and pixels of more than 8 bits are scaled by the range of
their type (floats by 0 … 1).
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import re
from typing import Any

import cv2
import numpy as np
from PIL import Image, TiffImagePlugin

from jaxscale.data import augment, partial_jpeg
from jaxscale.data.augment import CenterCrop, EvalView
from jaxscale.data.dataset import MAX_PIXELS
from jaxscale.metrics.log import logger

simplejpeg = partial_jpeg.simplejpeg
if simplejpeg is None:
  slower = "Pillow decodes JPEGs, more slowly and with pixels that differ by rounding"
  logger.warning(f"simplejpeg is not installed; {slower}")

cv2.setNumThreads(0)  # The pipeline's threads provide the parallelism.
# Without this, it writes several lines to stderr for every damaged TIFF.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


# By channels: the names in simplejpeg, Pillow and OpenCV, and the PNG colour types that OpenCV
# converts as Pillow does. Pillow reads the others.
_FORMATS = {
  1: ("GRAY", "L", cv2.IMREAD_GRAYSCALE, b"\0\4"),
  3: ("RGB", "RGB", cv2.IMREAD_COLOR_RGB, b"\0\2\3\4\6"),
  4: ("RGBA", "RGBA", 0, b""),
}


# The largest number of scans in a progressive JPEG: libjpeg writes 10, and each costs a pass
# over the whole image, however short the scan is.
_MAX_SCANS = 100
_MAX_WHOLE_SCANS = 20  # of an image of max_pixels; libjpeg writes 18 for CMYK
# Formats whose decoders need 16 to 22 bytes per pixel, three times as many as others, may have
# a quarter of the pixels.
_HEAVY = {"WEBP": 4, "AVIF": 4}
# The formats that Pillow may read. It supports more, some by starting other programs.
_PILLOW = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM", "AVIF")
_AT_ONCE = 1 << 20  # bytes of pixels that are converted to 8 bits at a time
_PNG = b"\x89PNG\r\n\x1a\n"
_TIFF = b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"
_SPACE = rb"(?:\s|#[^\n]*\n)+"
# Width, height and largest value of a greyscale or colour picture.
_PPM = re.compile(rb"P[56]" + rb"(\d{1,9})".join([_SPACE] * 3) + rb"(\d{3,5})\s")
# Inverse of the orientation, by number, that Pillow and OpenCV apply to every TIFF.
_TURNS = """FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_90 TRANSVERSE
  ROTATE_270"""
_UNDO = {i: Image.Transpose[name] for i, name in enumerate(_TURNS.split(), 2)}


def decode(
  data: bytes,
  channels: int,
  *,
  exact: bool = False,
  fast_dct: bool = True,
  max_pixels: int = MAX_PIXELS,
) -> tuple[np.ndarray, str]:
  """Decode an image to uint8 [h, w, channels]; return the pixels and the format.

  Args:
    data: a JPEG, PNG, BMP, WebP, GIF, TIFF, PPM or AVIF file.
    channels: 1, 3, or 4 with an alpha channel.
    exact: True interpolates chroma, so a JPEG's pixels equal those of TensorFlow's
      `decode_jpeg` bit for bit; False repeats chroma, which is 5 % faster.
    max_pixels: the pixels above which an image is not decoded.
    fast_dct: True uses the fast DCT, TensorFlow's default; False with `exact` gives Pillow's
      pixels.

  Returns:
    The pixels, and "JPEG", "CMYK", "odd JPEG", "PNG", "16-bit PNG" etc.

  Raises:
    ValueError: the bytes are not an image, or the image is damaged or too large.
  """
  color, mode, flag, color_types = _FORMATS[channels]
  if data[:2] == b"\xff\xd8":
    if (header := _jpeg_header(data, max_pixels)) and simplejpeg:
      # Pillow can read some unusual streams.
      with contextlib.suppress(ValueError, KeyError):
        options = {"fastdct": fast_dct, "fastupsample": not exact}
        pixels = simplejpeg.decode_jpeg(data, color, **options)
        return pixels, "CMYK" if header[2] in ("CMYK", "YCCK") else "JPEG"
  elif data[24:25] == b"\x08" and data[25:26] in color_types and _is_whole_png(data):
    _check_png(data, max_pixels)
    flags = flag | cv2.IMREAD_IGNORE_ORIENTATION
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    if image is not None:
      return image.reshape(*image.shape[:2], channels), "PNG"
  elif data[8:12] == b"WEBP":
    _check_size(*_webp_size(data), max_pixels, _HEAVY["WEBP"])
  try:
    image, kind = _deep(data, max_pixels) or _by_pillow(data, max_pixels)
    image = np.asarray(image.convert(mode))
  except MemoryError:
    raise
  except Exception as e:  # Pillow's plugins raise any exception on damaged bytes.
    first = f"{e}\n".splitlines()[0].partition(" <_io.")[0] or type(e).__name__
    raise ValueError(f"{len(data)} bytes that are not a readable image: {first}") from e
  return image.reshape(*image.shape[:2], channels), kind


def _by_pillow(data: bytes, max_pixels: int) -> tuple[Image.Image, str]:
  with Image.open(io.BytesIO(data), formats=_PILLOW) as opened:
    kind, tags = opened.format or "unknown", getattr(opened, "tag_v2", {})
    _check_size(opened.height, opened.width, max_pixels, _HEAVY.get(kind, 1))
    _check_scans(data, opened.height, opened.width, max_pixels)
    _check_tiles(data, tags, max_pixels)
    turned = _UNDO.get(tags.get(274, 1))
    opened.load()
    image = opened if turned is None else opened.transpose(turned)
    if image.mode.startswith(("I", "F")):  # `convert` would clip the values.
      most = 65535 if kind == "PPM" and image.mode == "I" else None
      bits = 16 if most or "16" in image.mode else 32
      levels, depth = _to_levels(np.asarray(image), bits, most)
      return Image.fromarray(levels), f"{depth} {kind}"
    if kind == "JPEG":
      kind = "CMYK" if opened.mode == "CMYK" else "odd JPEG" if simplejpeg else "JPEG"
    return image, kind


def _deep(data: bytes, max_pixels: int) -> tuple[Image.Image, str] | None:
  """Decode an image of more than 8 bits with OpenCV; Pillow has no such colours."""
  tags, bits, most = {}, 16, None
  if data[:8] == _PNG and data[24:25] == b"\x10" and _is_whole_png(data):
    kind, (width, height) = "PNG", _check_png(data, max_pixels)
  elif data[:4] in _TIFF:
    kind, tags = "TIFF", _tiff_tags(data)
    width, height, bits = (tags.get(i, 0) for i in (256, 257, 258))
    bits = max(bits or (1,))
    # Pillow reads the others, for example CMYK.
    if bits <= 8 or tags.get(262) not in (0, 1, 2) or not (width and height):
      return None
  elif (header := _PPM.match(data)) and int(header[3]) > 255:
    kind, (width, height, most) = "PPM", map(int, header.groups())
  else:
    return None
  _check_size(height, width, max_pixels)
  _check_tiles(data, tags, max_pixels)
  flags = cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION
  pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
  if pixels is None:
    raise ValueError(f"a {kind} of {bits} bits that OpenCV cannot read")
  if pixels.dtype == np.uint8:  # OpenCV has already converted 16 bits with two channels.
    levels, depth = pixels, f"{bits}-bit"
  else:
    levels, depth = _to_levels(pixels, bits, most)
    levels = ~levels if tags.get(262) == 0 and depth != "float" else levels  # 0: white
  if levels.ndim == 3:
    levels = levels[..., [2, 1, 0, 3][: levels.shape[2]]]  # OpenCV's order is blue first.
  image = Image.fromarray(np.ascontiguousarray(levels))
  turned = _UNDO.get(tags.get(274, 1))
  return image if turned is None else image.transpose(turned), f"{depth} {kind}"


def _to_levels(pixels: np.ndarray, bits: int, most: int | None = None) -> tuple[np.ndarray, str]:
  """Scale pixels to 0 … 255 by the range of their type; return the levels and the type's name.

  Args:
    pixels: integers from 0 to `most`, or floats from 0 to 1.
    bits: the stored bits per pixel.
    most: the largest value; None uses the type's.

  Raises:
    ValueError: values are out of range, or would all become 0.
  """
  is_float = pixels.dtype.kind == "f"
  name = "float" if is_float else f"{bits}-bit"
  top = 1 if is_float else most or np.iinfo(pixels.dtype).max
  low, high = pixels.min(initial=0), pixels.max(initial=0)
  if not (low >= 0 and high <= top):  # Also True for NaN.
    raise ValueError(f"{name} pixels from {low:g} to {high:g}, not from 0 to {top:g}")
  levels = np.empty(pixels.shape, np.uint8)
  for rows in np.array_split(np.arange(len(pixels)), -(-pixels.nbytes // _AT_ONCE) or 1):
    part = pixels[rows]
    if is_float:
      levels[rows] = np.rint(part * 255)
    else:
      levels[rows] = part.astype(np.uint64) * np.uint64(256) // np.uint64(top + 1)
  if high > 0 and not levels.any():
    raise ValueError(f"{name} pixels up to {high:g}, which would be black in 8 bits")
  return levels, name


def _tiff_tags(data: bytes) -> Any:
  """Read the tags of a TIFF's first picture, even if Pillow cannot decode it."""
  file = io.BytesIO(data)
  tags = TiffImagePlugin.ImageFileDirectory_v2(file.read(16 if b"+" in data[2:4] else 8))
  file.seek(tags.next)
  tags.load(file)
  return tags


def _check_png(data: bytes, max_pixels: int) -> tuple[int, int]:
  width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
  _check_size(height, width, max_pixels)
  return width, height


def _is_whole_png(data: bytes) -> bool:
  """Return whether data is a PNG of one picture with contiguous chunks up to the end.

  For others OpenCV writes to stderr, or allocates as much memory as a length field says.
  """
  at, kind = 8, b""
  while data[:8] == _PNG and kind not in (b"IEND", b"acTL", b"fcTL"):
    kind = data[at + 4 : at + 8]
    at += 12 + int.from_bytes(data[at : at + 4], "big")
    if at > len(data):
      return False
  return kind == b"IEND" and at == len(data)


def _webp_size(data: bytes) -> tuple[int, int]:
  """Return height and width of a WebP; Pillow would allocate it before reporting (RFC 9649)."""
  if data[12:16] == b"VP8X":
    width, height = (int.from_bytes(data[i : i + 3], "little") for i in (24, 27))
    return height + 1, width + 1
  if data[12:16] == b"VP8L":
    bits = int.from_bytes(data[21:25], "little")
    return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
  width, height = (int.from_bytes(data[i : i + 2], "little") for i in (26, 28))
  return height & 0x3FFF, width & 0x3FFF


def _jpeg_header(data: bytes, max_pixels: int) -> tuple[Any, ...] | None:
  """Return height, width, colour space and subsampling; None if simplejpeg cannot read them.

  The header is then damaged, or valid with a subsampling that simplejpeg does not know.

  Raises:
    ValueError: decoding would take too much time or memory.
  """
  if (scans := data.count(b"\xff\xda")) > _MAX_SCANS:
    raise ValueError(f"a JPEG of {scans} scans, more than the limit of {_MAX_SCANS}")
  if simplejpeg is None:
    return None
  try:
    header: tuple[Any, ...] = simplejpeg.decode_jpeg_header(data)  # 1 us
  except (ValueError, KeyError):
    return None
  _check_size(header[0], header[1], max_pixels)
  _check_scans(data, header[0], header[1], max_pixels)
  return header


def _check_size(height: int, width: int, max_pixels: int, cost: int = 1) -> None:
  # Tags of a TIFF may be texts, which a number would repeat.
  if operator.index(height) * operator.index(width) * cost > max_pixels:
    size, share = f"{width:,} x {height:,} pixels", "" if cost == 1 else f"1/{cost} of "
    raise ValueError(f"{size}, more than {share}--config.data.max_pixels={max_pixels}")


def _check_scans(data: bytes, height: int, width: int, max_pixels: int) -> None:
  scans = data.count(b"\xff\xda") if data[:2] == b"\xff\xd8" else 0
  what = f"{width:,} x {height:,} pixels and {scans} scans"
  _check_passes(height * width * scans, what, max_pixels)


def _check_passes(pixels: int, what: str, max_pixels: int) -> None:
  if pixels > _MAX_WHOLE_SCANS * max_pixels:
    too_slow = f"which is too slow with --config.data.max_pixels={max_pixels}"
    raise ValueError(f"a JPEG of {what}, {too_slow}")


def _check_tiles(data: bytes, tags: Any, max_pixels: int) -> None:
  """Check the tiles or strips of a TIFF, which may be larger than the picture, or JPEGs.

  Many may be the same bytes, so each counts its own scans, from its offset to its end.
  """
  height, width = tags.get(323, 1), tags.get(322, 1)
  _check_size(height, width, max_pixels)
  if tags.get(259) not in (6, 7):  # JPEG, old and new
    return
  starts, sizes = tags.get(324), tags.get(325)
  if starts is None:
    starts, sizes = tags.get(273, (0,)), tags.get(279)
    height, width = min(tags.get(278, tags[257]), tags[257]), tags[256]
  starts = np.array(starts, np.uint64)
  ends = starts + np.array(sizes or 0, np.uint64)
  ends = np.where(ends > starts, ends, len(data))  # libtiff estimates a size that is missing
  scans = [match.start() for match in re.finditer(b"\xff\xda", data)]
  passes = int((np.searchsorted(scans, ends) - np.searchsorted(scans, starts)).sum())
  blocks = -(-operator.index(height) // 16) * -(-operator.index(width) // 16)
  _check_passes(256 * blocks * passes, f"{passes:,} scans in a TIFF", max_pixels)


def decode_view(
  data: bytes,
  size: int,
  channels: int,
  draws: np.ndarray | None,
  eval_view: EvalView = "mlperf",
  max_pixels: int = MAX_PIXELS,
) -> tuple[np.ndarray, str]:
  """Decode a view of an image, uint8 [size, size, channels]; return it and the format.

  If the library of `partial_jpeg` exists, only the box of a random crop of a JPEG is decoded.
  The view is the same without it, but damage below the box is not noticed.

  Args:
    data: the encoded image.
    size: the height and width of the view, in pixels.
    channels: the channels, as for `decode`.
    draws: [NUM_DRAWS] for a random resized crop and a flip (draw 0); None for the evaluation
      view.
    eval_view: the evaluation view, see `view`.
    max_pixels: the pixels above which an image is not decoded.

  Raises:
    ValueError: the bytes are not an image, or the image is damaged or too large.
  """
  decode_box = partial_jpeg.library().decode if data[:2] == b"\xff\xd8" else None
  if draws is not None and channels < 4 and decode_box is not None:
    header = _jpeg_header(data, max_pixels)
    if header and min(header[:2]) > 0:
      box = decode_box(data, augment.crop_box(header[0], header[1], draws), channels)
      if box is not None:
        return _resize(box, size, draws), "JPEG"
  is_eval = draws is None
  fast_dct = not (is_eval and isinstance(eval_view, CenterCrop))
  options = {"exact": is_eval, "fast_dct": fast_dct, "max_pixels": max_pixels}
  pixels, kind = decode(data, channels, **options)
  return view(pixels, size, draws, eval_view), kind


def view(
  image: np.ndarray, size: int, draws: np.ndarray | None, eval_view: EvalView = "mlperf"
) -> np.ndarray:
  """Return a view of decoded pixels, uint8 [size, size, channels].

  Only `CenterCrop` averages before it downsizes (antialiasing), as in the published pipelines:

  - training: Inception's box, bilinear
  - "mlperf": the shorter side to 256 / 224 of the size, bilinear on the grid
    x = i * scale (TensorFlow 1's), then the centre, as the MLPerf reference
  - `CenterCrop`: by Pillow, equal to torchvision and timm to the byte

  Args:
    image: the pixels, uint8 [h, w, channels].
    size: the height and width of the view, in pixels.
    draws: [NUM_DRAWS] for a random crop and a flip; None for the evaluation view.
    eval_view: "mlperf" or a `CenterCrop`.
  """
  height, width, _ = image.shape
  if draws is not None:
    top, left, h, w = augment.crop_box(height, width, draws)
    return _resize(image[top : top + h, left : left + w], size, draws)
  if isinstance(eval_view, CenterCrop):
    tall, wide, top, left = augment.centered_crop(height, width, size, eval_view.share)
    # Resize the whole image: Pillow rounds between its two passes, so a part would differ.
    filter_ = Image.Resampling[eval_view.interpolation.upper()]
    plane = image[..., 0] if image.shape[2] == 1 else image
    whole = Image.fromarray(plane).resize((wide, tall), filter_)
    return np.asarray(whole)[top : top + size, left : left + size].reshape(size, size, -1)
  grid = np.arange(size)
  tall, wide = augment.shorter_side(height, width, size)
  # Compute only the pixels that the crop keeps.
  rows = _linear((grid + (tall - size) // 2) * (height / tall), height)
  columns = _linear((grid + (wide - size) // 2) * (width / wide), width)
  return _resample(image, rows, columns)


def _resize(box: np.ndarray, size: int, draws: np.ndarray) -> np.ndarray:
  """Resize a box bilinearly, and mirror it if draw 0 is below 1/2."""
  resized = cv2.resize(box, (size, size), interpolation=cv2.INTER_LINEAR)
  mirrored = cv2.flip(resized, 1) if draws[0] < 0.5 else resized
  return mirrored.reshape(size, size, -1)  # OpenCV drops a single channel.


Taps = list[tuple[np.ndarray, np.ndarray]]  # (indices [size], weights [size]) per tap


def _linear(places: np.ndarray, length: int) -> Taps:
  first = np.minimum(places.astype(int), length - 1)
  share = (places - first).astype(np.float32)
  return [(first, 1 - share), (np.minimum(first + 1, length - 1), share)]


def _resample(image: np.ndarray, rows: Taps, columns: Taps) -> np.ndarray:
  """Resample rows, then columns, in float32, and round to uint8."""
  first = min(int(indices.min()) for indices, _ in columns)
  last = max(int(indices.max()) for indices, _ in columns) + 1
  image = image[:, first:last]
  add = functools.partial(functools.reduce, operator.iadd)
  tall = add(image[i] * w[:, None, None] for i, w in rows)
  small = add(tall.take(i - first, axis=1) * w[:, None] for i, w in columns)
  return np.rint(small, out=small).clip(0, 255).astype(np.uint8)
