"""Limit the bytes of a checkpoint that are in flight between devices and disk.

A process reads and writes only its own shards, but two effects would make its memory grow
past their size. Files are read by whole chunks: an array saved in a few large chunks, under
another layout, would be read almost whole by every process. Therefore chunks are small. And
all arrays would be read or written at the same time, each with its compressed bytes.
Therefore at most a quarter of a process's bytes is in flight, or one array if that is more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxscale.optim.tree_paths import path_name

CHUNK = 2**22  # bytes; Orbax divides a device's shard until chunks are no larger.
_LEAST = 2**25  # bytes that may always be in flight, however little a process holds


def limit_to_write(state: Any) -> float:
  """Return the limit of bytes that this process may write at once, in GB as Orbax counts.

  Args:
    state: a tree of `jax.Array`s; replicas of an array share the work of writing it.
  """
  leaves = jax.tree.leaves(state)
  own = sum(x.nbytes for x in leaves) // jax.process_count()
  return _limit(own, (_shard_bytes(x, x.sharding.shard_shape(x.shape)) for x in leaves))


def limit_to_read(abstract: Any, chunks: Mapping[str, tuple[int, ...]]) -> float:
  """Return the limit of bytes that this process may read at once, in GB as Orbax counts.

  Args:
    abstract: a tree of `jax.ShapeDtypeStruct`s with shardings.
    chunks: the chunk shape of each array, by path.
  """
  own, most = 0, []
  for path, x in jax.tree_util.tree_leaves_with_path(abstract):
    here = x.sharding.addressable_devices_indices_map(x.shape).values()
    parts = {tuple(s.indices(n)[:2] for s, n in zip(index, x.shape, strict=True)) for index in here}
    own += sum(_shard_bytes(x, [b - a for a, b in part]) for part in parts)
    chunk = chunks.get(path_name(path), x.shape)
    most += [_shard_bytes(x, _touched(part, chunk)) for part in parts]
  return _limit(own, most)


def _touched(part: Any, chunk: tuple[int, ...]) -> list[int]:
  """Return the elements along each dim of all chunks that overlap a part."""
  pairs = zip(part, chunk, strict=True)
  return [-(-stop // size) * size - start // size * size for (start, stop), size in pairs]


def _shard_bytes(x: Any, shape: Any) -> int:
  return math.prod(shape) * x.dtype.itemsize


def _limit(local_bytes: int, most: Any) -> float:
  # Orbax requires each single array to be below the limit.
  return max(_LEAST, local_bytes / 4, 1.01 * max(most, default=0)) / 1e9
