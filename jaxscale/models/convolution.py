"""Convolutions that avoid slow cases of XLA's CPU backend.

On one core with jax 0.10.2
- a 3x3 convolution from 512 to 512 channels with 2 x 2 output pixels runs at 1 GFLOP/s,
  and so does the input gradient of one with stride 2; as a matrix product at 34 to 46
  (`benchmarks/cpu_convolutions.py`);
- 3x3x3 convolutions, from 4^3 pixels with 64 channels to 32^3 with 1 or 16, run at 1 to 70
  GFLOP/s; as ones in 2-D with three times the channels at 15 to 170, 1.7 to 18 times that;
- a 7x7 depthwise convolution, with 56^2 pixels and 96 channels to 7^2 and 768, runs at 2
  GFLOP/s, and its kernel's gradient at 0.1 to 1.3; as sums of shifted inputs at 8 to 38 and
  3 to 33.

GPUs and TPUs always use the convolution.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.linear import PRODUCT, alike
from jaxscale.models.stack import at_least_float32

_FEW_PIXELS = 9  # output pixels; from 4 x 4 on XLA's convolution is as fast or faster
# The most output channels of a convolution that XLA computes on one thread of a CPU. From jax
# 0.11 on it uses all threads. In four parts, a step of ResNet-18 on two cores takes 72 instead
# of 77 ms, and on one core 107 instead of 106; in two parts 79, in eight 75.
_ONE_THREAD, _PARTS = 64 if jax.__version_info__ < (0, 11) else 0, 4
_MOST_TAPS = 121  # of a depthwise kernel; each one is compiled


def convolve(
  x: jax.Array, kernel: jax.Array, strides: Any, padding: Any, **options: Any
) -> jax.Array:
  """Compute `lax.conv_general_dilated`, on CPU by products or sums if that is faster.

  Args:
    x: inputs, [rows, (depth,) height, width, in].
    kernel: kernel, [(depth,) height, width, in, out].
    strides: strides of the kernel on the input.
    padding: "SAME", "VALID" or pairs.
    options: further options of `lax.conv_general_dilated`.

  Returns:
    Outputs, [rows, (depth,) height, width, out].

  Example:
    >>> x, kernel = jnp.ones((1, 2, 2, 8)), jnp.ones((3, 3, 8, 4))
    >>> convolve(x, kernel, (1, 1), "SAME").shape
    (1, 2, 2, 4)
  """
  options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")} | options
  whole = functools.partial(
    lax.conv_general_dilated, window_strides=strides, padding=padding, **options
  )
  groups = options.get("feature_group_count", 1)
  if not _is_plain(x, options) or groups not in (1, kernel.shape[-1]):
    return whole(x, kernel)
  if isinstance(padding, str):
    padding = lax.padtype_to_pads(x.shape[1:-1], kernel.shape[:-2], strides, padding)
  given = {"strides": strides, "padding": padding, "precision": options.get("precision")}
  if groups > 1:
    few = math.prod(kernel.shape[:2]) <= _MOST_TAPS
    if x.ndim != 4 or (*strides, kernel.shape[2]) != (1, 1, 1) or not few:
      return whole(x, kernel)
    cpu = functools.partial(_depthwise_of, padding=padding)
  elif x.ndim == 5:
    cpu = functools.partial(_by_planes, **given)
  else:
    out = jax.eval_shape(whole, x, kernel).shape[1:3]
    cpu = functools.partial(_as_product, out=out, **given)
    if math.prod(out) > _FEW_PIXELS:
      if kernel.shape[-1] > _ONE_THREAD or len(x) < _PARTS:
        return whole(x, kernel)
      cpu = functools.partial(_in_parts, whole)
  return lax.platform_dependent(*alike(x, kernel), cpu=cpu, default=whole)


def _product(*arrays: Any, **options: Any) -> jax.Array:
  return checkpoint_name(convolve(*arrays, **options), PRODUCT)


# Flax's Conv, computed by `convolve`. The result has the checkpoint name `PRODUCT`.
Conv = functools.partial(nn.Conv, conv_general_dilated=_product)


def _is_plain(x: jax.Array, options: dict[str, Any]) -> bool:
  """Return whether a convolution has two or three dimensions, without dilation."""
  dilations = (options.get(f"{side}_dilation") or (1,) for side in ("lhs", "rhs"))
  return x.ndim in (4, 5) and all(n == 1 for dilation in dilations for n in dilation)


def _in_parts(whole: Callable[..., jax.Array], x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Compute a convolution for each quarter of the rows, so that XLA can use several threads."""
  ends = [len(x) * i // _PARTS for i in range(1, _PARTS)]
  return jnp.concatenate([whole(part, kernel) for part in jnp.split(x, ends)])


def _as_product(x, kernel, *, strides, padding, precision, out) -> jax.Array:
  """Compute a convolution as a product of the patches of output pixels and the kernel."""
  x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
  ends = [x[:, i:, j:] for i in range(kernel.shape[0]) for j in range(kernel.shape[1])]
  seen = [y[:, :: strides[0], :: strides[1]][:, : out[0], : out[1]] for y in ends]
  taps, kernel = jnp.concatenate(seen, axis=-1), kernel.reshape(-1, kernel.shape[-1])
  return jnp.matmul(taps, kernel, precision=precision)


def _by_planes(x, kernel, *, strides, padding, precision) -> jax.Array:
  """Compute a convolution in 3-D as one in 2-D, with the taps along the depth as channels."""
  x = jnp.pad(x, ((0, 0), padding[0], (0, 0), (0, 0), (0, 0)))
  taps, height, width = kernel.shape[:3]
  depth = (x.shape[1] - taps) // strides[0] + 1
  ends = [i + strides[0] * (depth - 1) + 1 for i in range(taps)]
  seen = [lax.slice_in_dim(x, i, end, strides[0], axis=1) for i, end in enumerate(ends)]
  planes = jnp.concatenate(seen, axis=-1).reshape(-1, *x.shape[2:4], taps * x.shape[4])
  kernel = jnp.moveaxis(kernel, 0, 2).reshape(height, width, -1, kernel.shape[-1])
  y = convolve(planes, kernel, strides[1:], padding[1:], precision=precision)
  return y.reshape(len(x), depth, *y.shape[1:])


def _depthwise_of(x: jax.Array, kernel: jax.Array, *, padding: Any) -> jax.Array:
  return _depthwise(jnp.pad(x, ((0, 0), *padding, (0, 0))), kernel)


@jax.custom_vjp
def _depthwise(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Compute a depthwise convolution of padded inputs as a sum of shifted inputs.

  Args:
    x: padded inputs, [rows, height + kernel's height - 1, width + …, channels].
    kernel: kernel, [height, width, 1, channels].

  Returns:
    Outputs, [rows, height, width, channels], which are summed in float32.
  """
  size = kernel.shape[:2]
  height, width = (n - k + 1 for n, k in zip(x.shape[1:3], size, strict=True))
  wide, taps = at_least_float32(x), at_least_float32(kernel)[:, :, 0]
  shifts = itertools.product(*map(range, size))
  parts = (wide[:, i : i + height, j : j + width] * taps[i, j] for i, j in shifts)
  return functools.reduce(jnp.add, parts).astype(x.dtype)


def _depthwise_backward(kept, g):
  x, kernel = kept
  around = [(n - 1, n - 1) for n in kernel.shape[:2]]
  by_x = _depthwise(jnp.pad(g, ((0, 0), *around, (0, 0))), kernel[::-1, ::-1])
  by_kernel = _by_kernel(at_least_float32(x), at_least_float32(g), *kernel.shape[:2])
  return by_x, by_kernel.astype(kernel.dtype)


_depthwise.defvjp(lambda x, kernel: (_depthwise(x, kernel), (x, kernel)), _depthwise_backward)


def _by_kernel(x: jax.Array, g: jax.Array, rows: int, columns: int) -> jax.Array:
  """Compute the gradient by the kernel, pixel by pixel of the outputs' gradient.

  XLA's sum over all pixels for one entry of the kernel is a hundred times slower.
  """
  examples, height, width, channels = g.shape

  def add(pixel: Any, total: jax.Array):
    corner = 0, pixel // width, pixel % width, 0
    seen = lax.dynamic_slice(x, corner, (examples, rows, columns, channels))
    return total + seen * lax.dynamic_slice(g, corner, (examples, 1, 1, channels))

  total = jnp.zeros((examples, rows, columns, channels), g.dtype)
  total = lax.fori_loop(0, height * width, add, alike(total, g)[0])
  return total.sum(0)[:, :, None]
