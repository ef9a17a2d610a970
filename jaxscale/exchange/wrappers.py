"""Exchanges made of others: one step late, plain at first, or left out.

They wrap any exchange, so `delayed(warm_start(one_bit(...), ...))` is one too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import same_everywhere
from jaxscale.errors import ConfigError
from jaxscale.exchange.base import Exchange, mean_for_all, plain, same_for_all


def delayed(inner: Exchange) -> Exchange:
  """The mean of the step before, so that its exchange can hide behind this step.

      result_t = mean_i g_i[t - 1],   result_0 = 0

  Two buffers: a device keeps its own gradients of one step and sends them in the
  next. Nothing that is sent then depends on what that step computes, so a compiler
  with asynchronous collectives may run the exchange while forward and backward run.
  The last step's gradients stay in the state.

  Args:
    inner: how the gradients are averaged.

  Returns:
    State: "grads", a device's own of the step before; "inner", the state of `inner`.

  Example:
    >>> exchange = delayed(plain(("replica", "data")))
    >>> exchange.init({"w": jnp.ones(2)})
    {'grads': {'w': Array([0., 0.], dtype=float32)}, 'inner': ()}

  Source: CNTK's `bufferedAsyncGradientAggregation`.
  """

  def init(params: Any):
    return {"grads": jax.tree.map(jnp.zeros_like, params), "inner": inner.init(params)}

  def exchange(grads: Any, state: Any):
    means, own = inner.exchange(state["grads"], state["inner"])
    return means, {"grads": grads, "inner": own}

  # With an exact inner exchange, the next result is what it would have been.
  return Exchange(init, exchange, _resize_with(inner, "grads", mean_for_all))


def warm_start(
  inner: Exchange, axes: tuple[str, ...], *, steps: int, first: Exchange | None = None
) -> Exchange:
  """Another exchange for the first steps, while gradients still change fast.

      result_t = mean_i g_i[t] for t < steps, then inner's

  The state of `inner` waits meanwhile. Both are in the compiled program, and a
  maximum over devices of the step counted in the state (4 bytes) lets all of them
  take the same branch.

  Args:
    inner: the exchange that follows.
    axes: mesh axes to average over.
    steps: how many are exchanged otherwise; for a number of examples, that number
      divided by the batch size. 0: `inner` itself is returned.
    first: how they are exchanged, without state; None: `plain`.

  Returns:
    State: "step", int32 []; "inner", the state of `inner`.

  Raises:
    ConfigError: a negative number of steps, or `first` keeps a state.

  Example:
    >>> exchange = warm_start(plain(("replica", "data")), ("data",), steps=100)
    >>> exchange.init({"w": jnp.ones(2)})
    {'step': Array(0, dtype=int32), 'inner': ()}

  Source: CNTK's `distributed_after`, the examples before it quantises.
  """
  if steps < 0:
    raise ConfigError(f"warm_start.steps={steps}: give the first steps, >= 0")
  if steps == 0:
    return inner
  before = first or plain(axes)

  def init(params: Any):
    if jax.tree.leaves(before.init(params)):
      raise ConfigError("warm_start.first: keeps a state, give one without, as plain")
    return {"step": jnp.zeros((), jnp.int32), "inner": inner.init(params)}

  def exchange(grads: Any, state: Any):
    def early(own: Any):
      return before.exchange(grads, ())[0], own

    late = functools.partial(inner.exchange, grads)
    step = lax.pmax(state["step"], axes)
    means, own = lax.cond(step < steps, early, late, state["inner"])
    return means, {"step": state["step"] + 1, "inner": own}

  return Exchange(init, exchange, _resize_with(inner, "step", same_for_all))


def _resize_with(inner: Exchange, key: str, own: Any) -> Any:
  """`resize` of a state {key, "inner"}; None where the inner one has none."""
  if not (resize := inner.resize):
    return None
  return lambda state, num_devices: {
    key: own(state[key], num_devices),
    "inner": resize(state["inner"], num_devices),
  }


def past_warm_start(state: Any) -> Any:
  """An exchange's state, every warm start in it over; other states as they are.

  Args:
    state: a device's, or stacked.

  Example:
    >>> exchange = warm_start(plain(("data",)), ("data",), steps=100)
    >>> int(past_warm_start(exchange.init({"w": jnp.ones(2)}))["step"]) > 100
    True
  """

  def is_counted(node: Any):
    return isinstance(node, dict) and node.keys() == {"step", "inner"}

  def past(node: Any):
    # Half of what an int32 counts: far past, and far from the end.
    return node | {"step": node["step"] * 0 + 2**30} if is_counted(node) else node

  return jax.tree.map(past, state, is_leaf=is_counted)


def silent(inner: Exchange, axes: tuple[str, ...]) -> Exchange:
  """Each device's own gradients in place of their mean; never to train with.

      result_i = g_i

  The replicas part with the first step: this is for timing. What is left of the
  network in such a step is sums of metrics and means of the model state
  (BatchNorm's statistics). The state is that of `inner`, untouched, so that one
  state fits both steps.

  Args:
    inner: the exchange that is left out.
    axes: mesh axes that it averages over.
  """

  def exchange(grads: Any, state: Any):
    return jax.tree.map(lambda g: same_everywhere(g, axes), grads), state

  return Exchange(inner.init, exchange)
