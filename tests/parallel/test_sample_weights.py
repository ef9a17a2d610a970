"""Sample and class weights: exact weighted means over devices, micro-batches and layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import log_softmax

from jaxscale import config, parallel
from jaxscale.data import eval_batches, from_named, to_device
from jaxscale.data.dataset import with_checked_weights
from jaxscale.exchange import plain
from jaxscale.exchange.local_updates import local_sgd
from jaxscale.experiment.build import experiment
from jaxscale.mesh import make_mesh
from jaxscale.metrics.log import logger
from jaxscale.parallel import rules
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.training.loop import evaluate
from jaxscale.training.losses import cross_entropy, eval_totals, training_loss
from jaxscale.training.step import make_eval_step
from support.cases import all_slow_except
from support.configs import small_config
from support.errors import config_error
from support.steps import on_mesh, training

RNG = np.random.default_rng(0)
ROWS, WIDTH, CLASSES = 32, 8, 4
X = RNG.normal(size=(ROWS, WIDTH)).astype("float32")
Y = RNG.integers(0, CLASSES, ROWS).astype("int32")
W = RNG.exponential(size=ROWS).astype("float32") * (RNG.random(ROWS) > 0.3)
W[:8] = 0  # nothing counts on the first of four devices
START = RNG.normal(size=(WIDTH, CLASSES)).astype("float32")
OF_CLASS = (1.0, 0.25, 3.0, 0.5)
BATCH = {"image": X, "label": Y}


def init(key):
  del key
  return {"w": jnp.asarray(START)}, {}


def apply(params, model_state, inputs, train, keys):
  return inputs @ params["w"], model_state


def expected(weights=None, class_weights=(), smoothing=0.0):
  """Return loss, accuracy and gradient by the formulas of PyTorch, in float64.

  torch.nn.CrossEntropyLoss (2.9): sum_i s_i w[y_i] l_i / sum_i s_i w[y_i]; smoothing adds
  e / classes * sum_c w[c] (-log p_c), divided by the same sum.
  """
  s = np.ones(ROWS) if weights is None else weights.astype(float)
  c = np.array(class_weights or [1.0] * CLASSES)
  target = (1 - smoothing) * np.eye(CLASSES)[Y] * c + smoothing / CLASSES * c
  log_p = log_softmax(X.astype(float) @ START, axis=-1)
  total = (s * c[Y]).sum()
  loss = -(s[:, None] * target * log_p).sum() / total
  d_logits = s[:, None] * (np.exp(log_p) * target.sum(1, keepdims=True) - target) / total
  accuracy = (s * ((X @ START).argmax(1) == Y)).sum() / s.sum()
  return loss, accuracy, X.T.astype(float) @ d_logits


def step_of(batch, objective, num_devices=4, layout=None, **options):
  """Return the metrics and the gradient of a step: SGD's change of the parameters."""
  mesh = make_mesh(devices=jax.devices()[:num_devices], fsdp=num_devices if layout else 1)
  loss = training_loss(apply, objective)
  if layout:
    shapes = jax.eval_shape(init, jax.random.key(0))[0]
    split = (rules.Rule("w", rules.largest("fsdp", least=1)),)
    options["layout"] = made = parallel.make_layout(mesh, shapes, split, shard=layout)
    loss = parallel.with_gathered_params(loss, made.gathers)
    options["exchange"] = plain(exchange_axes(made))
  state, step = training(loss, init, optax.sgd(1.0), mesh, **options)
  state, metrics = step(state, on_mesh(mesh, batch))
  return metrics, START - np.asarray(state.params["w"])


CASES = {
  "one device": dict(num_devices=1),
  "four": dict(num_devices=4),
  "micro-batches": dict(num_devices=4, num_microbatches=2),
  "fsdp": dict(num_devices=4, layout="fsdp"),
  "zero2 of micro-batches": dict(num_devices=4, layout="zero2", num_microbatches=4),
  "guarded": dict(num_devices=8, skip_bad_steps=True, num_microbatches=2),
}
WEIGHTS = {
  "rows": dict(weights=W),
  "classes": dict(class_weights=OF_CLASS),
  "all": dict(weights=W, class_weights=OF_CLASS, smoothing=0.1),
}


STEPS = [(case, weights) for case in CASES for weights in WEIGHTS]
FAST = [(case, "all") for case in CASES if case != "four"] + [("four", "rows")]


@pytest.mark.parametrize("case", all_slow_except(STEPS, *FAST))
def test_a_step_is_that_of_the_weighted_mean(case):
  case, weights = case
  given = WEIGHTS[weights]
  batch = BATCH | ({"weight": given["weights"]} if "weights" in given else {})
  objective = cross_entropy(given.get("smoothing", 0.0), given.get("class_weights", ()))
  metrics, gradient = step_of(batch, objective, **CASES[case])
  loss, accuracy, wanted = expected(**given)
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
  np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-6)
  np.testing.assert_allclose(gradient, wanted, atol=1e-6)


@pytest.mark.parametrize("case", all_slow_except(CASES, "guarded", "zero2 of micro-batches"))
def test_weights_of_one_change_no_bit(case):
  plain, gradient = step_of(BATCH, cross_entropy(), **CASES[case])
  ones, same = step_of(BATCH | {"weight": np.ones(ROWS, "float32")}, cross_entropy(), **CASES[case])
  np.testing.assert_array_equal(gradient, same)
  assert jax.device_get(plain).keys() == ones.keys()
  jax.tree.map(np.testing.assert_array_equal, plain, ones)


