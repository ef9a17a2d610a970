"""Arrays in NumPy's files, read by pread and not through a memory map.

If the owner of a file truncates it meanwhile, the result is an exception and not a SIGBUS.
"""

from __future__ import annotations

import functools
import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxscale.data.tfrecord import OpenFile
from jaxscale.files import open_regular, read_at

_SMALL = 64 << 20  # bytes that are always read at once
_MOST_RATIO = 200  # of an archive's content to its size; of pictures it is below 10


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
  """Read the shape, whether it is in Fortran's order, and the dtype."""
  major, minor = np.lib.format.read_magic(file)
  return getattr(np.lib.format, f"read_array_header_{major}_{minor}")(file)


def check_unpacked(packed: int, unpacked: int, small: int = _SMALL) -> None:
  """Check the size that a header gives, before the content takes memory.

  Raises:
    ValueError: a file unpacks to more than `small` bytes and more than 200 times its size.
  """
  if unpacked > max(small, _MOST_RATIO * packed):
    limit = f"more than {_MOST_RATIO} times (write it without compression)"
    raise ValueError(f"{packed:,} bytes unpack to {unpacked:,}, {limit}")


class StoredArray:
  """Array in C order in a file; indices along the first dim read rows.

  Args:
    path: the file.
    dtype: the dtype.
    shape: the shape, with at least one dim.
    offset: the position of the first byte.

  Raises:
    ValueError: the file is shorter than the array, or the array has Python objects.
    OSError: the file cannot be opened.
  """

  def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int):
    self.path, self.dtype, self.shape, self.offset = path, dtype, shape, offset
    self.ndim, self.size = len(shape), math.prod(shape)
    self._file = OpenFile(str(path))
    size = os.fstat(self._file.descriptor).st_size
    if dtype.hasobject or min(shape, default=0) < 0:
      raise ValueError("it has Python objects, or a negative size")
    if offset + self.size * dtype.itemsize > size:
      raise ValueError(f"it is truncated: {size:,} bytes, but the array ends later")

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, rows: Any) -> np.ndarray:
    """Return rows: indices int64 [n], or a slice."""
    if self.size * self.dtype.itemsize <= _SMALL:
      return self._whole[rows]
    rows = range(*rows.indices(len(self))) if isinstance(rows, slice) else rows.tolist()
    values = np.empty((len(rows), *self.shape[1:]), self.dtype)
    for i, row in enumerate(rows):
      self._fill(values[i : i + 1], row)
    return values

  @functools.cached_property
  def _whole(self) -> np.ndarray:
    self._fill(values := np.empty(self.shape, self.dtype), 0)
    return values

  def _fill(self, values: np.ndarray, row: int) -> None:
    at = self.offset + row * math.prod(self.shape[1:]) * self.dtype.itemsize
    raw = values.reshape(-1).view(np.uint8).data
    read_at(self._file.descriptor, raw, at, str(self.path))


def stored_array(path: Path) -> StoredArray | np.ndarray:
  """Return the array of a .npy file; of an array in Fortran's order, its content.

  Raises:
    Exception: the file is not a .npy file or is damaged; NumPy's parser raises any.
  """
  with open_regular(path) as file:
    shape, is_fortran, dtype = _header(file)
    if shape and not (is_fortran and len(shape) > 1):
      return StoredArray(path, dtype, shape, file.tell())
    if math.prod(shape) * dtype.itemsize > os.fstat(file.fileno()).st_size:
      raise ValueError("it is truncated")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def arrays_of(path: Path, names: Sequence[str] | None = None) -> dict[str, Any]:
  """Return the arrays of a .npz archive, or "x" of a .npy file; see `stored_array`."""
  with open_regular(path) as file:
    is_archive = file.read(2) == b"PK"
  return npz_arrays(path, names) if is_archive else {"x": stored_array(path)}


def npz_arrays(path: Path, names: Sequence[str] | None) -> dict[str, np.ndarray]:
  """Return the arrays of an archive by their names, or the chosen ones.

  Raises:
    ValueError: the archive unpacks to more than 200 times its size.
    Exception: it is damaged; NumPy and zipfile raise any.
  """
  with open_regular(path) as file, zipfile.ZipFile(file) as archive:
    found = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    found = {n: info for n, info in found.items() if names is None or n in names}
    total = sum(info.file_size for info in found.values())
    check_unpacked(os.fstat(file.fileno()).st_size, total)
    arrays = {}
    for name, info in found.items():
      with archive.open(info) as member:
        shape, _, dtype = _header(member)
      if math.prod(shape) * dtype.itemsize > info.file_size:
        raise ValueError(f"{name} is truncated")
      with archive.open(info) as member:
        arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
  return arrays
