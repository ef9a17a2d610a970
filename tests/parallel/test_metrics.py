"""Metrics that are no means equal scikit-learn's, on odd sizes and numbers of devices."""

import itertools

import jax
import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax
from sklearn import metrics as theirs

from jaxscale.data import eval_batches, from_named, to_device
from jaxscale.mesh import make_mesh
from jaxscale.training import built_in_metrics as ours
from jaxscale.training.loop import evaluate
from jaxscale.training.losses import Objective, eval_totals
from jaxscale.training.metrics import Metric
from jaxscale.training.step import make_eval_step
from support.cases import all_slow_except
from support.errors import config_error

ROWS, BATCH = 1003, 96
RNG = np.random.default_rng(3)
AVERAGES = "macro", "micro", "weighted"


def scores(*shape):
  """Return random scores with many ties."""
  return (RNG.integers(-8, 8, (ROWS, *shape)) / 4).astype("float32")


def labels_like(logits, classes):
  noise = RNG.gumbel(size=logits.shape) * 1.5
  return (logits + noise).argmax(-1).astype("int32") % classes


LOGITS = RNG.normal(0, 2, (ROWS, 7)).astype("float32")
LOGITS[::3] = LOGITS[0]  # equal rows are ties in all classes
CLASSES = labels_like(LOGITS, 6)  # no example has the last class
TWO = scores(2)
ONE = scores()
SEVERAL = scores(5)
NUMBERS = scores(3)
WEIGHTS = RNG.integers(0, 9, ROWS) / 8  # sums in float32 are exact
DATA = {
  "classes": (LOGITS, CLASSES),
  "two": (TWO, labels_like(TWO, 2)),
  "one logit": (ONE, (ONE + RNG.normal(0, 1, ROWS) > 0).astype("int32")),
  "float labels": (ONE[:, None], (ONE[:, None] > RNG.normal(0, 1, (ROWS, 1))).astype("float32")),
  "several": (SEVERAL, (RNG.normal(0, 1, SEVERAL.shape) < SEVERAL).astype("int32")),
  "numbers": (NUMBERS, (NUMBERS + RNG.normal(0, 1, NUMBERS.shape)).astype("float32")),
  "a number": (ONE, (ONE + RNG.normal(0, 1, ROWS)).astype("float32")),
}


def chosen(kind):
  """Return the metrics for data of this kind."""
  if kind in ("numbers", "a number"):
    return {"r2": ours.r2(), "pearson": ours.pearson()}
  averages = AVERAGES + ("binary",) * (kind not in ("classes", "several"))
  found = {f"f1 {name}": ours.f1(name) for name in averages} | {"auroc": ours.auroc()}
  if kind != "several":
    found |= {"matrix": ours.confusion_matrix(), "ece": ours.calibration_error(10)}
  return found


def measured(kind, num_devices, weights=None, metrics=None):
  """Return the results of an evaluation by name, those of F1 as "f1 AVERAGE: NAME"."""
  outputs, labels = DATA[kind]
  arrays = {"scores": outputs, "label": labels}
  arrays |= {} if weights is None else {"weight": weights.astype("float32")}
  mesh = make_mesh(devices=jax.devices()[:num_devices])
  metrics = metrics or chosen(kind)
  renamed = {}
  for name, metric in metrics.items():

    def compute(sums, metric=metric, name=name):
      values = metric.compute(sums)
      return {f"{name}: {k}": v for k, v in values.items()} if isinstance(values, dict) else values

    renamed[name] = metric._replace(compute=compute)
  # Strings sort before "label" and "scores", so "label" is the first leaf of a batch.
  objective = Objective(lambda outputs, batch: batch["scores"].reshape(len(outputs), -1).sum(-1))
  totals = eval_totals(
    lambda p, s, x, train, keys: (x, s), objective, lambda b: b["scores"], renamed
  )
  batches = to_device(eval_batches(from_named("x", arrays), BATCH), mesh)
  return evaluate(make_eval_step(totals, mesh), {}, {}, batches, renamed)


