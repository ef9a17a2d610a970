"""Convolutions that avoid slow cases of XLA's CPU backend.

With jax 0.10.2 a 3x3 convolution from 512 to 512 channels with 2 x 2 output pixels runs
at 1 GFLOP/s per core on CPU, and so does the input gradient of one with stride 2. As a
matrix product it runs at 34 to 46 GFLOP/s (`benchmarks/cpu_convolutions.py`). GPUs and
TPUs always use the convolution.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

_FEW_PIXELS = 9  # output pixels; from 4 x 4 on XLA's convolution is as fast or faster


def convolve(
  x: jax.Array, kernel: jax.Array, strides: Any, padding: Any, **options: Any
) -> jax.Array:
  """Compute `lax.conv_general_dilated`, on CPU as a matrix product if that is faster.

  Args:
    x: inputs, [rows, height, width, in].
    kernel: kernel, [height, width, in, out].
    strides: strides of the kernel on the input.
    padding: "SAME", "VALID" or pairs.
    options: further options of `lax.conv_general_dilated`.

  Returns:
    Outputs, [rows, height, width, out].

  Example:
    >>> x, kernel = jnp.ones((1, 2, 2, 8)), jnp.ones((3, 3, 8, 4))
    >>> convolve(x, kernel, (1, 1), "SAME").shape
    (1, 2, 2, 4)
  """
  options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")} | options
  whole = functools.partial(
    lax.conv_general_dilated, window_strides=strides, padding=padding, **options
  )
  if not _is_plain(x, options):
    return whole(x, kernel)
  if isinstance(padding, str):
    padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
  out = jax.eval_shape(whole, x, kernel).shape[1:3]
  if math.prod(out) > _FEW_PIXELS:
    return whole(x, kernel)
  given = {"strides": strides, "padding": padding, "out": out}
  product = functools.partial(_as_product, precision=options.get("precision"), **given)
  return lax.platform_dependent(x, kernel, cpu=product, default=whole)


# Flax's Conv, computed by `convolve`.
Conv = functools.partial(nn.Conv, conv_general_dilated=convolve)


def _is_plain(x: jax.Array, options: dict[str, Any]) -> bool:
  """Return whether a convolution is two-dimensional, without groups and dilation."""
  dilations = (options.get(f"{side}_dilation") or (1,) for side in ("lhs", "rhs"))
  is_dense = all(n == 1 for dilation in dilations for n in dilation)
  return x.ndim == 4 and is_dense and options.get("feature_group_count", 1) == 1


def _as_product(x, kernel, *, strides, padding, out, precision) -> jax.Array:
  """Compute a convolution as a product of the patches of output pixels and the kernel."""
  x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
  ends = [x[:, i:, j:] for i in range(kernel.shape[0]) for j in range(kernel.shape[1])]
  seen = [y[:, :: strides[0], :: strides[1]][:, : out[0], : out[1]] for y in ends]
  taps, kernel = jnp.concatenate(seen, axis=-1), kernel.reshape(-1, kernel.shape[-1])
  return jnp.matmul(taps, kernel, precision=precision)
