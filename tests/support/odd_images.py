"""Images whose header is false, and a valid image of a rare kind."""

import io

import numpy as np
from PIL import Image

NOISE = np.random.default_rng(0).integers(0, 255, (48, 64, 3)).astype(np.uint8)


def jpeg_441(height=64, width=32):
  """Return a grey JPEG in 4:4:1: four blocks of brightness per block of each colour.

  Its blocks have no coefficients: 001010 and 0000 in the standard's tables K.3 to K.6.
  """
  grey = np.full((height, width, 3), 128, np.uint8)
  out = io.BytesIO()
  Image.fromarray(grey).save(out, "JPEG", subsampling=0)
  whole = out.getvalue()
  head = bytearray(whole[: whole.index(b"\xff\xda") + 14])
  head[head.index(b"\xff\xc0") + 11] = 0x14
  return bytes(head) + b"\x28\xa2\x8a\x00" * (height // 32 * width // 8) + b"\xff\xd9"


def of_size(height, width, **options):
  """Return a small JPEG with a false size in its header."""
  out = io.BytesIO()
  Image.fromarray(NOISE).save(out, "JPEG", **options)
  found = bytearray(out.getvalue())
  at = max(found.find(b"\xff\xc0"), found.find(b"\xff\xc2"))
  found[at + 5 : at + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
  return bytes(found)


def with_scans(count, whole=None):
  """Return a progressive JPEG, by default of 64 x 48 pixels, whose last scan is repeated."""
  whole = whole or of_size(48, 64, progressive=True)
  last = whole[whole.rindex(b"\xff\xda") : -2]
  return whole[:-2] + last * count + whole[-2:]


def _with_header(kind, at, order, *sizes):
  """Return a file with false sizes in its header, four bytes each."""
  out = io.BytesIO()
  Image.fromarray(NOISE).save(out, kind)
  found = bytearray(out.getvalue())
  found[at : at + 8] = b"".join(size.to_bytes(4, order) for size in sizes)
  return bytes(found)


def png_of_size(height, width):
  return _with_header("PNG", 16, "big", width, height)


def bmp_of_size(height, width):
  return _with_header("BMP", 18, "little", width, height)


TOO_LARGE = {
  "a JPEG": of_size(65_500, 65_500),
  "a progressive JPEG": of_size(65_500, 65_500, progressive=True),
  "a 4:4:1 JPEG": jpeg_441().replace(b"\0\x40\0\x20", b"\xff\xdc\xff\xdc"),
  "300 scans": with_scans(300),
  "a PNG": png_of_size(100_000, 100_000),
  "a PNG of 2^62 pixels": png_of_size(2**31, 2**31),
  "a BMP": bmp_of_size(30_000, 30_000),
}
