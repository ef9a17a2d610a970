"""Floating-point operations (FLOPs) of a model, counted in its jaxpr.

Matrix products and convolutions are counted, with two operations per multiply-add;
everything else is small. Training takes three times the operations of the forward pass:
the backward pass of a product has two products of the same size, for the gradients of its
inputs and of its weights (arXiv:2204.02311, appendix B, which defines model FLOPs
utilization, MFU, this way). As in published counts, recomputation (remat) is not counted,
and causal attention and the padding of convolutions are counted in full.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr

from jaxscale import models
from jaxscale.collectives.typed import jaxprs_in
from jaxscale.models.attention import attention
from jaxscale.models.stack import Ops, hidden_states

FORWARD_AND_BACKWARD = 3  # products in training per product of the forward pass


def training_flops(model: models.ModelFns | models.Stack, batch: Any) -> int:
  """Return the model FLOPs of a training step: forward and backward, no recomputation.

  Args:
    model: the model, as functions or as a stack of layers.
    batch: arrays or their shapes; the count is proportional to the number of rows.

  Example:
    >>> from jaxscale import models
    >>> module = models.MLPModule(hidden=(32,), num_classes=10)
    >>> mlp = models.functions(module, (8, 8, 1))
    >>> image = jax.ShapeDtypeStruct((1, 8, 8, 1), "uint8")
    >>> training_flops(mlp, {"image": image}) == 3 * 2 * (64 * 32 + 32 * 10)
    True
  """
  # On GPUs attention is one opaque call. The XLA implementation has countable products.
  ops = Ops(attend=functools.partial(attention, implementation="xla"))

  state = models.init_shapes(model.init)

  def forward(state: Any, batch: Any):
    if isinstance(model, models.Stack):
      h = hidden_states(model, state, batch, ops)
      return model.finish(model.head_of(state.get), h, batch, ops)
    return model.apply(*state, model.inputs(batch), False, None)

  return FORWARD_AND_BACKWARD * count_flops(forward, state, batch)


def count_flops(function: Callable[..., Any], *args: Any) -> int:
  """Count the FLOPs of a function's matrix products and convolutions without running it.

  The body of a scan counts once per iteration, the body of a `while` once, and a
  conditional counts as its most expensive branch.

  Args:
    function: a function that JAX can trace.
    args: the arguments, as arrays or shapes.

  Example:
    >>> count_flops(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 4)))
    48
  """
  return _of_jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def _of_jaxpr(jaxpr: Jaxpr) -> int:
  return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(equation: Any) -> int:
  name, params = equation.primitive.name, equation.params
  if name == "dot_general":
    return _of_product(equation)
  if name == "conv_general_dilated":
    return _of_convolution(equation)
  inside = [_of_jaxpr(jaxpr) for jaxpr in jaxprs_in(equation)]
  if name == "cond":
    return max(inside)
  times = params.get("length", 1) if name == "scan" else 1
  if name == "shard_map":  # the inner arrays are one device's part
    times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
  return times * sum(inside)


def _of_product(equation: Any) -> int:
  (contracted, _), _ = equation.params["dimension_numbers"]
  left, out = equation.invars[0].aval, equation.outvars[0].aval
  return 2 * out.size * math.prod(left.shape[dim] for dim in contracted)


def _of_convolution(equation: Any) -> int:
  params = equation.params
  numbers, kernel = params["dimension_numbers"], equation.invars[1].aval
  out = equation.outvars[0].aval
  options = [params[n] for n in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")]
  dims = zip(numbers.out_spec[2:], numbers.rhs_spec[2:], *options, strict=True)
  taps = math.prod(_taps(out.shape[o], kernel.shape[k], *rest) for o, k, *rest in dims)
  channels = math.prod(out.shape[dim] for dim in numbers.out_spec[:2])
  return 2 * channels * taps * kernel.shape[numbers.rhs_spec[1]]


def _taps(out: int, kernel: int, stride: int, pad: Any, holes: int, apart: int) -> int:
  """Count the products along a dim, without those with zeros between dilated inputs.

  Args:
    out: length of the output.
    kernel: length of the kernel.
    stride: stride of the kernel on the input.
    pad: padding before and after the input.
    holes: distance between input elements (`lhs_dilation`).
    apart: distance between kernel elements (`rhs_dilation`).
  """
  if holes == 1:
    return out * kernel
  at = (o * stride + k * apart - pad[0] for o in range(out) for k in range(kernel))
  return sum(position % holes == 0 for position in at)
