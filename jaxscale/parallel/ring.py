"""Ring attention: exact attention over tokens that are split over devices.

Each device keeps its queries. Blocks of keys and values are sent around the ring, and the
softmax is accumulated as they arrive (arXiv:2310.01889), by the equations of
`models.flash_attention`. After j turns device i has the block of device i - j. The backward
pass stores no array of size tokens x tokens. The blocks are sent around once more, with their
gradients.

Scores, sums and gradients are float32. Scores are computed for `_BLOCK` keys at a time.
For causal attention with contiguous tokens, device i would have work in i+1 of n turns, and
all devices would wait for the last one. With zig-zag order every device has half a block of
work in each turn.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.collectives import vary
from jaxscale.collectives.typed import in_mesh_order, varying
from jaxscale.models.flash_attention import (
  ATTENTION,
  add_block,
  block_grads,
  inner_products,
  no_sums,
  scores,
)

_BLOCK = 1024  # keys whose scores are in memory at once


def ring_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  axis: str,
  causal: bool,
  documents: jax.Array | None = None,
  block: int = _BLOCK,
) -> jax.Array:
  """Compute attention over split tokens by sending keys and values around a ring.

  The tokens of the devices are in zig-zag order (`sequence.token_positions`).
  Call it inside `jax.shard_map`. A device sends its keys and values n-1 times. In the
  backward pass it also sends their gradients n times, as float32.

  Args:
    q: queries, [rows, tokens/n, heads, width]; an even number of tokens.
    k: keys, [rows, tokens/n, groups, width]; groups divide heads (arXiv:2305.13245).
    v: values, with the shape of `k`.
    axis: mesh axis of the tokens, with n devices.
    causal: whether a token attends only to itself and earlier tokens.
    documents: numbers of the documents of this device's tokens, int32 [rows, tokens/n], which
      travel with the keys; a token attends only to tokens with its own number. Blocks
      without such tokens are computed, too. None means one document per row.
    block: number of keys whose scores are in memory at once.

  Returns:
    Outputs in the dtype of q, [rows, tokens/n, heads, width].
  """
  devices = lax.axis_size(axis)
  rows, tokens, heads, width = q.shape
  groups = k.shape[2]
  axes = in_mesh_order((axis, *varying(q), *varying(k), *varying(v)))
  q, k, v, documents = vary((q, k, v, documents), axes)
  q = q.reshape(rows, tokens, groups, heads // groups, width)
  q, k, v = q.transpose(0, 2, 3, 1, 4), k.swapaxes(1, 2), v.swapaxes(1, 2)
  numbers = () if documents is None else (documents[:, None, :, None],)  # shaped like keys
  out: Any = _ring(_Plan(axis, axes, devices, causal, block), q, k, v, numbers)
  return out.transpose(0, 3, 1, 2, 4).reshape(rows, tokens, heads, width)


class _Plan(NamedTuple):
  """Settings of a ring."""

  axis: str
  axes: tuple[str, ...]  # axes over which the arrays vary
  devices: int
  causal: bool
  block: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, numbers: Any) -> jax.Array:
  return _ring_forward(plan, q, k, v, numbers)[0]


def _ring_forward(plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, numbers: Any):
  # q: [rows, groups, heads of a group, t, width]; k, v: [rows, groups, t, width];
  # numbers of documents: (int32 [rows, 1, t, 1],) or ()
  def step(first: int, num_keys: int, masked: bool, kept: Any, kv: Any, _: Any):
    queries, own = q[..., first:, :], [x[..., first:, :] for x in numbers]

    def add(sums: Any, block: Any, start: jax.Array):
      keys, values, *theirs = block
      s = scores(queries, keys, start, masked, own, theirs)
      return add_block(sums, s, values), ()

    block = tuple(x[..., :num_keys, :] for x in kv)
    old = tuple(x[..., first:, :] for x in kept)
    new, _ = _over_blocks(add, old, block, plan.block)
    return _put(kept, new, first), ()

  start = vary(no_sums(q), plan.axes)
  (m, total, acc), _ = _go_round(plan, step, start, (k, v, *numbers), ())
  out = checkpoint_name((acc / total).astype(q.dtype), ATTENTION)
  return out, (q, k, v, numbers, out, checkpoint_name(m + jnp.log(total), ATTENTION))


def _ring_backward(plan: _Plan, kept: Any, dout: jax.Array):
  q, k, v, numbers, out, lse = kept
  delta = inner_products(dout, out)

  def step(first: int, num_keys: int, masked: bool, dq: Any, kv: Any, grads: Any):
    by_query = q, dout, lse, delta, dq
    queries, back, lse_, delta_, dq_ = (x[..., first:, :] for x in by_query)
    own = [x[..., first:, :] for x in numbers]

    def add(dq_: jax.Array, block: Any, start: jax.Array):
      keys, values, *theirs = block
      s = scores(queries, keys, start, masked, own, theirs)
      more, *grads = block_grads(s, queries, back, lse_, delta_, keys, values)
      return dq_ + more, tuple(grads)

    block = tuple(x[..., :num_keys, :] for x in kv)
    dq_, more = _over_blocks(add, dq_, block, plan.block)
    grads = tuple(g.at[..., :num_keys, :].add(x) for g, x in zip(grads, more, strict=True))
    return _put(dq, dq_, first), grads

  zeros = (jnp.zeros(x.shape, lse.dtype) for x in (q, k, v))
  dq, dk, dv = vary(tuple(zeros), plan.axes)
  dq, (dk, dv) = _go_round(plan, step, dq, (k, v, *numbers), (dk, dv))
  return *(g.astype(x.dtype) for g, x in ((dq, q), (dk, k), (dv, v))), None


_ring.defvjp(_ring_forward, _ring_backward)


def _go_round(plan: _Plan, step: Callable[..., Any], kept: Any, kv: Any, grads: Any) -> Any:
  """Run a step on every block, as the blocks and their sums go around the ring.

  Args:
    plan: settings of the ring.
    step: (first, num_keys, masked, kept, kv, grads) -> (kept, grads), on one block: the queries
      from `first` on attend to its first `num_keys` keys; with `masked`, in the device's own
      block, only up to their position.
    kept: arrays that stay on the device.
    kv: keys and values of this device, and the numbers of their documents.
    grads: sums that travel with the blocks and return to the block's device.

  Returns:
    `kept` and `grads` after all n blocks.
  """
  n, here = plan.devices, lax.axis_index(plan.axis)
  tokens = kv[0].shape[-2]
  whole = functools.partial(step, 0, tokens, False)
  own = functools.partial(step, 0, tokens, True)
  earlier = functools.partial(step, 0, tokens // 2, False)
  later = functools.partial(step, tokens // 2, tokens, False)

  def attend(turn: Any, *args: Any):
    if not plan.causal:
      return whole(*args)
    source = (here - turn) % n
    which = jnp.where(source == here, 0, jnp.where(source < here, 1, 2))
    return lax.switch(which, (own, earlier, later), *args)

  def send(tree: Any):
    pairs = [(i, (i + 1) % n) for i in range(n)]
    return jax.tree.map(lambda x: lax.ppermute(x, plan.axis, pairs), tree)

  def turn(carry: Any, t: jax.Array):
    kept, kv, grads = carry
    coming = send(kv)  # can overlap with this turn, which does not use it
    kept, grads = attend(t, kept, kv, grads)
    return (kept, coming, send(grads)), None

  (kept, kv, grads), _ = lax.scan(turn, (kept, kv, grads), jnp.arange(n - 1))
  kept, grads = attend(n - 1, kept, kv, grads)
  return kept, send(grads)


def _over_blocks(add: Callable[..., Any], sums: Any, arrays: Any, size: int) -> Any:
  """Run a function over blocks of keys, `size` keys at a time.

  Args:
    add: (sums, block, start) -> (sums, out), where `start` is the index of the block's
      first key.
    sums: initial sums.
    arrays: arrays [..., keys, width].
    size: number of keys in a block; the last block may be smaller.

  Returns:
    The final sums and the concatenated outputs, [..., keys, width].
  """
  keys = arrays[0].shape[-2]
  size = min(size, keys)
  full = keys // size
  cut = full * size

  def blocks(x: jax.Array):
    x = x[..., :cut, :].reshape(*x.shape[:-2], full, size, x.shape[-1])
    return jnp.moveaxis(x, -3, 0)

  def together(x: jax.Array):
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], cut, x.shape[-1])

  xs = jax.tree.map(blocks, arrays), jnp.arange(full) * size
  sums, out = lax.scan(lambda sums, now: add(sums, *now), sums, xs)
  out = jax.tree.map(together, out)
  if cut < keys:
    sums, last = add(sums, tuple(x[..., cut:, :] for x in arrays), cut)
    out = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -2), out, last)
  return sums, out


def _put(kept: Any, new: Any, first: int) -> Any:
  """Replace the values of the queries from `first` on by `new`."""
  if not first:
    return new
  return jax.tree.map(lambda a, b: a.at[..., first:, :].set(b), kept, new)
