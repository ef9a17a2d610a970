"""Checksums of arrays that do not depend on the sharding.

Each element's bits are multiplied by an odd weight that depends on the element's position,
and summed modulo 2^64 (multilinear hashing: Lemire and Kaser, arXiv:1202.4961). The sum is
associative, so shards can be summed in any order and in any process. A change of one element
always changes the sum. Changes of several elements go unnoticed with probability 2^-32 if
only their highest bits change, and 2^-63 if only their lowest bits do. For 64-bit elements
two highest bits could cancel out, so these are mixed by a bijection first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.cluster import sum_over_processes
from jaxscale.optim.tree_paths import path_name

Rows = Mapping[str, Sequence[int]]  # by the name of an array: the saved row of each row, or -1
_CHUNK = 1 << 15  # elements at a time, so that temporaries stay in a core's cache
_PREFIX = "linear-"  # of checksums in manifests


class DamagedError(Exception):
  """A checkpoint is damaged; the message says why."""


def verify(
  tree: Any, leaves: dict[str, dict[str, Any]], shapes: Any = None, rows: Rows | None = None
) -> None:
  """Compare the arrays of a checkpoint with the checksums in its manifest.

  All processes must call this; `shapes` and `rows` are as for `manifest`.

  Raises:
    DamagedError: an array differs from the saved one.
  """
  try:
    current = manifest(tree, shapes, rows)
  except FloatingPointError as e:
    raise DamagedError(f"FloatingPointError: {e}") from e
  for name, leaf in current.items():
    if leaf["checksum"] != leaves[name]["checksum"]:
      raise DamagedError(f"the checksum of {name} does not match")


def manifest(tree: Any, shapes: Any = None, rows: Rows | None = None) -> dict[str, dict[str, Any]]:
  """Return the shape, dtype and checksum of every leaf, by path.

  Each process reads its own shards, replicas only once; all processes must call this.

  Args:
    tree: a tree of `jax.Array`s.
    shapes: a tree of shapes to which the arrays of `tree` are truncated, if they are padded
      by rows to fit on more devices; None counts all rows.
    rows: arrays of `tree` whose rows have another order in `shapes`, by name: the row there
      of each row, or -1 for a row of zeros, which adds nothing.

  Raises:
    FloatingPointError: a leaf has NaN or Inf; the message has its name.
  """
  shapes = tree if shapes is None else shapes
  return with_checksums(describe(shapes), sum_shards(own_shards(tree, shapes, rows)))


class Shards(NamedTuple):
  """Shards of one process at the same position of arrays of one shape.

  They share the weights of their elements, as parameters and their momentum do.

  Attributes:
    leaves: the indices of their leaves in the tree.
    data: one array per leaf, on the host.
    index: their position in the whole arrays.
    shape: the shape of the whole arrays.
  """

  leaves: list[int]
  data: list[np.ndarray]
  index: tuple[slice, ...]
  shape: tuple[int, ...]


def own_shards(tree: Any, shapes: Any = None, rows: Rows | None = None) -> list[Shards]:
  """Return the shards that this process adds to the checksums, on the host.

  On CPUs they are views of the arrays, and keep the memory when these are donated.

  Args:
    tree: a tree of `jax.Array`s.
    shapes: the shapes, as for `manifest`.
    rows: the order of rows, as for `manifest`.
  """
  leaves, names = jax.tree.leaves(tree), [*describe(tree)]
  likes = leaves if shapes is None else jax.tree.leaves(shapes)
  held = []
  for i, (leaf, like) in enumerate(zip(leaves, likes, strict=True)):
    held += [(i, x, like.shape) for x in leaf.addressable_shards if x.replica_id == 0]
  for _, shard, _ in held:
    shard.data.copy_to_host_async()
  shards: dict[Any, Shards] = {}
  for i, shard, shape in held:
    order = rows.get(names[i]) if rows else None
    for data, index in _parts(shape, np.asarray(shard.data), shard.index, order):
      key = shape, tuple((s.start, s.stop) for s in index)
      group = shards.setdefault(key, Shards([], [], index, shape))
      group.leaves.append(i)
      group.data.append(data)
  return list(shards.values())


def sum_shards(shards: list[Shards]) -> dict[int, tuple[int, int]]:
  """Return this process's part of each leaf's checksum, and its number of NaN and Inf.

  A thread may call it, as it uses neither JAX nor other processes.

  Example:
    >>> sum_shards(own_shards({"w": jax.numpy.array([1.0, float("nan")])}))[0][1]
    1
  """
  sums: dict[int, tuple[int, int]] = {}
  for leaves, data, index, shape in shards:
    totals = shard_checksums(data, index, shape)
    for i, part, total in zip(leaves, data, totals.tolist(), strict=True):
      checksum, bad = sums.get(i, (0, 0))
      sums[i] = (checksum + total) % 2**64, bad + count_bad(part)
  return sums


def with_checksums(
  described: dict[str, dict[str, Any]], sums: dict[int, tuple[int, int]]
) -> dict[str, dict[str, Any]]:
  """Add the checksums of all leaves to `describe`'s result; all processes call it.

  Args:
    described: the description of the tree, which is completed.
    sums: this process's part of the checksums, from `sum_shards`.

  Raises:
    FloatingPointError: in all processes, if any has found NaN or Inf.
  """
  found = np.zeros((2, len(described), 1), np.uint64)
  for i, values in sums.items():
    found[:, i, 0] = values
  totals, bad = sum_over_processes(found)[..., 0]
  if bad.any():
    name = list(described)[int(bad.argmax())]
    raise FloatingPointError(f"{int(bad.max())} values of {name} are not finite")
  for leaf, total in zip(described.values(), totals, strict=True):
    leaf["checksum"] = _as_text(total)
  return described


def is_of(array: np.ndarray, checksum: str) -> bool:
  """Return whether a checksum from a manifest belongs to a whole array."""
  (total,) = shard_checksums([array], (slice(None),) * array.ndim, array.shape)
  return checksum == _as_text(total)


def _as_text(total: np.uint64) -> str:
  return f"{_PREFIX}{total:016x}"


def count_bad(data: np.ndarray) -> int:
  """Return the number of values that are NaN or Inf."""
  if data.dtype.kind in "iub":  # NumPy's kind of bfloat16 and float8 types is "V".
    return 0
  flat = np.ascontiguousarray(data).reshape(-1)
  parts = (flat[i : i + _CHUNK] for i in range(0, flat.size, _CHUNK))
  return sum(part.size - int(np.count_nonzero(np.isfinite(part))) for part in parts)


def _parts(shape, data: np.ndarray, index: tuple[slice, ...], order: Sequence[int] | None):
  """Return the parts of a shard with their positions in the array that was saved."""
  if order is None:
    return [_within(shape, data, index)]
  rows = zip(data, order[index[0]], strict=True)
  return [(row[None], (slice(old, old + 1), *index[1:])) for row, old in rows if old >= 0]


def _within(shape, data: np.ndarray, index: tuple[slice, ...]):
  """Return a shard and its position without the rows beyond `shape`."""
  if not shape:
    return data, index
  first, *rest = index
  start, stop, _ = first.indices(max(shape[0], first.stop or 0))
  stop = max(min(stop, shape[0]), start)
  return data[: stop - start], (slice(start, stop), *rest)


def describe(tree: Any) -> dict[str, dict[str, Any]]:
  """Return the shape and dtype of every leaf or `jax.ShapeDtypeStruct`, by path."""
  leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
  return {n: {"shape": list(x.shape), "dtype": str(x.dtype)} for n, x in leaves.items()}


def shard_checksums(
  data: list[np.ndarray], index: tuple[slice, ...], shape: tuple[int, ...]
) -> np.ndarray:
  """Return what shards at one position add to their arrays' checksums, uint64 [shards].

  Args:
    data: the shards.
    index: their position in the whole arrays.
    shape: the shape of the whole arrays.
  """
  bits = [np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}") for x in data]
  total, first = np.zeros(len(data), np.uint64), 0
  scratch, values = np.empty((2, _CHUNK), np.uint64)
  for positions in _positions(index, shape):
    weights, last = _mix(positions, scratch), first + positions.size
    weights |= np.uint64(1)
    mixed = values[: positions.size]
    for i, of_shard in enumerate(bits):
      part = of_shard[first:last]
      if part.itemsize == 8:
        np.add(part, np.uint64(1), out=mixed)
        part = _mix(mixed, scratch)
      # NumPy would warn of an overflow of scalars.
      total[i : i + 1] += np.einsum("i,i->", part, weights)
    first = last
  return total


def _positions(index: tuple[slice, ...], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
  """Yield the positions of a shard's elements in the whole array, uint64 [≤ chunk].

  All positions at once would take more memory than the shard itself.
  """
  spans = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
  sizes = [stop - start for start, stop in spans]
  if math.prod(sizes) <= _CHUNK:
    positions = np.zeros(1, np.uint64)
    for (start, stop), size in zip(spans, shape, strict=True):
      along = np.arange(start, stop, dtype=np.uint64)
      positions = np.add.outer(positions * np.uint64(size), along).ravel()
    yield positions
    return
  # Split into blocks along the first dim that can be divided.
  dim = next(dim for dim, size in enumerate(sizes) if size > 1)
  (first, stop), rows = spans[dim], max(_CHUNK // math.prod(sizes[dim + 1 :]), 1)
  for start in range(first, stop, rows):
    block = slice(start, min(start + rows, stop))
    yield from _positions((*index[:dim], block, *index[dim + 1 :]), shape)


def _mix(x: np.ndarray, scratch: np.ndarray) -> np.ndarray:
  """Apply MurmurHash3's 64-bit finaliser (A. Appleby, public domain) in place.

  Args:
    x: the values, uint64, no longer than `scratch`.
    scratch: uint64 memory, which is overwritten.
  """
  shifted = scratch[: x.size]
  for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
    x ^= np.right_shift(x, np.uint64(33), out=shifted)
    x *= np.uint64(factor)
  x ^= np.right_shift(x, np.uint64(33), out=shifted)
  return x
