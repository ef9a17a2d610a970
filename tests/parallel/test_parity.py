"""Eight devices train as one does: every exchange with every optimizer.

Ten steps of the real train step on 2 x 4 devices, against one device with the plain
exchange, the same global batches and the same keys. Four copies of a model, each
with an optimizer of its own, train side by side in one program, so that an exchange
is compiled once for the four cells of its row.
"""

import jax
import numpy as np
import pytest

from support.cases import all_slow_except
from support.parity import (
  DECAY,
  DELAYED,
  EXACT,
  MOMENTUM,
  OPTIMIZERS,
  RATE,
  ROWS,
  SEED,
  SHAPES,
  Run,
  batches,
  first_params,
  loss_of,
  noise_of,
  run,
)

pytestmark = pytest.mark.optimized

QUICK = ("plain", "torus", "bucketed")


def assert_same(got: Run, wanted: Run, optimizer: str):
  """Losses of all steps, their mean gradients and the last parameters, to 1e-6.

  Of the largest value of a tensor; for gradients, of the largest mean magnitude of
  the devices' own, which cancel in the mean where a device sees two classes.
  Needed are 2.2e-7 for losses, 5.3e-7 for gradients (1.0e-6 of the largest mean) and
  1.4e-7 for parameters, by LAMB and AdamW (8.5e-8) less than by SGD (measured, jax
  0.10.2, CPU).
  """
  for a, b in zip(got.losses, wanted.losses, strict=True):
    assert abs(a[optimizer] - b[optimizer]) <= 1e-6 * abs(b[optimizer])
  for leaf in SHAPES:
    x, y = (run.params[optimizer][leaf] for run in (got, wanted))
    assert np.abs(x - y).max() <= 1e-6 * np.abs(y).max(), leaf
    for own, a, b in zip(got.own, got.means, wanted.means, strict=True):
      added = np.abs(own[optimizer][leaf]).mean(0).max()
      x, y = (mean[optimizer][leaf] for mean in (a, b))
      assert np.abs(x - y).max() <= 1e-6 * added, leaf


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", all_slow_except(EXACT, *QUICK))
def test_exact_exchanges_are_one_device(name, optimizer):
  assert_same(run(name), run("plain", devices=1), optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_delayed_is_one_device_that_delays(optimizer):
  assert_same(run("delayed"), run("delayed", devices=1), optimizer)


@pytest.mark.parametrize("late", [0, 1])
def test_sgd_is_float64_on_gradients_so_many_steps_late(late):
  """Whole batches, no mesh and no exchange; the optimizer in numpy."""
  params = jax.tree.map(np.float64, first_params())
  velocity = jax.tree.map(np.zeros_like, params)
  waiting = [jax.tree.map(np.zeros_like, params)] * late
  losses = []
  with jax.enable_x64(True):
    value_and_grad = jax.jit(jax.value_and_grad(loss_of))
    for step, batch in enumerate(batches()):
      key = jax.random.fold_in(jax.random.key(SEED), np.int32(step))
      places = np.arange(ROWS, dtype=np.int32)
      keys = jax.vmap(lambda place, key=key: jax.random.fold_in(key, place))(places)
      noise = np.float64(noise_of(keys))
      given = batch | {"image": np.float64(batch["image"])}
      loss, grads = value_and_grad(params, given, noise)
      losses.append(float(loss) / ROWS)
      waiting.append(jax.tree.map(lambda g: np.asarray(g) / ROWS, grads))
      for name, g in waiting.pop(0).items():
        decay = DECAY if g.ndim > 1 else 0.0
        velocity[name] = MOMENTUM * velocity[name] + g + decay * params[name]
        params[name] = params[name] - RATE * velocity[name]
  found = run("delayed" if late else "plain")
  np.testing.assert_allclose([x["sgd"] for x in found.losses], losses, rtol=1e-6)
  for name, wanted in params.items():
    error = np.abs(found.params["sgd"][name] - wanted).max()
    assert error <= 1e-6 * np.abs(wanted).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", EXACT | DELAYED)
def test_exactness_is_broken_by_the_finest_rounding(name, optimizer):
  with pytest.raises(AssertionError):
    assert_same(run("fp16"), run(name), optimizer)
