"""Sums over devices of encoded payloads, added in float32.

A reduce-scatter by `lax.all_to_all`, then an all-gather. With N devices, chunk d
of an array belongs to device d, C encodes and D decodes:

    device i sends chunk d as   C(x_i[d])                     all_to_all
    device d sums               y[d] = sum_i D(C(x_i[d]))     in float32
    device d sends to all       C(y[d]),  the result D(C(y))  all_gather

So a value is rounded twice whatever N is, not once a hop, and a device sends
2 M (1 - 1/N) payloads for M elements. Payloads are integers of the same width:
XLA on CPU widens collectives of bfloat16 to float32, never those of integers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import add_rows

# (x [rows, elements] float32, stage 0 or 1) -> integers [rows, payload]
Encode = Callable[[jax.Array, int], jax.Array]
Decode = Callable[[jax.Array], jax.Array]  # the inverse, but for the rounding


def coded_sum(
  x: jax.Array, axes: tuple[str, ...], encode: Encode, decode: Decode, chunk: int
) -> jax.Array:
  """The sum over devices of encoded chunks, as the module says.

  Args:
    x: float32 [elements], a device's own.
    axes: mesh axes to sum over.
    encode: (float32 [rows, chunk], stage) -> integers [rows, payload].
    decode: integers [rows, payload] -> float32 [rows, chunk].
    chunk: elements a device sums, at least elements / devices.

  Returns:
    float32 [elements], typed invariant.
  """
  num_devices = lax.axis_size(axes)
  rows = jnp.pad(x, (0, num_devices * chunk - x.size)).reshape(num_devices, chunk)
  received = lax.all_to_all(encode(rows, 0), axes, 0, 0)
  own = add_rows(decode(received))[None]
  gathered = lax.all_gather(encode(own, 1), axes, tiled=True, to="invarying")
  return decode(gathered).reshape(-1)[: x.size]
