"""Built-in metrics: confusion matrix, F1, AUROC, R², correlation, calibration error.

Classes are counted as integers. The other metrics gather a few numbers per example and
compute in float64, so that values do not depend on the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import softmax

from jaxscale.errors import invalid
from jaxscale.metrics.pictures import plot_calibration, plot_confusion
from jaxscale.training.losses import aligned, targets_of
from jaxscale.training.metrics import Metric
from jaxscale.training.types import Batch

_MOST_CLASSES = 4000  # The matrix of more has over 64 MB.


def confusion_matrix() -> Metric:
  """Return the number of examples of each (true, predicted) class, [classes, classes]."""

  def update(outputs: Any, batch: Batch, weights: jax.Array):
    scores, labels = _scores_and_labels(outputs, batch, several=False)
    if (count := scores.shape[-1]) > _MOST_CLASSES:
      problem = f"does not work with {count:,} classes"
      raise invalid("Config.metrics", "ConfusionMatrix", problem, "use F1")
    cells = jnp.where(labels < 0, -1, labels * count + scores.argmax(-1))  # -1 is dropped
    sums = jax.ops.segment_sum(weights.reshape(-1), cells.reshape(-1), count * count)
    return sums.reshape(count, count)

  name = "confusion_matrix"
  return Metric(update, lambda sums: {name: sums}, pictures={name: plot_confusion})


def f1(average: str) -> Metric:
  """Return F1 = 2 TP / (2 TP + FP + FN), precision and recall, averaged over the classes.

  Classes that have neither examples nor predictions do not count.

  Args:
    average: "macro", "micro", "weighted" or "binary", as in scikit-learn's `f1_score`.
  """

  def update(outputs: Any, batch: Batch, weights: jax.Array):
    scores, labels = _scores_and_labels(outputs, batch)
    is_several, count = scores.ndim == labels.ndim, scores.shape[-1]
    if average == "binary" and (count != 2 or is_several):
      problem = f"needs two classes, but the model has {count} outputs"
      raise invalid("F1.average", average, problem, "use 'macro', 'micro' or 'weighted'")
    if not is_several:
      scores, labels = (jax.nn.one_hot(x, count, dtype=int) for x in (scores.argmax(-1), labels))
    picked, true, each = scores > 0, labels > 0, weights[..., None]
    flags = jnp.stack([picked & true, picked, true])
    return jnp.where(flags, each, jnp.zeros_like(each)).sum(range(1, flags.ndim - 1))

  def compute(sums: np.ndarray):
    hits, picked, true = sums.sum(1, keepdims=True) if average == "micro" else sums
    share = true if average == "weighted" else (picked + true > 0).astype(float)
    share = share * [0, 1] if average == "binary" else share

    def mean(top: np.ndarray, bottom: np.ndarray) -> float:
      ratios = np.divide(top, bottom, out=np.zeros(len(top)), where=bottom > 0)
      return (share * ratios).sum() / share.sum() if share.any() else np.nan

    values = {"precision": mean(hits, picked), "recall": mean(hits, true)}
    return {"f1": mean(2 * hits, picked + true), **values}

  return Metric(update, compute)


def auroc() -> Metric:
  """Return the area under the ROC curve, where ties count half (Mann-Whitney U).

  With more than two classes it is the mean over classes of one class against the rest, by
  softmax probabilities. With several labels per example it is the mean over labels.
  Classes without examples do not count.
  """

  def update(outputs: Any, batch: Batch, weights: jax.Array):
    return *_scores_and_labels(outputs, batch), weights

  def compute(rows: Any):
    scores, labels, weights = rows
    is_several, count = scores.ndim == labels.ndim, scores.shape[-1]
    scores, weights = scores.reshape(-1, count), weights.reshape(-1)
    is_true = labels > 0
    if not is_several:
      is_true = labels.reshape(-1, 1) == np.arange(count)
      weights = weights * is_true.any(1)
      scores = softmax(scores, axis=1) if count > 2 else scores[:, 1:] - scores[:, :1]
      is_true = is_true if count > 2 else is_true[:, 1:]
    areas = [_area(*column, weights) for column in zip(scores.T, is_true.T, strict=True)]
    known = [area for area in areas if not np.isnan(area)]
    return np.mean(known) if known else np.nan

  return Metric(update, compute, gathers=True)


def _area(scores: np.ndarray, is_true: np.ndarray, weights: np.ndarray) -> float:
  """Return the weighted area under the ROC curve, NaN for examples of one kind."""
  places = np.unique(scores, return_inverse=True)[1]
  positive, negative = (np.bincount(places, weights * x) for x in (is_true, ~is_true))
  below, pairs = np.cumsum(negative) - negative, positive.sum() * negative.sum()
  return (positive * (below + negative / 2)).sum() / pairs if pairs else np.nan


def r2() -> Metric:
  """Return R² = 1 - sum (y - f)² / sum (y - mean y)², the mean over outputs."""

  def compute(outputs: np.ndarray, true: np.ndarray, weights: np.ndarray):
    spread = (weights * (true - _mean(true, weights)) ** 2).sum(0)
    rest = (weights * (true - outputs) ** 2).sum(0)
    return (1 - rest / spread).mean() if spread.all() else np.nan

  return _of_numbers(compute)


def pearson() -> Metric:
  """Return Pearson's correlation of outputs and targets, the mean over outputs."""

  def compute(outputs: np.ndarray, true: np.ndarray, weights: np.ndarray):
    a, b = (x - _mean(x, weights) for x in (outputs, true))
    scale = np.sqrt((weights * a * a).sum(0) * (weights * b * b).sum(0))
    return ((weights * a * b).sum(0) / scale).mean() if scale.all() else np.nan

  return _of_numbers(compute)


