"""JPEG crops that decode no more than their box, if their library has been built.

    python -m jaxscale.data.partial_jpeg        (or `make jpeg`)

builds it, once, with the system's C compiler and libjpeg-turbo, into a directory
of the user's. Training never compiles anything: it looks for the library there,
and without it decodes whole images by simplejpeg. The pixels are the same, and a
file cut short is damaged to both; other damage counts where a crop reaches it.
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
from typing import NamedTuple

import numpy as np
import simplejpeg

from jaxscale.errors import EXIT_DONE, ConfigError, one_line_errors

SOURCE = Path(__file__).with_suffix(".c")
BUILD = "python -m jaxscale.data.partial_jpeg"
_WIDEST_MCU = 32  # pixels, as in the C source

Box = tuple[int, int, int, int]


class Library(NamedTuple):
  """What was found of the library.

  Attributes:
    decode: `jaxscale_jpeg_box` of partial_jpeg.c; None without a library.
    text: one line about it, for people.
  """

  decode: Callable[..., int] | None
  text: str


def decode_box(data: bytes, box: Box, channels: int) -> np.ndarray | None:
  """The pixels of a box of a JPEG, uint8 [height, width, channels].

  Those of a whole decode by simplejpeg with `fastdct` and `fastupsample`, bit for
  bit. The rows are not contiguous in memory.

  Args:
    data: a JPEG.
    box: top, left, height, width in pixels, within the image.
    channels: 1 or 3.

  Returns:
    None for what a whole decode has to look at: no library, a stream without its
    end or that libjpeg-turbo has a warning for on the way to the box, CMYK.

  Example:
    >>> decode_box(data, (10, 20, 100, 200), 3).shape  # doctest: +SKIP
    (100, 200, 3)
  """
  decode = library().decode
  return None if decode is None else _call(decode, data, box, channels)


def _call(
  decode: Callable[..., int], data: bytes, box: Box, channels: int
) -> np.ndarray | None:
  height, width = box[2:]
  out = np.empty((height, width + _WIDEST_MCU - 1, channels), np.uint8)
  first = ctypes.c_int32()
  code = decode(
    data, len(data), (ctypes.c_int32 * 4)(*box), channels, out.ctypes.data, first
  )
  return None if code else out[:, first.value : first.value + width]


@functools.cache
def library() -> Library:
  """The library, if it has been built, loads here and gives simplejpeg's pixels."""
  found = sorted(cache_directory().glob(f"partial_jpeg-{_key()}-*.so"), reverse=True)
  why = "not built"
  for path in found:
    version = path.stem.rsplit("-", 1)[1]
    try:
      decode = _open(path)
    except OSError as e:  # built where another libjpeg is, say
      why = f"{path} does not load: {str(e).splitlines()[0]}"
      continue
    if _agrees(decode):
      return Library(decode, f"JPEG crops: only the box, by libjpeg-turbo {version}")
    why = f"{path} gives other pixels than simplejpeg {simplejpeg.__version__}"
  return Library(None, f"JPEG crops: whole images; faster after `{BUILD}` ({why})")


def cache_directory() -> Path:
  """Where the library lies: $XDG_CACHE_HOME/jaxscale or ~/.cache/jaxscale."""
  return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxscale"


def _key() -> str:
  """What a library was built from and for; another source is another file."""
  target = f"{sys.platform} {platform.machine()}".encode()
  return hashlib.sha256(SOURCE.read_bytes() + target).hexdigest()[:16]


def _open(path: Path) -> Callable[..., int]:
  # Its libjpeg is the system's, also where TensorFlow has brought one of its own.
  mode = os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0)
  decode = ctypes.CDLL(str(path), mode).jaxscale_jpeg_box  # lets go of the GIL
  number = ctypes.POINTER(ctypes.c_int32)
  decode.argtypes = [
    ctypes.c_char_p, ctypes.c_size_t, number, ctypes.c_int, ctypes.c_void_p, number,
  ]  # fmt: skip
  decode.restype = ctypes.c_int
  return decode


