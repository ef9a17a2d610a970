"""All-reduce by the compiler's own collectives: `psum`, and in a hierarchy.

What one of them becomes is XLA's affair (rings or trees of NCCL, the torus of a
TPU, pairs of gloo), and it may merge several, or start them early, which it does
not do with permutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import typed

Axes = str | Sequence[str]


def psum(
  x: jax.Array, axes: Axes, *, payload: Any = None, accumulate: Any = None
) -> jax.Array:
  """Sum over devices by `lax.psum`, inside `shard_map`.

  Args:
    x: any shape; each device's own.
    axes: mesh axes to sum over.
    payload: floats are cast to this dtype before; None: as they are. (XLA on CPU
      sends and sums bfloat16 and float16 as float32 all the same.)
    accumulate: sums are made in this dtype, and what is sent is `payload` still:
      an all-to-all, a sum by the owner of each block, an all-gather.

  Returns:
    The sum, in the dtype of `x`, typed invariant over `axes`.

  Raises:
    ConfigError: an axis that the mesh has not, or a dtype that has no sum.
  """
  names = typed.names(axes)
  sizes = typed.axis_sizes(names)
  sent, summed = typed.dtypes(x, payload, accumulate)
  x = typed.vary(x, names)
  if sent == summed or x.size == 0:
    return lax.psum(x.astype(sent), names).astype(x.dtype)
  flat = typed.padded(x.astype(summed), math.prod(sizes.values()))
  block = _scatter(flat, names, sent, summed)
  return _gathered(block, names, sent, x)


def hierarchical(
  x: jax.Array, axes: Axes, *, payload: Any = None, accumulate: Any = None
) -> jax.Array:
  """Sum within groups and then between them, inside `shard_map`.

  Reduce-scatter over the fast axes (all but the first), all-reduce of what is left
  over the slow one, all-gather over the fast ones. With f devices in a group and s
  groups a device sends 2 M (1 - 1/f) bytes on fast links and 2 (M/f) (1 - 1/s) on
  slow ones. (The form of arXiv:1811.05233; XLA makes it itself of one `psum` over
  slices of TPUs.) A single axis counts as fast.

  Args:
    x, payload, accumulate: as for `psum`.
    axes: mesh axes to sum over, slowest first.

  Returns:
    The sum, in the dtype of `x`, typed invariant over `axes`.

  Raises:
    ConfigError: as `psum`.
  """
  names = typed.names(axes)
  sizes = typed.axis_sizes(names)
  slow, fast = (names[:1], names[1:]) if len(names) > 1 else ((), names)
  sent, summed = typed.dtypes(x, payload, accumulate)
  x = typed.vary(x, names)
  if x.size == 0:
    return lax.psum(x, names)
  flat = typed.padded(x.astype(summed), math.prod(sizes[a] for a in fast))
  block = _scatter(flat, fast, sent, summed)
  if slow:
    block = psum(block, slow, payload=sent if _floating(x) else None,
                 accumulate=summed if sent != summed else None)  # fmt: skip
  return _gathered(block, fast, sent, x)


def _floating(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def _scatter(flat, axes, sent, summed):
  """The device's block of the sum, in `summed`."""
  if sent == summed:
    return lax.psum_scatter(flat, axes, tiled=True)
  blocks = typed.to_wire(flat, sent).reshape(lax.axis_size(axes), -1)
  parts = lax.all_to_all(blocks, axes, 0, 0, tiled=True)
  return typed.add_rows(typed.from_wire(parts, sent, summed))


def _gathered(block, axes, sent, like):
  """All blocks as an array like `like`, typed invariant over `axes`."""
  bits = lax.all_gather(typed.to_wire(block, sent), axes, tiled=True, to="invarying")
  return typed.unpadded(typed.from_wire(bits, sent, like.dtype), like.shape)
