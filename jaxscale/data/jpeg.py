"""Encoded bytes to pixels: decode, crop, resize, flip, one image at a time.

simplejpeg (libjpeg-turbo) and OpenCV's resize release the GIL, so threads
scale; Pillow takes what they do not.
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
from typing import Any

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from jaxscale.data import partial_jpeg
from jaxscale.data.augment import EvalView, center_box, crop_box, shorter_side

cv2.setNumThreads(0)  # the pipeline's threads are the parallelism


# Channels -> the names of simplejpeg, Pillow and OpenCV (None: Pillow reads it).
_FORMATS = {
  1: ("GRAY", "L", cv2.IMREAD_GRAYSCALE),
  3: ("RGB", "RGB", cv2.IMREAD_COLOR_RGB),
  4: ("RGBA", "RGBA", None),
}


def decode(
  data: bytes, channels: int, *, exact: bool = False
) -> tuple[np.ndarray, str]:
  """Pixels of an encoded image, uint8 [h, w, channels], and its format.

  Args:
    data: JPEG, PNG or anything Pillow reads.
    channels: 1, 3, or 4 with an alpha channel.
    exact: interpolate chroma, which makes a JPEG's pixels those of TensorFlow's
      `decode_jpeg`, bit for bit; otherwise repeat it, which is 5 % faster.

  Returns:
    The pixels, and "JPEG", "CMYK", "odd JPEG", "PNG" and so on.

  Raises:
    ValueError: the bytes are not an image, or a damaged one.
  """
  color, mode, flag = _FORMATS[channels]
  if data[:2] == b"\xff\xd8":
    try:
      # fastdct is TensorFlow's default, too.
      pixels = simplejpeg.decode_jpeg(data, color, fastdct=True, fastupsample=not exact)
      space = simplejpeg.decode_jpeg_header(data)[2]  # 1 us
      return pixels, "CMYK" if space in ("CMYK", "YCCK") else "JPEG"
    except ValueError:
      pass  # an unusual stream, which Pillow may read
  elif data[:4] == b"\x89PNG" and data[-8:-4] == b"IEND" and flag is not None:
    # A whole file: of others OpenCV writes to stderr.
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    if image is not None:
      return image.reshape(*image.shape[:2], channels), "PNG"
  try:
    with Image.open(io.BytesIO(data)) as opened:
      kind = opened.format or "unknown"
      if kind == "JPEG":
        kind = "CMYK" if opened.mode == "CMYK" else "odd JPEG"
      image = np.asarray(opened.convert(mode))
  except MemoryError:
    raise
  except Exception as e:  # Pillow's plugins raise anything on damaged bytes
    first = str(e).splitlines()[0] if str(e) else type(e).__name__
    raise ValueError(f"{len(data)} bytes that are not a readable image: {first}") from e
  return image.reshape(*image.shape[:2], channels), kind


def decode_view(
  data: bytes,
  size: int,
  channels: int,
  draws: np.ndarray | None,
  eval_view: EvalView = "mlperf",
  out: np.ndarray | None = None,
) -> tuple[np.ndarray, str]:
  """A view of an encoded image, uint8 [size, size, channels], and its format.

  For a random crop of a JPEG only the box is decoded where `partial_jpeg` has its
  library. The view is the same without it; damage below the box is then not seen.

  Args:
    data: the encoded image.
    size: height and width of the view, in pixels.
    channels: as of `decode`.
    draws: [NUM_DRAWS] for a random resized crop and a flip (draw 0); None for
      the evaluation view.
    eval_view: which one, see `view`.
    out: uint8 [size, size, channels], contiguous: where to put the view.

  Raises:
    ValueError: the bytes are not an image, or a damaged one.
  """
  decode_box = partial_jpeg.library().decode if data[:2] == b"\xff\xd8" else None
  if draws is not None and channels < 4 and decode_box is not None:
    with contextlib.suppress(ValueError):  # of a damaged header
      header: tuple[Any, ...] = simplejpeg.decode_jpeg_header(data)  # 1 us
      box = decode_box(data, crop_box(header[0], header[1], draws), channels)
      if box is not None:
        return _resize(box, size, draws, out), "JPEG"
  pixels, kind = decode(data, channels, exact=draws is None)
  return view(pixels, size, draws, eval_view, out), kind


def view(
  image: np.ndarray,
  size: int,
  draws: np.ndarray | None,
  eval_view: EvalView = "mlperf",
  out: np.ndarray | None = None,
) -> np.ndarray:
  """A view of decoded pixels at one size, uint8 [size, size, channels].

  Nothing here averages before it downsizes (no antialiasing), because neither
  published pipeline does:

  - training: Inception's box, bilinear;
  - "mlperf": the shorter side to 256 / 224 of the size, bilinear on the grid
    x = i * scale (TensorFlow 1's), then the centre: the MLPerf reference;
  - "google": the centred 7/8, bicubic (Keys, a = -1/2) on the grid
    x = (i + 1/2) * scale - 1/2: flax's ImageNet example.

  Args:
    image: uint8 [h, w, channels].
    size: height and width of the view, in pixels.
    draws: [NUM_DRAWS] for a random crop and a flip; None for the eval view.
    eval_view: "mlperf" or "google".
    out: uint8 [size, size, channels], contiguous: where to put the view.
  """
  height, width, _ = image.shape
  if draws is not None:
    top, left, h, w = crop_box(height, width, draws)
    return _resize(image[top : top + h, left : left + w], size, draws, out)
  grid = np.arange(size)
  if eval_view == "google":
    top, left, side, _ = center_box(height, width)
    image = image[top : top + side, left : left + side]
    rows = columns = _cubic((grid + 0.5) * (side / size) - 0.5, side)
  else:
    tall, wide = shorter_side(height, width, size)
    # Only the pixels that the crop keeps are ever computed.
    rows = _linear((grid + (tall - size) // 2) * (height / tall), height)
    columns = _linear((grid + (wide - size) // 2) * (width / wide), width)
  out = np.empty((size, size, image.shape[2]), np.uint8) if out is None else out
  out[:] = _resample(image, rows, columns)
  return out


def _resize(
  box: np.ndarray, size: int, draws: np.ndarray, out: np.ndarray | None
) -> np.ndarray:
  """A box at its size, bilinear, and mirrored if draw 0 is below 1/2."""
  if out is None:
    out = np.empty((size, size, box.shape[2]), np.uint8)
  mirrored = draws[0] < 0.5
  dst = None if mirrored else out
  resized = cv2.resize(box, (size, size), dst=dst, interpolation=cv2.INTER_LINEAR)
  if mirrored:
    cv2.flip(resized, 1, dst=out)
  return out


Taps = list[tuple[np.ndarray, np.ndarray]]  # (indices [size], weights [size]) each


def _linear(places: np.ndarray, length: int) -> Taps:
  first = np.minimum(places.astype(int), length - 1)
  share = (places - first).astype(np.float32)
  return [(first, 1 - share), (np.minimum(first + 1, length - 1), share)]


def _cubic(places: np.ndarray, length: int) -> Taps:
  """Keys' cubic convolution, a = -1/2 (IEEE TASSP 29, 1981), within the image."""
  base = np.floor(places).astype(int)
  indices = base[:, None] + np.arange(-1, 3)
  x = np.abs(places[:, None] - indices)
  near = (1.5 * x - 2.5) * x * x + 1
  far = ((-0.5 * x + 2.5) * x - 4) * x + 2
  weights = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
  weights = weights * ((indices >= 0) & (indices < length))
  weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
  indices = indices.clip(0, length - 1)
  return [(indices[:, k], weights[:, k]) for k in range(4)]


def _resample(image: np.ndarray, rows: Taps, columns: Taps) -> np.ndarray:
  """Rows, then columns, in float32; rounded to uint8."""
  first = min(int(indices.min()) for indices, _ in columns)
  last = max(int(indices.max()) for indices, _ in columns) + 1
  image = image[:, first:last]
  add = functools.partial(functools.reduce, operator.iadd)
  tall = add(image[i] * w[:, None, None] for i, w in rows)
  small = add(tall.take(i - first, axis=1) * w[:, None] for i, w in columns)
  return np.rint(small, out=small).clip(0, 255).astype(np.uint8)
