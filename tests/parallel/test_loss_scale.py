"""Loss scaling for float16: exact against float32, and an overflow is no fault."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxscale as jxs
from jaxscale import config as cfg
from jaxscale.exchange.low_precision import half_precision
from jaxscale.exchange.one_bit import one_bit
from jaxscale.experiment import make_layout
from jaxscale.experiment.build import experiment
from jaxscale.mesh import AXES, make_mesh
from jaxscale.training import loop, loss_scale
from support.cases import all_slow_except
from support.configs import small_config, tiny_language
from support.errors import config_error
from support.steps import on_mesh, training
from support.trees import assert_same_bits, relative_distance

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype("float32")
Y = np.tanh(X @ RNG.normal(size=(6, 1)).astype("float32"))
ONES = np.ones((32, 1), "float32")
SMALL = 2.0**-25  # of the gradients: below float16's least number


def init(key):
  a, b = jax.random.split(key)
  return {"a": 0.5 * jax.random.normal(a, (6, 16)), "b": 0.5 * jax.random.normal(b, (16, 1))}, {}


def errors(dtype):
  """Return a loss whose gradients of activations are of the size of `SMALL` times a boost."""

  def loss_fn(params, model_state, batch, keys):
    x, a, b = (y.astype(dtype) for y in (batch["x"], params["a"], params["b"]))
    outputs = (jnp.tanh(x @ a) @ b).astype(jnp.float32)
    loss = (batch["boost"] * SMALL * (outputs - batch["y"]) ** 2).sum()
    return loss, ({}, {"loss": loss, "examples": len(keys)})

  return loss_fn


def train(dtype, devices=1, boosts=(1,) * 8, exchange=None, **options):
  """Return the states and metrics of some steps, whose losses are multiplied by `boosts`."""
  mesh = make_mesh(devices=jax.devices()[:devices])
  # The learning rate undoes SMALL.
  step_of = errors(dtype), init, optax.sgd(0.3 / SMALL), mesh, exchange
  state, step = training(*step_of, skip_bad_steps=True, **options)
  states, metrics = [jax.device_get(state)], []
  for boost in boosts:
    batch = {"x": X, "y": Y, "boost": np.float32(boost) * ONES}
    state, values = step(state, on_mesh(mesh, batch))
    states.append(jax.device_get(state))
    metrics.append({name: np.asarray(x) for name, x in values.items()})
  return states, metrics


CASES = {
  "one device": dict(),
  "four devices": dict(devices=4),
  "micro-batches": dict(devices=4, num_microbatches=4),
  "half precision": dict(devices=4, exchange=half_precision(AXES, "float16")),
}


@pytest.mark.parametrize("name", CASES)
def test_small_gradients_underflow_only_without_a_scale(name):
  def moved(dtype, **options):
    states, metrics = train(dtype, **CASES[name] | options)
    change = jax.tree.map(np.subtract, states[-1].params, states[0].params)
    return np.concatenate([x.ravel() for x in jax.tree.leaves(change)]), metrics[-1]

  (wanted, exact), (scaled, metrics) = moved("float32"), moved("float16", scale_loss=True)
  assert np.linalg.norm(scaled - wanted) < 5e-3 * np.linalg.norm(wanted)
  np.testing.assert_allclose(metrics["loss"], exact["loss"], rtol=2e-2)
  np.testing.assert_allclose(metrics["grad_norm"], exact["grad_norm"], rtol=2e-2)
  assert (metrics["loss_scale"], metrics["overflow_steps"]) == (2**16, 0)
  plain, _ = moved("float16")
  assert np.linalg.norm(plain - wanted) > 0.2 * np.linalg.norm(wanted)


def test_the_scale_changes_no_bit_in_float32():
  for devices, micros in ((1, 1), (4, 2)):
    options = dict(devices=devices, num_microbatches=micros)
    (plain, _), (scaled, _) = (
      train("float32", **options),
      train("float32", scale_loss=True, **options),
    )
    assert_same_bits(scaled[-1].params, plain[-1].params)


HUGE = 1e20


def test_the_scale_follows_the_overflows(monkeypatch):
  """Expect the scales of flax's DynamicScale, on one and on four devices."""
  monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
  boosts = [1, HUGE, HUGE, 1, 1, 1, 1, HUGE, 1, 1, 1, 1, 1, 1, 1]
  # It counts the steps before the one that doubles the scale.
  reference, expected = DynamicScale(growth_interval=2, minimum_scale=1.0), []
  for boost in boosts:
    factor = jnp.inf if boost == HUGE else 1.0
    reference, *_ = reference.value_and_grad(lambda x, factor=factor: x * factor)(1.0)
    expected.append(float(reference.scale))
  assert set(expected) == {2.0**14, 2.0**15, 2.0**16}
  for devices in (1, 4):
    _, metrics = train("float16", devices, boosts, scale_loss=True)
    assert [float(m["loss_scale"]) for m in metrics] == expected
    assert [int(m["overflow_steps"]) for m in metrics] == np.cumsum(np.equal(boosts, HUGE)).tolist()


