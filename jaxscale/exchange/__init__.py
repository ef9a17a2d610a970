"""The gradient exchange: the one place where gradients cross the network.

An exchange is a few pure functions. `init(params)` makes the state that
one device keeps (error feedback, say; nothing for the plain one) and
`exchange(grads, state)`, called on every device inside `jax.shard_map`, turns
the device's own gradients into their mean over all devices. `resize` carries the
state over to another number of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxscale.collectives import Plan, sum_tree
from jaxscale.exchange.resize import unchanged

Grads = Any  # a tree of arrays shaped like the parameters
ExchangeState = Any  # a tree of arrays, one device's


class Exchange(NamedTuple):
  """How gradients are averaged over the devices.

  Attributes:
    init: params -> one device's exchange state.
    exchange: (local grads, state) -> (mean grads, state), inside `shard_map`.
      The mean must be typed invariant over the mesh axes, as `lax.psum` and
      `lax.all_gather(..., to="invarying")` leave it.
    resize: (state with a leading dim of N devices, N') -> the same for N' devices,
      outside of `shard_map`, with what is pending of the mean gradient kept:
      1/N' sum r'_i = 1/N sum r_i. None: the state cannot be carried over, and a
      checkpoint is refused on another number of devices.
  """

  init: Callable[[Any], ExchangeState]
  exchange: Callable[[Grads, ExchangeState], tuple[Grads, ExchangeState]]
  resize: Callable[[ExchangeState, int], ExchangeState] | None = None


def plain(axes: tuple[str, ...]) -> Exchange:
  """The mean by `lax.psum`, in the gradients' own dtype.

  Args:
    axes: mesh axes to average over.

  Example:
    >>> exchange = plain(("replica", "data"))
    >>> exchange.init({"w": 0.0})
    ()
  """

  def init(params):
    del params  # keeps nothing between steps
    return ()

  def exchange(grads, state):
    num_devices = lax.axis_size(axes)
    return jax.tree.map(lambda g: lax.psum(g, axes) / num_devices, grads), state

  return Exchange(init, exchange, unchanged)


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

  def init(params):
    del params  # keeps nothing between steps
    return ()

  def exchange(grads, state):
    num_devices = lax.axis_size(by.axes)
    return jax.tree.map(lambda g: g / num_devices, sum_tree(grads, by)), state

  return Exchange(init, exchange, unchanged)
