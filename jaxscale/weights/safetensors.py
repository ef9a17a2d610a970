"""The safetensors format: one file of named arrays, mapped and never executed.

    8 bytes        length n of the header, unsigned, little-endian
    n bytes        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]} and
                   "__metadata__": text -> text; may end in spaces
    the rest       the arrays, row-major and little-endian, end to end; offsets count
                   from its first byte

(huggingface/safetensors, README, "Format".) The package of that name writes from
arrays that are all in memory; here they come one at a time, as the header follows
from shapes alone. Reading maps the file: what is not asked for is not read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxscale.errors import ConfigError

# Their names of dtypes; all that arrays of JAX can have.
DTYPES = {
  name: np.dtype(dtype)
  for name, dtype in {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16,
    "I16": np.int16, "U32": np.uint32, "I32": np.int32, "U64": np.uint64,
    "I64": np.int64, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F32": np.float32, "F64": np.float64, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
  }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_INDEX = "model.safetensors.index.json"  # Hugging Face's, of a folder
_ONE = "model.safetensors"
_MOST_HEADER = 100_000_000  # bytes, as in the package
# How files begin that people take for one: PyTorch's, as zip and as pickle.
_PYTORCH = (b"PK\x03\x04", b"\x80\x02")


class Stored(NamedTuple):
  """An array in a file.

  Attributes:
    path: of the file.
    dtype: of the array.
    shape: likewise.
    begin: where its first byte is, from the file's first.
  """

  path: Path
  dtype: np.dtype
  shape: tuple[int, ...]
  begin: int


def view(stored: Stored) -> np.ndarray:
  """The array, mapped: pages are read when they are looked at."""
  if 0 in stored.shape:
    return np.zeros(stored.shape, stored.dtype)
  size = math.prod(stored.shape) * stored.dtype.itemsize
  raw = np.memmap(stored.path, np.uint8, "r", offset=stored.begin, shape=(size,))
  return raw.view(np.ndarray).view(stored.dtype).reshape(stored.shape)


def read_index(path: str | os.PathLike) -> dict[str, Stored]:
  """What is in a file, or in a folder as Hugging Face's, by name.

  Args:
    path: a file, or a folder with `model.safetensors`, or with several files and
      `model.safetensors.index.json`.

  Raises:
    ConfigError: it is not there, or not whole.

  Example:
    >>> write("/tmp/a.safetensors", {"w": (np.dtype("f4"), (2,))}, [np.ones(2, "f4")])
    >>> view(read_index("/tmp/a.safetensors")["w"])
    array([1., 1.], dtype=float32)
  """
  path = Path(path)
  try:
    return _read_folder(path) if path.is_dir() else read_header(path)[0]
  except OSError as e:
    raise ConfigError(f"{e.filename or path}: {e.strerror}; check the path") from None


def _read_folder(folder: Path) -> dict[str, Stored]:
  if not (folder / _INDEX).exists():
    if not (folder / _ONE).exists():
      raise ConfigError(
        f"{folder}: has neither {_ONE} nor {_INDEX}; give a .safetensors file, or "
        "a folder with one of them"
      )
    return read_header(folder / _ONE)[0]
  try:
    where = json.loads((folder / _INDEX).read_text())["weight_map"]
    files = sorted(set(where.values()))
  except (ValueError, KeyError, TypeError, AttributeError):
    raise ConfigError(f"{folder / _INDEX}: unreadable; copy it again") from None
  for file in files:
    if Path(str(file)).name != file:
      raise ConfigError(f"{folder / _INDEX}: {file!r} is not a file's name in there")
  found = {file: read_header(folder / file)[0] for file in files}
  for name, file in where.items():
    if name not in found[file]:
      raise ConfigError(
        f"{folder / file}: has no {name}, which {_INDEX} says it has; copy both again"
      )
  return {name: found[file][name] for name, file in where.items()}


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
  """(arrays by name, metadata) of one file.

  Raises:
    ConfigError: it is not such a file, or not whole.
    OSError: it cannot be opened.
  """
  size = path.stat().st_size
  with path.open("rb") as file:
    start = file.read(8)
    length = int.from_bytes(start, "little")
    text = file.read(length) if 2 <= length <= _MOST_HEADER else b""
  if not text.startswith(b"{"):
    advice = "give one"
    if start.startswith(_PYTORCH):
      advice = "write PyTorch's state dict with safetensors.torch.save_file"
    raise ConfigError(f"{path}: not a safetensors file; {advice}")
  try:
    header = json.loads(text)
    metadata = dict(header.pop("__metadata__", {}))
    found = {n: _stored(path, entry, 8 + length) for n, entry in header.items()}
  except (ValueError, KeyError, TypeError, AttributeError):
    problem = "is cut short" if size < 8 + length else "has a damaged header"
    raise ConfigError(f"{path}: {problem}; copy it again") from None
  end = 8 + length
  for name, stored in sorted(found.items(), key=lambda item: item[1].begin):
    if stored.begin != end:
      raise ConfigError(f"{path}: has a damaged header, at {name}; copy it again")
    end += math.prod(stored.shape) * stored.dtype.itemsize
  if size != end:
    problem = "is cut short" if size < end else "is longer than its header says"
    raise ConfigError(f"{path}: {problem}, {size:,} bytes of {end:,}; copy it again")
  return found, metadata


def _stored(path: Path, entry: Any, first: int) -> Stored:
  """Of an entry of the header; one that cannot be is a ValueError of some kind."""
  dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
  begin, end = entry["data_offsets"]
  if not all(type(n) is int and n >= 0 for n in (*shape, begin)):
    raise ValueError
  if end - begin != math.prod(shape) * dtype.itemsize:
    raise ValueError
  return Stored(path, dtype, shape, first + begin)


def write(
  path: str | os.PathLike,
  layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
  arrays: Iterable[np.ndarray],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Write a file, array by array: whole under its name, or not at all.

  Args:
    path: of the file; one that is there is replaced.
    layout: dtype and shape of every array by name.
    arrays: those, in the order of `layout`; taken one at a time. Where all items of
      smaller dtypes come last, each array lies at a multiple of its item's size.
    metadata: text about the file.

  Raises:
    OSError: the disk is full or the like; nothing is left behind.
  """
  path = Path(path)
  partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
  try:
    with partial.open("wb") as file:
      file.write(_header(layout, metadata or {}))
      expected = iter(layout.items())
      for array in arrays:
        name, (dtype, shape) = next(expected)
        assert (array.dtype, array.shape) == (dtype, shape), name
        little = array.astype(dtype.newbyteorder("<"), copy=False)
        file.write(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
      assert next(expected, None) is None
      file.flush()
      os.fsync(file.fileno())
    partial.replace(path)
  finally:
    with contextlib.suppress(OSError):
      partial.unlink()
  _sync_folder(path.parent)


def _header(layout: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
  header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
  end = 0
  for name, (dtype, shape) in layout.items():
    begin, end = end, end + math.prod(shape) * dtype.itemsize
    header[name] = {
      "dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end],
    }  # fmt: skip
  text = json.dumps(header, separators=(",", ":")).encode()
  text = text.ljust(-(-len(text) // 8) * 8)  # so that data are aligned, as theirs
  return len(text).to_bytes(8, "little") + text


def _sync_folder(folder: Path) -> None:
  """The name is on disk too, where the file system knows of such a thing."""
  with contextlib.suppress(OSError):
    handle = os.open(folder, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