def test_limits_of_the_scale(monkeypatch):
  monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 1)
  state = loss_scale.init()
  for overflow, limit in ((True, 1.0), (False, 2.0**24)):
    for _ in range(30):
      state = loss_scale.next_scale(state, jnp.bool(overflow), jnp.bool(not overflow))
    assert state.scale == limit
  assert loss_scale.next_scale(state, jnp.bool(False), jnp.bool(False)) == state


@pytest.mark.parametrize("exchange", [None, one_bit(AXES, num_devices=4)])
def test_an_overflow_on_one_device_changes_only_the_scale(exchange):
  boosts = np.where(np.arange(32)[:, None] == 9, HUGE, 1.0)
  (*_, before, after), (*_, metrics) = train(
    "float16", 4, [1, boosts], exchange, scale_loss=True, ema_decay=0.9
  )
  assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])
  assert after.step == before.step + 1 and after.loss_scale.scale == before.loss_scale.scale / 2
  for part in ("params", "exchange_state", "average"):
    assert_same_bits(getattr(after, part), getattr(before, part))


class Stopped(Exception):
  pass


def run_loop(batches, **options):
  """Run the loop with the default reaction to bad steps: raise."""
  mesh = make_mesh(devices=jax.devices()[:2])
  state, step = training(
    errors("float16"), init, optax.sgd(0.1), mesh, skip_bad_steps=True, scale_loss=True
  )
  state = state._replace(**options)
  on_devices = (on_mesh(mesh, batch) for batch in batches)
  state, _ = loop.train(
    state, step, on_devices, loop.LoopControl(), start=0, total_steps=len(batches)
  )
  return state


def test_only_an_overflow_of_the_scale_is_no_fault():
  good = {"x": X, "y": Y, "boost": ONES}
  overflow = good | {"boost": HUGE * ONES}
  assert run_loop([good, overflow, good]).loss_scale.overflows == 1
  with pytest.raises(jxs.NonFiniteError, match="step 2"):  # NaN in the loss itself
    run_loop([good, good | {"y": np.nan * Y}, good])
  with pytest.raises(jxs.NonFiniteError, match="step 1"):  # the scale cannot be the reason
    run_loop([overflow], loss_scale=loss_scale.init()._replace(scale=jnp.float32(1.0)))


def losses_and_change(config, devices, steps=4):
  """Return the loss of each step, how the parameters changed, and the overflows."""
  parts = experiment(config, devices=jax.devices()[:devices])
  state, losses = parts.init_state(), []
  start = jax.device_get(state.params)
  batches = jxs.data.train_batches(parts.train_data, config.batch_size)
  for _, batch in zip(range(steps), batches, strict=False):
    state, metrics = parts.train_step(state, on_mesh(parts.mesh, batch))
    losses.append(float(metrics["loss"]))
  change = jax.tree.map(np.subtract, jax.device_get(state.params), start)
  return losses, change, state.loss_scale and state.loss_scale.overflows


def wide(**fields):
  return small_config(model=cfg.MLP(hidden=(256,)), **fields)


