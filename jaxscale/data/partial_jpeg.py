"""JPEG crops that decode no more than their box, if their library has been built.

    jaxscale prepare jpeg        (or `make jpeg`)

builds it, once, with the system's C compiler and libjpeg-turbo, into a directory
of the user's. Training never compiles anything: it looks for the library there,
and without it decodes whole images by simplejpeg. The pixels are the same, and a file
cut short is unreadable with both; other damage counts only where a crop reaches it.
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
import simplejpeg

from jaxscale.data.dataset import user_cache
from jaxscale.errors import ConfigError
from jaxscale.files import who_else_writes

SOURCE = Path(__file__).with_suffix(".c")
BUILD = "jaxscale prepare jpeg"
_WIDEST_MCU = 32  # pixels, as in the C source

Box = tuple[int, int, int, int]
# (JPEG, box (top, left, height, width) within it, 1 or 3 channels) -> its pixels.
Decode = Callable[[bytes, Box, int], np.ndarray | None]


class Library(NamedTuple):
  """What was found: `jaxscale_jpeg_box` of partial_jpeg.c, and one line about it.

  `decode` gives the pixels of a box, uint8 [height, width, channels]: those of a whole
  decode by simplejpeg with `fastdct` and `fastupsample`, bit for bit. The rows are not
  contiguous in memory. None where the whole image has to be decoded: a stream without
  its end or that libjpeg-turbo has a warning for on the way to the box, CMYK.
  """

  decode: Decode | None
  text: str


@functools.cache
def library() -> Library:
  """The library, if it has been built, loads here and gives simplejpeg's pixels."""
  why = "not built"
  for path in sorted(user_cache().glob(f"partial_jpeg-{_key()}-*.so"), reverse=True):
    version = path.stem.rsplit("-", 1)[1]
    text = f"JPEG crops: only the box, by libjpeg-turbo {version}"
    try:
      if others := who_else_writes(path):  # whoever can replace it would run as us
        raise OSError(f"is not loaded: {others}")
      return Library(_open(path), text)
    except OSError as e:  # built where another libjpeg is, say
      why = f"{path} {e}"
  return Library(None, f"JPEG crops: whole images; faster after `{BUILD}` ({why})")


def _key() -> str:
  """What a library was built from and for; another source is another file."""
  target = f"{sys.platform} {platform.machine()}".encode()
  return hashlib.sha256(SOURCE.read_bytes() + target).hexdigest()[:16]


def _open(path: Path) -> Decode:
  """The library's function, if a box of a small JPEG has simplejpeg's pixels."""
  # Its libjpeg is the system's, also where TensorFlow has brought one of its own.
  mode = os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0)
  try:
    function = ctypes.CDLL(str(path), mode).jaxscale_jpeg_box  # releases the GIL
  except OSError as e:
    raise OSError(f"does not load: {str(e).splitlines()[0]}") from None
  number = ctypes.POINTER(ctypes.c_int32)
  size, pointer = ctypes.c_size_t, ctypes.c_void_p
  function.argtypes = [ctypes.c_char_p, size, number, ctypes.c_int, pointer, number]

  def decode(data: bytes, box: Box, channels: int) -> np.ndarray | None:
    height, width = box[2:]
    out = np.empty((height, width + _WIDEST_MCU - 1, channels), np.uint8)
    first, place = ctypes.c_int32(), (ctypes.c_int32 * 4)(*box)
    code = function(data, len(data), place, channels, out.ctypes.data, first)
    return None if code else out[:, first.value : first.value + width]

  y, x = np.mgrid[:40, :56]
  pixels = np.stack([6 * y, 4 * x, (y * x) % 256], axis=-1).astype(np.uint8)
  data = simplejpeg.encode_jpeg(pixels, 90, colorsubsampling="420")
  whole = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
  box = decode(data, (9, 19, 17, 30), 3)
  if box is None or not np.array_equal(box, whole[9:26, 19:49]):
    raise OSError(f"gives other pixels than simplejpeg {simplejpeg.__version__}")
  return decode


def build() -> Path:
  """Compile the library into the cache directory, with CC, CFLAGS and LDFLAGS.

  Returns:
    The path of the library.

  Raises:
    ConfigError: no compiler or no libjpeg-turbo, or not one that works here.
  """
  cflags, ldflags = (shlex.split(os.environ.get(v, "")) for v in ("CFLAGS", "LDFLAGS"))
  header = "#include <stdio.h>\n#include <jpeglib.h>\n"
  macros = _compile([*cflags, "-E", "-dM", "-x", "c", "-"], header)
  found = re.search(r"^#define LIBJPEG_TURBO_VERSION (\S+)", macros, re.MULTILINE)
  if not found:
    raise ConfigError(f"jpeglib.h: not libjpeg-turbo's; {_HOW_TO_GET_IT}")
  # A libjpeg from a module is found again when the module is not loaded.
  folders = [f[2:] for f in ldflags if f.startswith("-L") and f[2:]]
  folders += filter(None, os.environ.get("LIBRARY_PATH", "").split(":"))
  link = [*ldflags, "-ljpeg", *(f"-Wl,-rpath,{folder}" for folder in folders)]
  target = user_cache() / f"partial_jpeg-{_key()}-{found[1]}.so"
  target.parent.mkdir(parents=True, exist_ok=True)
  _only_owner_writes(target.parent)
  with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
    built = Path(scratch) / "built.so"
    _compile(["-O3", *cflags, "-shared", "-fPIC", str(SOURCE), "-o", str(built), *link])
    try:
      _open(built)
    except OSError as e:
      why = f"what was built {e}; use libjpeg-turbo 2.1 or newer, with its SIMD code"
      raise ConfigError(f"libjpeg={found[1]}: {why}") from None
    _only_owner_writes(built)
    os.replace(built, target)  # no process sees half of it
  return target


def _only_owner_writes(path: Path) -> None:
  path.chmod(path.stat().st_mode & ~0o022)


_BY = "apt install libjpeg62-turbo-dev on Debian, libjpeg-turbo8-dev on Ubuntu; dnf install "
_BY += "libjpeg-turbo-devel; on a cluster module load libjpeg-turbo"
_PLACE = "or give their place in CPATH and LDFLAGS"
_HOW_TO_GET_IT = f"install libjpeg-turbo's development files ({_BY}), {_PLACE}"


def _compile(arguments: list[str], stdin: str = "") -> str:
  """Run the compiler; returns what it prints."""
  compiler = shlex.split(os.environ.get("CC") or "cc")
  name = f"CC={shlex.join(compiler)!r}"
  try:
    options: Any = {"input": stdin, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*compiler, *arguments], **options)
  except OSError as e:
    fix = "install one (apt install gcc, module load gcc) or name it in CC"
    raise ConfigError(f"{name}: no such C compiler; {fix}") from e
  if done.returncode:
    if "jpeglib.h" in done.stderr or "-ljpeg" in done.stderr:
      raise ConfigError(f"libjpeg: {compiler[0]} does not find it; {_HOW_TO_GET_IT}")
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    raise ConfigError(f"{name}: it fails: {errors[0] if errors else done.returncode}")
  return done.stdout
