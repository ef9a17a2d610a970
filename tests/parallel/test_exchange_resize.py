"""Gradients that an exchange has not sent yet arrive, however many devices resume."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.exchange import Exchange
from jaxscale.exchange.one_bit import one_bit, resize, shrinks
from jaxscale.exchange.wrappers import delayed, warm_start
from jaxscale.mesh import make_mesh
from support.cases import all_slow_except
from support.exchanges import EXCHANGES, FEEDBACK, SHAPES, first_state, program, unsent

AXES = ("replica", "data")
STATEFUL = [
  name for name, make in EXCHANGES.items() if jax.tree.leaves(make().init({"w": jnp.zeros((9, 7))}))
]
# From how many devices to how many: fewer, more, no divisor, from one.
COUNTS = [(8, 4), (4, 8), (8, 6), (1, 8), (5, 3)]


def resized(name, state, count):
  """Return the state for `count` devices, on the host."""
  carry = EXCHANGES[name](count).resize
  assert carry is not None
  return jax.device_get(jax.jit(carry, static_argnums=1)(state, count))


def made_up(name, count):
  """Return a state of random numbers; values that are equal on all devices stay equal."""
  rng = np.random.default_rng(3)
  state = first_state(EXCHANGES[name](count), count)

  def fill(path, x):
    if {getattr(part, "key", None) for part in path} & {"step", "q"}:
      return x
    return rng.standard_normal(x.shape).astype(x.dtype) + np.float32(0.3)

  return jax.tree_util.tree_map_with_path(fill, state)


def close(got, wanted, tolerance, name):
  error = np.linalg.norm(np.asarray(got, np.float64) - wanted)
  assert error <= tolerance * np.linalg.norm(wanted), (name, error)


@pytest.mark.parametrize("name", all_slow_except(STATEFUL, "one bit", "top k", "delayed"))
def test_what_is_pending_of_the_mean_is_kept(name):
  for old, new in COUNTS:
    exchange = EXCHANGES[name](new)
    state = made_up(name, old)
    carried = resized(name, state, new)
    expected = first_state(exchange, new)
    assert jax.tree.structure(carried) == jax.tree.structure(expected)
    for got, like in zip(*map(jax.tree.leaves, (carried, expected)), strict=True):
      assert got.shape == like.shape and got.dtype == like.dtype
      if got.dtype == np.int32:
        np.testing.assert_array_equal(got, like)
    if name in FEEDBACK:
      for leaf in SHAPES:
        # A stripe's filling belongs to no column: `unsent` leaves it out.
        close(unsent(carried, leaf) / new, unsent(state, leaf) / old, 1e-6, leaf)


@pytest.mark.parametrize(("old", "new"), [(4, 8), (8, 4)])
def test_one_bit_sends_what_is_left_of_a_tensor_that_shrinks_no_longer(old, new):
  """15 elements: on 4 devices their stripes are smaller than they are, on 8 not."""
  shape = (15,)
  assert shrinks(shape, 4) and not shrinks(shape, 8)
  rng = np.random.default_rng(0)
  exchanges = {n: one_bit(AXES, num_devices=n) for n in (old, new)}
  state = first_state(exchanges[old], old, {"w": shape})
  sent = wanted = np.zeros(shape)
  for n in (old, new):
    if n == new:
      state = jax.device_get(resize(state, n))
    grads = rng.standard_normal((3, n, *shape)).astype(np.float32)
    run = program(exchanges[n], make_mesh(devices=jax.devices()[:n]))
    means, state = jax.device_get(run({"w": grads}, state))
    sent = sent + means["w"].sum(0, dtype=np.float64)
    wanted = wanted + grads.mean(1, dtype=np.float64).sum(0)
    pending = unsent_of(state, shape) / n
    close(sent + pending, wanted, 1e-6, n)
    assert bool(pending.any()) == (n == 4)  # on 8 all of it has been sent


def unsent_of(state, shape):
  stripe = state["stripe"]["w"][0, :, 0].reshape(shape)
  return state["residual"]["w"].sum(0, dtype=np.float64) + stripe


def test_what_cannot_be_carried_over_says_so():
  own = Exchange(lambda params: {"mine": params}, lambda grads, state: (grads, state))
  assert own.resize is None
  assert delayed(own).resize is None
  assert warm_start(own, AXES, steps=3).resize is None
  for make in EXCHANGES.values():
    assert make().resize is not None
