"""Products with weights whose gradients are float32, whatever is computed in.

A weight's gradient is a sum over all rows and tokens of a device. Rounded to the
activations' bfloat16, each device's part loses what the parts do not have in common:
with few rows per device the mean gradient of 8 devices was 5e-3 off that of one
(tests/parallel/test_parity.py), before any network was used. The matrix units sum in
float32 anyway; here the sums are kept so.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.cluster.jax_internals import varying_axes

PRODUCT = "product"  # the name, for remat policies, of what `linear` gives


def linear(x: jax.Array, kernel: jax.Array, dtype: Any = None) -> jax.Array:
  """[..., in] @ [in, out], named `PRODUCT`; gradients in x's and the kernel's dtypes.

  Args:
    x: [..., in].
    kernel: [in, out], float32 say.
    dtype: that both are rounded to, and of the result; None: that of x.

  Example:
    >>> linear(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3))).dtype
    dtype(bfloat16)
  """
  given = jnp.dtype(dtype or x.dtype)
  # A policy sees no product in a function that has its own derivative.
  return checkpoint_name(_linear(given, given, *alike(x, kernel)), PRODUCT)


def dense(x: jax.Array, p: Any, dtype: Any = None) -> jax.Array:
  """`linear` by p["kernel"], and p["bias"] added, if there is one."""
  y = linear(x, p["kernel"], dtype)
  return shift(y, p["bias"]) if "bias" in p else y


def linear_sum(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """`linear` before it is rounded to the dtype of x: what a sum over devices adds."""
  wide = jnp.dtype(jnp.float32) if x.dtype.itemsize < 4 else x.dtype
  return _linear(x.dtype, wide, *alike(x, kernel))


def shift(x: jax.Array, bias: jax.Array) -> jax.Array:
  """[..., width] + [width], in the dtype of x; the bias's gradient in its own."""
  return _shift(*alike(x, bias))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(dtype, out, x, kernel):
  x, kernel = x.astype(dtype), kernel.astype(dtype)
  return jnp.matmul(x, kernel, preferred_element_type=out)


def _linear_forward(dtype, out, x, kernel):
  # Empty arrays keep the dtypes of what the gradients are of.
  types = jnp.zeros(0, x.dtype), jnp.zeros(0, kernel.dtype)
  return _linear(dtype, out, x, kernel), (x.astype(dtype), kernel, types)


def _linear_backward(dtype, out, kept, g):
  x, kernel, types = kept
  g = g.astype(dtype)
  rows = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
  by_kernel = jnp.einsum("ni,no->io", *rows, preferred_element_type=types[1].dtype)
  transposed = kernel.astype(dtype).T
  return jnp.matmul(g, transposed, preferred_element_type=types[0].dtype), by_kernel


_linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def _shift(x, bias):
  return x + bias.astype(x.dtype)


def _shift_backward(bias, g):
  return g, g.reshape(-1, g.shape[-1]).astype(bias.dtype).sum(0)


_shift.defvjp(lambda x, bias: (_shift(x, bias), bias), _shift_backward)


def alike(*arrays: jax.Array) -> list[jax.Array]:
  """Arrays that are typed varying over the same mesh axes, where there are any.

  JAX does so by itself in its own products; the derivative of the cast is the sum
  over devices that a kernel's columns on several of them need.
  """
  axes = [varying_axes(jax.typeof(x)) for x in arrays]
  every = frozenset().union(*axes)
  missing = [(x, tuple(sorted(every - own))) for x, own in zip(arrays, axes, strict=True)]
  return [lax.pcast(x, more, to="varying") if more else x for x, more in missing]
