"""Random access to TFRecord files without TensorFlow.

A TFRecord file is a chain of length, checksum of the length, bytes, and checksum of the bytes
(tensorflow/core/lib/io/record_writer.h). One pass finds the positions of all records. They are
saved in the user's cache, because a million small reads take minutes on a network file system.

Records are read with pread and not through a memory map: if a file shrinks or the network
fails, the result is an exception and not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import resource
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.data.caches import key_of, user_cache
from jaxscale.errors import ConfigError
from jaxscale.files import open_descriptor, read_bytes, replacing
from jaxscale.metrics.event_file import masked_crc32c
from jaxscale.owners import unsafe_owner

_MOST = 1 << 30  # bytes of a record, which is read at once
_HEAD, _FOOT = 12, 4  # uint64 length with its uint32 checksum; checksum of the bytes


class Shard(NamedTuple):
  """Part of a TFRecord file that belongs to a split.

  Attributes:
    path: the path of the file.
    records: the number of records in the whole file.
    skip: the number of records at the start that are not in the split.
    take: the number of records after these that are in the split.
  """

  path: str
  records: int
  skip: int
  take: int


def random_access(shards: Sequence[Shard]) -> Callable[[int], bytes]:
  """Return a function from an index over all shards to the bytes of that record.

  Args:
    shards: the shards, in the order of their examples.

  Raises:
    ConfigError: a shard is missing, damaged, or has a different number of records.

  Example:
    >>> read = random_access([Shard("a.tfrecord", 3, 0, 3)])  # doctest: +SKIP
    >>> read(2)  # doctest: +SKIP
  """
  try:
    found = [(shard.path, os.stat(shard.path)) for shard in shards]
    # A replaced file has a different size or modification time.
    files = [(path, (status.st_size, status.st_mtime_ns)) for path, status in found]
    parts = _cached_index(files)
  except FileNotFoundError as e:
    raise ConfigError(f"TFDS: {e.filename} is missing; copy it again") from None
  positions = [np.zeros((0, 3), np.int64)]
  for number, (shard, part) in enumerate(zip(shards, parts, strict=True)):
    if len(part) != shard.records:
      problem = f"has {len(part)} records, but dataset_info.json says {shard.records}"
      fix = "copy it again, in the version of dataset_info.json"
      raise ConfigError(f"TFDS: {shard.path} {problem}; {fix}")
    positions.append(np.insert(part[shard.skip :][: shard.take], 0, number, axis=1))
  table = np.concatenate(positions)

  def read(index: int) -> bytes:
    number, offset, length = table[index].tolist()
    file = open_file(*files[number])  # The local variable keeps the file open.
    data = os.pread(file.descriptor, length, offset)
    if len(data) != length:
      raise OSError(f"{files[number][0]} ends in the middle of a record")
    return data

  return read


def index_shard(path: str) -> np.ndarray:
  """Return the position of every record of a file: int64 [records, 2], offset and length.

  Raises:
    ConfigError: the checksum of a length is wrong, or the last record does not end at the
      end of the file.
  """
  positions, file = [], OpenFile(path)
  size, at = os.fstat(file.descriptor).st_size, 0
  while at < size:
    head = os.pread(file.descriptor, _HEAD, at)
    length, checksum = (int.from_bytes(part, "little") for part in (head[:8], head[8:]))
    if checksum != masked_crc32c(head[:8]) or at + _HEAD + length + _FOOT > size or length > _MOST:
      problem = "it is truncated or damaged; copy it again"
      raise ConfigError(f"TFDS: {path} is invalid at byte {at} of {size}: {problem}")
    positions.append((at + _HEAD, length))
    at += _HEAD + length + _FOOT
  return np.array(positions, np.int64).reshape(-1, 2)


def _cached_index(files: Sequence[tuple[str, tuple[int, int]]]) -> list[np.ndarray]:
  """Return the index of every file, from the user's cache if the files are unchanged."""
  identity = [(os.path.abspath(path), stamp) for path, stamp in files]
  kept = user_cache() / "tfrecord" / f"{key_of(identity)}.npz"
  if (parts := _read_index(kept, len(files))) is not None:
    return parts
  with ThreadPoolExecutor(16) as threads:  # The threads wait for the file system.
    parts = list(threads.map(index_shard, [path for path, _ in files]))
  with contextlib.suppress(OSError):  # The home may be full or read-only.
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may do this at once; each writes its own file, and the last one stays.
    with replacing(kept) as file:
      np.savez(file, *parts)
  return parts


def _read_index(kept: Path, count: int) -> list[np.ndarray] | None:
  """Return the saved index of `count` files; None if it is missing or damaged."""
  try:
    if unsafe_owner(kept, group=False):
      return None
    with np.load(io.BytesIO(read_bytes(kept, most=_MOST))) as saved:
      parts = [np.asarray(saved[f"arr_{i}"]) for i in range(count)]
  except Exception:  # Raised by zip, zlib or NumPy: the file is missing or damaged.
    return None
  are_whole = all(part.dtype == np.int64 and part.shape[1:] == (2,) for part in parts)
  return parts if are_whole and all(part.min(initial=0) >= 0 for part in parts) else None


class OpenFile:
  """File for `os.pread` from any thread, closed with its last reference."""

  def __init__(self, path: str):
    self.descriptor = open_descriptor(path)
    weakref.finalize(self, os.close, self.descriptor)


# Training and evaluation together keep at most half of a process's file descriptors open.
@functools.lru_cache(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 8))
def open_file(path: str, stamp: tuple[int, int]) -> OpenFile:
  """Open the file with this size and modification time, or return it if it is open."""
  del stamp  # A replaced file gets a new entry in the cache.
  return OpenFile(path)
