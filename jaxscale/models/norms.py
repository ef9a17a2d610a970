"""RMSNorm and LayerNorm, with a derivative that stores little.

With y = (x - mean) r * scale, r = 1 / sqrt(var + eps), x' = (x - mean) r and g the gradient of
y, the derivatives are

    d x = r (g scale - mean(g scale) - x' mean(g scale x'))      d scale = sum g x'

where RMSNorm has no means of x and of g scale. x in its own dtype, and the mean and r of each
row, are enough for them. JAX's derivative would store six float32 arrays of the size of x.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.models.linear import alike
from jaxscale.models.stack import at_least_float32


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
  """RMSNorm (arXiv:1910.07467, eq. 4): x / sqrt(mean(x^2) + eps) * scale.

  Args:
    x: inputs, [..., width].
    scale: scale, float32 [width].
    eps: term added to the mean square.

  Returns:
    Normalised values, float32 [..., width].

  Example:
    >>> print(rms_norm(jnp.array([3.0, 4.0]), jnp.ones(2), eps=0.0))
    [0.84852815 1.1313709 ]
  """
  return _norm(False, eps, *alike(x, scale))


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, *, eps: float) -> jax.Array:
  """LayerNorm (arXiv:1607.06450): (x - mean) / sqrt(var + eps) * scale + bias.

  Args:
    x: inputs, [..., width].
    scale: scale, float32 [width].
    bias: bias, float32 [width].
    eps: term added to the variance.

  Returns:
    Normalised values, float32 [..., width].
  """
  y: Any = _norm(True, eps, *alike(x, scale))
  return y + bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(has_mean, eps, x, scale):
  return _forward(has_mean, eps, x, scale)[0]


def _forward(has_mean, eps, x, scale):
  wide, mean = at_least_float32(x), None
  if has_mean:
    mean = wide.mean(axis=-1, keepdims=True)
    wide = wide - mean
  r = lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + eps)
  return wide * r * scale, (x, mean, r, scale)


def _backward(has_mean, eps, kept, g):
  x, mean, r, scale = kept
  wide = at_least_float32(x)
  unit = (wide if mean is None else wide - mean) * r
  scaled = g * scale
  slope = scaled - unit * (scaled * unit).mean(axis=-1, keepdims=True)
  if has_mean:
    slope = slope - scaled.mean(axis=-1, keepdims=True)
  by_scale = (g * unit).reshape(-1, x.shape[-1]).sum(0)
  return (slope * r).astype(x.dtype), by_scale.astype(scale.dtype)


_norm.defvjp(_forward, _backward)