def test_workers_of_local_sgd_use_their_own_means():
  mesh, batch = make_mesh(devices=jax.devices()[:4]), BATCH | {"weight": W}
  options = dict(local=local_sgd(every=1), skip_bad_steps=True)
  loss = training_loss(apply, cross_entropy(0.0, OF_CLASS))
  state, step = training(loss, init, optax.sgd(1.0), mesh, **options)
  state, metrics = step(state, on_mesh(mesh, batch))
  np.testing.assert_allclose(metrics["loss"], expected(W, OF_CLASS)[0], rtol=1e-6)
  alone = [
    step_of({k: v[i : i + 8] for k, v in batch.items()}, cross_entropy(0.0, OF_CLASS), 1)
    for i in range(0, ROWS, 8)
  ]
  assert not np.any(alone[0][1])  # the first worker has no weights
  wanted = np.mean([gradient for _, gradient in alone], axis=0)
  np.testing.assert_allclose(START - np.asarray(state.params["w"]), wanted, atol=1e-6)


def test_a_batch_of_weight_zero_has_no_gradient():
  batch = BATCH | {"weight": np.zeros(ROWS, bool)}
  metrics, gradient = step_of(batch, cross_entropy(0.1, OF_CLASS), num_microbatches=2)
  assert not np.any(gradient) and metrics["loss"] == metrics["accuracy"] == 0
  with config_error("weight is 0 for all validation examples"):
    evaluated(batch)


def evaluated(arrays, objective=None):
  objective, mesh = objective or cross_entropy(0.1), make_mesh()
  step = make_eval_step(eval_totals(apply, objective), mesh)
  dataset = from_named("x", {"label": arrays["label"]})  # `from_named` refuses NaN
  dataset = dataset._replace(load=lambda at, draws: {k: v[at] for k, v in arrays.items()})
  batches = to_device(eval_batches(dataset, 16), mesh)
  return evaluate(step, init(None)[0], {}, batches)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_evaluation_is_the_weighted_mean(weights):
  """27 examples in batches of 16: without the last five, whose weights are 0 in `expected`."""
  given = dict(WEIGHTS[weights]) | {"smoothing": 0.0}
  batch = {k: v[:27] for k, v in BATCH.items()}
  given["weights"] = np.where(np.arange(ROWS) < 27, given.get("weights", np.ones(ROWS)), 0)
  if weights != "classes":
    batch["weight"] = W[:27]
  got = evaluated(batch, cross_entropy(0.1, given.get("class_weights", ())))
  loss, accuracy, _ = expected(**given)
  assert got == pytest.approx({"loss": loss, "accuracy": accuracy}, rel=1e-6)


def test_an_example_of_weight_zero_may_be_nan():
  batch = BATCH | {"weight": np.where(np.arange(ROWS) == 3, 0, 1).astype("float32")}
  batch["image"] = np.where(np.arange(ROWS)[:, None] == 3, np.nan, X)
  assert np.isfinite(evaluated(batch)["loss"])


@pytest.mark.parametrize("shape", ((6,), (6, 5)))
def test_weights_of_tokens(shape):
  logits, targets = RNG.normal(size=(6, 5, 9)), RNG.integers(-1, 9, (6, 5))
  weights = RNG.random(shape).astype("float32")
  batch = {"targets": targets.astype("int32"), "weight": weights}
  loss = training_loss(lambda *_: (jnp.float32(logits), {}), cross_entropy(), lambda batch: None)
  total, (_, totals) = loss({}, {}, jax.tree.map(jnp.asarray, batch), None)
  each = -np.take_along_axis(log_softmax(logits, -1), np.maximum(targets, 0)[..., None], -1)
  w = np.broadcast_to(weights.reshape(6, -1), (6, 5)) * (targets >= 0)
  got = [total, totals["examples"]]
  np.testing.assert_allclose(got, [(w * each[..., 0]).sum(), w.sum()], rtol=1e-5)


class Weighted(config.Data):
  """Rows with a class and a weight."""

  weight: tuple[float, ...] = (1.0, 2.0)

  def build(self):
    weight = np.resize(self.weight, 64).astype("float32")
    arrays = {"image": RNG.normal(size=(64, 4)).astype("float32"), "weight": weight}
    arrays["label"] = (arrays["image"][:, 0] > 0).astype("int32")
    return (from_named("rows", arrays),) * 2


def test_weights_of_a_config_reach_the_step_and_wrong_ones_are_refused(caplog):
  made = experiment(small_config(data=Weighted()), devices=jax.devices()[:2])
  assert "weight" in made.abstract_batch()
  for wrong in (-1.0, float("nan"), float("inf")):
    data = Weighted().build()[0]._replace(load=lambda *_, w=wrong: {"weight": np.array([1.0, w])})
    with config_error(f"rows: weight={wrong}", "is not a weight"):
      with_checked_weights(data).load(np.arange(4), None)
  empty = with_checked_weights(Weighted(weight=(0.0,)).build()[0])
  logger.propagate = True
  for _ in range(2):
    empty.load(np.arange(4), np.zeros((4, 0)))
  logger.propagate = False
  (line,) = [x.message for x in caplog.records]
  assert "rows: weight is 0 in a whole batch" in line
  with config_error("class_weights", "one weight for each of the 2 classes"):
    loss = config.CrossEntropy(class_weights=(1.0, 2.0, 3.0))
    experiment(small_config(data=Weighted(), loss=loss))
  for change in (
    dict(loss=config.CrossEntropy(class_weights=(1.0,) * 10)),
    dict(metrics=(config.F1(),)),
  ):
    vit = config.ViT(patch=4, num_layers=2, width=16, num_heads=2, hidden=16)
    with config_error("does not work with ViT, which computes its own totals"):
      experiment(small_config(model=vit, **change))
  with config_error("batch['weight'] has the shape (2, 8)"):
    evaluated(BATCH | {"weight": np.ones((ROWS, 8), "float32")})
