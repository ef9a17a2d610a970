"""Exchanges in 16 or 8 bits, with sums in float32.

`int8` sums by a reduce-scatter made of `lax.all_to_all`, then an all-gather. With N
devices, chunk d of an array belongs to device d; C encodes and D decodes:

    device i sends chunk d as   C(x_i[d])                     all_to_all
    device d sums               y[d] = sum_i D(C(x_i[d]))     in float32
    device d sends to all       C(y[d]),  the result D(C(y))  all_gather

A value is therefore rounded twice for any N, not once per hop, and a device sends
2 M (1 - 1/N) payload elements for M elements. Payloads are sent as integers of the same
width, because XLA on CPU widens collectives of bfloat16 to float32.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import Plan, add_rows, sum_tree
from jaxscale.collectives.typed import padded, unpadded
from jaxscale.errors import ConfigError
from jaxscale.exchange.base import Axes, Exchange, same_for_all
from jaxscale.exchange.buckets import BUCKET_BYTES, bucketed, map_buckets

# Scaling keeps float16 sums below 2^15, half of the overflow threshold. Rounding can grow
# a sum of N terms by at most (1 + 2^-11)^N, which is 2 for N = 1419.
_FP16_EXPONENT = 15


def half_precision(
  axes: tuple[str, ...],
  dtype: Literal["bfloat16", "float16"] = "bfloat16",
  *,
  sum_in: Literal["float32", "payload"] = "float32",
  bucket_bytes: int = BUCKET_BYTES,
  by: Plan | None = None,
) -> Exchange:
  """Return an exchange that sends 16 bits per element.

  bfloat16 has float32's range, and each rounding has a relative error of at most 2^-8.
  float16 has an error of 2^-11, but its largest value is 65,504. With m the largest
  magnitude over all N devices, each bucket x is therefore sent as x 2^k with

      k = 14 - ceil(log2 N) - floor(log2 m)        (N m 2^k < 2^15)

  Multiplying by a power of two is exact in both directions, except for elements that fall
  below float16's smallest value, 2^-24.

  Args:
    axes: mesh axes to average over.
    dtype: dtype of the sent gradients.
    sum_in: "float32" sends chunks by all_to_all, adds them in float32 and rounds once
      more. "payload" is a `lax.psum` in `dtype`, where the backend chooses the precision
      of the sum; XLA on CPU sends float32.
    bucket_bytes: size of a bucket in bytes, in the gradients' own dtype.
    by: all-reduce for the same axes to use instead of `lax.psum`.

  Example:
    >>> half_precision(("replica", "data"), "float16").init({"w": 0.0})
    ()

  Source: arXiv:1710.03740 scales into float16's range, but scales the loss.
  """
  by, payload = by or Plan("psum", axes, (), None), jnp.dtype(dtype)
  accumulate = {"float32": jnp.float32, "payload": None}[sum_in]
  total = functools.partial(sum_tree, by=by, payload=payload, accumulate=accumulate)

  def reduce(bucket: jax.Array):
    x = bucket.astype(jnp.float32)
    if dtype == "bfloat16":
      return total(x).astype(bucket.dtype)
    _, exponent = jnp.frexp(lax.pmax(jnp.max(jnp.abs(x)), axes))  # floor(log2) + 1
    k = _FP16_EXPONENT - math.ceil(math.log2(lax.axis_size(axes))) - exponent
    k = jnp.clip(k, -126, 126)  # both 2^k and 2^-k are normal float32
    return jnp.ldexp(total(jnp.ldexp(x, k)), -k).astype(bucket.dtype)

  return bucketed(axes, bucket_bytes=bucket_bytes, reduce=reduce)


def int8(
  axes: Axes, *, block: int = 256, seed: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> Exchange:
  """Return an exchange that sends 8 bits per element, with stochastic rounding.

      s = max |x| / 127  over a block,   q = floor(x / s + u),  u uniform in [0, 1)

  E[q s] = x, so the mean is unbiased without a residual. Each of the two roundings has an
  error below s, so the error of the mean is below (mean_i max |x_i| + max |mean|) / 127
  in a block. `u` has 16 bits, which biases q s by at most s 2^-17. Random keys are derived
  from the seed, the step counted in the state, the device's position in the mesh, the
  bucket and the stage. Blocks do not cross tensors, whose gradients may differ by orders
  of magnitude: each tensor is padded to a multiple of a block. The four bytes of a scale
  are sent in the same collective as the payload.

  Args:
    axes: mesh axes to average over.
    block: number of elements that share a scale.
    seed: seed of the stochastic rounding.
    bucket_bytes: size of a bucket in bytes of float32 gradients; rounded down to whole
      blocks.

  Raises:
    ConfigError: a bucket is smaller than a block.

  Example:
    >>> int8(("replica", "data")).init({"w": 0.0})
    {'step': Array(0, dtype=int32)}

  Sources: stochastic rounding of scaled blocks, arXiv:1610.02132; all_to_all of
  quantised blocks, added in full precision, arXiv:2306.10209.
  """
  if bucket_bytes < 4 * block:
    problem = f"is less than a block of {block} float32; give {4 * block} or more"
    raise ConfigError(f"bucket_bytes={bucket_bytes} {problem}")

  def exchange(grads: Any, state: Any):
    num_devices = lax.axis_size(axes)
    key = jax.random.fold_in(jax.random.key(seed), state["step"])
    key = jax.random.fold_in(key, lax.axis_index(axes))

    def mean(number: int, bucket: jax.Array):
      first, second = jax.random.split(jax.random.fold_in(key, number))
      chunks = padded(bucket, num_devices * block).reshape(num_devices, -1)
      sent = encode_int8(chunks, block, first)
      own = add_rows(decode_int8(lax.all_to_all(sent, axes, 0, 0), block))[None]
      sent = encode_int8(own, block, second)
      gathered = lax.all_gather(sent, axes, tiled=True, to="invarying")
      return decode_int8(gathered, block).reshape(-1)[: bucket.size] / num_devices

    def like(mean: jax.Array, g: jax.Array):
      return unpadded(mean, g.shape).astype(g.dtype)

    whole_blocks = bucket_bytes // (4 * block) * 4 * block
    flat = jax.tree.map(lambda g: padded(g.astype(jnp.float32), block), grads)
    means = map_buckets(mean, flat, whole_blocks)
    return jax.tree.map(like, means, grads), {"step": state["step"] + 1}

  return Exchange(lambda _: {"step": jnp.zeros((), jnp.int32)}, exchange, same_for_all)


def encode_int8(x: jax.Array, block: int, key: jax.Array) -> jax.Array:
  """Round blocks stochastically to int8 and append their scales.

  Args:
    x: float32 [rows, elements], with a multiple of `block` elements.
    block: number of elements that share a scale.
    key: random key of the rounding.

  Returns:
    The payload, int8 [rows, elements + 4 blocks].
  """
  blocks = x.reshape(x.shape[0], -1, block)
  scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
  # The scale of a block of zeros is 0. A block with Inf or NaN decodes to NaN.
  steps = blocks / jnp.where(scale == 0, jnp.ones_like(scale), scale)
  bits = jax.random.bits(key, blocks.shape, jnp.uint16).astype(jnp.float32)
  q = jnp.floor(steps + (bits + 0.5) / 2**16)
  q = jnp.clip(q, -127, 127).astype(jnp.int8).reshape(x.shape)
  sent = lax.bitcast_convert_type(scale[..., 0], jnp.int8).reshape(x.shape[0], -1)
  return jnp.concatenate([q, sent], axis=1)


def decode_int8(payload: jax.Array, block: int) -> jax.Array:
  """Decode a payload of `encode_int8`: float32 [rows, elements]."""
  rows, count = payload.shape[0], payload.shape[1] // (block + 4)
  q, sent = jnp.split(payload, [count * block], axis=1)
  scale = lax.bitcast_convert_type(sent.reshape(rows, count, 4), jnp.float32)
  blocks = q.reshape(rows, count, block).astype(jnp.float32)
  return (blocks * scale[..., None]).reshape(rows, -1)
