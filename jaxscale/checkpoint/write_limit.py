"""Limit the bytes of a checkpoint that are in flight between devices and disk.

A process reads and writes only its own shards, but two effects would make its memory grow
past their size. Files are read by whole chunks: an array saved in a few large chunks, under
another layout, would be read almost whole by every process. Therefore chunks are small. And
all arrays would be written at the same time. Therefore at most a quarter of a process's bytes
is in flight, or one array if that is more. Arrays are read one after another.
"""

from __future__ import annotations

import math
from typing import Any

import jax

CHUNK = 2**22  # bytes; Orbax divides a device's shard until chunks are no larger.
_LEAST = 2**25  # bytes that may always be in flight, however little a process holds


def limit_to_write(state: Any) -> float:
  """Return the limit of bytes that this process may write at once, in GB as Orbax counts.

  Args:
    state: a tree of `jax.Array`s; replicas of an array share the work of writing it.
  """
  leaves = jax.tree.leaves(state)
  own = sum(x.nbytes for x in leaves) // jax.process_count()
  shards = (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
  # Orbax requires each single array to be below the limit.
  return max(_LEAST, own / 4, 1.01 * max(shards, default=0)) / 1e9
