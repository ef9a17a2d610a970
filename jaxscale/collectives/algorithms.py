"""All-reduces inside `shard_map`, by XLA's own collectives and by permutes.

XLA chooses the implementation of `psum` and `hierarchical` (NCCL's rings or trees, the
torus of a TPU, gloo's pairs), and may merge several or start them early. It does not do
this with permutes, which run over a d-dimensional torus; a ring has d = 1.

With M bytes in N = n_1 ... n_d devices:

    forward:  for k = 1..d   reduce-scatter along dimension k, a ring of n_k,
                             of the block that k - 1 has left
    backward: for k = d..1   all-gather along dimension k

    steps  2 sum_k (n_k - 1)
    bytes  2 M sum_k (n_k - 1) / prod_{j<=k} n_j  =  2 M (1 - 1/N)

are sent by each device: as many bytes as with one ring of N, in fewer steps (IBM DDL,
arXiv:1708.02188, as reconstructed; Sony's 2D torus, arXiv:1811.05233, has d = 2).
Recursive halving and doubling (Rabenseifner; Thakur et al., 2005) has d = log2 N and
every n_k = 2.

Arrays are padded with zeros to a multiple of N.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import planner, typed
from jaxscale.collectives.planner import Dim

Axes = tuple[str, ...]  # names of mesh axes, slowest first


def psum(x: jax.Array, axes: Axes, *, payload: Any = None, accumulate: Any = None) -> jax.Array:
  """Sum over devices by `lax.psum`, inside `shard_map`.

  Args:
    x: the device's array, of any shape.
    axes: mesh axes to sum over.
    payload: dtype to which floats are cast first; None means no cast. XLA on CPU sends and
      sums bfloat16 and float16 as float32 anyway.
    accumulate: dtype of sums, while `payload` is still sent: an all-to-all, a sum by the
      owner of each block, and an all-gather. None means sums in `payload`.

  Returns:
    The sum, in the dtype of `x`, typed invariant over `axes`.

  Raises:
    ConfigError: the dtype cannot be summed.
  """
  return _sum(typed.vary(x, axes), axes, *typed.dtypes(x, payload, accumulate))


def _sum(x: jax.Array, axes: Axes, sent: Any, summed: Any):
  """Sum an array that is typed varying over `axes`, in its dtype."""
  if sent == summed or x.size == 0:
    return lax.psum(x.astype(sent), axes).astype(x.dtype)
  flat = typed.padded(x.astype(summed), lax.axis_size(axes))
  return _gathered(_block_of_sum(flat, axes, sent, summed), axes, sent, x)


def hierarchical(
  x: jax.Array, axes: Axes, *, payload: Any = None, accumulate: Any = None
) -> jax.Array:
  """Sum within groups and then between groups, inside `shard_map`.

  It is a reduce-scatter over the fast axes (all but the first), an all-reduce of the
  blocks over the slow axis, and an all-gather over the fast axes. With f devices per group
  and s groups each device sends 2 M (1 - 1/f) bytes on fast links and 2 (M/f) (1 - 1/s) on
  slow ones. The algorithm is that of arXiv:1811.05233; XLA itself uses it for a `psum` over
  TPU slices. A single axis counts as fast.

  Args:
    x, payload, accumulate: as in `psum`.
    axes: mesh axes to sum over, slowest first.

  Returns:
    The sum, in the dtype of `x`, typed invariant over `axes`.

  Raises:
    ConfigError: as in `psum`.
  """
  slow, fast = (axes[:1], axes[1:]) if len(axes) > 1 else ((), axes)
  sent, summed = typed.dtypes(x, payload, accumulate)
  x = typed.vary(x, axes)
  if x.size == 0:
    return lax.psum(x, axes)
  flat = typed.padded(x.astype(summed), lax.axis_size(fast))
  block = _block_of_sum(flat, fast, sent, summed)
  if slow:
    block = _sum(block, slow, sent, summed)
  return _gathered(block, fast, sent, x)


def _block_of_sum(flat: jax.Array, axes: Axes, sent: Any, summed: Any):
  """Return the device's block of the sum, in the dtype `summed`."""
  if sent == summed:
    return lax.psum_scatter(flat, axes, tiled=True)
  blocks = typed.to_wire(flat, sent).reshape(lax.axis_size(axes), -1)
  parts = lax.all_to_all(blocks, axes, 0, 0, tiled=True)
  return typed.add_rows(typed.from_wire(parts, sent, summed))