def _agrees(decode: Callable[..., int]) -> bool:
  """Whether a box of a small JPEG has the pixels that simplejpeg gives it."""
  y, x = np.mgrid[:40, :56]
  pixels = np.stack([6 * y, 4 * x, (y * x) % 256], axis=-1).astype(np.uint8)
  data = simplejpeg.encode_jpeg(pixels, 90, colorsubsampling="420")
  whole = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
  box = _call(decode, data, (9, 19, 17, 30), 3)
  return box is not None and np.array_equal(box, whole[9:26, 19:49])


def build() -> Path:
  """Compile the library into the cache directory, with CC, CFLAGS and LDFLAGS.

  Returns:
    Where it lies.

  Raises:
    ConfigError: no compiler or no libjpeg-turbo, or not one that works here.
  """
  version = _libjpeg_version()
  target = cache_directory() / f"partial_jpeg-{_key()}-{version}.so"
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
    built = Path(scratch) / "built.so"
    flags = [
      "-O3",
      *_flags("CFLAGS"),
      "-shared",
      "-fPIC",
      str(SOURCE),
      "-o",
      str(built),
    ]
    _compile([*flags, *_flags("LDFLAGS"), "-ljpeg", *_run_paths()])
    try:
      agrees = _agrees(_open(built))
    except OSError as e:
      raise ConfigError(
        f"libjpeg={version}: what was built does not load: {str(e).splitlines()[0]}"
      ) from e
    if not agrees:
      raise ConfigError(
        f"libjpeg={version}: its pixels are not those of simplejpeg "
        f"{simplejpeg.__version__}; use libjpeg-turbo 2.1 or newer, with its SIMD code"
      )
    os.replace(built, target)  # no one ever sees half of it
  return target


def _libjpeg_version() -> str:
  """The version of the header that the compiler finds."""
  asked = "#include <stdio.h>\n#include <jpeglib.h>\n"
  macros = _compile([*_flags("CFLAGS"), "-E", "-dM", "-x", "c", "-"], asked)
  found = re.search(r"^#define LIBJPEG_TURBO_VERSION (\S+)", macros, re.MULTILINE)
  if not found:
    raise ConfigError(f"jpeglib.h: not libjpeg-turbo's; {_HOW_TO_GET_IT}")
  return found[1]


_HOW_TO_GET_IT = (
  "install libjpeg-turbo's development files (apt install libjpeg62-turbo-dev on "
  "Debian, libjpeg-turbo8-dev on Ubuntu; dnf install libjpeg-turbo-devel; on a "
  "cluster module load libjpeg-turbo), or say where they are in CPATH and LDFLAGS"
)


def _compile(arguments: list[str], stdin: str = "") -> str:
  """Run the compiler; returns what it prints."""
  compiler = shlex.split(os.environ.get("CC") or "cc")
  try:
    done = subprocess.run(
      [*compiler, *arguments], input=stdin, capture_output=True, text=True, check=False
    )
  except OSError as e:
    raise ConfigError(
      f"CC={shlex.join(compiler)!r}: no such C compiler; install one (apt install gcc, "
      "module load gcc) or name it in CC"
    ) from e
  if not done.returncode:
    return done.stdout
  lines = done.stderr.splitlines()
  said = next((line for line in lines if "error" in line or "ljpeg" in line), "")
  if "jpeglib.h" in done.stderr or "-ljpeg" in done.stderr:
    raise ConfigError(f"libjpeg: {compiler[0]} does not find it; {_HOW_TO_GET_IT}")
  raise ConfigError(f"CC={shlex.join(compiler)!r}: it fails: {said or done.returncode}")


def _flags(variable: str) -> list[str]:
  return shlex.split(os.environ.get(variable, ""))


def _run_paths() -> list[str]:
  """So that a libjpeg from a module is found again when the module is not loaded."""
  named = [f[2:] for f in _flags("LDFLAGS") if f.startswith("-L") and f[2:]]
  named += [d for d in os.environ.get("LIBRARY_PATH", "").split(":") if d]
  return [f"-Wl,-rpath,{directory}" for directory in named]


@one_line_errors
def main() -> int:
  """The command line; returns the exit code."""
  print(f"{build()}: built; training on crops of JPEGs uses it from now on")
  return EXIT_DONE


if __name__ == "__main__":
  sys.exit(main())
