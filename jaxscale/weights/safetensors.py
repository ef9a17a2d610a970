"""The safetensors format: one file of named arrays, which is never executed.

    8 bytes        length n of the header, unsigned, little-endian
    n bytes        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]} and
                   "__metadata__": text -> text; may end in spaces
    the rest       the arrays, row-major and little-endian, end to end; offsets count
                   from its first byte

(huggingface/safetensors, README, "Format".) Reading a part of an array reads only that part of
the file. The package `safetensors` is not used: it maps files into memory, which ends the process
if somebody truncates one, and writes only arrays that are all in memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxscale.errors import ConfigError, invalid, message_of, remedy_for
from jaxscale.files import (
  expand,
  mismatch,
  open_regular,
  output_path,
  parse_json,
  read_at,
  refuse_pointer,
  replacing,
  require_json,
)

_PLAIN = "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"
# The format's names of all dtypes that JAX arrays can have.
DTYPES = {f"{d[0].upper()}{8 * int(d[1])}": np.dtype(d) for d in _PLAIN}
DTYPES |= {"BOOL": np.dtype(np.bool_), "BF16": np.dtype(ml_dtypes.bfloat16)}
DTYPES |= {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_DIMS, _MOST_ITEMS = 32, 2**56  # below NumPy's own limits
_LONGEST = 8 << 20  # bytes of a header, of about 100,000 arrays
_ENTRIES = {str: {"dtype": str, "shape": [int], "data_offsets": [int]}}
_INDEX = "model.safetensors.index.json"  # in a Hugging Face folder
_ONE = "model.safetensors"


class Stored(NamedTuple):
  """Array in a file; `begin` is the offset of its first byte."""

  path: Path
  dtype: np.dtype
  shape: tuple[int, ...]
  begin: int


def view(stored: Stored) -> np.ndarray:
  """Return the array, read from the file."""
  return read_part(stored, lambda array: array)


def read_part(stored: Stored, part: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
  """Return a part of an array, and read only this part if `part` makes a view.

  Files are not mapped: if the owner of one truncated it, the map would end the process by
  SIGBUS. Instead, the view of empty memory of the same size tells which bytes are needed.

  Args:
    stored: the array.
    part: a function from the array to the part, which may be called twice.

  Raises:
    OSError: the file became shorter, or cannot be read.
  """
  size = math.prod(stored.shape) * stored.dtype.itemsize
  if not size:
    return part(np.zeros(stored.shape, stored.dtype))
  with open_regular(stored.path) as file:
    raw = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    whole, start = raw.view(stored.dtype).reshape(stored.shape), raw.ctypes.data

    def fill(view: np.ndarray) -> None:
      low, high = np.lib.array_utils.byte_bounds(view)
      if high - low <= 2 * view.nbytes:
        bounds = slice(low - start, high - start)
        read_at(file.fileno(), raw[bounds].data, stored.begin + low - start, str(stored.path))
      elif view.nbytes:
        outer = np.moveaxis(view, np.argmax(view.strides), 0)
        for i in range(len(outer)):
          fill(outer[i, ...])  # A view even of a number.

    view = part(whole)
    is_view = np.may_share_memory(view, whole)
    fill(view if is_view else whole)
    return view if is_view else part(whole)


def read_index(path: str | os.PathLike) -> dict[str, Stored]:
  """Return the arrays of a file, or of a Hugging Face folder, by name.

  Args:
    path: a file, or a folder with `model.safetensors`, or with several files and
      `model.safetensors.index.json`.

  Raises:
    ConfigError: a file is missing or damaged.

  Example:
    >>> write("/tmp/a.safetensors", {"w": (np.dtype("f4"), (2,))}, [np.ones(2, "f4")])
    >>> view(read_index("/tmp/a.safetensors")["w"])
    array([1., 1.], dtype=float32)
  """
  path = Path(expand(path))
  try:
    return _read_folder(path) if path.is_dir() else read_header(path)[0]
  except OSError as e:
    problem = f"{e.filename or path}: {e.strerror}"
    raise ConfigError(f"{problem}; {remedy_for(path)}") from None


def read_metadata(path: Path) -> dict[str, str]:
  """Return the metadata of a file, or of the only file of a folder; empty for several files.

  Raises:
    ConfigError: the file is not a safetensors file, or is damaged.
    OSError: the file cannot be opened.
  """
  path = path / _ONE if path.is_dir() else path
  return read_header(path)[1] if path.exists() else {}


def _read_folder(folder: Path) -> dict[str, Stored]:
  if not (folder / _INDEX).exists() and (folder / _ONE).exists():
    return read_header(folder / _ONE)[0]
  if not (folder / _INDEX).exists():
    remedy = "give a .safetensors file, or a folder with one of them"
    if (folder / "checkpoints").is_dir():
      file = f"{folder}.safetensors"
      remedy = f"give {file}, after `jaxscale export {folder} --to {file}`"
    raise ConfigError(f"{folder}: has neither {_ONE} nor {_INDEX}; {remedy}")
  shape = {"weight_map": {str: str}}
  where = require_json(folder / _INDEX, shape, "copy it again")["weight_map"]
  files = sorted(set(where.values()))
  for file in files:
    if Path(file).name != file or not file.isprintable():
      raise ConfigError(f"{folder / _INDEX}: {file!r} is not a file name; copy the index again")
  headers = {file: read_header(folder / file)[0] for file in files}
  for name, file in where.items():
    if name not in headers[file]:
      raise ConfigError(f"{folder / file}: has no {name}, which {_INDEX} lists; copy both again")
  return {name: headers[file][name] for name, file in where.items()}


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
  """Return (arrays by name, metadata) of one file.

  Raises:
    ConfigError: the file is not a safetensors file, or is damaged.
    OSError: the file cannot be opened.
  """
  with open_regular(path) as file:
    start = refuse_pointer(path, file.read(64))[:9]
    if start[8:] != b"{":
      advice = "give one"
      if start.startswith((b"PK\x03\x04", b"\x80\x02")):  # a zip file or a pickle
        advice = "write PyTorch's state dict with safetensors.torch.save_file"
      raise ConfigError(f"{path}: not a safetensors file; {advice}")
    length, size = int.from_bytes(start[:8], "little"), os.fstat(file.fileno()).st_size
    if _LONGEST < length <= size:
      problem = f"has a header of {length:,} bytes, more than {_LONGEST:,}"
      raise invalid(str(path), ..., problem, "write the arrays to several files")
    try:
      if length > size - 8:
        raise ValueError("header length beyond the end")
      file.seek(8)
      return _parse_header(path, parse_json(file.read(length)), 8 + length, size)
    except (TypeError, AttributeError, KeyError, ValueError) as e:
      reason = f"truncated or with a damaged header ({message_of(e):.200}); copy it again"
      raise ConfigError(f"{path}: {reason}") from None


def _parse_header(
  path: Path, header: dict[str, Any], first: int, size: int
) -> tuple[dict[str, Stored], dict[str, str]]:
  """Return (arrays by name, metadata); arrays must cover the file from byte `first` to the end."""
  metadata, arrays, at = header.pop("__metadata__", {}), {}, 0
  if problem := mismatch(metadata, {str: str}, "__metadata__") or mismatch(header, _ENTRIES):
    raise ValueError(problem)
  for name, x in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
    shape, (begin, end) = tuple(x["shape"]), x["data_offsets"]
    if len(shape) > _MOST_DIMS or math.prod(n or 1 for n in shape) > _MOST_ITEMS:
      raise ValueError(f"{name:.40} has an invalid shape")
    dtype = DTYPES[x["dtype"]]
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
      raise ValueError(f"`{name:.40}` has {end - begin} bytes, not those of its shape")
    if begin != at:
      raise ValueError(f"`{name:.40}` begins at {begin}, not at {at}")
    arrays[name], at = Stored(path, dtype, shape, first + begin), end
  if first + at != size:
    raise ValueError(f"the file is not fully covered: its arrays end at {first + at} of {size}")
  return {name: arrays[name] for name in header}, metadata


def write(
  path: str | os.PathLike,
  layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
  arrays: Iterable[np.ndarray | None],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Write a file array by array; it appears under its name only when complete.

  Args:
    path: the path of the file; an existing file is replaced.
    layout: the dtype and shape of every array, by name.
    arrays: the arrays in the order of `layout`, taken one at a time. If arrays of smaller
      dtypes come last, each array begins at a multiple of its item size.
    metadata: text about the file.

  Raises:
    OSError: writing failed, for example because the disk is full; no partial file remains.
  """
  with replacing(output_path(path), durable=True) as file:
    file.write(_header(layout, metadata or {}))
    for (name, (dtype, shape)), array in zip(layout.items(), arrays, strict=True):
      assert array is not None and (array.dtype, array.shape) == (dtype, shape), name
      little = array.astype(dtype.newbyteorder("<"), copy=False)
      file.write(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)


def _header(layout: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
  header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
  end = 0
  for name, (dtype, shape) in layout.items():
    begin, end = end, end + math.prod(shape) * dtype.itemsize
    offsets = [begin, end]
    header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": offsets}
  text = json.dumps(header, separators=(",", ":")).encode()
  text = text.ljust(-(-len(text) // 8) * 8)  # Aligns the data, as the package does.
  return len(text).to_bytes(8, "little") + text
