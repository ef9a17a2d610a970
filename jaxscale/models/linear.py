"""Linear layers whose weight gradients are float32 for any compute dtype.

A weight's gradient is a sum over all rows and tokens of a device. If each device rounded
its part to the activations' bfloat16, the mean over devices would be inexact: with few
rows per device the mean gradient of 8 devices differed from that of one by 5e-3
(tests/parallel/test_parity.py). Matrix units sum in float32 anyway, and the results are
kept in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.cluster.jax_internals import varying_axes
from jaxscale.models import float8

PRODUCT = "product"  # checkpoint name of the results of `linear`, for remat policies


def linear(
  x: jax.Array, kernel: jax.Array, dtype: Any = None, maxima: jax.Array | None = None
) -> jax.Array:
  """Multiply [..., in] @ [in, out], with gradients in the dtypes of x and of the kernel.

  The result has the checkpoint name `PRODUCT`.

  Args:
    x: inputs, [..., in].
    kernel: weights, [in, out], e.g. float32.
    dtype: dtype to which both are rounded, and dtype of the result; None means the dtype of x.
    maxima: maxima for the scales of a product in FP8 (`models.float8`); None means no FP8.

  Example:
    >>> linear(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3))).dtype
    dtype(bfloat16)
  """
  dtype_in = jnp.dtype(dtype or x.dtype)
  # The name is needed because remat policies do not see products inside a custom_vjp.
  return checkpoint_name(_product(dtype_in, dtype_in, x, kernel, maxima), PRODUCT)


def dense(x: jax.Array, p: Any, dtype: Any = None) -> jax.Array:
  """Apply `linear` with p["kernel"], and add p["bias"] if there is one.

  If p has the leaves of an adapter (`models.lora`), their product with x is added, too.
  """
  y = linear(x, p["kernel"], dtype, p.get(float8.MAXIMA))
  if "kernel_lora_a" in p:
    y = y + linear(linear(x, p["kernel_lora_a"], dtype), p["kernel_lora_b"], dtype)
  return shift(y, p["bias"]) if "bias" in p else y


def linear_sum(x: jax.Array, kernel: jax.Array, maxima: jax.Array | None = None) -> jax.Array:
  """Compute `linear` without rounding to the dtype of x, for a sum over devices."""
  wide = jnp.dtype(jnp.float32) if x.dtype.itemsize < 4 else x.dtype
  return _product(x.dtype, wide, x, kernel, maxima)


def _product(dtype, out, x, kernel, maxima):
  if maxima is None:
    return _linear(dtype, out, *alike(x, kernel))
  return float8.product(dtype, out, *alike(x, kernel), maxima)


def shift(x: jax.Array, bias: jax.Array) -> jax.Array:
  """Add a bias [width] in the dtype of x, with the bias's gradient in its own dtype."""
  return _shift(*alike(x, bias))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(dtype, out, x, kernel):
  x, kernel = x.astype(dtype), kernel.astype(dtype)
  return jnp.matmul(x, kernel, preferred_element_type=out)


def _linear_forward(dtype, out, x, kernel):
  # Empty arrays remember the dtypes of the gradients.
  types = jnp.zeros(0, x.dtype), jnp.zeros(0, kernel.dtype)
  return _linear(dtype, out, x, kernel), (x.astype(dtype), kernel, types)


def _linear_backward(dtype, out, kept, g):
  x, kernel, types = kept
  g = g.astype(dtype)
  rows = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
  by_kernel = jnp.einsum("ni,no->io", *rows, preferred_element_type=types[1].dtype)
  return jnp.matmul(g, kernel.astype(dtype).T, preferred_element_type=types[0].dtype), by_kernel


_linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def _shift(x, bias):
  return x + bias.astype(x.dtype)


def _shift_backward(bias, g):
  return g, g.reshape(-1, g.shape[-1]).astype(bias.dtype).sum(0)


_shift.defvjp(lambda x, bias: (_shift(x, bias), bias), _shift_backward)


def alike(*arrays: jax.Array) -> list[jax.Array]:
  """Cast arrays to vary over the same mesh axes, if there are any.

  JAX does this automatically in its own products. The derivative of the cast is the sum
  over devices that the gradient of a kernel needs.
  """
  axes = [varying_axes(jax.typeof(x)) for x in arrays]
  every = frozenset().union(*axes)
  missing = [(x, tuple(sorted(every - own))) for x, own in zip(arrays, axes, strict=True)]
  return [lax.pcast(x, more, to="varying") if more else x for x, more in missing]