LAYOUTS = {
  "fsdp": (wide, cfg.Mesh(data=2, fsdp=2), cfg.Layout(shard="fsdp")),
  "zero2": (wide, cfg.Mesh(data=1, fsdp=4), cfg.Layout(shard="zero2")),
  "text, fsdp": (tiny_language, cfg.Mesh(data=2, fsdp=2), cfg.Layout(shard="fsdp")),
  "text, tensor": (tiny_language, cfg.Mesh(data=2, model=2), cfg.Layout(sum_in="dtype")),
}


@pytest.mark.parametrize("name", all_slow_except(LAYOUTS, "fsdp"))
def test_layouts_train_as_one_device_in_float32(name, monkeypatch):
  monkeypatch.setattr(loss_scale, "INITIAL", 2.0**10)  # So that no step overflows.
  make, mesh, layout = LAYOUTS[name]
  wanted, exact, _ = losses_and_change(make(), 1)
  halved = make(dtype="float16", accumulate_steps=2, mesh=mesh, layout=layout)
  losses, change, overflows = losses_and_change(halved, 4)
  np.testing.assert_allclose(losses, wanted, rtol=3e-4)
  assert relative_distance(change, exact) < 2e-2
  assert overflows == 0


def stop(step, state, metrics):
  raise Stopped


def test_a_run_resumes_bit_for_bit(tmp_path, monkeypatch):
  """The scale starts too high, so that steps overflow before and after the resume."""
  monkeypatch.setattr(loss_scale, "INITIAL", 2.0**24)
  saves, log = cfg.Checkpoint(every_steps=2), cfg.Log(plot=False, every_steps=1)
  usual = dict(dtype="float16", steps=8, epochs=None, batch_size=128)
  config = small_config(**usual, checkpoint=saves, log=log)
  whole = jxs.fit(config, tmp_path / "whole")
  with pytest.raises(Stopped):
    jxs.fit(config, tmp_path / "parts", callbacks=[jxs.Callback(every=3, on_step=stop)])
  again = jxs.fit(config, tmp_path / "parts")
  assert_same_bits(jax.device_get(again.state), jax.device_get(whole.state))
  lines = jxs.metrics.read_metrics(tmp_path / "parts" / "metrics.jsonl")
  of_step = {line["step"]: line for line in lines if "train/loss_scale" in line}
  assert of_step[1]["train/loss_scale"] == 2.0**23 and "train/grad_norm" not in of_step[1]
  counts = [of_step[step]["train/overflow_steps"] for step in range(1, 9)]
  assert counts[1] == 2 < counts[-1] == again.summary["overflow_steps"] < 8


def test_what_float16_does_not_work_with_is_refused():
  with config_error(match="^Config.sync=LocalSGD: float16 needs scales"):
    small_config(dtype="float16", sync=cfg.LocalSGD(sync_every_steps=2))
  with config_error(match="^Mesh.stage=2: a pipeline .* use bfloat16, or mesh.stage=1"):
    tiny_language(dtype="float16", mesh=cfg.Mesh(stage=2))
  with config_error(match="^scale_loss=True needs skip_bad_steps and no pipeline"):
    jxs.make_train_step(errors("float16"), optax.sgd(1), make_mesh(), options=scaling())


def scaling():
  return jxs.training.StepOptions(scale_loss=True)


@dataclasses.dataclass(frozen=True)
class Device:
  compute_capability: str
  platform: str = "gpu"


def test_a_device_with_bfloat16_is_noted(monkeypatch):
  found = {
    name: make_layout.has_bfloat16(Device(name)) for name in ("7.0", "7.5", "8.0", "12.0", "gfx90a")
  }
  assert found == {"7.0": False, "7.5": False, "8.0": True, "12.0": True, "gfx90a": True}
  (note,) = experiment(small_config(dtype="float16")).notes
  assert note == "dtype='float16': cpu has bfloat16, which needs no loss scale"
  assert not experiment(small_config(dtype="bfloat16")).notes
  monkeypatch.setattr(make_layout, "has_bfloat16", lambda device: False)
  (note,) = experiment(small_config(dtype="bfloat16")).notes
  assert note == "dtype='bfloat16': cpu lacks it; use dtype='float16'"
  assert not experiment(small_config(dtype="float16")).notes