def references(kind, weights):
  """Return the values of scikit-learn and SciPy."""
  outputs, labels = DATA[kind]
  w = np.ones(ROWS) if weights is None else weights
  if kind in ("numbers", "a number"):
    outputs, labels = (x.reshape(ROWS, -1).astype(float) for x in (outputs, labels))
    times = (w * 8).astype(int)  # correlation with repeated examples
    columns = [
      [np.repeat(x[:, i], times) for x in (outputs, labels)] for i in range(labels.shape[1])
    ]
    return {
      "r2": theirs.r2_score(labels, outputs, sample_weight=w),
      "pearson": np.mean([stats.pearsonr(*pair).statistic for pair in columns]),
    }
  if outputs.ndim == 1 or outputs.shape[-1] == 1:
    outputs, labels = (
      np.stack([0 * outputs.ravel(), outputs.ravel()], 1),
      labels.ravel().astype(int),
    )
  is_several = labels.ndim > 1
  picked = (outputs > 0).astype(int) if is_several else outputs.argmax(-1)
  found = {}
  for name in AVERAGES + ("binary",) * (outputs.shape[-1] == 2):
    options = dict(average=name, sample_weight=w, zero_division=0)
    for score in ("f1", "precision", "recall"):
      value = getattr(theirs, f"{score}_score")(labels, picked, **options)
      found[f"f1 {name}: {score}"] = value
  probabilities = softmax(outputs.astype(float), axis=-1)
  if is_several:
    found["auroc"] = theirs.roc_auc_score(labels, outputs, sample_weight=w)
  elif outputs.shape[-1] == 2:
    margin = outputs.astype(float) @ [-1, 1]
    found["auroc"] = theirs.roc_auc_score(labels, margin, sample_weight=w)
  else:
    present = np.unique(labels)
    areas = [
      theirs.roc_auc_score(labels == c, probabilities[:, c], sample_weight=w) for c in present
    ]
    found["auroc"] = np.mean(areas)
  if not is_several:
    each = range(outputs.shape[-1])
    found["matrix: confusion_matrix"] = theirs.confusion_matrix(
      labels, picked, labels=each, sample_weight=weights
    )
    found["ece: calibration_error"] = ece(probabilities.max(1), picked == labels, w, 10)
  return found


def ece(sure, hits, w, bins):
  """Return equation 3 of arXiv:1706.04599."""
  edges, error = np.linspace(0, 1, bins + 1), 0.0
  for low, high in itertools.pairwise(edges):
    inside = (sure > low) & (sure <= high) & (w > 0)
    if inside.any():
      gap = np.average(hits[inside], weights=w[inside]) - np.average(
        sure[inside], weights=w[inside]
      )
      error += w[inside].sum() / w.sum() * abs(gap)
  return error


KINDS = [(kind, is_weighted) for kind in DATA for is_weighted in (False, True)]
FAST = ("classes", True), ("two", False), ("one logit", True), ("several", True), ("numbers", True)


@pytest.mark.parametrize("case", all_slow_except(KINDS, *FAST), ids=str)
def test_values_are_those_of_scikit_learn(case):
  kind, weights = case[0], WEIGHTS if case[1] else None
  expected, got = references(kind, weights), measured(kind, 8, weights)
  assert not expected.keys() - got.keys()
  for name, value in expected.items():
    # Probabilities are float32 on the devices.
    tolerance = 1e-6 if name.startswith("ece") else 4e-15
    np.testing.assert_allclose(got[name], value, rtol=tolerance, err_msg=name)


@pytest.mark.parametrize("num_devices", all_slow_except((1, 3, 4), 3))
def test_values_do_not_depend_on_the_devices(num_devices):
  for kind, weights in (("classes", WEIGHTS), ("several", None), ("numbers", None)):
    jax.tree.map(
      np.testing.assert_array_equal,
      *(
        {k: v for k, v in measured(kind, n, weights).items() if k != "loss"}
        for n in (num_devices, 8)
      ),
    )


def test_counts_are_integers():
  matrix = measured("classes", 8)["matrix: confusion_matrix"]
  assert matrix.dtype == np.int64 and matrix.sum() == ROWS


def test_a_metric_that_is_not_defined_is_nan():
  DATA["all of one class"] = TWO, np.ones(ROWS, "int32")
  found = measured("all of one class", 4)
  assert np.isnan(found["auroc"]) and found["f1 macro: recall"] > 0
  DATA["constant"] = ONE, np.ones(ROWS, "float32")
  got = measured("constant", 4, metrics=chosen("numbers"))
  assert all(np.isnan(got[name]) for name in ("r2", "pearson"))


WRONG = {
  "m": (Metric(lambda o, b, w: o[:1], float, True), "gathers an array of shape (1,"),
  "n": (Metric(lambda o, b, w: w.sum(), lambda sums: "high"), "returns 'n': str"),
  "loss": (Metric(lambda o, b, w: w.sum(), float), "loss is reported by two metrics"),
  "binary": (ours.f1("binary"), "F1.average=binary needs two classes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_metric_is_refused_in_one_line(name):
  metric, problem = WRONG[name]
  with config_error(problem):
    measured("classes", 2, metrics={name: metric})
