"""Incremental decoding of language models with a cache of keys and values.

The model is the one used in training, with `Ops` whose attention and positions use the
cache. The layers run in a scan that carries the whole cache, so that every step updates
it in place.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.models.attention import cached_attention
from jaxscale.models.stack import Ops, Stack


class Cache(NamedTuple):
  """Keys and values of the tokens so far.

  Attributes:
    k: keys, [layers, rows, room, groups, width].
    v: values, with the shape of `k`.
    length: number of tokens so far, int32 []; unused room is 0.
  """

  k: jax.Array
  v: jax.Array
  length: jax.Array


def empty_cache(stack: Stack, params: Any, rows: int, room: int) -> Cache:
  """Return a cache without tokens.

  Args:
    stack: a model whose batches are tokens.
    params: parameters from `stack.init`, or their shapes.
    rows: number of sequences.
    room: maximum number of tokens in a sequence.
  """
  caches = []

  def attend(q, k, v, *, causal):
    caches.append((k, v))
    return q

  def one_layer(params, tokens):
    ops = Ops(attend=attend)
    h = stack.embed(params["embed"], {"tokens": tokens}, ops)
    stack.layer(jax.tree.map(lambda x: x[0], params["layers"]), h, ops)
    return caches[0]

  kept = jax.eval_shape(one_layer, params, jax.ShapeDtypeStruct((rows, room), jnp.int32))
  k, v = (jnp.zeros((stack.num_layers, *x.shape), x.dtype) for x in kept)
  return Cache(k, v, jnp.zeros((), jnp.int32))


def advance(stack: Stack, params: Any, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
  """Process the next tokens of every row.

  Args:
    stack: a model whose batches are tokens.
    params: parameters from `stack.init`.
    tokens: the new tokens, int32 [rows, new]; the cache must have room for them.
    cache: cache of the previous tokens.

  Returns:
    h: outputs of the last layer for the new tokens, [rows, new, width]; `stack.logits`
      maps them to the logits of the next tokens.
    cache: the cache with the new tokens.

  Example:
    >>> from jaxscale.models import make_transformer
    >>> stack = make_transformer(
    ...   vocab_size=256, num_layers=2, width=64, num_heads=4, hidden=128
    ... )
    >>> params = stack.init(jax.random.key(0))
    >>> cache = empty_cache(stack, params, rows=1, room=8)
    >>> h, cache = advance(stack, params, jnp.zeros((1, 5), jnp.int32), cache)
    >>> h.shape, int(cache.length)
    ((1, 5, 64), 5)
  """
  start = cache.length
  here = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
  plain = Ops(positions=lambda n: start + jnp.arange(n, dtype=jnp.int32))

  def layer(carry, inputs):
    h, k_all, v_all = carry
    p, i = inputs
    kept = []

    def attend(q, k, v, *, causal):
      assert causal, "incremental decoding requires causal attention"
      starts = (i, 0, start, 0, 0)
      k_now = lax.dynamic_update_slice(k_all, k[None], starts)
      v_now = lax.dynamic_update_slice(v_all, v[None], starts)
      kept.extend((k_now, v_now))
      return cached_attention(q, here(k_now, i), here(v_now, i), start)

    h = stack.layer(p, h, plain._replace(attend=attend))
    return (h, *kept), None

  h = stack.embed(params["embed"], {"tokens": tokens}, plain)
  numbers = jnp.arange(stack.num_layers, dtype=jnp.int32)
  (h, k, v), _ = lax.scan(layer, (h, cache.k, cache.v), (params["layers"], numbers))
  return h, Cache(k, v, start + tokens.shape[1])
