"""Built-in losses and their metrics are those of plain float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import config
from jaxscale.config import BinaryCrossEntropy, CrossEntropy, Huber, SquaredError
from jaxscale.data import DatasetInfo, array_info, eval_batches, train_batches
from jaxscale.data.dataset import DamagedExamples, Dataset
from jaxscale.errors import ConfigError
from jaxscale.experiment.build import experiment
from jaxscale.mesh import batch_sharding
from jaxscale.models import ModelFns
from jaxscale.training.losses import Objective, eval_totals, training_loss
from support.configs import small_config
from support.errors import config_error

ROWS, OUTPUTS = 6, 4
RNG = np.random.default_rng(5)
LOGITS = RNG.normal(0, 2, (ROWS, OUTPUTS))
CLASSES = RNG.integers(0, OUTPUTS, ROWS)
SEVERAL = RNG.integers(0, 2, (ROWS, OUTPUTS))
SEVERAL[0] = LOGITS[0] > 0  # one example is right in every class
NUMBERS = LOGITS + RNG.normal(0, 1.5, (ROWS, OUTPUTS))
MASK = np.arange(ROWS) < ROWS - 2  # padding is at the end

P = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
ONE_HOT = np.eye(OUTPUTS)[CLASSES]
SIGMOID, ERROR = 1 / (1 + np.exp(-LOGITS)), LOGITS - NUMBERS
BINARY = -(SEVERAL * np.log(SIGMOID) + (1 - SEVERAL) * np.log(1 - SIGMOID)).sum(-1)
ALL_RIGHT = ((LOGITS > 0) == SEVERAL).all(-1)
SMOOTH = 0.9 * ONE_HOT + 0.1 / OUTPUTS
SQUARED, SIZE = (ERROR**2 / 2).sum(-1), np.abs(ERROR)
HUBER = np.where(SIZE <= 0.7, ERROR**2 / 2, 0.7 * SIZE - 0.7**2 / 2).sum(-1)
# Settings, labels, and by the formulas: loss trained on, loss evaluated, metric.
CASES = {
  "smoothed": (
    CrossEntropy(label_smoothing=0.1),
    CLASSES,
    -(SMOOTH * np.log(P)).sum(-1),
    -(ONE_HOT * np.log(P)).sum(-1),
    ("accuracy", LOGITS.argmax(-1) == CLASSES),
  ),
  "several classes": (BinaryCrossEntropy(), SEVERAL, BINARY, BINARY, ("accuracy", ALL_RIGHT)),
  "squared": (SquaredError(), NUMBERS, SQUARED, SQUARED, ("mean_absolute_error", SIZE.mean(-1))),
  "huber": (Huber(delta=0.7), NUMBERS, HUBER, HUBER, ("mean_absolute_error", SIZE.mean(-1))),
}


def info(labels):
  return array_info(np.zeros((ROWS, 2, 2, 1), np.uint8), labels)


def apply(params, model_state, inputs, train, keys):
  return jnp.float32(LOGITS), model_state


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_formulas(name):
  settings, labels, trained, evaluated, (metric, values) = CASES[name]
  labels = labels.astype(np.int32 if labels.dtype == np.int64 else np.float32)
  objective = settings.build(info(labels))
  batch = {"image": jnp.zeros((ROWS, 2, 2, 1)), "label": jnp.asarray(labels)}
  loss, (_, sums) = training_loss(apply, objective)({}, {}, batch, None)
  np.testing.assert_allclose([loss, sums["loss"]], 2 * [trained.sum()], rtol=1e-6)
  np.testing.assert_allclose(sums[metric], values.sum(), rtol=1e-6)
  assert sums["examples"] == ROWS
  totals = eval_totals(apply, objective)({}, {}, batch | {"mask": jnp.asarray(MASK)})
  np.testing.assert_allclose(totals["loss"], evaluated[MASK].sum(), rtol=1e-6)
  np.testing.assert_allclose(totals[metric], values[MASK].sum(), rtol=1e-6)
  assert totals["examples"] == MASK.sum()


def test_a_class_is_not_several():
  with pytest.raises(ConfigError, match="use BinaryCrossEntropy or SquaredError"):
    CrossEntropy().build(info(SEVERAL))


def on_two(**fields):
  return experiment(small_config(**fields), devices=jax.devices()[:2])


def digit_run(loss, x, y, **other):
  return on_two(data=config.Arrays(x=x, y=y), loss=loss, **other)


def losses_of(loss, y):
  """Training and evaluation losses, and metrics, of four steps on two devices."""
  made = digit_run(loss, INPUTS, y)
  state, seen = made.init_state(), []
  for _, batch in zip(range(4), train_batches(made.train_data, 16), strict=False):
    state, metrics = made.train_step(state, to_mesh(batch, made))
    seen.append({k: v for k, v in metrics.items() if not v.ndim})
  (batch,) = eval_batches(made.eval_data, 8)
  totals = made.eval_step(*state.evaluated(), to_mesh(batch, made))
  return jax.tree.map(float, [seen, totals])


def to_mesh(batch, made):
  return jax.device_put(batch, batch_sharding(made.mesh))


INPUTS = RNG.normal(size=(80, 3)).astype("float32")
POSITIVE = INPUTS[:, 0] > 0
COUNTS = (INPUTS[:, 1] ** 2 * 3).astype(int)


SHAPED = {
  "binary": (BinaryCrossEntropy(), POSITIVE),
  "counts": (SquaredError(), COUNTS),
  "huber": (Huber(), COUNTS),
  "bool": (SquaredError(), POSITIVE),
}


@pytest.mark.parametrize("loss, y", SHAPED.values(), ids=SHAPED)
def test_targets_of_any_shape_and_dtype_are_the_same_numbers(loss, y):
  """Neither all pairs of [n] and [n, 1], nor an output for each count."""
  wanted = losses_of(loss, y[:, None].astype("float32"))
  assert wanted[0][0]["loss"] > 0
  kinds = [y, y.astype(int), y.astype("float32"), y[:, None], y.astype("uint8")]
  for kind in kinds:
    got = losses_of(loss, kind)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, got, wanted)), kind.dtype


def test_bool_targets_are_two_classes():
  assert losses_of(CrossEntropy(), POSITIVE) == losses_of(CrossEntropy(), POSITIVE + 0)
  for y in (POSITIVE, np.zeros(80, bool)):
    assert array_info(INPUTS, y).num_classes == 2


def test_numbers_of_classes_can_be_learned():
  """`--config.loss=SquaredError` on the digits has one output, not ten."""
  made = digit_run(SquaredError(), INPUTS, CLASSES[RNG.integers(0, ROWS, 80)])
  kernels = jax.tree.leaves(made.abstract_state().params)
  assert [w.shape for w in kernels][-1] == (8, 1)


class Outputs(config.Model):
  """A model with any outputs.

  Attributes:
    make: of the hidden units.
  """

  make: object

  def build(self, context):
    def init(key):
      return {"w": jax.random.normal(key, (3, 4))}, {}

    def apply(params, model_state, inputs, train, keys):
      return self.make(inputs @ params["w"]), model_state

    return ModelFns(init, apply)


class Given(config.Loss):
  """A loss with any build.

  Attributes:
    made: by `build`.
  """

  made: object

  def build(self, info):
    return self.made


def one(outputs, batch):
  return (outputs[:, 0] - batch["label"]) ** 2


def same(h):
  return h


PAIR = INPUTS[:, :2]
SQUARES = (INPUTS > 0).astype(int)


MADE_WRONGLY = [
  (lambda h: {"class": h, "aux": h}, SquaredError(), PAIR, "a dict of 'class', 'aux'; return"),
  (lambda h: (h, h), CrossEntropy(), COUNTS, "the model returns a tuple of 2; return one array"),
  (lambda h: h.mean(), SquaredError(), PAIR, r"output has shape \[\] for 8 rows; return one"),
  (lambda h: h[:1], SquaredError(), PAIR, r"output has shape \[1, 4\] for 8 rows; return one"),
  (same, SquaredError(), PAIR, r"targets \(8, 2\), but the model returns \(8, 4\)"),
  (same, BinaryCrossEntropy(), POSITIVE, r"targets \(8,\), but the model returns"),
  (lambda h: h[:, :, None] * h[:, None], CrossEntropy(), COUNTS, "one vector of lo"),
  (same, BinaryCrossEntropy(), COUNTS, "takes targets 0 or 1, but Arrays has .* classes"),
  (lambda h: h.no_such, SquaredError(), PAIR, rf"{__file__}:\d+: Outputs .*no_such"),
]
LINE = rf"{__file__}:\d+: Given"
SHAPE = r"of shape \(\) for examples \(8,\); return one value per example"
NAMES = "return a dict of names other than 'loss' and 'examples'"
OWN = [
  (one, "Given.build returned function; return a train"),
  ((one, dict), "Given.build returned tuple; return a train"),
  (None, "Given.build returned NoneType; return a training"),
  (Objective(lambda o, b: one(o, b).mean()), f"returns 'loss' {SHAPE}"),
  (Objective(lambda o, b: 1), f"returns 'loss' {SHAPE}"),
  (Objective(lambda o, b: jnp.ones(len(o), int)), "returns a loss of int32"),
  (Objective(lambda o, b: one(o, b) * b["weight"]), rf"{LINE} \(loss\): KeyError: 'weight'"),
  (Objective(lambda o, b: jax.lax.psum(one(o, b), "rows")), rf"{LINE} \(loss\): .*Error: "),
  (Objective(lambda o, b: o - b["label"]), rf"{LINE} \(loss\): \w+Error: .*shapes"),
  (Objective(one, lambda o, b: {"mae": 3.0}), f"returns 'mae' {SHAPE}"),
  (Objective(one, lambda o, b: one(o, b)), NAMES),
  (Objective(one, lambda o, b: {"loss": one(o, b)}), NAMES),
  (
    Objective(one, lambda o, b: {"mae": "x"}),
    "returns 'mae' as str; return one number per example",
  ),
  (Objective(one, dict, lambda o, b: b["labels"]), r"Given \(metrics\): TypeError: dict expected"),
  (
    Objective(one, lambda o, b: {}, lambda o, b: b["labels"]),
    rf"{LINE} \(eval_loss\): KeyError: 'labels'",
  ),
]
MADE_WRONGLY += [(same, Given(made=made), PAIR[:, 0], line) for made, line in OWN]


@pytest.mark.parametrize("make, loss, y, line", MADE_WRONGLY)
def test_what_a_loss_is_not_made_for_is_refused_in_one_line(make, loss, y, line):
  with config_error(match=line):
    digit_run(loss, INPUTS, y, model=Outputs(make=make))


def test_a_loss_of_ones_own_takes_a_dict():
  model = Outputs(make=lambda h: {"a": h, "b": h[:, :1]})
  loss = Given(made=Objective(lambda o, b: one(o["b"], b)))
  digit_run(loss, INPUTS, PAIR[:, 0], model=model).lower_train_step()


def test_flat_outputs_are_those_of_a_field():
  objective, field = SquaredError().build(info(NUMBERS)), jnp.ones((6, 2, 3, 1))
  want = objective.loss(field, {"label": 2 * field})
  np.testing.assert_array_equal(objective.loss(field.reshape(6, 6), {"label": 2 * field}), want)
  with pytest.raises(ConfigError, match="one output for each of the targets"):
    objective.loss(field.reshape(6, 3, 2), {"label": field})


class Labels(config.Data):
  """Examples with these targets, which `from_arrays` does not check.

  Attributes:
    y: targets.
    damaged: whether examples may be unreadable.
  """

  y: object
  damaged: bool = False

  def build(self):
    y = np.asarray(self.y)
    kind = "float32" if y.dtype.kind == "f" else "int32"
    info = DatasetInfo("mine", (3,), 3, (0.0,), (1.0,), "float32", y.shape[1:], kind)
    damaged = DamagedExamples() if self.damaged else None

    def load(indices, draws):
      return {"image": INPUTS[indices], "label": y[indices].astype(kind)}

    return 2 * (Dataset(info, len(y), load, damaged=damaged),)


def with_one(value, y=None):
  y = np.zeros(len(INPUTS), type(value)) if y is None else y
  return np.where(np.arange(len(y)).reshape(-1, *[1] * (y.ndim - 1)) == 5, value, y)


OUT_OF_RANGE = [
  (with_one(3), CrossEntropy(), r"mine: label=3 is out of range \[0, 2\]; fix the targets"),
  (with_one(-1), CrossEntropy(), r"mine: label=-1 is out of range \[0, 2\]; fix the targets"),
  (with_one(2, SQUARES), BinaryCrossEntropy(), r"label=2 is out of range \[0, 1\]"),
  (with_one(1.5), BinaryCrossEntropy(), r"label=1.5 is out of range \[0, 1\]; fix"),
  (with_one(np.nan), BinaryCrossEntropy(), r"label=nan is out of range \[0, 1\]"),
]


@pytest.mark.parametrize("y, loss, line", OUT_OF_RANGE)
def test_targets_out_of_range_are_refused_in_the_batch_that_has_them(y, loss, line):
  """A class of -1 would be the last one, any other NaN."""
  made = on_two(data=Labels(y=y), loss=loss)
  for dataset in (made.train_data, made.eval_data):
    assert len(dataset.load(np.arange(5), None)["label"]) == 5
    with pytest.raises(ConfigError, match=line):
      dataset.load(np.arange(8), None)


def test_unreadable_examples_and_numbers_have_any_target():
  unreadable = Labels(y=with_one(-1), damaged=True)
  for data, loss in ((unreadable, CrossEntropy()), (Labels(y=with_one(70)), SquaredError())):
    made = on_two(data=data, loss=loss)
    made.eval_data.load(np.arange(8), None)


def test_arrays_with_targets_out_of_range_are_refused_at_the_start():
  for y, loss, line in (
    (with_one(-0.5), BinaryCrossEntropy(), r"Arrays.y=-0.5 is out of range \[0, 1\]"),
    (with_one(1.5, SQUARES), BinaryCrossEntropy(), r"Arrays.y=1.5 is out of range"),
  ):
    with pytest.raises(ConfigError, match=line):
      digit_run(loss, INPUTS, y)
