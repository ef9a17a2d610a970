"""The train step: its gradient, collectives, dtypes and average; dropout and BatchNorm.

Parity of exchanges, layouts and micro-batches is one table, support/parity_table.py.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import optim
from jaxscale.mesh import make_mesh
from jaxscale.training import losses
from jaxscale.training.state import abstract_state, init_state
from jaxscale.training.step import with_average
from jaxscale.training.types import TrainState
from support.cases import all_slow_except
from support.digits import BATCH, OPTIMIZERS, assert_same, cnn, digits_batch, run
from support.leaves import assert_close, assert_like
from support.steps import on_mesh, training
from support.trees import assert_same_bits


@pytest.mark.parametrize("optimizer", all_slow_except(OPTIMIZERS, "lars"))
def test_global_batch_norm_equals_one_device(optimizer):
  fns = cnn(batch_norm=True, bn_axis_name=("replica", "data"), dropout=0.5)
  assert_same(run(fns, optimizer, num_devices=8), run(fns, optimizer, num_devices=1))


@pytest.mark.slow
def test_accumulation_leaves_running_averages_exact():
  """Statistics over 16 examples: four micro-batches of them or one of groups."""
  groups = run(cnn(batch_norm=True, bn_group_size=16), "sgd", num_devices=1)
  micros = run(cnn(batch_norm=True), "sgd", num_devices=1, num_microbatches=4)
  assert_same(micros, groups)


ACCUMULATED = [("sgd", True), *((name, False) for name in OPTIMIZERS)]


@pytest.mark.parametrize("case", all_slow_except(ACCUMULATED, ("sgd", False)), ids=str)
def test_accumulation_on_eight_devices_equals_none(case):
  optimizer, unroll = case
  fns, options = cnn(dropout=0.5), dict(num_microbatches=4, unroll=unroll)
  got = run(fns, optimizer, num_devices=8, **options)
  assert_same(got, run(fns, optimizer, num_devices=1))


def test_gradient_is_that_of_the_mean_loss():
  """One SGD step against jax.grad of the plain formula, without any of ours."""
  fns, mesh = cnn(), make_mesh()
  loss = losses.classification_loss(fns.apply)
  state, step = training(loss, fns.init, optax.sgd(1.0), mesh, seed=3)
  before = jax.device_get(state.params)
  batch = digits_batch(BATCH)

  def mean_loss(params):
    logits, _ = fns.apply(params, {}, jnp.array(batch["image"]), False, None)
    one_hot = jax.nn.one_hot(batch["label"], 10)
    return -(jax.nn.log_softmax(logits) * one_hot).sum(-1).mean()

  state, metrics = step(state, on_mesh(mesh, batch))
  loss, grads = jax.jit(jax.value_and_grad(mean_loss))(before)
  assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
  assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
  assert_close(jax.tree.map(np.subtract, before, state.params), grads, atol=1e-6)


def count_collectives(text: str) -> dict[str, int]:
  names = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
  return {n: len(re.findall(rf" {n}(?:-start)?\(", text)) for n in names}


def lowered_step(model=(), **options):
  fns, mesh = cnn(**dict(model)), make_mesh()
  loss = losses.classification_loss(fns.apply)
  state, step = training(loss, fns.init, optim.sgd(0.1), mesh, **options)
  return step.lower(state, on_mesh(mesh, digits_batch(BATCH)))


def test_accumulation_exchanges_once():
  """No collective sits in the loop over micro-batches, and none is added."""
  single = lowered_step().compile().as_text()
  accumulated = lowered_step(num_microbatches=4, unroll=False).compile().as_text()
  assert count_collectives(single) == count_collectives(accumulated)
  bodies = re.findall(r"body=%?([\w.\-]+)", accumulated)
  assert bodies
  for body in bodies:
    text = accumulated.split(f"%{body} (", 1)[1].split("\n}", 1)[0]
    assert not any(count_collectives(text).values())
  unrolled = lowered_step(num_microbatches=4).compile().as_text()
  assert count_collectives(single) == count_collectives(unrolled)


def test_gradients_cross_in_float32_under_bfloat16_compute():
  text = lowered_step(model={"dtype": jnp.bfloat16}).as_text()
  reduced = re.findall(r'stablehlo.all_reduce"?.*?-> tensor<([^>]*)>', text, flags=re.S)
  assert reduced and not any("bf16" in r for r in reduced)


@pytest.mark.slow
def test_average_of_parameters_follows_its_recurrence():
  fns = cnn(batch_norm=True)
  state, _ = run(fns, "sgd", num_devices=4, steps=3, ema_decay=0.9)
  parts = [run(fns, "sgd", num_devices=4, steps=i)[0] for i in range(4)]
  average = (parts[0].params, parts[0].model_state)
  for part in parts[1:]:
    new = (part.params, part.model_state)
    average = jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, new)
  assert_close(state.average, average, rtol=2e-5, atol=1e-7)
  assert_same_bits(state.evaluated(), state.average)


def test_the_average_warms_up():
  """The decay of step t is 1 - t^(-2/3), and at most that of the settings."""

  def update(state, new):
    return state._replace(step=state.step + 1, params=new)

  step = with_average(update, 0.6, warmup=True)
  state = TrainState(jnp.int32(0), 0.0, (), (), (), (jnp.float32(9.0), ()))
  values, average = [1.0, 5.0, -2.0, 4.0, 8.0], 9.0
  for t, value in enumerate(values, 1):
    state = step(state, jnp.float32(value))
    decay = [0.0, 1 - 2 ** (-2 / 3), 1 - 3 ** (-2 / 3), 0.6, 0.6][t - 1]
    average = decay * average + (1 - decay) * value
    np.testing.assert_allclose(state.average[0], average, rtol=1e-6)


def test_abstract_state_is_what_init_makes():
  parts = cnn(batch_norm=True).init, optim.sgd(0.1), make_mesh()
  assert_like(init_state(*parts, average=True), abstract_state(*parts, average=True))


@pytest.mark.parametrize("make", [optim.sgd, optax.inject_hyperparams(optax.sgd)])
def test_the_learning_rate_is_the_one_that_the_optimizer_applied(make):
  """Expect that SGD on a mean of (0 - w)^2 moves w by -2 w times the learning rate."""
  mesh, schedule = make_mesh(), optim.warmup_cosine(0.1, 3, 30)
  tx = make(schedule, **({"momentum": 0.0} if make is optim.sgd else {}))

  def loss_fn(params, model_state, batch, keys):
    loss = jnp.square(batch["x"] - params["w"]).sum()
    return loss, (model_state, {"loss": loss, "examples": len(keys)})

  init = lambda key: ({"w": jnp.ones(4)}, {})  # noqa: E731
  state, step = training(loss_fn, init, tx, mesh, schedule=schedule)
  batch = on_mesh(mesh, {"x": np.zeros((8, 4), np.float32)})
  rates = []
  for _ in range(5):
    before = state.params["w"][0].item()
    state, metrics = step(state, batch)
    rates.append(metrics["learning_rate"].item())
    applied = (before - state.params["w"][0].item()) / (2 * before)
    assert rates[-1] == pytest.approx(applied, rel=1e-4)
  assert rates[0] < rates[1] < rates[2]
