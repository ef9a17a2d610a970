"""Flash attention by blocks, in plain JAX: no array of all pairs of tokens is in memory.

The softmax is accumulated over blocks of keys (arXiv:2205.14135; the running maximum and sum
are from arXiv:1805.02867). With s = q k^T / sqrt(width), for each query

    m = max_k s      l = sum_k exp(s - m)      out = sum_k exp(s - m) v / l

The backward pass reads q, k, v, out and log l + m, and computes the blocks again
(arXiv:2205.14135, algorithm 4):

    p = exp(s - (log l + m))        dv = p^T dout
    ds = p (dout v^T - sum(dout out))   dq = ds k   dk = ds^T q   (each / sqrt(width))

Scores, sums and gradients are float32, or float64 for such inputs. Arrays of queries are
[rows, groups, heads of a group, tokens, width], those of keys and values [rows, groups, tokens,
width]. `parallel.ring` uses the same sums for blocks from other devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.linear import alike

# Checkpoint name of what a kernel of attention returns, for remat policies.
ATTENTION = "attention"
NEVER = -1e30  # score of a masked key; unlike -inf, its differences are not NaN
# Queries and keys of a block. At 512, a causal mask of 8,192 tokens wastes 6 % of the products,
# and the scores of 32 heads take 34 MB.
_BLOCK = 512


def flash_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  documents: jax.Array | None = None,
  block: int = _BLOCK,
) -> jax.Array:
  """Compute attention by blocks of queries and keys, without those above the diagonal.

  The blocks of two different documents are computed, too. XLA compiles it everywhere. The
  scores of a block are in memory: float32 [rows, heads, block, block].

  Args:
    q: queries, [rows, tokens, heads, width].
    k: keys, [rows, tokens, groups, width]; groups divide heads (arXiv:2305.13245).
    v: values, with the shape of `k`.
    causal: whether a token attends only to itself and earlier tokens.
    documents: numbers of the tokens' documents, 0 or more, int32 [rows, tokens]; a token
      attends only to tokens with its own number. None means one document per row.
    block: number of queries, and of keys, of a block. The last block is padded.

  Returns:
    Outputs in the dtype of q, [rows, tokens, heads, width].

  Example:
    >>> x = jnp.ones((2, 7, 4, 16))
    >>> flash_attention(x, x[:, :, :2], x[:, :, :2], causal=True, block=4).shape
    (2, 7, 4, 16)
  """
  rows, tokens, heads, width = q.shape
  block = min(block, tokens)
  if rest := -tokens % block:
    q, k, v = (jnp.pad(x, ((0, 0), (0, rest), (0, 0), (0, 0))) for x in (q, k, v))
    if documents is None and not causal:
      documents = jnp.zeros((rows, tokens), jnp.int32)
    if documents is not None:  # No token sees the padding; a causal mask hides it by itself.
      documents = jnp.pad(documents, ((0, 0), (0, rest)), constant_values=-1)
  q, k, v = alike(q, k, v)
  q = q.reshape(rows, tokens + rest, k.shape[2], -1, width).transpose(0, 2, 3, 1, 4)
  numbers = () if documents is None else (documents[:, None, :, None],)
  out: Any = _flash(causal, block, q, k.swapaxes(1, 2), v.swapaxes(1, 2), numbers)
  return out.transpose(0, 3, 1, 2, 4).reshape(rows, -1, heads, width)[:, :tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(causal, block, q, k, v, numbers):
  return _flash_forward(causal, block, q, k, v, numbers)[0]


def _flash_forward(causal, block, q, k, v, numbers):
  take = functools.partial(lax.dynamic_slice_in_dim, slice_size=block, axis=-2)

  def step(sums: Any, starts: Any):
    i, j = starts
    s = _block_scores(causal, take, starts, q, k, numbers)
    new = add_block(tuple(take(x, i) for x in sums), s, take(v, j))
    return tuple(_put(x, y, i) for x, y in zip(sums, new, strict=True)), None

  _, *sums = alike(q, *no_sums(q))
  (m, total, acc), _ = lax.scan(step, tuple(sums), _starts(causal, block, q.shape[-2]))
  out = checkpoint_name((acc / total).astype(q.dtype), ATTENTION)
  return out, (q, k, v, numbers, out, checkpoint_name(m + jnp.log(total), ATTENTION))


def _flash_backward(causal, block, kept, dout):
  q, k, v, numbers, out, lse = kept
  take = functools.partial(lax.dynamic_slice_in_dim, slice_size=block, axis=-2)
  delta = inner_products(dout, out)

  def step(grads: Any, starts: Any):
    i, j = starts
    s = _block_scores(causal, take, starts, q, k, numbers)
    of_block = [*(take(x, i) for x in (q, dout, lse, delta)), take(k, j), take(v, j)]
    parts = zip(grads, block_grads(s, *of_block), (i, j, j), strict=True)
    return tuple(_put(x, take(x, at) + y, at) for x, y, at in parts), None

  _, *zeros = alike(q, *(jnp.zeros(x.shape, lse.dtype) for x in (q, k, v)))
  grads, _ = lax.scan(step, tuple(zeros), _starts(causal, block, q.shape[-2]))
  return *(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None


_flash.defvjp(_flash_forward, _flash_backward)


def _starts(causal: bool, block: int, tokens: int) -> tuple[jax.Array, jax.Array]:
  """Return the first queries and the first keys of all blocks that are not masked."""
  first = np.arange(0, tokens, block, dtype=np.int32)
  pairs = [(i, j) for i in first for j in first if j <= i or not causal]
  queries, keys = zip(*pairs, strict=True)
  return jnp.asarray(queries), jnp.asarray(keys)


def _block_scores(causal: bool, take: Any, starts: Any, q: Any, k: Any, numbers: Any):
  i, j = starts
  own, theirs = ([take(x, at) for x in numbers] for at in starts)
  return scores(take(q, i), take(k, j), j - i, causal, own, theirs)


def _put(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
  return lax.dynamic_update_slice_in_dim(x, part, start, -2)


def no_sums(q: jax.Array) -> tuple[jax.Array, ...]:
  """Return the running maximum, the sum and the outputs' sum of queries before any key."""
  wide = np.promote_types(q.dtype, np.float32)
  one = jnp.zeros((*q.shape[:-1], 1), wide)
  return one + NEVER, one, jnp.zeros(q.shape, wide)


