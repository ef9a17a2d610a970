"""Random access to TFRecord files, without TensorFlow.

A TFRecord file is a chain: length, its checksum, the bytes, their checksum
(tensorflow/core/lib/io/record_writer.h). Walking it once gives every record's
place; the places are kept in the user's cache, because on a network file system
a million small reads take minutes.

Records are read with pread, not through a memory map: a file that shrinks, or
a network that fails, is then an error one can catch and not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import resource
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.data.dataset import user_cache
from jaxscale.errors import ConfigError
from jaxscale.files import read_bytes, replacing, who_else_writes

_HEAD, _FOOT = 12, 4  # uint64 length and its uint32 checksum; checksum of the bytes


class Shard(NamedTuple):
  """The part of a TFRecord file that belongs to a split.

  Attributes:
    path: of the file.
    records: how many the whole file has.
    skip: records left out at its start.
    take: how many belong to the split after those.
  """

  path: str
  records: int
  skip: int
  take: int


def random_access(shards: Sequence[Shard]) -> Callable[[int], bytes]:
  """A function from an index over all shards to the bytes of that record.

  Args:
    shards: in the order of their examples.

  Raises:
    ConfigError: a shard is missing, damaged, or has another number of records.

  Example:
    >>> read = random_access([Shard("a.tfrecord", 3, 0, 3)])  # doctest: +SKIP
    >>> read(2)  # doctest: +SKIP
  """
  try:
    found = [(shard.path, os.stat(shard.path)) for shard in shards]
    # Another file in its place has another size or time of change.
    files = [(path, (status.st_size, status.st_mtime_ns)) for path, status in found]
    parts = _cached_index(files)
  except FileNotFoundError as e:
    raise ConfigError(f"TFDS: {e.filename} is missing, copy it again") from None
  places = [np.zeros((0, 3), np.int64)]
  for number, (shard, part) in enumerate(zip(shards, parts, strict=True)):
    if len(part) != shard.records:
      why = f"holds {len(part)} records where dataset_info.json says {shard.records}"
      fix = "truncated or of another version, copy it again"
      raise ConfigError(f"TFDS: {shard.path} {why}: {fix}")
    places.append(np.insert(part[shard.skip :][: shard.take], 0, number, axis=1))
  table = np.concatenate(places)

  def read(index: int) -> bytes:
    number, offset, length = table[index].tolist()
    file = open_file(*files[number])  # a local, so that it stays open
    data = os.pread(file.descriptor, length, offset)
    if len(data) != length:
      raise OSError(f"{files[number][0]} ends in the middle of a record")
    return data

  return read


def index_shard(path: str) -> np.ndarray:
  """The place of every record of a file: int64 [records, 2], offset and length.

  Raises:
    ConfigError: the chain breaks: a length's checksum is wrong, or the last
      record does not end where the file does.
  """
  places, heads, file = [], [], OpenFile(path)
  size, at = os.fstat(file.descriptor).st_size, 0
  while at < size:
    head = os.pread(file.descriptor, _HEAD, at)
    length = int.from_bytes(head[:8], "little")
    if len(head) < _HEAD or at + _HEAD + length + _FOOT > size:
      break
    heads.append(head)
    places.append((at + _HEAD, length))
    at += _HEAD + length + _FOOT
  rows = np.frombuffer(b"".join(heads), np.uint8).reshape(-1, _HEAD)
  stored = np.ascontiguousarray(rows[:, 8:]).view("<u4").ravel()
  wrong = np.flatnonzero(masked_crc32c(rows[:, :8].astype(np.uint32)) != stored)
  if len(wrong) or at != size:
    where = places[wrong[0]][0] - _HEAD if len(wrong) else at
    why = "truncated or damaged, copy it again"
    raise ConfigError(f"TFDS: {path} breaks off at byte {where} of {size}: {why}")
  return np.array(places, np.int64).reshape(-1, 2)


def masked_crc32c(data: np.ndarray) -> np.ndarray:
  """TFRecord's checksum of each row, uint32 [n], all rows at once.

  CRC-32C (RFC 3720, appendix B.4), rotated and shifted by a constant
  (tensorflow/core/lib/hash/crc32c.h, `Mask`).

  Args:
    data: uint8 [n, bytes].
  """
  from tensorboardX.crc32c import CRC_TABLE

  table, crc = np.array(CRC_TABLE, np.uint32), np.full(len(data), ~np.uint32(0))
  for column in data.T:
    crc = table[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
  crc = ~crc
  return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def _cached_index(files: Sequence[tuple[str, tuple[int, int]]]) -> list[np.ndarray]:
  """The index of every file, from the user's cache if the files are the same."""
  identity = [(os.path.abspath(path), stamp) for path, stamp in files]
  key = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
  kept = user_cache() / "tfrecord" / f"{key}.npz"
  if (parts := _read_index(kept, len(files))) is not None:
    return parts
  with ThreadPoolExecutor(16) as threads:  # they wait for the file system
    parts = list(threads.map(index_shard, [path for path, _ in files]))
  with contextlib.suppress(OSError):  # a home that is full or read-only
    kept.parent.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum([len(part) for part in parts])
    # Many processes may do this at once: each writes its own, the last one stays.
    with replacing(kept) as file:
      np.savez(file, places=np.concatenate(parts), ends=ends)
  return parts


def _read_index(kept: Path, count: int) -> list[np.ndarray] | None:
  """The index of so many files, if it is there and whole."""
  try:
    if who_else_writes(kept, group=False):
      return None
    with np.load(io.BytesIO(read_bytes(kept))) as saved:
      places, ends = (np.asarray(saved[name]) for name in ("places", "ends"))
  except Exception:  # of zip, of zlib, of numpy's parser: not there yet, or damaged
    return None
  is_whole = places.dtype == ends.dtype == np.int64 and ends.shape == (count,)
  is_whole = is_whole and places.ndim == 2 and places.shape[1] == 2 and count > 0
  is_whole = is_whole and (np.diff(ends, prepend=0) >= 0).all()
  if not is_whole or ends[-1] != len(places) or places.min(initial=0) < 0:
    return None
  return np.split(places, ends[:-1])


class OpenFile:
  """A file for `os.pread` from any thread, closed when nobody refers to it."""

  def __init__(self, path: str):
    self.descriptor = os.open(path, os.O_RDONLY)
    weakref.finalize(self, os.close, self.descriptor)


# Training and evaluation together keep open half of the files that a process may.
@functools.lru_cache(max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 8))
def open_file(path: str, stamp: tuple[int, int]) -> OpenFile:
  """The file of this size and time of change, opened if it is not yet."""
  del stamp  # another file in its place is another entry
  return OpenFile(path)
