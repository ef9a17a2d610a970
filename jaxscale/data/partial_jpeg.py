"""Decode only the crop of a JPEG, if the library for it is built.

    jaxscale prepare jpeg        (or `make jpeg`)

builds the library once, with the system's C compiler and libjpeg-turbo, in a directory of the
user. Training never compiles it; it looks for the library, and without it decodes whole images
with simplejpeg. The pixels are the same. A truncated file is unreadable with both; other damage
only counts with the library where a crop reaches it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.caches import user_cache
from jaxscale.errors import ConfigError
from jaxscale.owners import unsafe_owner

try:
  import simplejpeg
except ModuleNotFoundError:
  simplejpeg = None

SOURCE = Path(__file__).with_suffix(".c")
BUILD = "jaxscale prepare jpeg"
_WIDEST_MCU = 32  # pixels, the same as in the C source

Box = tuple[int, int, int, int]
# A function of (JPEG, box (top, left, height, width), channels 1 or 3) -> pixels of the box.
Decode = Callable[[bytes, Box, int], np.ndarray | None]


class Library(NamedTuple):
  """Loaded library, `jaxscale_jpeg_box` of partial_jpeg.c, and one line about it.

  `decode` returns the pixels of a box, uint8 [height, width, channels], which equal a whole
  decode by simplejpeg with `fastdct` and `fastupsample` bit for bit. Rows are not contiguous in
  memory. It returns None if the whole image must be decoded: CMYK, or a stream without its end
  or with a libjpeg-turbo warning before the box.
  """

  decode: Decode | None
  text: str


@functools.cache
def library() -> Library:
  """Load the library if it is built, loads on this machine, and gives simplejpeg's pixels."""
  problem = "not built"
  for path in sorted(user_cache().glob(f"partial_jpeg-{_key()}-*.so"), reverse=True):
    version = path.stem.rsplit("-", 1)[1]
    text = f"JPEG crops: only the box, by libjpeg-turbo {version}"
    try:
      if others := unsafe_owner(path):  # A user who can replace it would run code as us.
        raise OSError(f"was not loaded: {others}")
      return Library(_open(path), text)
    except OSError as e:  # For example, it was built with another libjpeg.
      problem = f"{path} {e}"
  return Library(None, f"JPEG crops: whole images; faster after `{BUILD}` ({problem})")


def _key() -> str:
  """Return a key of the library's source and platform; each key has its own file."""
  target = f"{sys.platform} {platform.machine()}".encode()
  return hashlib.sha256(SOURCE.read_bytes() + target).hexdigest()[:16]


def _open(path: Path) -> Decode:
  """Return the library's function, if a box of a small JPEG has simplejpeg's pixels."""
  if simplejpeg is None:
    raise OSError("cannot be compared with simplejpeg, which is not installed")
  # Use the system's libjpeg, even if TensorFlow has loaded its own.
  mode = os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0)
  try:
    function = ctypes.CDLL(str(path), mode).jaxscale_jpeg_box  # Releases the GIL.
  except OSError as e:
    raise OSError(f"does not load: {str(e).splitlines()[0]}") from None
  number = ctypes.POINTER(ctypes.c_int32)
  size, pointer = ctypes.c_size_t, ctypes.c_void_p
  function.argtypes = [ctypes.c_char_p, size, number, ctypes.c_int, pointer, number]

  def decode(data: bytes, box: Box, channels: int) -> np.ndarray | None:
    height, width = box[2:]
    out = np.empty((height, width + _WIDEST_MCU - 1, channels), np.uint8)
    first, crop = ctypes.c_int32(), (ctypes.c_int32 * 4)(*box)
    code = function(data, len(data), crop, channels, out.ctypes.data, first)
    return None if code else out[:, first.value : first.value + width]

  y, x = np.mgrid[:40, :56]
  pixels = np.stack([6 * y, 4 * x, (y * x) % 256], axis=-1).astype(np.uint8)
  data = simplejpeg.encode_jpeg(pixels, 90, colorsubsampling="420")
  whole = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
  box = decode(data, (9, 19, 17, 30), 3)
  if box is None or not np.array_equal(box, whole[9:26, 19:49]):
    raise OSError(f"decodes to different pixels than simplejpeg {simplejpeg.__version__}")
  return decode


def build() -> Path:
  """Compile the library into the cache directory, with CC, CFLAGS and LDFLAGS.

  Returns:
    The path of the library.

  Raises:
    ConfigError: there is no compiler or no libjpeg-turbo, or it does not work.
  """
  cflags, ldflags = (shlex.split(os.environ.get(v, "")) for v in ("CFLAGS", "LDFLAGS"))
  header = "#include <stdio.h>\n#include <jpeglib.h>\n"
  macros = _compile([*cflags, "-E", "-dM", "-x", "c", "-"], header)
  match = re.search(r"^#define LIBJPEG_TURBO_VERSION (\S+)", macros, re.MULTILINE)
  if not match:
    raise ConfigError(f"jpeglib.h: not libjpeg-turbo's; {_HOW_TO_GET_IT}")
  # Link the path of a libjpeg from a module, so that it is found without the module.
  folders = [f[2:] for f in ldflags if f.startswith("-L") and f[2:]]
  folders += filter(None, os.environ.get("LIBRARY_PATH", "").split(":"))
  link = [*ldflags, "-ljpeg", *(f"-Wl,-rpath,{folder}" for folder in folders)]
  target = user_cache() / f"partial_jpeg-{_key()}-{match[1]}.so"
  target.parent.mkdir(parents=True, exist_ok=True)
  _only_owner_writes(target.parent)
  with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
    built = Path(scratch) / "built.so"
    _compile(["-O3", *cflags, "-shared", "-fPIC", str(SOURCE), "-o", str(built), *link])
    try:
      _open(built)
    except OSError as e:
      problem = f"the built library {e}; use libjpeg-turbo 2.1 or newer, with its SIMD code"
      raise ConfigError(f"libjpeg={match[1]}: {problem}") from None
    _only_owner_writes(built)
    os.replace(built, target)  # Atomic, so no process sees a partial file.
  return target


def _only_owner_writes(path: Path) -> None:
  path.chmod(path.stat().st_mode & ~0o022)


_BY = "apt install libjpeg62-turbo-dev on Debian, libjpeg-turbo8-dev on Ubuntu; dnf install "
_BY += "libjpeg-turbo-devel; on a cluster module load libjpeg-turbo"
_PLACE = "or set CPATH and LDFLAGS to their location"
_HOW_TO_GET_IT = f"install libjpeg-turbo's development files ({_BY}), {_PLACE}"


def _compile(arguments: list[str], stdin: str = "") -> str:
  """Run the compiler and return its output."""
  compiler = shlex.split(os.environ.get("CC") or "cc")
  name = f"CC={shlex.join(compiler)!r}"
  try:
    options: Any = {"input": stdin, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*compiler, *arguments], **options)
  except OSError as e:
    fix = "install one (apt install gcc, module load gcc), or set CC"
    raise ConfigError(f"{name}: no such C compiler; {fix}") from e
  if done.returncode:
    if "jpeglib.h" in done.stderr or "-ljpeg" in done.stderr:
      raise ConfigError(f"libjpeg: {compiler[0]} does not find it; {_HOW_TO_GET_IT}")
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    errors += [f"exit code {done.returncode}"]
    raise ConfigError(f"{name}: compilation failed: {errors[0]}")
  return done.stdout
