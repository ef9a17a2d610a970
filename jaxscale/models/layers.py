"""Pieces that several models share."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class BatchNorm(nn.Module):
  """BatchNorm (arXiv:1502.03167) with float32 statistics, NHWC.

  Attributes:
    axis_name: mesh axes whose devices share statistics; None: a device's own.
    momentum: decay of the running mean and variance.
    epsilon: added to the variance.
    scale_init: initialiser of gamma.
    dtype: of the output.
  """

  axis_name: tuple[str, ...] | None = None
  momentum: float = 0.9
  epsilon: float = 1e-5
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    return nn.BatchNorm(
      use_running_average=not train,
      momentum=self.momentum,
      epsilon=self.epsilon,
      scale_init=self.scale_init,
      dtype=self.dtype,
      # Only training has devices to average with: evaluation and
      # initialisation use the running statistics.
      axis_name=self.axis_name if train else None,  # pyright: ignore (a tuple works)
      name="bn",
    )(x)


def max_pool_2x2(x: jax.Array) -> jax.Array:
  """2x2 max-pool with stride 2, [n, h, w, c]; an odd last row or column goes.

  A reshape and a maximum: the backward pass of `nn.max_pool`, a
  select-and-scatter, is several times slower on CPU (benchmarks/pooling.py).
  """
  n, h, w, c = x.shape
  x = x[:, : h // 2 * 2, : w // 2 * 2]
  x = x.reshape(n, h // 2, 2, w // 2, 2, c)
  x = jnp.maximum(x[:, :, 0], x[:, :, 1])
  return jnp.maximum(x[:, :, :, 0], x[:, :, :, 1])


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, layer: int) -> jax.Array:
  """Dropout whose masks are the same on any number of devices.

  Args:
    x: [batch, ...].
    rate: probability of a zero.
    keys: one key an example, as the train step hands them out; None: evaluate.
    layer: tells apart the dropout layers of one model.
  """
  if keys is None or rate == 0.0:
    return x

  def keep(key):
    return jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - rate, x.shape[1:])

  return jnp.where(jax.vmap(keep)(keys), x / (1 - rate), 0).astype(x.dtype)
