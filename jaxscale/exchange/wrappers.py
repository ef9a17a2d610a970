"""Exchanges that wrap another: delayed by a step, plain at first, or left out.

They can be nested, as in `delayed(warm_start(one_bit(...), ...))`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import same_everywhere
from jaxscale.exchange.base import Exchange, mean_for_all, plain, same_for_all


def delayed(inner: Exchange) -> Exchange:
  """Return an exchange delayed by one step, so that it can overlap with computation.

      result_t = mean_i g_i[t - 1],   result_0 = 0

  A device keeps its gradients of one step and sends them in the next one. The sent values
  then do not depend on that step's computation, so that a compiler with asynchronous
  collectives can run the exchange during the forward and backward pass. The gradients of
  the last step remain in the state.

  Args:
    inner: the exchange that averages the gradients.

  Returns:
    An exchange. Its state has "grads", the device's gradients of the previous step, and
    "inner", the state of `inner`.

  Example:
    >>> exchange = delayed(plain(("replica", "data")))
    >>> exchange.init({"w": jnp.ones(2)})
    {'grads': {'w': Array([0., 0.], dtype=float32)}, 'inner': ()}

  Source: CNTK's `bufferedAsyncGradientAggregation`.
  """

  def init(params: Any):
    return {"grads": jax.tree.map(jnp.zeros_like, params), "inner": inner.init(params)}

  def exchange(grads: Any, state: Any):
    means, inner_state = inner.exchange(state["grads"], state["inner"])
    return means, {"grads": grads, "inner": inner_state}

  # With an exact inner exchange, resizing does not change the next result.
  return Exchange(init, exchange, _resize_with(inner, "grads", mean_for_all))


def warm_start(inner: Exchange, axes: tuple[str, ...], *, steps: int) -> Exchange:
  """Return an exchange that averages by `plain` in the first steps.

      result_t = mean_i g_i[t] for t < steps, then the result of inner

  Use it for lossy exchanges, since gradients change fast at first. The state of `inner`
  does not change during these steps. Both exchanges are in the compiled program. The
  step count is reduced by a maximum over devices (4 bytes), so that all take the same branch.

  Args:
    inner: the exchange after the first steps.
    axes: mesh axes to average over.
    steps: number of first steps.

  Returns:
    An exchange. Its state has "step", int32 [], and "inner", the state of `inner`.

  Example:
    >>> exchange = warm_start(plain(("replica", "data")), ("data",), steps=100)
    >>> exchange.init({"w": jnp.ones(2)})
    {'step': Array(0, dtype=int32), 'inner': ()}

  Source: CNTK's `distributed_after`, the number of examples before it quantises.
  """

  def init(params: Any):
    return {"step": jnp.zeros((), jnp.int32), "inner": inner.init(params)}

  def exchange(grads: Any, state: Any):
    def early(inner_state: Any):
      return plain(axes).exchange(grads, ())[0], inner_state

    late = functools.partial(inner.exchange, grads)
    step = lax.pmax(state["step"], axes)
    means, inner_state = lax.cond(step < steps, early, late, state["inner"])
    return means, {"step": state["step"] + 1, "inner": inner_state}

  return Exchange(init, exchange, _resize_with(inner, "step", same_for_all))


def _resize_with(inner: Exchange, key: str, resize_key: Any) -> Any:
  """Return `resize` for a state {key, "inner"}; None if `inner` cannot be resized."""
  if not (resize := inner.resize):
    return None
  return lambda state, num_devices: {
    key: resize_key(state[key], num_devices),
    "inner": resize(state["inner"], num_devices),
  }


def past_warm_start(state: Any) -> Any:
  """Return an exchange's state after the end of all its warm starts.

  Args:
    state: the state of a device, or a stacked state.

  Example:
    >>> exchange = warm_start(plain(("data",)), ("data",), steps=100)
    >>> int(past_warm_start(exchange.init({"w": jnp.ones(2)}))["step"]) > 100
    True
  """

  def is_counted(node: Any):
    return isinstance(node, dict) and node.keys() == {"step", "inner"}

  def past(node: Any):
    # 2^30 is far beyond any warm start and far from int32's overflow.
    return node | {"step": node["step"] * 0 + 2**30} if is_counted(node) else node

  return jax.tree.map(past, state, is_leaf=is_counted)


def silent(inner: Exchange, axes: tuple[str, ...]) -> Exchange:
  """Return an exchange that sends nothing, for timing only.

      result_i = g_i

  Replicas diverge with the first step, so never train with it. Such a step uses the
  network only for sums of metrics and means of the model state (BatchNorm statistics).
  The state is that of `inner` and does not change, so that one state fits both steps.

  Args:
    inner: the exchange that is left out.
    axes: mesh axes over which `inner` averages.
  """

  def exchange(grads: Any, state: Any):
    return jax.tree.map(lambda g: same_everywhere(g, axes), grads), state

  return Exchange(inner.init, exchange)
