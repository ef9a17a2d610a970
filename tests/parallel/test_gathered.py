"""Losses on the outputs of all rows: equal on any number of devices and micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.exchange.local_updates import local_sgd
from jaxscale.mesh import batch_axes, make_mesh
from jaxscale.training import Everyone, GatheredObjective
from jaxscale.training.contrastive import contrastive
from jaxscale.training.gathered import gathered_loss, gathered_totals
from jaxscale.training.step import make_eval_step
from support.errors import config_error
from support.leaves import assert_close
from support.steps import on_mesh, training

RNG = np.random.default_rng(0)
BATCH = {name: RNG.normal(size=(32, 6)).astype("float32") for name in "ab"}
AXES = ("replica", "data")


def init(key):
  return {"w": 0.3 * jax.random.normal(key, (6, 5))}, {"n": jnp.int32(0)}


def apply(params, state, batch, train, keys):
  """Return two embeddings, the first with noise in training, and integers."""
  a = batch["a"] * jax.vmap(lambda k: jax.random.uniform(k, (6,)))(keys) if train else batch["a"]
  outputs = {"a": jnp.tanh(a @ params["w"]), "b": jnp.tanh(batch["b"] @ params["w"])}
  return outputs | {"rows": jnp.arange(len(a))}, {"n": state["n"] + 1}


def info_nce(outputs, batch, everyone):
  logits = outputs["a"] @ everyone.outputs["b"].T
  return optax.softmax_cross_entropy_with_integer_labels(logits, everyone.rows)


def barlow(outputs, batch, everyone):
  """Return the loss of arXiv:2103.03230 for every row."""
  a, b = ((x - x.mean(0)) / x.std(0) for x in (everyone.outputs[k] for k in "ab"))
  return jnp.full(len(everyone.rows), ((a.T @ b / len(a) - jnp.eye(5)) ** 2).sum())


def steps(objective, num_devices, micros, **options):
  """Return the state and the metrics after three steps, and the compiled program."""
  mesh = make_mesh(devices=jax.devices()[:num_devices])
  loss = gathered_loss(apply, objective, batch_axes(mesh))
  options["num_microbatches"] = micros
  state, step = training(loss, init, optax.sgd(0.3), mesh, **options)
  batch = on_mesh(mesh, BATCH)
  text = step.lower(state, batch).as_text()
  for _ in range(3):
    state, metrics = step(state, batch)
  return jax.device_get((state.params, state.model_state, metrics)), text


@pytest.mark.parametrize("loss", [info_nce, barlow, contrastive(chunk=5).loss])
def test_devices_and_micro_batches_do_not_change_it(loss):
  if loss not in (info_nce, barlow):
    loss = lambda o, b, e, f=loss: f(  # noqa: E731
      (o["a"], o["b"]), b, e._replace(outputs=(e.outputs["a"], e.outputs["b"]))
    )
  objective = GatheredObjective(loss, lambda o, b, e: {"position": e.rows})
  one, _ = steps(objective, 1, 1)
  assert one[1]["n"] == 3 and one[2]["position"] == 15.5
  for num_devices, micros in ((1, 4), (4, 1), (8, 4)):
    assert_close(steps(objective, num_devices, micros)[0], one, rtol=2e-6, atol=1e-6)


def test_its_gradient_is_that_of_the_whole_loss():
  """A reference without devices, gathers and passes."""
  key = jax.random.fold_in(jax.random.key(0), 0)
  keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(32))
  everyone = functools.partial(Everyone, rows=jnp.arange(32), mask=jnp.ones(32, bool))

  def mean(params):
    outputs, _ = apply(params, {"n": jnp.int32(0)}, BATCH, True, keys)
    return info_nce(outputs, BATCH, everyone(outputs, BATCH)).mean()

  params = init(jax.random.key(0))[0]
  norm = optax.tree.norm(jax.grad(mean)(params))
  mesh = make_mesh(devices=jax.devices()[:8])
  loss = gathered_loss(apply, GatheredObjective(info_nce), AXES)
  state, step = training(loss, init, optax.sgd(0.3), mesh, num_microbatches=2)
  _, metrics = step(state, on_mesh(mesh, BATCH))
  np.testing.assert_allclose(metrics["loss"], mean(params), rtol=1e-6)
  np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_padding_and_rows_of_weight_0_are_no_negatives(num_devices):
  mesh, rows = make_mesh(devices=jax.devices()[:num_devices]), 29
  objective = GatheredObjective(contrastive(chunk=4).loss)
  fixed = lambda p, s, batch, train, keys: ((batch["a"], batch["b"]), s)  # noqa: E731
  step = make_eval_step(gathered_totals(fixed, objective, AXES), mesh)
  batch = BATCH | {"mask": np.arange(32) < rows}
  totals = step({}, {}, on_mesh(mesh, batch))
  a, b = (BATCH[k][:rows].astype(float) for k in "ab")
  expected = reference("infonce", a, b)[0].sum()
  np.testing.assert_allclose(totals["loss"], expected, rtol=1e-6)


def reference(kind, a, b, temperature=0.07, bias=-10.0):
  """Return losses and accuracies of each row in float64, from whole matrices."""
  a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
  cosines, eye = a @ b.T, np.eye(len(a), dtype=bool)
  accuracies = [c.argmax(1) == np.arange(len(a)) for c in (cosines, cosines.T)]
  if kind == "siglip":
    z = np.where(eye, 1, -1) * (cosines / temperature + bias)
    return np.log1p(np.exp(-z)).sum(1), *accuracies
  logits = [cosines / temperature, cosines.T / temperature]
  if kind == "nt_xent":
    within = [np.where(eye, -np.inf, x @ x.T / temperature) for x in (a, b)]
    logits = [np.hstack(pair) for pair in zip(logits, within, strict=True)]
  sums = [np.log(np.exp(x).sum(1)) for x in logits]
  return sum(sums) / 2 - np.diag(cosines) / temperature, *accuracies


@pytest.mark.parametrize("kind", ["infonce", "nt_xent", "siglip"])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_contrastive_losses_are_those_of_their_equations(kind, chunk):
  b = BATCH["a"] + BATCH["b"]
  expected = reference(kind, BATCH["a"].astype(float), b.astype(float))
  objective = contrastive(kind, chunk=chunk)
  outputs = (jnp.array(BATCH["a"]), jnp.array(b))
  everyone = Everyone(outputs, BATCH, jnp.arange(32), jnp.ones(32, bool))
  metrics = objective.metrics(outputs, BATCH, everyone)
  found = objective.loss(outputs, BATCH, everyone), *metrics.values()
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-6, atol=4e-6)
  assert list(metrics) == ["accuracy", "reverse_accuracy"] and 0 < expected[1].mean() < 1
  scale = {"scale": jnp.full(32, 1 / 0.07), "bias": jnp.full(32, -10.0)}
  outputs = dict(zip(("photo", "caption"), outputs[::-1], strict=True)) | scale
  learned = objective.loss(outputs, BATCH, everyone._replace(outputs=outputs))
  np.testing.assert_allclose(learned, expected[0], rtol=2e-6, atol=4e-6)


def test_the_matrix_of_all_pairs_never_exists():
  n, own = 2048, 512

  def loss(a, b, chunk):
    everyone = Everyone((b, b), {}, jnp.arange(own), jnp.ones(n, bool))
    return contrastive(chunk=chunk).loss((a, a), {}, everyone).sum()

  def temp(chunk):
    shapes = [jax.ShapeDtypeStruct((size, 8), "float32") for size in (own, n)]
    grad = jax.jit(jax.grad(functools.partial(loss, chunk=chunk), (0, 1)))
    return grad.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

  assert temp(n) > own * n * 4 > 4 * temp(64)


def test_arrays_that_a_loss_does_not_use_are_not_gathered():
  mesh = make_mesh(devices=jax.devices()[:4])
  loss = gathered_loss(apply, GatheredObjective(info_nce), AXES)
  state, step = training(loss, init, optax.sgd(0.3), mesh)
  text = step.lower(state, on_mesh(mesh, BATCH)).compile().as_text()
  assert "f32[32,5]" in text and "f32[32,6]" not in text


def test_what_does_not_fit_is_refused():
  objective = GatheredObjective(info_nce)
  with config_error("measure_noise_scale=True compares gradients"):
    steps(objective, 4, 2, measure_noise_scale=True)
  with config_error("loss_fn gathers rows of all devices, whose parameters differ"):
    steps(objective, 4, 1, local=local_sgd(2))
  for wrong in (lambda o, b, e: info_nce(o, b, e).mean(), lambda o, b, e: info_nce(o, b, e)[:3]):
    with config_error("return one value per example"):
      steps(GatheredObjective(wrong), 4, 2)
  with config_error("takes two embeddings [rows, dim], but the outputs have the shapes [(32, 6)"):
    contrastive().loss((BATCH["a"],), BATCH, Everyone((BATCH["a"],), BATCH, None, None))