def _of_numbers(compute: Callable[..., Any]) -> Metric:
  """Return a metric of (outputs [n, k], targets [n, k], weights [n, 1])."""

  def update(outputs: Any, batch: Batch, weights: jax.Array):
    return *aligned(outputs, batch["label"]), weights[:, None]

  def of_rows(rows: Any):
    is_used = rows[2][:, 0] > 0
    return compute(*(x[is_used] for x in rows)) if is_used.any() else np.nan

  return Metric(update, of_rows, gathers=True)


def _mean(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
  return (weights * x).sum(0) / weights.sum(0)


def calibration_error(bins: int) -> Metric:
  """Return the expected calibration error (arXiv:1706.04599, eq. 3), and its diagram.

  Examples are divided by the probability of the predicted class into equal bins
  ((m - 1)/M, m/M]. The error is the mean over examples of the absolute difference
  between the accuracy and the mean probability of their bin. The array "calibration",
  [bins, 3], has the share of the examples, the mean probability and the accuracy.
  """

  def update(outputs: Any, batch: Batch, weights: jax.Array):
    scores, labels = _scores_and_labels(outputs, batch, several=False)
    return jax.nn.softmax(scores).max(-1), scores.argmax(-1) == labels, weights

  def compute(rows: Any):
    sure, hits, weights = (x.reshape(-1) for x in rows)
    places = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    count, *sums = (np.bincount(places, weights * x, bins) for x in (1, sure, hits))
    means = [x / np.maximum(count, 1e-300) for x in sums]
    share = count / max(count.sum(), 1e-300)
    error = (share * abs(means[1] - means[0])).sum() if weights.any() else np.nan
    return {"calibration_error": error, "calibration": np.stack([share, *means], axis=1)}

  lower, pictures = ("calibration_error",), {"calibration": plot_calibration}
  return Metric(update, compute, True, lower, pictures)


def _scores_and_labels(
  outputs: Any, batch: Batch, *, several: bool = True
) -> tuple[jax.Array, jax.Array]:
  """Return class scores, float32 [rows, ..., classes], and labels, int32 [rows, ...].

  A single output is the logit of class 1 against class 0. Labels have the shape of the
  scores if an example has several labels.

  Args:
    outputs: outputs of the model.
    batch: rows with "label", or "targets" of text.
    several: allow several labels per example.
  """
  labels, shape = targets_of(batch).astype(jnp.int32), getattr(outputs, "shape", ())
  labels = labels[:, 0] if labels.shape[1:] == (1,) else labels
  if shape in (labels.shape, (*labels.shape, 1)) and labels.ndim == 1:
    logits = outputs.reshape(-1)
    outputs, shape = jnp.stack([jnp.zeros_like(logits), logits], axis=-1), (*labels.shape, 2)
  if not shape or labels.shape not in (shape[:-1], shape)[: 1 + several]:
    given = shape or type(outputs).__name__
    problem = f"take one score per class for labels {labels.shape}, but the model returns {given}"
    raise invalid("Config.metrics", ..., problem, "choose others, or write a config.Metric")
  return outputs.astype(jnp.float32), labels
