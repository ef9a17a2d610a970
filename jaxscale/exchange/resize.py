"""Exchange states when a run goes on with another number of devices.

What an exchange did not send yet must arrive all the same. With r_i what device i
keeps of the gradients, it is late in the mean of N devices by 1/N sum_i r_i, so
carrying it over to N' devices has to keep

    1/N' sum_i r'_i = 1/N sum_i r_i

Every new device therefore takes the old ones' mean: the same for all, which no
order of the devices changes, and exact up to float32's rounding. What is the same
on all devices, a count of steps say, is copied.

States are *stacked* here, as in `TrainState.exchange_state`: a leading dim of one
entry a device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def unchanged(state: Any, num_devices: int) -> Any:
  """Of an exchange that keeps nothing: there is nothing to carry over."""
  del num_devices
  return state


def mean_for_all(state: Any, num_devices: int) -> Any:
  """Every new device gets the mean of the old ones: what is pending is kept.

  Sums are float32's or better. Under `jit` with the leading dim spread over
  devices each adds up its own entries and one all-reduce the rest; adding by
  halves (`collectives.add_rows`) would take five times the memory.

  Args:
    state: a tree of [N, ...].
    num_devices: N'.

  Returns:
    A tree of [N', ...], dtypes as they were.

  Example:
    >>> mean_for_all({"r": jnp.array([[1.0], [2.0], [6.0]])}, 2)
    {'r': Array([[3.],
           [3.]], dtype=float32)}
  """

  def mean(x):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return copies((jnp.sum(wide, axis=0) / len(x)).astype(x.dtype), num_devices)

  return jax.tree.map(mean, state)


def same_for_all(state: Any, num_devices: int) -> Any:
  """What is the same on all devices, for another number of them.

  Args:
    state: a tree of [N, ...], equal along the leading dim.
    num_devices: N'.

  Example:
    >>> same_for_all({"step": jnp.array([7, 7])}, 3)
    {'step': Array([7, 7, 7], dtype=int32)}
  """
  return jax.tree.map(lambda x: copies(x[0], num_devices), state)


def copies(x: jax.Array, num_devices: int) -> jax.Array:
  """[...] for every device: [num_devices, ...]."""
  return jnp.broadcast_to(x, (num_devices, *x.shape))
