"""Compare the arrays of a checkpoint with the disk before the checkpoint is committed.

Each process reads back what it has written. It compares the bytes with those on the host,
or, for data that it does not hold (replicas share the writing), adds their checksum to the
checksums of the other processes. Process 0 then looks for each chunk of each array in the
merged index. This finds arrays and chunks that are missing, truncated, swapped or wrong. The
bytes come from the page cache: a medium that loses data after confirming the write is
noticed only when the checkpoint is restored.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.checkpoint import checksum
from jaxscale.checkpoint.checksum import DamagedError, Shards

_Index = tuple[slice, ...]


class _Chunk(NamedTuple):
  """Part of an array on disk: its position, and the store and key of its bytes."""

  index: _Index
  shape: tuple[int, ...]
  store: Any
  key: bytes

  @property
  def size(self) -> int:
    return math.prod(s.stop - s.start for s in self.index)

  def read(self, itemsize: int) -> np.ndarray:
    """Read the elements as unsigned integers.

    Raises:
      DamagedError: the file is truncated.
    """
    try:
      data = np.frombuffer(self.store[self.key], f"u{itemsize}")
    except (ValueError, LookupError) as e:
      raise DamagedError(f"a chunk cannot be read: {e}") from e
    if data.size != math.prod(self.shape):
      raise DamagedError("a file is truncated")
    # Chunks have their full size even at the edge of an array.
    return data.reshape(self.shape)[tuple(slice(s.stop - s.start) for s in self.index)]


def check_complete(state: Path, leaves: dict[str, dict[str, Any]]) -> None:
  """Check that a merged checkpoint has every array completely.

  Args:
    state: the folder that Orbax has written.
    leaves: the shape and dtype of each array, from `checksum.describe`.

  Raises:
    DamagedError: an array or a chunk is missing, or has a different shape or dtype.
  """
  store, keys = _open(state)
  metas = {_name(k): json.loads(store[k]) for k in keys if k.endswith(b".zarray")}
  for name, leaf in leaves.items():
    if (meta := metas.get(stored_name(name))) is None:
      raise DamagedError(f"{name} is missing on disk")
    there = {"shape": meta["shape"], "dtype": np.dtype(meta["dtype"]).name}
    if any(leaf[key] != there[key] for key in there):
      old, new = (f"{x['dtype']}{x['shape']}" for x in (there, leaf))
      raise DamagedError(f"{name} is {old} on the disk, not {new}")
  shapes = {name: meta["chunks"] for name, meta in metas.items()}
  chunks = _chunks(store, keys, leaves, shapes)
  for name, leaf in leaves.items():
    if sum(c.size for c in chunks.get(name, ())) != math.prod(leaf["shape"]):
      raise DamagedError(f"{name} is incomplete on disk")


def stored_sums(
  state: Path,
  leaves: dict[str, dict[str, Any]],
  shards: list[Shards],
  sums: dict[int, tuple[int, int]],
) -> dict[int, int]:
  """Return checksums of what this process has written, by leaf, read from disk.

  Args:
    state: the folder that Orbax has written.
    leaves: the shape and dtype of each array.
    shards: the shards that this process has summed, from `checksum.own_shards`.
    sums: their checksums, from `checksum.sum_shards`.

  Raises:
    DamagedError: an array on disk differs from the one in memory.
  """
  who = f"process_{jax.process_index()}"
  shapes, part, chunks, stored = {}, state / f"ocdbt.{who}", {}, {}
  if part.exists():
    # Only process 0 writes `.zarray`.
    text = (state / "array_metadatas" / who).read_text()
    metas = [x["array_metadata"] for x in json.loads(text)["array_metadatas"]]
    shapes = {stored_name(x["param_name"]): x["chunk_shape"] for x in metas}
    chunks = _chunks(*_open(part), leaves, shapes)
  held: dict[int, list[tuple[_Index, np.ndarray]]] = {}
  for group in shards:
    for i, data in zip(group.leaves, group.data, strict=True):
      index = [slice(*s.indices(n)) for s, n in zip(group.index, group.shape, strict=True)]
      held.setdefault(i, []).append((tuple(index), data))
  for i, (name, leaf) in enumerate(leaves.items()):
    of_leaf, whole = chunks.get(name, []), tuple(leaf["shape"])
    pairs = [(chunk, _part_of(held.get(i, ()), chunk.index)) for chunk in of_leaf]
    # Chunks are disjoint, so the number of elements shows that this process's are complete.
    size = sum(data.size for _, data in held.get(i, ()))
    is_held = all(data is not None for _, data in pairs)
    if is_held and size == sum(chunk.size for chunk in of_leaf):
      if not all(_is_same(chunk, data) for chunk, data in pairs):
        raise DamagedError(checksum.unlike(name))
      total = sums.get(i, (0, 0))[0]
    else:
      itemsize, total = np.dtype(leaf["dtype"]).itemsize, 0
      for chunk in of_leaf:
        data = [chunk.read(itemsize)]
        total += int(checksum.shard_checksums(data, chunk.index, whole)[0])
    stored[i] = total % 2**64
  return stored


def _is_same(chunk: _Chunk, data: np.ndarray | None) -> bool:
  assert data is not None
  unsigned = data.view(f"u{data.dtype.itemsize}")
  return np.array_equal(chunk.read(data.dtype.itemsize), unsigned)


def _part_of(held: Any, index: _Index) -> np.ndarray | None:
  """Return the bytes of a chunk in memory; None if this process has not summed them."""
  for outer, data in held:
    pairs = list(zip(outer, index, strict=True))
    if all(o.start <= s.start and s.stop <= o.stop for o, s in pairs):
      return data[tuple(slice(s.start - o.start, s.stop - o.start) for o, s in pairs)]
  return None


def _chunks(
  store: Any, keys: list[bytes], leaves: dict[str, dict[str, Any]], shapes: dict[str, list[int]]
) -> dict[str, list[_Chunk]]:
  """Return the chunks in a store, by the name of their array in `leaves`.

  Args:
    store: the store, from `_open`.
    keys: its keys.
    leaves: the shape of each array.
    shapes: the chunk shape of each array, by Orbax's name of the array.
  """
  names = {stored_name(name): name for name in leaves}
  chunks: dict[str, list[_Chunk]] = {}
  for key in keys:
    suffix = key.decode().rpartition("/")[2]
    if suffix.startswith(".") or (name := names.get(_name(key))) is None:
      continue
    chunk, whole = shapes[_name(key)], leaves[name]["shape"]
    starts = map(int, suffix.split("."))
    bounds = zip(starts, chunk, whole, strict=False)  # The key of a scalar is "0".
    index = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in bounds)
    chunks.setdefault(name, []).append(_Chunk(index, tuple(chunk), store, key))
  return chunks


def _name(key: bytes) -> str:
  """Return the array name in a key, with its parts joined by points."""
  return stored_name(key.decode().rpartition("/")[0])


def stored_name(name: str) -> str:
  """Return Orbax's name of an array from its name in the manifest."""
  return name.replace("/", ".")


def ocdbt(folder: Path) -> dict[str, Any]:
  """Return TensorStore's description of the key-value store in a folder of Orbax."""
  # A cache of the index; without it, every chunk would read the index again.
  context = {"cache_pool": {"total_bytes_limit": 2**26}}
  base = {"driver": "file", "path": f"{folder}/"}
  return {"driver": "ocdbt", "base": base, "context": context}


def _open(folder: Path) -> tuple[Any, list[bytes]]:
  """Open a folder of Orbax as a store from keys to bytes; return it with its keys.

  Raises:
    DamagedError: the index cannot be read.
  """
  import tensorstore as ts

  try:
    store = ts.KvStore.open(ocdbt(folder)).result()
    return store, store.list().result()
  except (ValueError, LookupError) as e:
    raise DamagedError(f"the index cannot be read: {e}") from e
