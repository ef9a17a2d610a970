"""Interface of exchanges, plain exchanges, and helpers for exchanges with a state.

Gradients that an exchange has not sent yet must not be lost when the number of devices
changes. If device i keeps the residual r_i, the mean gradient of N devices lacks
1/N sum_i r_i, so resizing the state to N' devices must preserve

    1/N' sum_i r'_i = 1/N sum_i r_i

Every new device therefore gets the mean of the old residuals. It does not depend on the
order of the devices and is exact up to float32 rounding. Values that are the same on all
devices, such as a step count, are copied. `resize` works on *stacked* states, as in
`TrainState.exchange_state`: arrays with a leading dim of one entry per device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import Plan, sum_tree

Grads = Any  # a tree of arrays shaped like the parameters
ExchangeState = Any  # a tree of one device's arrays
Axes = tuple[str, ...]  # names of mesh axes


class Exchange(NamedTuple):
  """A method to average gradients over devices.

  Attributes:
    init: params -> exchange state of one device.
    exchange: (local grads, state) -> (mean grads, state), called inside `shard_map`.
      The mean must be typed invariant over the mesh axes, like the results of `lax.psum`
      and `lax.all_gather(..., to="invarying")`.
    resize: (state with a leading dim of N devices, N') -> the state for N' devices,
      called outside of `shard_map`. It must preserve the pending mean gradient:
      1/N' sum r'_i = 1/N sum r_i. None means that the state cannot be resized, and a run cannot
      resume on a different number of devices.

  Example:
    >>> def in_bfloat16(axes):  # the rounding errors are sent in the next step
    ...   def exchange(grads, residuals):
    ...     pending = jax.tree.map(jnp.add, grads, residuals)
    ...     sent = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), pending)
    ...     mean = jax.tree.map(lambda x: lax.psum(x, axes) / lax.axis_size(axes), sent)
    ...     return mean, jax.tree.map(jnp.subtract, pending, sent)
    ...   return Exchange(zero_residuals, exchange, resize=mean_for_all)
    >>> in_bfloat16(("data",)).init({"bias": jnp.ones(2)})
    {'bias': Array([0., 0.], dtype=float32)}
  """

  init: Callable[[Any], ExchangeState]
  exchange: Callable[[Grads, ExchangeState], tuple[Grads, ExchangeState]]
  resize: Callable[[ExchangeState, int], ExchangeState] | None = None


def stateless(mean: Callable[[Grads], Grads]) -> Exchange:
  """Return an exchange without a state.

  Args:
    mean: local grads -> mean grads, typed as for `Exchange.exchange`.
  """
  return Exchange(lambda _: (), lambda g, own: (mean(g), own), lambda own, _: own)


def plain(axes: tuple[str, ...]) -> Exchange:
  """Return the exchange that averages by `lax.psum`, in the dtype of the gradients.

  Example:
    >>> exchange = plain(("replica", "data"))
    >>> exchange.init({"w": 0.0})
    ()
  """

  def mean(g: jax.Array):
    return lax.psum(g, axes) / lax.axis_size(axes)

  return stateless(lambda grads: jax.tree.map(mean, grads))


def planned(by: Plan) -> Exchange:
  """Return an exchange by a chosen all-reduce, with one vector per gradient dtype.

  Args:
    by: the all-reduce, a result of `collectives.plan` for the axes of the mesh.

  Example:
    >>> from jaxscale.collectives import plan
    >>> by = plan({"replica": 2, "data": 4}, 4e6, "ring")
    >>> planned(by).init({"w": 0.0})
    ()
  """

  def mean(grads: Grads):
    return jax.tree.map(lambda g: g / lax.axis_size(by.axes), sum_tree(grads, by))

  return stateless(mean)


def zero_residuals(params: Any) -> Any:
  """Return residuals of error feedback before the first step: float32 zeros.

  A residual r is the part of the gradients that was not sent. With x = g + r and a
  compressor C,

      sent = C(x),   r' = x - sent     so that   sum_t sent_t + r_T = sum_t g_t

  Gradients are delayed, but never lost (arXiv:1809.07599, arXiv:1901.09847).
  """
  return jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)


def mean_for_all(state: Any, num_devices: int) -> Any:
  """Give every new device the mean of the old devices' states.

  This preserves pending gradients. Sums have at least float32. Under `jit`, with the
  leading dim sharded over devices, each device adds its own entries and an all-reduce
  adds the rest. Pairwise addition (`collectives.add_rows`) would take five times the
  memory.

  Args:
    state: a tree of arrays [N, ...].
    num_devices: the new number of devices, N'.

  Returns:
    A tree of arrays [N', ...] with unchanged dtypes.

  Example:
    >>> mean_for_all({"r": jnp.array([[1.0], [2.0], [6.0]])}, 2)
    {'r': Array([[3.],
           [3.]], dtype=float32)}
  """

  def mean(x: jax.Array):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    average = (jnp.sum(wide, axis=0) / len(x)).astype(x.dtype)
    return jnp.broadcast_to(average, (num_devices, *average.shape))

  return jax.tree.map(mean, state)


def same_for_all(state: Any, num_devices: int) -> Any:
  """Resize a tree of arrays [N, ...] that are equal along the leading dim to [N', ...].

  Example:
    >>> same_for_all({"step": jnp.array([7, 7])}, 3)
    {'step': Array([7, 7, 7], dtype=int32)}
  """
  return jax.tree.map(lambda x: jnp.broadcast_to(x[0], (num_devices, *x.shape[1:])), state)
