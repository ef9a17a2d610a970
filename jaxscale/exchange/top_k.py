"""Top-k sparsification: send the largest gradient elements, with error feedback.

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
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives.typed import vary, varying
from jaxscale.errors import ConfigError
from jaxscale.exchange import buckets
from jaxscale.exchange.base import Axes, Exchange, check_devices, mean_for_all, zero_residuals
from jaxscale.exchange.buckets import BUCKET_BYTES, exchange_groups, whole_means


def top_k(
  axes: tuple[str, ...],
  *,
  num_devices: int,
  share: float = 0.01,
  per: Literal["tensor", "bucket"] = "tensor",
  bucket_bytes: int = BUCKET_BYTES,
) -> Exchange:
  """Return the top-k exchange with error feedback (equations in the module).

  A tensor (or bucket) with at most k elements per device, over all devices, is averaged
  uncompressed in float32.

  Args:
    axes: mesh axes to average over.
    num_devices: number of devices along these axes.
    share: share of the elements that a device sends; k = ceil(share elements).
    per: choose the largest elements per "tensor" or per "bucket".
    bucket_bytes: bytes of float32 gradients that are sent together.

  Returns:
    An exchange. Its state has "residual", r, float32 and shaped like the parameters.

  Raises:
    ConfigError: the share is not in (0, 1), or too large to save bytes with this number
      of devices; or `per` is unknown.

  Example:
    >>> exchange = top_k(("replica", "data"), num_devices=8, share=0.01)
    >>> exchange.init({"w": jnp.zeros((64, 20))})["residual"]["w"].shape
    (64, 20)
  """
  if not 0 < share < 1:
    raise ConfigError(f"share={share} is out of range; give a number in (0, 1)")
  if share * num_devices >= 1:
    problem = f"saves no bytes over a plain all-reduce with {num_devices} devices"
    raise ConfigError(f"share={share} {problem}; give less than {1 / num_devices:.3g}")
  if per not in ("tensor", "bucket"):
    raise ConfigError(f'per={per!r} is unknown; use "tensor" or "bucket"')

  def exchange(grads: Any, state: Any):
    check_devices("top_k", axes, num_devices)

    def tensors(_: list[int], xs: list[jax.Array]):
      done = _exchange_group([x.reshape(-1) for x in xs], share, axes)
      return [(a.reshape(x.shape), b.reshape(x.shape)) for x, (a, b) in zip(xs, done, strict=True)]

    def by_bucket(_: list[int], xs: list[jax.Array]):
      xs = xs[::-1]  # groups have the last leaf first, but `layout` starts from the last
      pieces = buckets.layout(xs, bucket_bytes)
      pairs = [_exchange_group([x], share, axes)[0] for x in buckets.pack(xs, pieces)]
      means, left = (buckets.unpack(x, pieces, xs) for x in zip(*pairs, strict=True))
      return list(zip(means, left, strict=True))[::-1]

    how = (tensors, bucket_bytes) if per == "tensor" else (by_bucket, sys.maxsize)
    means, left = exchange_groups(how[0], grads, state["residual"], how[1])
    return means, {"residual": left}

  return Exchange(lambda p: {"residual": zero_residuals(p)}, exchange, mean_for_all)


def _exchange_group(xs: list[jax.Array], share: float, axes: Axes):
  """Return (mean, residual) of each of several flat arrays that are sent together."""
  # Rounded, since 0.07 * 100 is 7.000000000000001.
  counts = [math.ceil(round(share * x.size, 6)) for x in xs]
  sparse = [i for i, k in enumerate(counts) if k * lax.axis_size(axes) < xs[i].size]
  done = whole_means({i: x for i, x in enumerate(xs) if i not in sparse}, axes)
  indices = [lax.top_k(jnp.abs(xs[i]), counts[i])[1] for i in sparse]
  means = _mean_of_sent([xs[i] for i in sparse], indices, axes)
  for i, mean, index in zip(sparse, means, indices, strict=True):
    done[i] = mean, xs[i].at[index].set(0.0, unique_indices=True)
  return [done[i] for i in range(len(xs))]


def _mean_of_sent(xs: list[jax.Array], indices: list[jax.Array], axes: Axes):
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
