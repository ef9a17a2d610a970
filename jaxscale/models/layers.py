"""Pieces that several models share."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.errors import ConfigError

Keys = jax.Array | None  # a key for each row, or None where nothing is random


class BatchNorm(nn.Module):
  """BatchNorm (arXiv:1502.03167) by number of examples; float32 statistics, NHWC.

  Statistics are those of a device's micro-batch, of `group_size` examples of
  it ("ghost" batches, arXiv:1705.08741), or of the micro-batches of several
  devices. `mesh.batch_norm_span` chooses between them, so that a group is the
  same examples on any number of devices. The variance is the biased one (the
  mean of squared deviations, as Flax has it), for the running average too,
  where Caffe and PyTorch write n / (n - 1) of it. The running averages take in
  the mean over groups of the groups' statistics: of groups of one size, it is
  the same however they are spread over devices.

  Attributes:
    axis_name: mesh axes whose devices share statistics; None: a device's own.
    momentum: decay of the running mean and variance.
    epsilon: added to the variance.
    scale_init: initialiser of gamma.
    group_size: examples that share statistics, consecutive rows that divide the
      micro-batch; None: all of it.
    dtype: of the output.

  Raises:
    ConfigError: the groups do not divide the batch, or `group_size` is given
      with `axis_name`.

  Example:
    >>> norm = BatchNorm(group_size=32)
    >>> variables = norm.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)), train=False)
  """

  axis_name: tuple[str, ...] | None = None
  momentum: float = 0.9
  epsilon: float = 1e-5
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  group_size: int | None = None
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    width = x.shape[-1]

    def init_params(key):
      scale = self.scale_init(key, (width,), jnp.float32)
      return {"scale": scale, "bias": jnp.zeros(width, jnp.float32)}

    params = self.param("bn", init_params)

    def init_stats():
      one = jnp.ones(width, jnp.float32)
      return {"mean": jnp.zeros_like(one), "var": one}

    running = self.variable("batch_stats", "bn", init_stats)
    if not train or self.is_initializing():
      # The running statistics need no group and no other device.
      return _normalise(x, running.value, params, self.epsilon, self.dtype)
    # Distances from the running mean are as good as x, and exact where x is large.
    near = lax.stop_gradient(running.value["mean"])
    distance = _grouped(x, self.group_size, self.axis_name).astype(jnp.float32) - near
    dims = tuple(range(distance.ndim - x.ndim, distance.ndim - 1))
    stats = _group_statistics(distance, dims, self.axis_name)
    new = {k: v.reshape(-1, width).mean(0) for k, v in stats.items()}
    var = self.momentum * running.value["var"] + (1 - self.momentum) * new["var"]
    running.value = {"mean": near + (1 - self.momentum) * new["mean"], "var": var}
    y = _normalise(distance, stats, params, self.epsilon, self.dtype)
    return y.reshape(x.shape)


class ImageModule(nn.Module, kw_only=True):
  """What modules of images share: their classes, their BatchNorm and their dtype.

  Attributes:
    num_classes: classes.
    bn_axis_name: mesh axes whose devices share BatchNorm's statistics, or None.
    bn_group_size: rows that share them on a device, or None: all of a micro-batch.
    bn_momentum, bn_epsilon: of `BatchNorm`.
    dtype: of activations and matrix products.
  """

  num_classes: int
  bn_axis_name: tuple[str, ...] | None = None
  bn_group_size: int | None = None
  bn_momentum: float = 0.9
  bn_epsilon: float = 1e-5
  dtype: jnp.dtype = jnp.float32

  def norm(self, **options: Any) -> BatchNorm:
    """A BatchNorm of the module's settings; other fields by name."""
    given = self.bn_axis_name, self.bn_momentum, self.bn_epsilon
    return BatchNorm(*given, group_size=self.bn_group_size, dtype=self.dtype, **options)