def add_block(sums: Any, s: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
  """Add a block of keys to the sums of queries.

  Args:
    sums: results of `no_sums` or of this function.
    s: result of `scores`.
    v: values of the keys.
  """
  m, total, acc = sums
  higher = jnp.maximum(m, s.max(-1, keepdims=True))
  p, less = jnp.exp(s - higher), jnp.exp(m - higher)
  acc = acc * less + _dot("bgrqk,bgkd->bgrqd", p.astype(v.dtype), v)
  return higher, total * less + p.sum(-1, keepdims=True), acc


def inner_products(dout: jax.Array, out: jax.Array) -> jax.Array:
  """Return each query's sum of output times gradient, [rows, groups, heads, tokens, 1]."""
  wide = np.promote_types(out.dtype, np.float32)
  return (dout.astype(wide) * out.astype(wide)).sum(-1, keepdims=True)


def block_grads(
  s: jax.Array,
  q: jax.Array,
  dout: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
  k: jax.Array,
  v: jax.Array,
) -> tuple[jax.Array, ...]:
  """Return a block's parts of the gradients of queries, keys and values, as wide as `s`.

  Args:
    s: result of `scores` for q and k.
    q: the block's queries.
    dout: gradient of their outputs.
    lse: log of the sum over all keys of exp(score), a number per query.
    delta: result of `inner_products`.
    k: the block's keys.
    v: values of the keys.
  """
  p = jnp.exp(s - lse)
  dv = _dot("bgrqk,bgrqd->bgkd", p.astype(dout.dtype), dout)
  ds = p * (_dot("bgrqd,bgkd->bgrqk", dout, v) - delta) * q.shape[-1] ** -0.5
  ds = ds.astype(q.dtype)
  return _dot("bgrqk,bgkd->bgrqd", ds, k), _dot("bgrqk,bgrqd->bgkd", ds, q), dv


def scores(
  q: jax.Array, k: jax.Array, start: Any, masked: bool, own: Any, theirs: Any
) -> jax.Array:
  """Return attention scores, [rows, groups, heads of a group, queries, keys].

  Args:
    q: queries, [rows, groups, heads of a group, queries, width].
    k: keys, [rows, groups, keys, width].
    start: position of the first key, relative to the first query.
    masked: whether a query attends only to keys up to its own position.
    own: numbers of the queries' documents, [int32 [rows, 1, queries, 1]]; [] without.
    theirs: numbers of the keys' documents, [int32 [rows, 1, keys, 1]]; [] without.
  """
  s = _dot("bgrqd,bgkd->bgrqk", q, k) * q.shape[-1] ** -0.5
  if own:
    s = jnp.where((own[0] == theirs[0].mT)[:, :, None], s, NEVER)
  if not masked:
    return s
  seen = jnp.arange(q.shape[-2])[:, None] >= start + jnp.arange(k.shape[-2])
  return jnp.where(seen, s, NEVER)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
  wide = np.promote_types(a.dtype, np.float32)
  return jnp.einsum(equation, a, b, preferred_element_type=wide)
