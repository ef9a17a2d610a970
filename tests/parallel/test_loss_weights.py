"""Losses on all rows or with queues, weights of examples and metrics: together, and in float16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import f1_score

from jaxscale import config as cfg
from jaxscale.data import eval_batches, from_named, to_device, train_batches
from jaxscale.experiment.build import experiment
from jaxscale.training import CustomLoss, GatheredObjective, Objective, Queue, loss_scale
from jaxscale.training.loop import evaluate
from support.configs import small_config
from support.steps import on_mesh

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 8)).astype("float32")
Y = RNG.integers(0, 3, 70)
WEIGHT = RNG.choice([0.0, 0.5, 1.0, 2.5], 70).astype("float32")


class Rows(cfg.Data):
  """Weighted points of three classes."""

  def build(self):
    arrays = {"image": X, "label": Y.astype("int32"), "weight": WEIGHT}
    return (from_named("rows", arrays, num_classes=3),) * 2


def cross_entropy(logits, batch):
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def centred(outputs, batch, everyone):
  """Return the loss of logits from which the mean of all that count is subtracted."""
  mean = everyone.outputs.mean(0, where=everyone.mask[:, None])
  return cross_entropy((outputs - mean).astype(jnp.float32), batch)


class Gathered(cfg.Loss):
  """A loss on the outputs of all rows."""

  def build(self, info):
    return GatheredObjective(centred)


class Queued(cfg.Loss):
  """A loss on the newest outputs of all devices."""

  def build(self, info, context):
    def start(params, key):
      return {"queue": Queue(jnp.zeros((48, 3))), "steps": jnp.int32(0)}

    def loss_fn(params, state, batch, keys):
      inputs, loss_state = context.model.inputs(batch), state.loss
      logits, model_state = context.model.apply(params, state.model, inputs, True, keys)
      logits = logits.astype(jnp.float32)
      rows = cross_entropy(logits - loss_state["queue"].rows.mean(0), batch)
      loss = (batch["weight"] * rows).sum()
      totals = {"loss": loss, "examples": batch["weight"].sum()}
      new = {"queue": Queue(jax.lax.stop_gradient(logits)), "steps": loss_state["steps"] + 1}
      return loss, (state._replace(model=model_state, loss=new), totals)

    return CustomLoss(loss_fn, Objective(cross_entropy), start)


@functools.cache
def trained(kind, num_devices, micros=1, dtype="float32", steps=5):
  """Return the losses, the last state and the evaluation of a few steps, and the notes."""
  options = dict(data=Rows(), batch_size=16, dtype=dtype, accumulate_steps=micros)
  options |= dict(model=cfg.MLP(hidden=(8,)), metrics=(cfg.F1(), cfg.ConfusionMatrix()))
  settings = small_config(**options, loss=kind(), steps=steps, epochs=None)
  made = experiment(settings, devices=jax.devices()[:num_devices])
  state, losses, step = made.init_state(), [], made.compile_train_step()
  batches = train_batches(made.train_data, 16, position=0, seed=0)
  for _ in range(steps):
    state, metrics = step(state, on_mesh(made.mesh, next(batches)))
    losses.append(float(metrics["loss"]))
  batches = to_device(eval_batches(made.eval_data, 24), made.mesh)
  values = evaluate(made.eval_step, *state.evaluated(), batches, made.metrics)
  return losses, jax.device_get(state), values, made


@pytest.mark.parametrize("kind", [Gathered, Queued])
@pytest.mark.parametrize("num_devices, micros", [(4, 1), (4, 2)])
def test_they_are_equal_on_any_number_of_devices(kind, num_devices, micros):
  losses, one, values, made = trained(kind, 1)
  again, other, others, more = trained(kind, num_devices, micros)
  np.testing.assert_allclose(again, losses, rtol=1e-6)
  for x, y in zip(*map(jax.tree.leaves, (other.params, one.params)), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
  if kind is Queued:
    queues = other.model_state.loss["queue"], one.model_state.loss["queue"]
    np.testing.assert_allclose(*(queue.rows for queue in queues), rtol=1e-5, atol=1e-6)
    assert other.model_state.loss["steps"] == 5
  assert values.keys() == others.keys() > {"f1", "loss", "confusion_matrix"}
  for name, value in values.items():
    np.testing.assert_allclose(others[name], value, rtol=1e-6, err_msg=name)
  # A CustomLoss may depend on the devices in a way that no test finds, so the run says it.
  says = ["Queued: its loss_fn is not tested for results that depend on the number of devices"]
  assert [*more.notes] == [*made.notes] == says * (kind is Queued)


@pytest.mark.parametrize("kind", [Gathered, Queued])
def test_metrics_count_an_example_by_its_weight(kind):
  _, state, values, made = trained(kind, 1)
  logits, _ = made.model.apply(state.params, {}, made.model.inputs({"image": X}), False, None)
  found = np.asarray(logits).argmax(1)
  expected = f1_score(Y, found, average="macro", sample_weight=WEIGHT)
  assert values["f1"] == pytest.approx(expected, rel=1e-6)
  matrix = np.zeros((3, 3))
  np.add.at(matrix, (Y, found), WEIGHT)
  np.testing.assert_allclose(values["confusion_matrix"], matrix, rtol=1e-6)


@pytest.mark.parametrize("kind", [Gathered, Queued])
@pytest.mark.parametrize("micros", [1, 2])
def test_float16_trains_as_float32(kind, micros, monkeypatch):
  monkeypatch.setattr(loss_scale, "INITIAL", 2.0**10)  # no step overflows
  exact, *_ = trained(kind, 1)
  losses, state, values, _ = trained(kind, 4, micros, "float16")
  np.testing.assert_allclose(losses, exact, rtol=5e-3)
  assert state.loss_scale.good_steps == 5 and np.isfinite(values["loss"])
