"""A step with NaN or Inf changes nothing, whatever the exchange, and is named."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import hlo, optim
from jaxscale.exchange import Exchange, local_updates, plain
from jaxscale.mesh import make_mesh
from jaxscale.training import nan_guard
from support.bad_values import AXES, ROWS, batch, init, loss_fn
from support.cases import all_slow_except
from support.commands import run_python
from support.exchanges import EXCHANGES
from support.paths import ROOT
from support.steps import training
from support.trees import assert_same_bits

pytestmark = pytest.mark.optimized
LEAVES = ("bias", "gain", "kernel")  # in the order of jax.tree
RATE = optim.warmup_cosine(0.05, 2, 100)
SKIPS = {"skip_bad_steps": True}


def diagnose(metrics, state):
  seen = metrics.pop(nan_guard.CODES)
  return nan_guard.describe(seen, state.params, state.model_state, state)


@functools.cache
def made(name, num_microbatches=1):
  """Return a mesh, a state with every optional part on the host, and a step."""
  mesh, tx = make_mesh(replica=2), optim.sgd(RATE, momentum=0.9)
  options = SKIPS | dict(num_microbatches=num_microbatches, ema_decay=0.9, measure_noise_scale=True)
  return mesh, *training(loss_fn, init, tx, mesh, EXCHANGES[name](), **options)


def train(name, batches, **options):
  """States after each step, on the host; the last metrics and state."""
  mesh, state, step = made(name, **options)
  state, states, metrics = jax.tree.map(jnp.copy, state), [], {}
  for number, bad in enumerate(batches):
    state, metrics = step(state, batch(mesh, number, **bad))
    states.append(jax.device_get(state))
  return states, metrics, state


def moved_on(before, after):
  """`after`, but with the counts of `before`."""
  counted = []

  def counts_of(old, new):
    if old.dtype != np.int32:
      return new
    counted.append(new - old)
    return old

  opt_state = jax.tree.map(counts_of, before.opt_state, after.opt_state)
  assert after.step == before.step + 1 and set(counted) == {1}
  return after._replace(step=before.step, opt_state=opt_state)


@pytest.mark.parametrize("name", all_slow_except(EXCHANGES, "plain", "one bit", "delayed"))
def test_a_bad_gradient_changes_no_bit_of_the_state(name):
  bad = {"gradient": (21, np.nan)}  # device 5 of 8, 4 rows each
  states, metrics, last = train(name, [{}, {}, bad])
  assert_same_bits(states[1], moved_on(states[1], states[2]))
  assert np.isnan(metrics["loss"])
  diagnosis = diagnose(metrics, last)
  assert diagnosis == (nan_guard.Diagnosis(diagnosis.text, in_state=False))
  assert diagnosis.text.startswith("process 0 (")
  assert diagnosis.text.endswith("), device 5: gradient of kernel is NaN")
  # What follows is good: nothing waits in a residual or in a buffer.
  states, metrics, _ = train(name, [{}, {}, bad, {}, {}])
  assert np.isfinite(metrics["loss"])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(states[-1]))
  assert not np.array_equal(states[-1].params["kernel"], states[1].params["kernel"])


BAD = [("gradient", np.inf, "gradient of kernel is Inf"), ("loss", np.nan, "loss is NaN")]
BAD += [("state", -np.inf, "new batch_stats/mean is Inf")]


@pytest.mark.parametrize("what, value, words", BAD)
@pytest.mark.parametrize("micros", [1, 4])
def test_each_of_them_is_found_and_named(what, value, words, micros):
  """With micro-batches too: the bad one is the last but one of its device."""
  bad = {what: (10, value)}
  states, metrics, last = train("plain", [{}, bad], num_microbatches=micros)
  assert_same_bits(states[0], moved_on(states[0], states[1]))
  assert np.isnan(metrics["loss"])
  assert diagnose(metrics, last).text.endswith(f"device 2: {words}")


def test_several_devices_are_named_and_all_are_all():
  nan = np.full(ROWS, np.nan, np.float32)
  _, metrics, last = train("plain", [{"gradient": ([0, 9, 30], np.nan)}])
  assert "devices 0, 2 and 7: gradient of kernel" in diagnose(metrics, last).text
  _, metrics, last = train("plain", [{"loss": (range(ROWS), nan)}])
  assert diagnose(metrics, last).text == "all 8 devices: loss is NaN"


def test_what_is_bad_in_the_state_is_reported():
  mesh, state, step = made("plain")
  kernel = state.params["kernel"].at[1, 2].set(np.nan)
  kernel = jax.device_put(kernel, state.params["kernel"].sharding)
  state = jax.tree.map(jnp.copy, state._replace(params=state.params | {"kernel": kernel}))
  state, metrics = step(state, batch(mesh, 0))
  diagnosis = diagnose(metrics, state)
  assert diagnosis.in_state
  assert diagnosis.text == "all 8 devices: params/kernel is NaN in the state itself"


def test_a_mean_that_overflows_in_the_exchange_is_skipped():
  """float16 ends at 65,504: what is fine on each device is Inf on the way."""
  mesh, tx = make_mesh(replica=2), optax.sgd(0.1, momentum=0.9)

  def unscaled(grads, state):
    means, _ = plain(AXES).exchange(optax.tree.cast(grads, jnp.float16), ())
    return optax.tree.cast(means, jnp.float32), state

  exchange = Exchange(lambda params: (), unscaled)
  state, step = training(loss_fn, init, tx, mesh, exchange, **SKIPS)
  before = jax.device_get(state)
  state, metrics = step(state, batch(mesh, 0, gradient=(0, 1e10)))
  assert_same_bits(before, jax.device_get(state)._replace(step=before.step))
  assert diagnose(metrics, state).text.startswith("mean gradient of kernel, after the ex")


def test_a_rate_that_is_nan_is_skipped():
  def schedule(step):
    return jnp.where(step == 1, jnp.nan, 0.1)

  mesh, tx = make_mesh(), optim.sgd(schedule)
  state, step = training(loss_fn, init, tx, mesh, schedule=schedule, **SKIPS)
  losses, rates = [], []
  for number in range(3):
    state, metrics = step(state, batch(mesh, number))
    losses.append(metrics["loss"].item())
    rates.append(metrics["learning_rate"].item())
    assert np.isfinite(state.params["kernel"]).all()
  assert np.isfinite(losses).tolist() == [True, False, True]
  np.testing.assert_allclose(rates, [0.1, np.nan, 0.1])
  assert diagnose(metrics, state).text == ""  # nobody's gradient was bad


def test_the_code_of_the_first_bad_leaf():
  fine, nan, inf = (jnp.array([1.0, x]) for x in (1e15, np.nan, np.inf))
  both, half = jnp.array([np.inf, np.nan]), jnp.array([np.inf], jnp.bfloat16)
  trees = [], [fine, fine], [fine, nan, inf], [inf, fine, nan], [fine, both]
  trees = *trees, [jnp.ones(2, jnp.int32), half]
  assert [int(jax.jit(nan_guard.first_bad)(tree)) for tree in trees] == [-1, -1, 2, 1, 2, 3]


@pytest.mark.parametrize("workers", [None, ("replica",)])
def test_a_worker_sits_a_bad_step_out_and_the_meeting_is_good(workers):
  """Against float64, where that worker does not move in that step."""
  mesh, every, lr = make_mesh(replica=2), 3, 0.01
  method = dict(local=local_updates.local_sgd(every), workers=workers)
  state, step = training(loss_fn, init, optax.sgd(lr), mesh, **method, **SKIPS)
  groups = 2 if workers else 8
  own = [jax.tree.map(lambda x: np.asarray(x, np.float64), dict(state.params))] * groups
  own_rows = ROWS // groups
  for number in range(2 * every):
    # A loss alone is known to one device of the worker, and all of it must sit out.
    bad = {1: {"gradient": (9, np.nan)}, 2: {"loss": (9, np.nan)}}.get(number, {})
    rows = batch(mesh, number, **bad)
    state, metrics = step(state, rows)
    assert np.isfinite(metrics["loss"]) == (not bad)
    if bad:
      words = "gradient of kernel is NaN" if number == 1 else "loss is NaN"
      assert diagnose(metrics, state).text.endswith(f"device 2: {words}")
    for g in range(groups):
      if bad and g == 9 // own_rows:
        continue
      x, y = (np.asarray(rows[n], np.float64)[g * own_rows : (g + 1) * own_rows] for n in "xy")
      p = own[g]
      out = x @ p["kernel"] + p["bias"]
      d = 2 * (out * p["gain"] - y) / own_rows
      grads = {"kernel": x.T @ (d * p["gain"]), "bias": (d * p["gain"]).sum(0)}
      grads["gain"] = (d * out).sum(0)
      own[g] = {n: p[n] - lr * grads[n] for n in LEAVES}
    if number % every == every - 1:
      own = [{n: np.mean([p[n] for p in own], axis=0) for n in LEAVES}] * groups
  for name in LEAVES:
    np.testing.assert_allclose(state.params[name], own[0][name], rtol=0, atol=1e-5)


def test_a_meeting_of_bad_ways_moves_nobody():
  """An exchange whose second synchronization gives NaN."""
  mesh, tx, method = make_mesh(), optax.sgd(0.01), local_updates.local_sgd(2)

  def exchange(deltas, times):
    mean, _ = plain(AXES).exchange(deltas, ())
    factor = jnp.where(times == 1, jnp.nan, 1.0)
    factor = jax.lax.pmax(factor, AXES)
    return jax.tree.map(lambda m: m * factor, mean), times + 1

  breaking = Exchange(lambda params: jnp.zeros((), jnp.int32), exchange)
  state, step = training(loss_fn, init, tx, mesh, breaking, local=method, **SKIPS)
  anchors, losses = [], []
  for number in range(6):
    state, metrics = step(state, batch(mesh, number))
    anchors.append(jax.device_get(state.params))
    losses.append(metrics["loss"].item())
    # The synchronization is not counted, so that it stays the second for ever.
  assert np.isfinite(losses).tolist() == [True, True, True, False, True, False]
  assert_same_bits(anchors[1], anchors[5])
  assert np.isfinite(state.exchange_state.params["kernel"]).all()
  assert diagnose(metrics, state).text.startswith("mean gradient of bias")


def test_it_sends_nothing_more():
  """The collectives of the compiled step are those of the step without."""
  mesh, tx = make_mesh(replica=2), optax.sgd(0.1, momentum=0.9)

  def sent(skips):
    state, step = training(loss_fn, init, tx, mesh, skip_bad_steps=skips)
    compiled = step.lower(state, batch(mesh, 0)).compile()  # pyright: ignore
    table = hlo.collectives(compiled, mesh)
    return sorted((c.kind, c.payload_bytes) for c in table)

  assert sent(True) == sent(False)


SAME = """
import jax
jax.config.update("jax_numpy_dtype_promotion", "strict")
import numpy as np
from support import bad_values as t
from support.steps import training
from support.trees import assert_same_bits
from jaxscale import optim
from jaxscale.exchange.buckets import bucketed
from jaxscale.exchange.one_bit import one_bit
from jaxscale.mesh import make_mesh
mesh = make_mesh()
exchanges = {
  "bucketed": bucketed(t.AXES, bucket_bytes=4096),
  "one bit": one_bit(t.AXES, num_devices=8, bucket_bytes=4096),
}
for name, tx, by in [
  ("sgd", optim.sgd(0.05), "bucketed"), ("lars", optim.lars(0.05), "bucketed"),
  ("adamw", optim.adamw(1e-2), "bucketed"), ("sgd", optim.sgd(0.01), "one bit"),
]:
  ends = []
  for skips in (False, True):
    state, step = training(t.loss_fn, t.init, tx, mesh, exchanges[by], skip_bad_steps=skips)
    for number in range(5):
      state, _ = step(state, t.batch(mesh, number))
    ends.append(jax.device_get(state))
  assert_same_bits(*ends)
  print(name, by, "same")
"""


@pytest.mark.slow
def test_without_a_bad_step_no_bit_is_another():
  """On an instruction set without fused multiply-add.

  With it LLVM may round an update's a b + c d either way, by what else is in the
  loop: a last bit, in small tensors that an exchange divides by N in the same loop.
  """
  env = dict(XLA_FLAGS="--xla_cpu_max_isa=AVX", PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT}/tests")
  done = run_python("-c", SAME, num_devices=8, **env)
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("same") == 4
