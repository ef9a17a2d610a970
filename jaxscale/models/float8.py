"""Products of layers in FP8, with scales from the maxima of earlier steps.

A product y = x w rounds x and w to e4m3 (4 bits of exponent, 3 of mantissa), and its backward
pass rounds the gradient g of y to e5m2, which has a larger range (arXiv:2209.05433, section 3):

    y = q(x) q(w)        d x = q(g) q(w)^T        d w = q(x)^T q(g)

where q(a) = round(a / s) s. The scale s of a tensor is the power of two by which the largest
magnitude of the last `HISTORY` steps fits the format. It is known before the tensor is
computed, so that rounding can be a part of its computation ("delayed scaling", as in NVIDIA's
Transformer Engine). Values beyond the format are clipped, and the next step's scale covers
them. With a power of two, scaling is exact, and the values q(a) are exact in bfloat16: XLA
computes

    dot(bfloat16(x8) * s_x, bfloat16(w8) * s_w)

by FP8 units where a device has them, and in bfloat16 with the same rounding elsewhere.

The magnitudes are model state, {STATE: {"q": float32 [layers, 3, HISTORY], ...}}, of x, w and g,
the newest first. Their derivative is, by definition, the history after the step, as the
magnitude of g is only known in the backward pass. Devices and micro-batches take the maximum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.cluster.jax_internals import varying_axes

STATE = "float8"  # key in the model state
MAXIMA = "kernel_maxima"  # name beside a kernel of its maxima of x, w and g, float32 [3]
# Steps; the length in the examples of Transformer Engine's documentation.
HISTORY = 16
_FORWARDS, _BACKWARDS = jnp.float8_e4m3fn, jnp.float8_e5m2


def init_state(layers: Any) -> Any:
  """Return the model state before the first step, in which all scales are 1.

  Args:
    layers: parameters of a stack's layers, with kernels [layers, in, out].
  """

  def zeros(p: Any):
    return jnp.zeros((len(p["kernel"]), 3, HISTORY), jnp.float32)

  return {STATE: {name: zeros(p) for name, p in layers.items() if "kernel" in p}}


def with_maxima(params: Any, model_state: Any) -> Any:
  """Return a stack's parameters with the maxima of its kernels, if the model state has them."""
  if STATE not in model_state:
    return params
  found = {name: {MAXIMA: _largest(x)} for name, x in model_state[STATE].items()}
  layers = {name: p | found.get(name, {}) for name, p in params["layers"].items()}
  return params | {"layers": layers}


@jax.custom_vjp
def _largest(history: jax.Array) -> jax.Array:
  return history.max(-1)


def _next_history(history: jax.Array, newest: jax.Array) -> tuple[jax.Array]:
  return (jnp.concatenate([newest[..., None], history[..., :-1]], axis=-1),)


_largest.defvjp(lambda history: (_largest(history), history), _next_history)


def value_and_grad(loss_fn: Any) -> Any:
  """Return `jax.value_and_grad(loss_fn, has_aux=True)` that also updates the histories.

  Args:
    loss_fn: (params, model_state, ...) -> (loss, (model_state, totals)).
  """

  def call(params: Any, model_state: Any, *rest: Any):
    if not isinstance(model_state, dict) or STATE not in model_state:
      return jax.value_and_grad(loss_fn, has_aux=True)(params, model_state, *rest)

    def loss_of(both: tuple[Any, Any]):
      return loss_fn(both[0], model_state | {STATE: both[1]}, *rest)

    value, (grads, histories) = jax.value_and_grad(loss_of, has_aux=True)(
      (params, model_state[STATE])
    )
    loss, (new_state, totals) = value
    return (loss, (new_state | {STATE: histories}, totals)), grads

  return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(dtype: Any, out: Any, x: jax.Array, kernel: jax.Array, maxima: jax.Array) -> jax.Array:
  """Multiply [..., in] @ [in, out] in FP8; its derivative by `maxima` is the new maxima.

  Args:
    dtype: dtype in which rounded values are multiplied, bfloat16.
    out: dtype of the result.
    x: inputs, [..., in], which vary over the same mesh axes as the kernel.
    kernel: weights, [in, out], e.g. float32.
    maxima: largest magnitudes of earlier steps of x, kernel and the gradient, float32 [3].

  Example:
    >>> x, kernel = jnp.full((2, 4), 0.3), jnp.ones((4, 3))
    >>> print(product(jnp.bfloat16, jnp.float32, x, kernel, jnp.ones(3))[0])  # 0.3 -> 0.3125
    [1.25 1.25 1.25]
  """
  return _forward(dtype, out, x, kernel, maxima)[0]


def _forward(dtype, out, x, kernel, maxima):
  x8, scale = _rounded(x, maxima[0], _FORWARDS)
  wide = values(x8, scale, dtype)
  y = jnp.matmul(wide, values(*rounded_kernel(kernel, maxima), dtype), preferred_element_type=out)
  found = jnp.stack([_magnitude(x), _magnitude(kernel)])
  # The kernel is kept, not its rounded form: if it was gathered, it will be gathered again.
  return y, (x8, scale, jnp.zeros(0, x.dtype), kernel, maxima, found)


def _backward(dtype, out, kept, g):
  x8, scale, like_x, kernel, maxima, found = kept
  wide = values(*_rounded(g, maxima[2], _BACKWARDS), dtype)
  rows = (a.reshape(-1, a.shape[-1]) for a in (values(x8, scale, dtype), wide))
  # On Hopper sums of FP8 products have about 14 bits, unless the highest precision is asked for
  # (arXiv:2412.19437, section 3.3.2). Transformer Engine asks for it in the backward pass, too.
  wider: Any = {"precision": lax.Precision.HIGHEST}
  by_kernel = jnp.einsum("ni,no->io", *rows, preferred_element_type=kernel.dtype, **wider)
  product = functools.partial(jnp.matmul, preferred_element_type=like_x.dtype, **wider)
  by_x = product(wide, values(*rounded_kernel(kernel, maxima), dtype).T)
  new = jnp.append(found, _magnitude(g))
  # Devices along `model` hold other columns of one matrix, with the same scale.
  more = tuple(sorted(varying_axes(jax.typeof(new)) - varying_axes(jax.typeof(maxima))))
  return by_x, by_kernel, lax.pmax(new, more) if more else new


product.defvjp(_forward, _backward)


def rounded_kernel(kernel: jax.Array, maxima: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return a kernel, or a part of it, in e4m3, and its scale, float32 []."""
  return _rounded(kernel, maxima[1], _FORWARDS)


def _rounded(x: jax.Array, largest: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """Return round(x / scale) and the scale, the power of two by which `largest` fits; 1 for 0."""
  limit = float(jnp.finfo(dtype).max)
  exponent = jnp.frexp(largest / limit)[1]  # largest / limit <= 2^exponent
  scale = jnp.where(largest > 0, jnp.ldexp(jnp.float32(1), exponent), 1)
  scaled = x.astype(jnp.float32) / scale
  return jnp.clip(scaled, -limit, limit).astype(dtype), scale


def values(x8: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
  """Return x8 * scale, in a form that XLA recognizes as an operand of FP8 products."""
  return x8.astype(dtype) * scale.astype(dtype)


def _magnitude(x: jax.Array) -> jax.Array:
  return jnp.abs(x).max().astype(jnp.float32)