def _grouped(x: jax.Array, group_size: int | None, axis_name) -> jax.Array:
  """[n, ..., c] -> [groups, n / groups, ..., c], or x where it is one group."""
  if group_size is None or group_size == len(x):
    # A leading dim of 1 made the gradient 3 to 13 times slower on CPU.
    return x
  if axis_name is not None:
    why = f"devices share statistics over {axis_name}, which takes their whole micro-batches"
    fix = "give one of the two"
    raise ConfigError(f"bn_group_size={group_size}: {why}; {fix}")
  if group_size < 1 or len(x) % group_size:
    why = f"does not divide the {len(x)} rows of a device's micro-batch, give a divisor"
    raise ConfigError(f"bn_group_size={group_size}: {why}")
  return x.reshape(-1, group_size, *x.shape[1:])


def _group_statistics(distance: jax.Array, dims, axis_name) -> dict[str, jax.Array]:
  """Mean and variance over some dims, which keep the length 1, and over devices.

  One pass and one exchange: the variance is E[d^2] - E[d]^2. With x for the
  distance d, as in Flax, a mean of 100 standard deviations costs the variance all
  but three digits, and devices disagree on the rest.
  """
  powers = distance, jnp.square(distance)
  means = jnp.stack([x.mean(dims, keepdims=True) for x in powers])
  if axis_name is not None:
    means = lax.pmean(means, axis_name)  # both at once: latency, not bytes
  mean, mean_square = means
  # Rounding can take the difference below zero.
  return {"mean": mean, "var": jnp.maximum(mean_square - jnp.square(mean), 0.0)}


def _normalise(x, stats, params, epsilon, dtype):
  """(x - mean) / sqrt(var + epsilon) * scale + bias, in float32, as `dtype`."""
  scale = lax.rsqrt(stats["var"] + epsilon) * params["scale"]
  y = (x.astype(jnp.float32) - stats["mean"]) * scale + params["bias"]
  return y.astype(dtype)


def max_pool_2x2(x: jax.Array) -> jax.Array:
  """2x2 max-pool with stride 2, [n, h, w, c]; an odd last row or column goes.

  A reshape and a maximum: the backward pass of `nn.max_pool`, a
  select-and-scatter, is several times slower on CPU (measured, jax 0.10).
  """
  n, h, w, c = x.shape
  x = x[:, : h // 2 * 2, : w // 2 * 2]
  x = x.reshape(n, h // 2, 2, w // 2, 2, c)
  x = jnp.maximum(x[:, :, 0], x[:, :, 1])
  return jnp.maximum(x[:, :, :, 0], x[:, :, :, 1])


def local_response_norm(
  x: jax.Array, size: int = 5, alpha: float = 1e-4, k: float = 1.0
) -> jax.Array:
  """Krizhevsky et al.'s normalisation across neighbouring channels (2012, §3.3).

  y_c = x_c / (k + alpha / size * sum of x_i^2 over |i - c| <= size / 2)^(3/4).

  Caffe's form and defaults (lrn_layer.cpp, models/bvlc_alexnet): alpha is
  divided by the size of the window, k is 1; the paper has k = 2 and alpha = 1e-4
  without the division. In float32 whatever the dtype of x.

  Args:
    x: [..., c].
    size: channels of the window, an odd number.
    alpha: weight of the mean square.
    k: what the mean square is added to.

  Example:
    >>> local_response_norm(jnp.ones((1, 1, 1, 5)), alpha=1.0)[0, 0, 0, 2]  # 2**-0.75
    Array(0.59460354, dtype=float32)
  """
  wide = x.astype(jnp.float32)
  window = (1,) * (x.ndim - 1) + (size,)
  ones = (1,) * x.ndim
  squares = lax.reduce_window(jnp.square(wide), 0.0, lax.add, window, ones, "SAME")
  # d^(-3/4) from two roots: 4 times faster than a power on CPU, forwards.
  root = lax.rsqrt(k + alpha / size * squares)
  return (wide * root * jnp.sqrt(root)).astype(x.dtype)


def dropout(x: jax.Array, rate: float, keys: Keys, layer: int) -> jax.Array:
  """Dropout whose masks are the same on any number of devices.

  Args:
    x: [batch, ...].
    rate: probability of a zero.
    keys: one key per example, as the train step hands them out; None: evaluate.
    layer: tells apart the dropout layers of one model.
  """
  if keys is None or rate == 0.0:
    return x

  def keep(key):
    return jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - rate, x.shape[1:])

  return jnp.where(jax.vmap(keep)(keys), x / (1 - rate), 0).astype(x.dtype)