def _gathered(block: jax.Array, axes: Axes, sent: Any, like: jax.Array):
  """Gather all blocks into an array like `like`, typed invariant over `axes`."""
  bits = lax.all_gather(typed.to_wire(block, sent), axes, tiled=True, to="invarying")
  return typed.unpadded(typed.from_wire(bits, sent, like.dtype), like.shape)


def over_dims(
  x: jax.Array,
  sizes: dict[str, int],
  dims: tuple[Dim, ...],
  payload: Any = None,
  accumulate: Any = None,
) -> jax.Array:
  """Sum over devices by rings along each dimension of a torus, inside `shard_map`.

  It takes 2 sum_k (n_k - 1) permutes and 2 M (1 - 1/N) bytes. Every block starts next to its
  owner and is summed on its way around the ring.

  Args:
    x: the device's array, of any shape and any floating or integer dtype.
    sizes: sizes of the mesh axes, slowest first.
    dims: the dimensions, which cover the axes; the first is reduced first and gathered last.
    payload: dtype in which floats are sent; None means their own. Without `accumulate`, sums
      are rounded to it at every step.
    accumulate: dtype of sums, e.g. float32, so that each addend is rounded to `payload`
      only once. Each device then sends its part of a block directly to the block's owner,
      in as many steps of as many bytes, but to more distant devices. None means sums in
      `payload`, between neighbours.

  Returns:
    The sum, in the dtype of `x`, bit-identical on all devices and typed invariant over the
    axes. Its derivative is that of `lax.psum` under `check_vma=True`.

  Raises:
    ConfigError: the dtype cannot be summed.
  """
  axes = tuple(sizes)
  sent, summed = typed.dtypes(x, payload, accumulate)

  def total(x: jax.Array):
    if x.size == 0:
      return typed.same_everywhere(x, axes)
    flat = typed.padded(x.reshape(-1).astype(summed), math.prod(d.size for d in dims))
    for dim in dims:
      flat = _scatter_along(flat, dim, sent)
    bits = typed.to_wire(flat, sent)
    for dim in reversed(dims):
      bits = _gather_along(bits, dim)
    whole = typed.unpadded(typed.from_wire(bits, sent, x.dtype), x.shape)
    return typed.same_everywhere(whole, axes)

  def back(_: None, ct: jax.Array):  # every device's addend gets the cotangent
    return (lax.pcast(ct, axes, to="varying"),)

  total = jax.custom_vjp(total)
  total.defvjp(lambda x: (total(x), None), back)
  return total(typed.vary(x, axes))


def _position(dim: Dim) -> jax.Array:
  """Return this device's position on a dimension."""
  return lax.axis_index(dim.axes) // dim.stride % dim.size


def _scatter_along(flat: jax.Array, dim: Dim, sent: Any):
  """Return this device's block of the sum along one dimension."""
  position = _position(dim)
  blocks = flat.reshape(dim.size, -1)

  def block(index: jax.Array):
    return lax.dynamic_index_in_dim(blocks, index % dim.size, keepdims=False)

  def from_behind(part: jax.Array, steps: int):
    moves = planner.pairs(dim, lax.axis_size(dim.axes), steps)
    bits = lax.ppermute(typed.to_wire(part, sent), dim.axes, moves)
    return typed.from_wire(bits, sent, part.dtype)

  if sent != flat.dtype:  # each part is rounded once and sent to the block's owner
    part = block(position)
    for steps in range(1, dim.size):
      part = part + from_behind(block(position + steps), steps)
    return part
  part = block(position - 1)
  for step in range(1, dim.size):
    part = from_behind(part, 1) + block(position - 1 - step)
  return part


def _gather_along(bits: jax.Array, dim: Dim):
  """Concatenate the blocks along one dimension."""
  moves = planner.pairs(dim, lax.axis_size(dim.axes), 1)
  blocks = jnp.broadcast_to(bits, (dim.size, bits.size))  # The others' blocks replace copies.
  for step in range(1, dim.size):
    bits = lax.ppermute(bits, dim.axes, moves)
    index = (_position(dim) - step) % dim.size
    blocks = lax.dynamic_update_index_in_dim(blocks, bits, index, 0)
  return blocks.reshape(-1)
