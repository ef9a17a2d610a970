"""File of one process's local copy: the data of a state that its devices hold.

The file has the bytes of each shard, one after another; a JSON footer with their positions
and checksums; the footer's length and CRC-32; and a mark. It is written sequentially, and a
truncated file has no footer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.checkpoint import checksum
from jaxscale.checkpoint.checksum import DamagedError
from jaxscale.files import mismatch, parse_json
from jaxscale.mesh import array_from_parts
from jaxscale.optim.tree_paths import path_name

_SHARD = {"bounds": [[int]], "crc32": int}
_LEAF = {"shape": [int], "dtype": str, "shards": [_SHARD]}
_FOOTER = {"run": str, "step": int, "process": int, "processes": int, "leaves": {str: _LEAF}}
_END = struct.Struct("<QI8s")
_MARK = b"jaxscale"
_BLOCK = 2**20  # bytes, few enough to stay in a core's cache until they are written
_Bounds = tuple[tuple[int, int], ...]  # start and stop along each dim


class Shard(NamedTuple):
  """Part of an array that this process holds, on the host."""

  leaf: str
  shape: tuple[int, ...]
  bounds: _Bounds
  data: np.ndarray


def held_shards(state: Any) -> list[Shard]:
  """Return each part of each array that this process's devices hold, once.

  On CPUs they are views of the arrays, and keep the memory when these are donated.
  """
  held: dict[tuple[str, _Bounds], tuple[tuple[int, ...], jax.Array]] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    for shard in leaf.addressable_shards:
      key = path_name(path), _bounds(shard.index, leaf.shape)
      held.setdefault(key, (leaf.shape, shard.data))
  for _, data in held.values():
    data.copy_to_host_async()
  parts = held.items()
  return [Shard(name, shape, at, np.asarray(data)) for (name, at), (shape, data) in parts]


def write_copy(path: Path, footer: dict[str, Any], shards: list[Shard]) -> None:
  """Write a file, or overwrite one, and sync it to disk.

  Args:
    path: the path of the file.
    footer: the content of the footer without the shards.
    shards: the shards, from `held_shards`.

  Raises:
    FloatingPointError: an array has NaN or Inf; the message has its name.
    OSError: the disk is full or failed.
  """
  leaves: dict[str, Any] = {}
  flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
  with open(os.open(path, flags, 0o600), "wb") as file:
    for name, shape, bounds, data in shards:
      if bad := checksum.count_bad(data):
        raise FloatingPointError(f"{bad} values of {name} are not finite")
      crc, left = 0, _bytes_of(np.ascontiguousarray(data))
      for block in (left[i : i + _BLOCK] for i in range(0, len(left), _BLOCK)):
        crc = zlib.crc32(block, crc)
        file.write(block)
      leaf = {"shape": shape, "dtype": str(data.dtype), "shards": []}
      shard = {"bounds": bounds, "crc32": crc}
      leaves.setdefault(name, leaf)["shards"].append(shard)
    text = json.dumps({**footer, "leaves": leaves}).encode()
    file.write(text + _END.pack(len(text), zlib.crc32(text), _MARK))
    file.truncate()
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def open_copy(path: Path) -> Iterator[BufferedReader]:
  """Open a regular file of this user for reading, without following links."""
  flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
  with open(os.open(path, flags), "rb") as file:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
      raise DamagedError("it is not a file of this user")
    yield file


def read_footer(file: BufferedReader) -> dict[str, Any]:
  """Read the footer of a file, after checking the file's length.

  Raises:
    DamagedError: the file was truncated or has changed.
  """
  size = os.fstat(file.fileno()).st_size
  file.seek(max(size - _END.size, 0))
  end = file.read(_END.size)
  if len(end) < _END.size:
    raise DamagedError("it is truncated")
  length, crc, mark = _END.unpack(end)
  if mark != _MARK or length > size - _END.size:
    raise DamagedError("it is truncated")
  file.seek(size - _END.size - length)
  text = file.read(length)
  with contextlib.suppress(ValueError):
    footer = parse_json(text)
    if zlib.crc32(text) == crc and not mismatch(footer, _FOOTER):
      return footer
  raise DamagedError("its footer has changed")


def read_state(file: BufferedReader, leaves: dict[str, Any], abstract: Any) -> Any:
  """Load the arrays of a file onto this process's devices.

  Raises:
    DamagedError: the file lacks data of these devices, or its content has changed.
  """
  wanted = checksum.describe(abstract)
  for name in wanted.keys() | leaves.keys():
    keys = "shape", "dtype"
    there, here = ([x.get(name, {}).get(k) for k in keys] for x in (leaves, wanted))
    if there != here:
      raise DamagedError("it belongs to a different model, optimizer or exchange")
  locations = _locations(leaves)

  def load(path, x) -> jax.Array:
    name = path_name(path)

    def read(bounds: _Bounds) -> np.ndarray:
      if (location := locations.get((name, bounds))) is None:
        raise DamagedError("it is from different devices or has a different layout")
      data = np.empty([b - a for a, b in bounds], x.dtype)
      if not _read_into(data, file, *location):
        raise DamagedError(f"the checksum of {name} does not match")
      return data

    return array_from_parts(x, read)

  return jax.tree_util.tree_map_with_path(load, abstract)


def _locations(leaves: dict[str, Any]) -> dict[tuple[str, _Bounds], tuple[int, int]]:
  """Return the offset and checksum of each part of each array in a file."""
  locations, offset = {}, 0
  for name, leaf in leaves.items():
    for shard in leaf["shards"]:
      bounds = tuple((start, stop) for start, stop in shard["bounds"])
      locations[name, bounds] = offset, shard["crc32"]
      size = math.prod(stop - start for start, stop in bounds)
      offset += size * np.dtype(leaf["dtype"]).itemsize
  return locations


def _read_into(data: np.ndarray, file: BufferedReader, offset: int, crc: int) -> bool:
  """Read an array's bytes; return whether they match the checksum."""
  raw = _bytes_of(data)
  file.seek(offset)
  return file.readinto(raw) == len(raw) and zlib.crc32(raw) == crc


def _bytes_of(data: np.ndarray) -> memoryview:
  """Return the bytes of a contiguous array."""
  return data.reshape(-1).view(np.uint8).data


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Bounds:
  spans = (s.indices(n) for s, n in zip(index, shape, strict=True))
  return tuple((start, stop) for start, stop, _ in spans)
