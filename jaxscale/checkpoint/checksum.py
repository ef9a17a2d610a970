"""Checksums of array bytes that do not depend on how an array is sharded.

Each element's bits are mixed (a bijection), multiplied by an odd weight that
depends on its place, and summed modulo 2^64. The sum is associative, so shards
can be summed in any order and on any process. One changed element always
changes the sum; several leave it alone once in about 2^64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxscale.cluster import sum_over_processes
from jaxscale.optim.tree_paths import path_name

_CHUNK = 1 << 18  # elements at a time: the temporaries stay in cache


class DamagedError(Exception):
  """Why a checkpoint cannot be trusted."""


def verify(tree: Any, leaves: dict[str, dict[str, Any]], shapes: Any = None) -> None:
  """Compare the arrays of a checkpoint with the checksums in its manifest.

  All processes must call this; `shapes` as of `manifest`.

  Raises:
    DamagedError: an array is not the one that was saved.
  """
  try:
    found = manifest(tree, shapes)
  except FloatingPointError as e:
    raise DamagedError(f"FloatingPointError: {e}") from e
  for name, leaf in found.items():
    if leaf["checksum"] != leaves[name]["checksum"]:
      raise DamagedError(f"the checksum of {name} does not match")


def manifest(tree: Any, shapes: Any = None) -> dict[str, dict[str, Any]]:
  """Shape, dtype and checksum of every leaf, by path.

  Each process reads the shards it holds, replicas once; all must call this.

  Args:
    tree: of `jax.Array`s.
    shapes: a tree of the shapes that count, where arrays of `tree` are padded by
      rows to fit on more devices; None: all of them counts.

  Raises:
    FloatingPointError: a leaf holds NaN or Inf; the message names it.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  # Row 0: checksums; row 1: how many values are not finite. Arrays, because
  # NumPy warns of an overflow of scalars, which is meant here.
  found = np.zeros((2, len(leaves), 1), np.uint64)
  shapes = tree if shapes is None else shapes
  pairs = zip(leaves, jax.tree.leaves(shapes), strict=True)
  for i, ((_, leaf), like) in enumerate(pairs):
    for shard in leaf.addressable_shards:
      if shard.replica_id == 0:
        data, index = _within(like.shape, np.asarray(shard.data), shard.index)
        found[0, i] += shard_checksum(data, index, like.shape)
        if data.dtype.kind not in "iub":  # bfloat16 and its kin are "V" to numpy
          found[1, i] += np.uint64(data.size - np.isfinite(data).sum())
  sums, bad = sum_over_processes(found)[..., 0]
  if bad.any():
    name = path_name(leaves[int(bad.argmax())][0])
    raise FloatingPointError(f"{int(bad.max())} values of {name} are not finite")
  described = describe(shapes)
  for leaf, total in zip(described.values(), sums, strict=True):
    leaf["checksum"] = f"{total:016x}"
  return described


def _within(shape, data: np.ndarray, index: tuple[slice, ...]):
  """A shard and its place without the rows beyond those of `shape`."""
  if not shape:
    return data, index
  first, *rest = index
  start, stop, _ = first.indices(max(shape[0], first.stop or 0))
  stop = max(min(stop, shape[0]), start)
  return data[: stop - start], (slice(start, stop), *rest)


def describe(tree: Any) -> dict[str, dict[str, Any]]:
  """Shape and dtype of every leaf (or of its `jax.ShapeDtypeStruct`), by path."""
  return {
    path_name(path): {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def shard_checksum(
  data: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]
) -> np.ndarray:
  """What one shard adds to the checksum of its array, uint64 [1].

  Args:
    data: the shard.
    index: its place in the whole array.
    shape: of the whole array.
  """
  bits = np.ascontiguousarray(data).reshape(-1).view(f"u{data.dtype.itemsize}")
  total, first = np.zeros(1, np.uint64), 0
  for places in _places(index, shape):
    weight = _mix(places) | np.uint64(1)
    mixed = _mix(bits[first : first + places.size].astype(np.uint64) + np.uint64(1))
    total += (mixed * weight).sum(dtype=np.uint64)
    first += places.size
  return total


def _places(index: tuple[slice, ...], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
  """Places of a shard's elements in the whole array, in their order, uint64 [≤ chunk].

  Those of all would take more memory than the shard itself.
  """
  spans = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
  sizes = [stop - start for start, stop in spans]
  if math.prod(sizes) <= _CHUNK:
    places = np.zeros(1, np.uint64)
    for (start, stop), size in zip(spans, shape, strict=True):
      along = np.arange(start, stop, dtype=np.uint64)
      places = np.add.outer(places * np.uint64(size), along).ravel()
    yield places
    return
  # In blocks of the first dim that can be divided.
  dim = next(dim for dim, size in enumerate(sizes) if size > 1)
  (first, stop), rows = spans[dim], max(_CHUNK // math.prod(sizes[dim + 1 :]), 1)
  for start in range(first, stop, rows):
    block = slice(start, min(start + rows, stop))
    yield from _places((*index[:dim], block, *index[dim + 1 :]), shape)


def _mix(x: np.ndarray) -> np.ndarray:
  """MurmurHash3's 64-bit finaliser (A. Appleby, public domain)."""
  x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
  x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
  return x ^ (x >> np.uint64(33))
