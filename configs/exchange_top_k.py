"""Top-k gradients on the digits: an exchange of your own, with error feedback.

Command    JAX_NUM_CPU_DEVICES=8 jaxscale train --config configs/exchange_top_k.py
Hardware   2 CPU cores (AMD EPYC), 8 simulated devices, jax 0.10.2, Python 3.11
Time       13 s of processor time; 2026-11-27
Result     95.56 % of the 360 validation digits, with 2 % of the gradients' elements per device

With x = g + r, the gradient plus the residual, a device sends the k elements of largest
magnitude with their indices:

    S = the k indices of largest |x|
    result = 1/N sum_i x_i [on S_i],   r' = x [off S]

k is a share of each tensor, or of each bucket of concatenated tensors. One all_gather
sends indices (int32) and values (float32): each device sends 8 k bytes and receives N
times as many. A plain all-reduce moves 8 bytes per element through every device, so the
exchange saves bytes only if share < 1 / N.

Sources: arXiv:1704.05021 (share of all elements), arXiv:1809.07599 (error feedback and
convergence), arXiv:1712.01887 (share per tensor).
"""

import itertools
import math
import sys
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale import config
from jaxscale.collectives import vary, varying
from jaxscale.errors import ConfigError
from jaxscale.exchange import Exchange, buckets, mean_for_all, zero_residuals


class TopK(config.Exchange):
  """Largest elements of the gradient, with error feedback (arXiv:1809.07599).

  Attributes:
    share: the fraction of gradient elements that each device sends; must be below 1 / number of
      devices, above which sending all of them takes fewer bytes.
    per: the group of elements in which the largest are chosen; each "tensor" or each "bucket".
    bucket_bytes: the size in bytes of the buckets in which gradients are sent, counted as
      float32.
    plain_epochs: the number of epochs with uncompressed gradients at the start of the run;
      0 compresses from the first step.
  """

  share: Annotated[float, "in (0, 1)"] = 0.01
  per: Literal["tensor", "bucket"] = "tensor"
  bucket_bytes: config.Count = buckets.BUCKET_BYTES
  plain_epochs: config.NonNegative = 0.0

  def build(self, context):
    if self.share * context.num_devices >= 1:
      problem = f"saves no bytes over a plain all-reduce with {context.num_devices} devices"
      problem += f"; give less than {1 / context.num_devices:.3g}"
      raise ConfigError(f"TopK.share={self.share} {problem}")
    return top_k(context.axes, self.share, self.per, self.bucket_bytes)


def top_k(axes, share=0.01, per="tensor", bucket_bytes=buckets.BUCKET_BYTES):
  """Return the exchange; its state has "residual", r, float32 and shaped like the parameters.

  A tensor (or bucket) with at most k elements per device, over all devices, is averaged
  uncompressed in float32.
  """

  def exchange(grads, state):
    def tensors(_, xs):
      done = exchange_group([x.reshape(-1) for x in xs], share, axes)
      return [(a.reshape(x.shape), b.reshape(x.shape)) for x, (a, b) in zip(xs, done, strict=True)]

    def by_bucket(_, xs):
      xs = xs[::-1]  # groups have the last leaf first, but `layout` starts from the last
      pieces = buckets.layout(xs, bucket_bytes)
      pairs = [exchange_group([x], share, axes)[0] for x in buckets.pack(xs, pieces)]
      means, left = (buckets.unpack(x, pieces, xs) for x in zip(*pairs, strict=True))
      return list(zip(means, left, strict=True))[::-1]

    group, size = (tensors, bucket_bytes) if per == "tensor" else (by_bucket, sys.maxsize)
    means, left = buckets.exchange_groups(group, grads, state["residual"], size)
    return means, {"residual": left}

  return Exchange(lambda p: {"residual": zero_residuals(p)}, exchange, mean_for_all)


def exchange_group(xs, share, axes):
  """Return (mean, residual) of each of several flat arrays that are sent together."""
  # Rounded, since 0.07 * 100 is 7.000000000000001.
  counts = [math.ceil(round(share * x.size, 6)) for x in xs]
  sparse = [i for i, k in enumerate(counts) if k * lax.axis_size(axes) < xs[i].size]
  done = buckets.whole_means({i: x for i, x in enumerate(xs) if i not in sparse}, axes)
  indices = [lax.top_k(jnp.abs(xs[i]), counts[i])[1] for i in sparse]
  means = mean_of_sent([xs[i] for i in sparse], indices, axes)
  for i, mean, index in zip(sparse, means, indices, strict=True):
    done[i] = mean, xs[i].at[index].set(0.0, unique_indices=True)
  return [done[i] for i in range(len(xs))]


def mean_of_sent(xs, indices, axes):
  """Return means over devices of arrays that are zero except at a device's indices."""
  if not xs:
    return []
  starts = [sum(x.size for x in xs[:i]) for i in range(len(xs) + 1)]
  values = jnp.concatenate([x[p] for x, p in zip(xs, indices, strict=True)])
  shifted = jnp.concatenate([p + a for p, a in zip(indices, starts[:-1], strict=True)])
  sent = jnp.stack([shifted, lax.bitcast_convert_type(values, jnp.int32)])
  received = lax.all_gather(sent, axes, to="invarying")  # int32 [devices, 2, k]

  def add(total: jax.Array, one: jax.Array):
    index, value = one[0], lax.bitcast_convert_type(one[1], jnp.float32)
    return total.at[index].add(value, unique_indices=True), None

  # Devices are added one after another. On a GPU a scatter with repeated indices adds in
  # any order, so that replicas would differ.
  none = vary(jnp.zeros(starts[-1], jnp.float32), varying(received))
  total, _ = lax.scan(add, none, received)
  mean = total / lax.axis_size(axes)
  return [mean[a:b] for a, b in itertools.pairwise(starts)]


def get_config() -> config.Config:
  return config.Config(
    model=config.CNN(features=(16, 32), dense=64),
    data=config.Digits(),
    exchange=TopK(share=0.02, plain_epochs=1.0),
    optimizer=config.SGD(lr=0.1),
    schedule=config.Cosine(warmup_epochs=1),
    batch_size=128,
    epochs=15,
  )
