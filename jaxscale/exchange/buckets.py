"""Flat gradient buckets of one size, so that collectives are few and start early.

A collective of M bytes takes alpha + M beta, where alpha is its latency. One collective
per tensor pays alpha for each of hundreds of small tensors. One collective for all
tensors can start only when the last gradient is available. Buckets are a compromise:
bucket b holds the elements [b S, (b + 1) S) of the concatenated gradients, beginning with
the last layers, since the backward pass computes them first. Each bucket is made of its
own tensors only, so that its collective waits for no other gradient (arXiv:2006.15704).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxscale.collectives import joined
from jaxscale.errors import ConfigError
from jaxscale.exchange.base import Exchange, stateless

# Default of PyTorch's DistributedDataParallel (arXiv:2006.15704).
BUCKET_BYTES = 25 * 2**20


def best_bucket_bytes(mesh: Mesh) -> int | None:
  """Return the best bucket size for plain sums on a mesh; None if none is needed.

  On TPU and GPU XLA combines the tensors of a `psum` itself, and devices of one process
  share memory. Between CPU processes gloo sums tensors one after another: ResNet-50's 161
  tensors took twice as long as buckets (benchmarks/exchange.py).

  Args:
    mesh: the mesh whose devices average gradients.
  """
  devices = list(mesh.devices.flat)
  is_gloo = devices[0].platform == "cpu" and len({d.process_index for d in devices}) > 1
  return BUCKET_BYTES if is_gloo else None


class Piece(NamedTuple):
  """Elements [start, stop) of the flattened leaf number `leaf`."""

  leaf: int
  start: int
  stop: int


def layout(leaves: Sequence[Any], bucket_bytes: int) -> list[list[Piece]]:
  """Return the pieces of leaves in each bucket.

  A bucket has one dtype. All buckets of a dtype except the last are full.

  Args:
    leaves: arrays, or objects with `shape` and `dtype`; concatenated from last to first.
    bucket_bytes: size of a bucket in bytes.

  Raises:
    ConfigError: a bucket is smaller than an element.

  Example:
    >>> layout([np.zeros(3, np.float32), np.zeros(4, np.float32)], 16)
    [[Piece(leaf=1, start=0, stop=4)], [Piece(leaf=0, start=0, stop=3)]]
  """
  order = range(len(leaves) - 1, -1, -1)
  buckets: list[list[Piece]] = []
  for dtype in dict.fromkeys(np.dtype(leaves[i].dtype) for i in order):
    size = bucket_bytes // dtype.itemsize
    if size < 1:
      problem = f"is less than an element of {dtype.name}; give {dtype.itemsize} or more"
      raise ConfigError(f"bucket_bytes={bucket_bytes} {problem}")
    room = 0
    for i in (i for i in order if np.dtype(leaves[i].dtype) == dtype):
      start, stop = 0, math.prod(leaves[i].shape)
      while start < stop:
        if room == 0:
          buckets.append([])
          room = size
        taken = min(room, stop - start)
        buckets[-1].append(Piece(i, start, start + taken))
        start, room = start + taken, room - taken
  return buckets


def leaf_groups(leaves: Sequence[Any], bucket_bytes: int) -> list[list[int]]:
  """Group leaves up to `bucket_bytes` without cutting them; a larger leaf is alone.

  Compressors that work on whole tensors send the tensors of a group together.

  Example:
    >>> leaf_groups([np.zeros(3, np.float32)] * 3, 24)
    [[2, 1], [0]]
  """
  groups: list[list[int]] = []
  held = 0
  for i in reversed(range(len(leaves))):
    size = math.prod(leaves[i].shape) * np.dtype(leaves[i].dtype).itemsize
    if not groups or held + size > bucket_bytes:
      groups.append([])
      held = 0
    groups[-1].append(i)
    held += size
  return groups


def pack(leaves: Sequence[jax.Array], pieces: list[list[Piece]]) -> list[jax.Array]:
  """Return the buckets of a layout, each of shape [elements]."""
  flat = [leaf.reshape(-1) for leaf in leaves]
  return [jnp.concatenate([flat[i][a:b] for i, a, b in bucket]) for bucket in pieces]


def unpack(
  buckets: Sequence[jax.Array], pieces: list[list[Piece]], leaves: Sequence[Any]
) -> list[jax.Array]:
  """Return the leaves from the buckets of `pack`, with the shapes of `leaves`.

  Example:
    >>> leaves = [jnp.arange(3), jnp.arange(4)]
    >>> pieces = layout(leaves, 8)
    >>> unpack(pack(leaves, pieces), pieces, leaves)[0]
    Array([0, 1, 2], dtype=int32)
  """
  parts: list[list[jax.Array]] = [[] for _ in leaves]
  for bucket, array in zip(pieces, buckets, strict=True):
    ends = itertools.accumulate(p.stop - p.start for p in bucket)
    for piece, end in zip(bucket, ends, strict=True):
      parts[piece.leaf].append(array[end - (piece.stop - piece.start) : end])
  pairs = [(part or [jnp.zeros(0, x.dtype)], x) for part, x in zip(parts, leaves, strict=True)]
  return [jnp.concatenate(part).reshape(leaf.shape) for part, leaf in pairs]


def map_buckets(
  function: Callable[[int, jax.Array], jax.Array], tree: Any, bucket_bytes: int
) -> Any:
  """Apply a function (number, bucket [elements]) -> bucket to the buckets of a tree."""
  leaves, structure = jax.tree.flatten(tree)
  pieces = layout(leaves, bucket_bytes)
  done = [function(i, bucket) for i, bucket in enumerate(pack(leaves, pieces))]
  return jax.tree.unflatten(structure, unpack(done, pieces, leaves))


# (numbers of the leaves, their gradients + residuals) -> (mean, residual) of each leaf
ExchangeGroup = Callable[[list[int], list[jax.Array]], list[tuple[Any, Any]]]


def exchange_groups(
  exchange_group: ExchangeGroup, grads: Any, residuals: Any, bucket_bytes: int
) -> tuple[Any, Any]:
  """Exchange gradients with error feedback, for compressors of whole tensors.

  Args:
    exchange_group: function that exchanges one of the `leaf_groups`; its arrays are
      float32.
    grads: a tree of a device's own gradients.
    residuals: a tree of the device's residuals.
    bucket_bytes: bytes of gradients that are sent together.

  Returns:
    A tree of means in the gradients' dtypes, and a tree of residuals.
  """
  leaves, structure = jax.tree.flatten(grads)
  left = structure.flatten_up_to(residuals)
  means: list[Any] = list(leaves)
  for group in leaf_groups(leaves, bucket_bytes):
    xs = [leaves[i].astype(jnp.float32) + left[i] for i in group]
    for i, (mean, rest) in zip(group, exchange_group(group, xs), strict=True):
      means[i], left[i] = mean.astype(leaves[i].dtype), rest
  return structure.unflatten(means), structure.unflatten(left)


def sum_together(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
  """Return the sums of arrays over devices, with one `lax.psum` per dtype."""
  return joined(lambda x: lax.psum(x, axes), list(arrays))


def whole_means(xs: dict[int, jax.Array], axes: tuple[str, ...]) -> dict[int, Any]:
  """Return (mean, residual of 0) of tensors that are too small to compress."""
  totals, devices = sum_together(list(xs.values()), axes), lax.axis_size(axes)
  return {i: (total / devices, jnp.zeros_like(xs[i])) for i, total in zip(xs, totals, strict=True)}


def bucketed(
  axes: tuple[str, ...],
  *,
  bucket_bytes: int = BUCKET_BYTES,
  reduce: Callable[[jax.Array], jax.Array] | None = None,
) -> Exchange:
  """Return an exchange with one collective per bucket: mean_b = reduce(bucket_b) / devices.

  XLA may combine the collectives again: on CPU (jax 0.10.2) it makes one tuple all-reduce
  of all buckets, and on TPU and GPU its combiners join them up to a threshold. In any
  case a bucket waits only for its own tensors, and tensors share latencies.

  Args:
    axes: mesh axes to average over.
    bucket_bytes: size of a bucket in bytes.
    reduce: array [elements] of a device -> sum over `axes`, typed invariant; it must
      accept every size. None means `lax.psum`.

  Example:
    >>> exchange = bucketed(("replica", "data"), bucket_bytes=4 * 2**20)
    >>> exchange.init({"w": 0.0})
    ()
  """
  sum_over = reduce or (lambda x: lax.psum(x, axes))

  def mean(_: int, bucket: jax.Array):
    return sum_over(bucket) / lax.axis_size(axes)

  return stateless(lambda grads: map_buckets(mean, grads, bucket_bytes))
