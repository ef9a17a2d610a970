"""Layers that several models share."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.errors import ConfigError
from jaxscale.models.adapters.rows import drop
from jaxscale.models.linear import PRODUCT
from jaxscale.models.stack import at_least_float32

_PIXELS = [*itertools.product(range(3), repeat=2)]  # of a max-pool of 3, by row
Keys = jax.Array | None  # one random key per row, or None in evaluation


class BatchNorm(nn.Module):
  """BatchNorm (arXiv:1502.03167) over a chosen number of examples, for NHWC.

  Statistics are computed in float32 over a device's micro-batch, over groups of
  `group_size` examples of it ("ghost" batches, arXiv:1705.08741), or over the
  micro-batches of several devices. `mesh.batch_norm_span` chooses among them, so that a
  group contains the same examples on any number of devices. The variance is the biased
  one, as in Flax, also in the running average (Caffe and PyTorch multiply it by
  n / (n - 1) there). Running averages are updated by the mean of the groups' statistics.
  For groups of equal size it does not depend on their distribution over devices.

  Attributes:
    axis_name: mesh axes whose devices share statistics; None means no sharing.
    momentum: decay of the running mean and variance.
    epsilon: term added to the variance.
    scale_init: initialiser of the scale.
    group_size: number of consecutive rows that share statistics, which must divide the
      micro-batch; None means the whole micro-batch.
    dtype: dtype of the output.

  Raises:
    ConfigError: the group size does not divide the micro-batch, or both `group_size` and
      `axis_name` are set.

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
      # Running statistics need neither groups nor other devices.
      return _normalise(x, running.value, params, self.epsilon, self.dtype)
    # Distances from the running mean have the same variance as x, without its rounding
    # errors if the mean is large.
    near = lax.stop_gradient(running.value["mean"])
    distance = _grouped(x, self.group_size, self.axis_name).astype(jnp.float32) - near
    dims = tuple(range(distance.ndim - x.ndim, distance.ndim - 1))
    stats = _group_statistics(distance, dims, self.axis_name)
    new = {k: v.reshape(-1, width).mean(0) for k, v in stats.items()}
    var = self.momentum * running.value["var"] + (1 - self.momentum) * new["var"]
    running.value = {"mean": near + (1 - self.momentum) * new["mean"], "var": var}
    return _normalise(distance, stats, params, self.epsilon, self.dtype).reshape(x.shape)


class ImageModule(nn.Module, kw_only=True):
  """Base class of image models, with the fields of their classes, BatchNorm and dtype.

  Attributes:
    num_classes: number of classes.
    bn_axis_name: mesh axes whose devices share BatchNorm statistics; None means no sharing.
    bn_group_size: number of rows of a device that share statistics; None means its whole
      micro-batch.
    bn_momentum: decay of BatchNorm's running statistics.
    bn_epsilon: term added to BatchNorm's variance.
    dtype: dtype of activations and matrix products.
  """

  num_classes: int
  bn_axis_name: tuple[str, ...] | None = None
  bn_group_size: int | None = None
  bn_momentum: float = 0.9
  bn_epsilon: float = 1e-5
  dtype: jnp.dtype = jnp.float32

  def norm(self, **options: Any) -> BatchNorm:
    """Return a BatchNorm with the module's settings; pass other fields by name."""
    given = self.bn_axis_name, self.bn_momentum, self.bn_epsilon
    return BatchNorm(*given, group_size=self.bn_group_size, dtype=self.dtype, **options)


def _grouped(x: jax.Array, group_size: int | None, axis_name) -> jax.Array:
  """Reshape [n, ..., c] to [groups, n / groups, ..., c]; a single group is unchanged."""
  if group_size is None or group_size == len(x):
    # A leading dim of 1 would make the gradient 3 to 13 times slower on CPU.
    return x
  if axis_name is not None:
    problem = f"does not work with bn_axis_name={axis_name}, which shares whole micro-batches"
    fix = "unset one of them"
    raise ConfigError(f"bn_group_size={group_size} {problem}; {fix}")
  if group_size < 1 or len(x) % group_size:
    problem = f"does not divide the {len(x)} rows of a device's micro-batch; give a divisor"
    raise ConfigError(f"bn_group_size={group_size} {problem}")
  return x.reshape(-1, group_size, *x.shape[1:])


