"""How many bytes of a checkpoint are between devices and disk at once.

A process reads and writes its own shards, not the whole state, but two things would
make its memory grow past that. Files are read by whole chunks: arrays in few large
chunks, because they were saved in another layout, would be read nearly whole by every
process, so chunks are small. And all arrays would be read or written at the same
time, each with its compressed bytes: so at most a quarter of what a process holds is,
or one array where that is more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxscale.optim.tree_paths import path_name

CHUNK = 2**22  # bytes; Orbax divides what a device has until it is no larger
_LEAST = 2**25  # bytes that may be on their way however little a process holds


def limit_to_write(state: Any) -> float:
  """Bytes that this process may be writing at once, in GB as Orbax counts.

  Args:
    state: of `jax.Array`s. Replicas of an array share the work of writing it.
  """
  leaves = jax.tree.leaves(state)
  own = sum(x.nbytes for x in leaves) // jax.process_count()
  return _limit(own, (_shard_bytes(x, x.sharding.shard_shape(x.shape)) for x in leaves))


def limit_to_read(abstract: Any, chunks: Mapping[str, tuple[int, ...]]) -> float:
  """Bytes that this process may be reading at once, in GB as Orbax counts.

  Args:
    abstract: a tree of `jax.ShapeDtypeStruct`s with shardings.
    chunks: shape of the chunks of each array, by path.
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
  """Elements along each dim of all chunks that overlap a part."""
  pairs = zip(part, chunk, strict=True)
  return [-(-stop // size) * size - start // size * size for (start, stop), size in pairs]


def _shard_bytes(x: Any, shape: Any) -> int:
  return math.prod(shape) * x.dtype.itemsize


def _limit(own: int, most: Any) -> float:
  # Orbax refuses an array that does not stay below the limit by itself.
  return max(_LEAST, own / 4, 1.01 * max(most, default=0)) / 1e9
