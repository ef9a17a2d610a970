"""The train step: its gradient, collectives, dtypes and average; dropout and BatchNorm.

Parity of exchanges, layouts and micro-batches is one table, test_parity.py.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import optim
from jaxscale.exchange import Exchange, plain
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.training import losses
from jaxscale.training.state import abstract_state, init_state
from jaxscale.training.step import make_eval_step, make_train_step, with_average
from jaxscale.training.types import StepOptions, TrainState
from support.cases import all_slow_except
from support.digits import BATCH, assert_same, cnn, digits_batch, run


def test_global_batch_norm_equals_one_device():
  fns = cnn(batch_norm=True, bn_axis_name=("replica", "data"), dropout=0.5)
  assert_same(run(fns, "lars", num_devices=8), run(fns, "lars", num_devices=1))


@pytest.mark.slow
def test_accumulation_leaves_running_averages_exact():
  """Statistics over 16 examples: four micro-batches of them or one of groups."""
  groups = run(cnn(batch_norm=True, bn_group_size=16), "sgd", num_devices=1)
  micros = run(cnn(batch_norm=True), "sgd", num_devices=1, num_microbatches=4)
  assert_same(micros, groups)


@pytest.mark.parametrize("unroll", all_slow_except([True, False], False))
def test_accumulation_on_several_devices_equals_none(unroll):
  fns, options = cnn(dropout=0.5), dict(num_microbatches=4, unroll=unroll)
  got = run(fns, "sgd", num_devices=4, **options)
  assert_same(got, run(fns, "sgd", num_devices=1))


def test_gradient_is_that_of_the_mean_loss():
  """One SGD step against jax.grad of the plain formula, without any of ours."""
  fns = cnn()
  mesh = make_mesh()
  tx, exchange = optax.sgd(1.0), plain(mesh.axis_names)
  state = init_state(fns.init, tx, mesh, exchange, seed=3)
  before = jax.device_get(state.params)
  batch = digits_batch(BATCH)

  def mean_loss(params):
    logits, _ = fns.apply(params, {}, jnp.array(batch["image"]), False, None)
    one_hot = jax.nn.one_hot(batch["label"], 10)
    return -(jax.nn.log_softmax(logits) * one_hot).sum(-1).mean()

  step = make_train_step(losses.classification_loss(fns.apply), tx, mesh, exchange)
  state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
  loss, grads = jax.jit(jax.value_and_grad(mean_loss))(before)
  assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
  assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
  for old, new, g in zip(*map(jax.tree.leaves, (before, state.params, grads)), strict=True):
    np.testing.assert_allclose(old - new, g, atol=1e-6)


def count_collectives(text: str) -> dict[str, int]:
  names = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
  return {n: len(re.findall(rf" {n}(?:-start)?\(", text)) for n in names}


def lowered_step(exchange=None, **options):
  fns = cnn(**options.pop("model", {}))
  mesh = make_mesh()
  tx = optim.sgd(0.1)
  exchange = exchange or plain(mesh.axis_names)
  abstract = abstract_state(fns.init, tx, mesh, exchange)
  loss = losses.classification_loss(fns.apply)
  step = make_train_step(loss, tx, mesh, exchange, options=StepOptions(**options))
  sharding = batch_sharding(mesh)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), digits_batch(BATCH)
  )
  return step.lower(abstract, batch)


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
def test_bfloat16_is_near_float32():
  got = run(cnn(dropout=0.5, dtype=jnp.bfloat16), "sgd", num_devices=8, steps=3)
  wanted = run(cnn(dropout=0.5), "sgd", num_devices=8, steps=3)
  for a, b in zip(got[1], wanted[1], strict=True):
    assert a["loss"] == pytest.approx(b["loss"], rel=2e-2)
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(got[0].params))


def test_the_state_is_donated():
  compiled = lowered_step().compile()
  memory = compiled.memory_analysis()
  # Parameters and momenta are written where they were.
  assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes


@pytest.mark.slow
def test_average_of_parameters_follows_its_recurrence():
  fns = cnn(batch_norm=True)
  state, _ = run(fns, "sgd", num_devices=4, steps=3, ema_decay=0.9)
  parts = [run(fns, "sgd", num_devices=4, steps=i)[0] for i in range(4)]
  average = (parts[0].params, parts[0].model_state)
  for part in parts[1:]:
    new = (part.params, part.model_state)
    average = jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, new)
  for a, b in zip(*map(jax.tree.leaves, (state.average, average)), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)
  assert state.evaluated() is state.average


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


def test_an_exchange_may_keep_state_on_each_device():
  """The interface that compressed exchanges will use: residuals stay apart."""
  axes = ("replica", "data")

  def exchange(grads, seen):
    here = jax.tree.map(lambda s, g: s + g, seen, grads)
    return jax.tree.map(lambda g: jax.lax.pmean(g, axes), grads), here

  summing = Exchange(lambda params: jax.tree.map(jnp.zeros_like, params), exchange)
  state, _ = run(cnn(), "sgd", num_devices=8, steps=1, exchange=summing)
  for seen in jax.tree.leaves(state.exchange_state):
    assert len(seen) == 8
    assert np.abs(seen[0] - seen[1]).max() > 0  # each device saw other rows
  wanted, _ = run(cnn(), "sgd", num_devices=8, steps=1)
  for a, b in zip(*map(jax.tree.leaves, (state.params, wanted.params)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_abstract_state_is_what_init_makes():
  fns = cnn(batch_norm=True)
  mesh = make_mesh()
  tx, exchange = optim.sgd(0.1), plain(mesh.axis_names)
  abstract = abstract_state(fns.init, tx, mesh, exchange, average=True)
  state = init_state(fns.init, tx, mesh, exchange, average=True)
  for a, x in zip(*map(jax.tree.leaves, (abstract, state)), strict=True):
    assert (a.shape, a.dtype, a.sharding) == (x.shape, x.dtype, x.sharding)


def test_eval_step_ignores_padding():
  fns = cnn()
  mesh = make_mesh()
  params, _ = fns.init(jax.random.key(0))
  eval_step = make_eval_step(losses.classification_totals(fns.apply), mesh)
  batch = digits_batch(16) | {"mask": np.arange(16) < 11}
  poisoned = {**batch, "image": batch["image"].copy()}
  poisoned["image"][11:] = 255
  totals, same = (
    eval_step(params, {}, jax.device_put(b, batch_sharding(mesh))) for b in (batch, poisoned)
  )
  assert int(totals["examples"]) == 11
  assert {k: v.item() for k, v in totals.items()} == {k: v.item() for k, v in same.items()}


@pytest.mark.parametrize("make", [optim.sgd, optax.inject_hyperparams(optax.sgd)])
def test_the_learning_rate_is_the_one_that_the_optimizer_applied(make):
  mesh, schedule = make_mesh(), optim.warmup_cosine(0.1, 3, 30)
  tx = make(schedule)

  def loss_fn(params, model_state, batch, keys):
    loss = jnp.square(batch["x"] - params["w"]).sum()
    return loss, (model_state, {"loss": loss, "examples": len(keys)})

  state = init_state(lambda key: ({"w": jnp.ones(4)}, {}), tx, mesh)
  step = make_train_step(loss_fn, tx, mesh, schedule=schedule)
  batch = jax.device_put({"x": np.zeros((8, 4), np.float32)}, batch_sharding(mesh))
  rates = []
  for _ in range(5):
    state, metrics = step(state, batch)
    rates.append(metrics["learning_rate"].item())
    applied = optim.learning_rate(state.opt_state).item()
    assert rates[-1] == pytest.approx(applied, rel=1e-6)
  assert rates[0] < rates[1] < rates[2]