def _group_statistics(distance: jax.Array, dims, axis_name) -> dict[str, jax.Array]:
  """Return mean and variance over dims, which keep length 1, and over devices.

  One pass and one collective suffice, because the variance is E[d^2] - E[d]^2. With x
  instead of the distance d, as in Flax, a mean of 100 standard deviations would leave the
  variance three correct digits, and devices would disagree on the others.
  """
  powers = distance, jnp.square(distance)
  means = jnp.stack([x.mean(dims, keepdims=True) for x in powers])
  if axis_name is not None:
    means = lax.pmean(means, axis_name)  # one collective, since latency dominates
  # Remat policies that store products also store the few statistics of their outputs.
  mean, mean_square = checkpoint_name(means, PRODUCT)
  # Rounding can make the difference negative.
  return {"mean": mean, "var": jnp.maximum(mean_square - jnp.square(mean), 0.0)}


def _normalise(x, stats, params, epsilon, dtype):
  """Compute (x - mean) / sqrt(var + epsilon) * scale + bias in float32; return `dtype`."""
  scale = lax.rsqrt(stats["var"] + epsilon) * params["scale"]
  y = (x.astype(jnp.float32) - stats["mean"]) * scale + params["bias"]
  return y.astype(dtype)


def max_pool_2(x: jax.Array) -> jax.Array:
  """Apply a max-pool of 2 with stride 2 to [n, ..., c]; drop an odd last row or column.

  It is a reshape and a maximum per dim, because the backward pass of `nn.max_pool`, a
  select-and-scatter, is several times slower on CPU (measured with jax 0.10).
  """
  for dim in range(1, x.ndim - 1):
    half = x.shape[dim] // 2
    x = lax.slice_in_dim(x, 0, 2 * half, axis=dim)
    x = x.reshape(*x.shape[:dim], half, 2, *x.shape[dim + 1 :])
    x = jnp.maximum(*(lax.index_in_dim(x, i, dim + 1, keepdims=False) for i in (0, 1)))
  return x


def max_pool_3(x: jax.Array) -> jax.Array:
  """Apply a max-pool of 3 with stride 2 to [n, height, width, c], without padding.

  The gradient goes to the first of several equal maxima, as with `nn.max_pool`. XLA finds it
  there by sums over windows with the index of each pixel: on CPU that takes six times as long,
  25 of the 168 ms of a step of ResNet-18, and on GPUs it writes 3.2 GB in a step of ResNet-50
  with 256 images. Here one byte per output tells which of the 9 pixels is the largest.
  """
  return _max_pool_3(x.shape[1:3], x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _max_pool_3(sizes: tuple[int, ...], x: jax.Array) -> jax.Array:
  return _max_pool_3_forward(sizes, x)[0]


def _max_pool_3_forward(sizes, x):
  height, width = ((n - 3) // 2 * 2 + 1 for n in sizes)
  largest, *others = (x[:, i : i + height : 2, j : j + width : 2] for i, j in _PIXELS)
  place = jnp.zeros_like(largest, jnp.int8)
  for number, pixel in enumerate(others, 1):
    place = jnp.where(pixel > largest, jnp.int8(number), place)
    largest = jnp.maximum(largest, pixel)  # NaN if one of them is
  return largest, place


def _max_pool_3_backward(sizes, place, g):
  wide = at_least_float32(g)
  zero, total = jnp.zeros_like(wide), jnp.zeros((), wide.dtype)
  for number, corner in enumerate(_PIXELS):
    ends = zip(corner, sizes, g.shape[1:3], strict=True)
    around = [(i, size - i - (2 * count - 1), 1) for i, size, count in ends]
    part = jnp.where(place == number, wide, zero)
    total = total + lax.pad(part, zero[0, 0, 0, 0], [(0, 0, 0), *around, (0, 0, 0)])
  return (total.astype(g.dtype),)


_max_pool_3.defvjp(_max_pool_3_forward, _max_pool_3_backward)


def dropout(x: jax.Array, rate: float, keys: Keys, layer: int) -> jax.Array:
  """Apply dropout with masks that do not depend on the number of devices.

  Args:
    x: inputs, [batch, ...].
    rate: probability of a zero.
    keys: one key per example, from the train step; None in evaluation.
    layer: number that distinguishes the dropout layers of a model.
  """
  return x if keys is None or rate == 0.0 else drop(x, rate, keys, layer, x.shape[1:])
