"""The largest elements alone, with error feedback.

Of x = g + r, the gradient plus what was not sent before, a device sends the k
elements of largest magnitude with their indices:

    S = the k indices of largest |x|
    result = 1/N sum_i x_i [on S_i],   r' = x [off S]

k is a share of each tensor, or of each bucket of tensors laid end to end. One
all_gather carries indices (int32) and values (float32): each device sends 8 k bytes,
and N times that it receives. A plain all-reduce moves 8 bytes an element through
every device, so the exchange is smaller only while share < 1 / N.

Sources: arXiv:1704.05021 (share of all elements), arXiv:1809.07599 (its memory,
and why it converges), arXiv:1712.01887 (the share a tensor).
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
  """The mean of the largest elements of every device, as the module says.

  A tensor (or bucket) of which the devices' k elements would together be as many
  as it has is averaged whole, in float32.

  Args:
    axes: mesh axes to average over.
    num_devices: devices of those axes, `mesh.size`.
    share: of the elements that a device sends; k = ceil(share elements).
    per: what the largest are chosen from.
    bucket_bytes: of float32 gradients that are sent at once.

  Returns:
    State: "residual", r, shaped like the parameters, float32.

  Raises:
    ConfigError: the share is not in (0, 1), or so large that with this number of
      devices nothing would be saved; `per` is neither.

  Example:
    >>> exchange = top_k(("replica", "data"), num_devices=8, share=0.01)
    >>> exchange.init({"w": jnp.zeros((64, 20))})["residual"]["w"].shape
    (64, 20)
  """
  if not 0 < share < 1:
    raise ConfigError(f"share={share}: give a share of the elements, in (0, 1)")
  if share * num_devices >= 1:
    why = f"{num_devices} devices would together send as much as the plain exchange or more"
    raise ConfigError(f"share={share}: {why}, give a share below {1 / num_devices:.3g}")
  if per not in ("tensor", "bucket"):
    raise ConfigError(f'per={per!r}: give "tensor" or "bucket"')

  def exchange(grads: Any, state: Any):
    check_devices("top_k", axes, num_devices)

    def tensors(_: list[int], xs: list[jax.Array]):
      done = _exchange_group([x.reshape(-1) for x in xs], share, axes)
      pairs = zip(xs, done, strict=True)
      return [(a.reshape(x.shape), b.reshape(x.shape)) for x, (a, b) in pairs]

    def by_bucket(_: list[int], xs: list[jax.Array]):
      xs = xs[::-1]  # groups have the last leaf first, as `layout` takes them
      pieces = buckets.layout(xs, bucket_bytes)
      pairs = [_exchange_group([x], share, axes)[0] for x in buckets.pack(xs, pieces)]
      means, left = (buckets.unpack(x, pieces, xs) for x in zip(*pairs, strict=True))
      return list(zip(means, left, strict=True))[::-1]

    how = (tensors, bucket_bytes) if per == "tensor" else (by_bucket, sys.maxsize)
    means, left = exchange_groups(how[0], grads, state["residual"], how[1])
    return means, {"residual": left}

  return Exchange(lambda p: {"residual": zero_residuals(p)}, exchange, mean_for_all)


def _exchange_group(xs: list[jax.Array], share: float, axes: Axes):
  """[(mean, residual)] of flat arrays that are sent at once."""
  num_devices = lax.axis_size(axes)
  # Rounded, since 0.07 * 100 is 7.000000000000001.
  counts = [math.ceil(round(share * x.size, 6)) for x in xs]
  sparse = [i for i, k in enumerate(counts) if k * num_devices < xs[i].size]
  done = whole_means({i: x for i, x in enumerate(xs) if i not in sparse}, axes)
  indices = [lax.top_k(jnp.abs(xs[i]), counts[i])[1] for i in sparse]
  means = _mean_of_sent([xs[i] for i in sparse], indices, axes)
  for i, mean, index in zip(sparse, means, indices, strict=True):
    done[i] = mean, xs[i].at[index].set(0.0, unique_indices=True)
  return [done[i] for i in range(len(xs))]


def _mean_of_sent(xs: list[jax.Array], indices: list[jax.Array], axes: Axes):
  """The means over devices of arrays that are zero but at a device's indices."""
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

  # One device after another: a scatter to one index twice adds in any order
  # on a GPU, and replicas would drift apart.
  none = vary(jnp.zeros(starts[-1], jnp.float32), varying(received))
  total, _ = lax.scan(add, none, received)
  mean = total / lax.axis_size(axes)
  return [mean[a:b] for a, b in itertools.pairwise(starts)]
