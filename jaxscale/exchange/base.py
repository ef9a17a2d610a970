"""The interface of exchanges, the plain ones, and helpers for those with a state.

What an exchange did not send yet must arrive all the same. With r_i what device i
keeps of the gradients, it is late in the mean of N devices by 1/N sum_i r_i, so
resizing the state to N' devices has to keep

    1/N' sum_i r'_i = 1/N sum_i r_i

Every new device therefore takes the old ones' mean: the same for all, which no
order of the devices changes, and exact up to float32's rounding. What is the same
on all devices, a count of steps say, is copied. `resize` works on *stacked* states,
as in `TrainState.exchange_state`: a leading dim of one entry for each device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import Plan, sum_tree
from jaxscale.errors import ConfigError

Grads = Any  # a tree of arrays shaped like the parameters
ExchangeState = Any  # a tree of arrays, one device's
Axes = tuple[str, ...]  # names of mesh axes


class Exchange(NamedTuple):
  """A way to average gradients over the devices.

  Attributes:
    init: params -> one device's exchange state.
    exchange: (local grads, state) -> (mean grads, state), inside `shard_map`.
      The mean must be typed invariant over the mesh axes, as `lax.psum` and
      `lax.all_gather(..., to="invarying")` leave it.
    resize: (state with a leading dim of N devices, N') -> the same for N' devices,
      outside of `shard_map`, with what is pending of the mean gradient kept:
      1/N' sum r'_i = 1/N sum r_i. None: the state cannot be resized, and a
      checkpoint is refused on another number of devices.
  """

  init: Callable[[Any], ExchangeState]
  exchange: Callable[[Grads, ExchangeState], tuple[Grads, ExchangeState]]
  resize: Callable[[ExchangeState, int], ExchangeState] | None = None


def stateless(mean: Callable[[Grads], Grads]) -> Exchange:
  """An exchange that keeps nothing between steps.

  Args:
    mean: local grads -> mean grads, as of `Exchange.exchange`.
  """
  return Exchange(lambda _: (), lambda g, own: (mean(g), own), lambda own, _: own)


def plain(axes: tuple[str, ...]) -> Exchange:
  """The mean over mesh axes by `lax.psum`, in the gradients' own dtype.

  Example:
    >>> exchange = plain(("replica", "data"))
    >>> exchange.init({"w": 0.0})
    ()
  """

  def mean(g: jax.Array):
    return lax.psum(g, axes) / lax.axis_size(axes)

  return stateless(lambda grads: jax.tree.map(mean, grads))


def planned(by: Plan) -> Exchange:
  """The mean by a chosen all-reduce, all gradients of a dtype as one vector.

  Args:
    by: of `collectives.plan`, for the axes of the mesh.

  Example:
    >>> from jaxscale.collectives import plan
    >>> by = plan({"replica": 2, "data": 4}, 4e6, "ring")
    >>> planned(by).init({"w": 0.0})
    ()
  """

  def mean(grads: Grads):
    num_devices = lax.axis_size(by.axes)
    return jax.tree.map(lambda g: g / num_devices, sum_tree(grads, by))

  return stateless(mean)


def zero_residuals(params: Any) -> Any:
  """Error feedback before the first step: float32, shaped like the parameters.

  A residual r is what was not sent. Of x = g + r is sent

      sent = C(x),   r' = x - sent     so that   sum_t sent_t + r_T = sum_t g_t

  Nothing of a gradient is lost, it is late (arXiv:1809.07599, arXiv:1901.09847).
  """
  return jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)


def check_devices(name: str, axes: tuple[str, ...], num_devices: int) -> None:
  """Refuse an exchange made for another number of devices.

  Raises:
    ConfigError: the axes have another size.
  """
  if (found := lax.axis_size(axes)) != num_devices:
    why = f"the axes {', '.join(axes)} have {found} devices, give mesh.size"
    raise ConfigError(f"{name}.num_devices={num_devices}: {why}")


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

  def mean(x: jax.Array):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return copies((jnp.sum(wide, axis=0) / len(x)).astype(x.dtype), num_devices)

  return jax.tree.map(mean, state)


def same_for_all(state: Any, num_devices: int) -> Any:
  """A tree of [N, ...] that is equal along the leading dim, as [N', ...].

  Example:
    >>> same_for_all({"step": jnp.array([7, 7])}, 3)
    {'step': Array([7, 7, 7], dtype=int32)}
  """
  return jax.tree.map(lambda x: copies(x[0], num_devices), state)


def copies(x: jax.Array, num_devices: int) -> jax.Array:
  """[...] for every device: [num_devices, ...]."""
  return jnp.broadcast_to(x, (num_devices, *x.shape))
