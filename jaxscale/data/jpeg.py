"""Encoded bytes to pixels: decode, crop, resize, flip, one image at a time.

simplejpeg (libjpeg-turbo) and OpenCV's resize release the GIL, so threads
scale; Pillow takes what they do not: CMYK, and PNG named JPEG.
"""

from __future__ import annotations

import io

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from jaxscale.data.augment import center_box, crop_box

cv2.setNumThreads(0)  # the pipeline's threads are the parallelism


def decode(data: bytes, channels: int) -> np.ndarray:
  """Pixels of an encoded image, uint8 [h, w, channels].

  Args:
    data: JPEG, PNG or anything Pillow reads.
    channels: 1 or 3.

  Raises:
    ValueError: the bytes are no image, or a damaged one.
  """
  if data[:2] == b"\xff\xd8":
    try:
      return simplejpeg.decode_jpeg(
        data,
        "RGB" if channels == 3 else "GRAY",
        fastdct=True,
        fastupsample=True,
      )
    except ValueError:
      pass  # CMYK, or an unusual stream: let Pillow have a look
  elif data[:4] == b"\x89PNG":
    flag = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    if image is not None:
      return image.reshape(*image.shape[:2], channels)
  try:
    with Image.open(io.BytesIO(data)) as opened:
      image = np.asarray(opened.convert("RGB" if channels == 3 else "L"))
  except OSError as e:
    raise ValueError(f"{len(data)} bytes that are not a readable image: {e}") from e
  return image.reshape(*image.shape[:2], channels)


def decode_view(
  data: bytes, size: int, channels: int, draws: np.ndarray | None
) -> np.ndarray:
  """A view of an encoded image at one size, uint8 [size, size, channels].

  Args:
    data: the encoded image.
    size: height and width of the view.
    channels: 1 or 3.
    draws: [NUM_DRAWS] for a random resized crop and a flip (draw 0); None for
      the centred square of 7/8 of the shorter side.
  """
  image = decode(data, channels)
  height, width, _ = image.shape
  if draws is None:
    top, left, h, w = center_box(height, width)
  else:
    top, left, h, w = crop_box(height, width, draws)
  view = cv2.resize(
    image[top : top + h, left : left + w],
    (size, size),
    interpolation=cv2.INTER_LINEAR,
  ).reshape(size, size, channels)
  if draws is not None and draws[0] < 0.5:
    view = view[:, ::-1]
  return view
