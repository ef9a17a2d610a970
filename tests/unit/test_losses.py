"""Built-in losses and their metrics are those of plain float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import BinaryCrossEntropy, CrossEntropy, Huber, SquaredError
from jaxscale.data import array_info
from jaxscale.errors import ConfigError
from jaxscale.training.losses import eval_totals, training_loss

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
BOTH = SEVERAL * np.log(SIGMOID) + (1 - SEVERAL) * np.log(1 - SIGMOID)
SMOOTH = 0.9 * ONE_HOT + 0.1 / OUTPUTS
SQUARED, SIZE = (ERROR**2 / 2).sum(-1), np.abs(ERROR)
HUBER = np.where(SIZE <= 0.7, ERROR**2 / 2, 0.7 * SIZE - 0.7**2 / 2).sum(-1)
# Settings, labels, and by the formulas: loss trained on, loss evaluated, metric.
CASES = {
  "smoothed": (
    CrossEntropy(label_smoothing=0.1), CLASSES, -(SMOOTH * np.log(P)).sum(-1),
    -(ONE_HOT * np.log(P)).sum(-1), ("accuracy", LOGITS.argmax(-1) == CLASSES),
  ),
  "several classes": (
    BinaryCrossEntropy(), SEVERAL, -BOTH.sum(-1), -BOTH.sum(-1),
    ("accuracy", ((LOGITS > 0) == SEVERAL).all(-1)),
  ),
  "squared": (
    SquaredError(), NUMBERS, SQUARED, SQUARED,
    ("mean_absolute_error", SIZE.mean(-1)),
  ),
  "huber": (
    Huber(delta=0.7), NUMBERS, HUBER, HUBER,
    ("mean_absolute_error", SIZE.mean(-1)),
  ),
}  # fmt: skip


def info(labels):
  images = np.zeros((ROWS, 2, 2, 1), np.uint8)
  return array_info(images, labels)


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
