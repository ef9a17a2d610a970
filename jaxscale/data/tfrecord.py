"""Random access to TFRecord files, without TensorFlow.

A TFRecord file is a chain: length, its checksum, the bytes, their checksum
(tensorflow/core/lib/io/record_writer.h). Walking it once gives every record's
place; the places are kept in the user's cache, because on a network file system
a million small reads take minutes.

Records are read with pread, not through a memory map: a file that shrinks, or
a network that fails, is then an error one can catch and not a SIGBUS, and a map
would hold a descriptor a shard just the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import resource
import struct
import tempfile
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.errors import ConfigError

_HEAD, _FOOT = 12, 4  # uint64 length and its uint32 checksum; checksum of the bytes


class Shard(NamedTuple):
  """The part of a TFRecord file that belongs to a split.

  Attributes:
    path: of the file.
    records: how many the file has, all in all.
    skip: leave out so many at its start.
    take: then take so many.
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
  paths = tuple(shard.path for shard in shards)
  stamps = _stamps(paths)
  parts = _cached_index(paths, stamps)
  places: list[np.ndarray] = []
  for number, (shard, part) in enumerate(zip(shards, parts, strict=True)):
    if len(part) != shard.records:
      raise ConfigError(
        f"TFDS: {shard.path} holds {len(part)} records where dataset_info.json says "
        f"{shard.records}: truncated or of another version, copy it again"
      )
    part = part[shard.skip : shard.skip + shard.take]
    places.append(np.insert(part, 0, number, axis=1))
  table = np.concatenate(places) if places else np.zeros((0, 3), np.int64)

  def read(index: int) -> bytes:
    number, offset, length = table[index].tolist()
    # Held here, so that no eviction closes it.
    descriptor = _opened(paths[number], stamps[number])
    data = os.pread(descriptor.number, length, offset)
    if len(data) != length:
      raise OSError(f"{paths[number]} ends in the middle of a record")
    return data

  return read


def index_shard(path: str) -> np.ndarray:
  """The place of every record of a file: int64 [records, 2], offset and length.

  Raises:
    ConfigError: the chain breaks: a length's checksum is wrong, or the last
      record does not end where the file does.
  """
  places: list[tuple[int, int]] = []
  heads: list[bytes] = []
  try:
    descriptor = Descriptor(path)
    size, at = os.fstat(descriptor.number).st_size, 0
    while at < size:
      head = os.pread(descriptor.number, _HEAD, at)
      if len(head) < _HEAD:
        break
      (length,) = struct.unpack_from("<Q", head)
      if at + _HEAD + length + _FOOT > size:
        break
      heads.append(head)
      places.append((at + _HEAD, length))
      at += _HEAD + length + _FOOT
  except FileNotFoundError:
    raise ConfigError(f"TFDS: {path} is missing, copy or prepare it again") from None
  wrong = _wrong_checksums(heads)
  if len(wrong) or at != size:
    where = places[wrong[0]][0] - _HEAD if len(wrong) else at
    raise ConfigError(
      f"TFDS: {path} breaks off at byte {where} of {size}: truncated or damaged, "
      "copy it again"
    )
  return np.array(places, np.int64).reshape(-1, 2)


def masked_crc32c(data: np.ndarray) -> np.ndarray:
  """TFRecord's checksum of each row, uint32 [n].

  CRC-32C (RFC 3720, appendix B.4), rotated and shifted by a constant
  (tensorflow/core/lib/hash/crc32c.h, `Mask`).

  Args:
    data: uint8 [n, bytes].
  """
  crc = np.full(len(data), 0xFFFFFFFF, np.uint32)
  for column in data.T:
    crc = _crc_table()[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
  crc = ~crc
  return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


@functools.cache
def _crc_table() -> np.ndarray:
  table = np.arange(256, dtype=np.uint32)
  for _ in range(8):
    odd = (table & np.uint32(1)).astype(bool)
    table = np.where(odd, np.uint32(0x82F63B78), np.uint32(0)) ^ (table >> np.uint32(1))
  return table


def _wrong_checksums(heads: list[bytes]) -> np.ndarray:
  rows = np.frombuffer(b"".join(heads), np.uint8).reshape(-1, _HEAD)
  stored = np.ascontiguousarray(rows[:, 8:]).view("<u4").ravel()
  return np.flatnonzero(masked_crc32c(rows[:, :8].astype(np.uint32)) != stored)


def _stamps(paths: tuple[str, ...]) -> list[tuple[int, int]]:
  """Size and time of change of every file: another file has others."""
  try:
    found = [os.stat(path) for path in paths]
  except FileNotFoundError as e:
    raise ConfigError(
      f"TFDS: {e.filename} is missing, copy or prepare it again"
    ) from None
  return [(status.st_size, status.st_mtime_ns) for status in found]


def _cached_index(
  paths: tuple[str, ...], stamps: list[tuple[int, int]]
) -> list[np.ndarray]:
  """The index of every file, from the user's cache if the files are the same."""
  identity = hashlib.sha256()
  for path, stamp in zip(paths, stamps, strict=True):
    identity.update(repr((os.path.abspath(path), *stamp)).encode())
  root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
  kept = Path(root) / "jaxscale" / "tfrecord" / f"{identity.hexdigest()[:32]}.npz"
  try:
    with np.load(kept) as saved:
      return np.split(saved["places"], saved["ends"][:-1])
  except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
    pass  # not there yet, or damaged: make it
  with ThreadPoolExecutor(16) as threads:  # they wait for the file system
    parts = list(threads.map(index_shard, paths))
  with contextlib.suppress(OSError):  # a home that is full or read-only
    _save(kept, parts)
  return parts


def _save(kept: Path, parts: list[np.ndarray]) -> None:
  kept.parent.mkdir(parents=True, exist_ok=True)
  ends = np.cumsum([len(part) for part in parts])
  # Many processes may do this at once: each writes its own, the last one stays.
  number, scratch = tempfile.mkstemp(dir=kept.parent)
  with os.fdopen(number, "wb") as file:
    np.savez(file, places=np.concatenate(parts), ends=ends)
  os.replace(scratch, kept)


def _descriptors() -> int:
  """How many files to hold open, over all splits: half of what the process may."""
  return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 8)


class Descriptor:
  """A file that is closed when nobody reads it any more.

  Attributes:
    number: for `os.pread`; any thread may use it.
  """

  def __init__(self, path: str):
    self.number = -1
    self.number = os.open(path, os.O_RDONLY)

  def __del__(self):
    if self.number >= 0:
      os.close(self.number)


# Open files of all splits, the one that was used last at the end: training and
# evaluation together keep to one limit.
_OPEN: OrderedDict[tuple[str, tuple[int, int]], Descriptor] = OrderedDict()
_LOCK = threading.Lock()


def _opened(path: str, stamp: tuple[int, int]) -> Descriptor:
  """The file, opened if it is not yet; any thread may ask."""
  key = path, stamp
  with _LOCK:
    if key in _OPEN:
      _OPEN.move_to_end(key)
      return _OPEN[key]
  opened = Descriptor(path)  # not locked: opening takes milliseconds on a network
  with _LOCK:
    held = _OPEN.setdefault(key, opened)
    while len(_OPEN) > _descriptors():
      _OPEN.popitem(last=False)
  return held
