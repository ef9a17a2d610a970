"""Metrics of evaluations that are no means over examples: F1, AUROC, correlation.

A `Metric` adds up sums over the batches and devices, or gathers arrays of all examples.
The host computes its values at the end, in double precision. The built-in metrics are in
`built_in_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.errors import invalid
from jaxscale.metrics.log import logger
from jaxscale.metrics.scoring import perplexity_of
from jaxscale.training.types import Batch

# Totals of an eval step: sums by metric, and (mask, arrays of examples by metric).
SUMS, ROWS = "_sums", "_rows"


class Metric(NamedTuple):
  """Metric computed from sums over all examples, or from arrays of all examples.

  Attributes:
    update: (outputs, batch, weights) -> tree of sums over the rows. Weights are the
      batch's "weight" in float32 or int32 ones, [rows] (text: [rows, tokens]), and 0 for
      padding. Sums are added over batches, devices and processes. With `gathers`, the
      result is a tree of arrays [rows, ...] instead.
    compute: tree of sums, float64 or int64 -> the value, or a dict of values by name:
      numbers, or arrays for pictures. NaN means that the metric is not defined for these
      examples.
    gathers: collect the arrays of all examples, in their order and without padding. Every
      process holds them in its memory during an evaluation.
    lower_is_better: names of values of which the lowest is best.
    pictures: function (path, array, class names) that draws an array, by its name.

  Example:
    >>> def update(outputs, batch, weights):
    ...   is_hit = outputs.argmax(-1) == batch["label"]
    ...   return {"hits": (weights * is_hit).sum(), "all": weights.sum()}
    >>> metric = Metric(update, lambda sums: sums["hits"] / sums["all"])
  """

  update: Callable[[Any, Batch, jax.Array], Any]
  compute: Callable[[Any], Any]
  gathers: bool = False
  lower_is_better: Collection[str] = ()
  pictures: Mapping[str, Callable[[Path, np.ndarray, Sequence[str]], None]] = MappingProxyType({})


def updates(
  metrics: Mapping[str, Metric], outputs: Any, batch: Batch, weights: jax.Array
) -> dict[str, Any]:
  """Return the totals `SUMS` and `ROWS` of an evaluation batch.

  Args:
    metrics: metrics by name.
    outputs: outputs of the model.
    batch: this device's rows, with "mask".
    weights: weights of the examples; bool counts them.
  """
  weights = weights.astype(jnp.int32) if weights.dtype == bool else weights
  parts = {name: metric.update(outputs, batch, weights) for name, metric in metrics.items()}
  rows = {name: parts.pop(name) for name, metric in metrics.items() if metric.gathers}
  for name, part in rows.items():
    for shape in map(jnp.shape, jax.tree.leaves(part)):
      if shape[:1] != batch["mask"].shape:
        problem, fix = f"gathers an array of shape {shape}", "return arrays [rows, ...]"
        raise invalid("Config.metrics", name, problem, fix)
  return {SUMS: jax.tree.map(jnp.asarray, parts), ROWS: (batch["mask"], rows)} if metrics else {}


def results(
  metrics: Mapping[str, Metric], sums: Mapping[str, Any], rows: Sequence[Any]
) -> Iterator[tuple[str, Any]]:
  """Yield the name and the value, a float or an array, of each result.

  Args:
    metrics: metrics by name.
    sums: sums over all batches by metric.
    rows: arrays of each batch by metric, without padding.

  Raises:
    ConfigError: a metric returned something else.
  """
  gathered = jax.tree.map(lambda *xs: wide(np.concatenate(xs)), *rows) if rows else {}
  for name, part in {**sums, **gathered}.items():
    computed = metrics[name].compute(part)
    named = computed if isinstance(computed, Mapping) else {name: computed}
    for key, value in named.items():
      array = np.asarray(value)
      if array.dtype.kind not in "iufb":
        fix = "return a number, or a dict of numbers and arrays"
        raise invalid("Config.metrics", name, f"returns {key!r}: {type(value).__name__}", fix)
      yield key, array if array.ndim else float(array)


def separate(found: Mapping[str, Any], info: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
  """Return the numbers of an evaluation, for text with the perplexity, and its arrays.

  A metric that is NaN, as AUROC for examples of one class, is left out and logged.

  Args:
    found: the result of `loop.evaluate`.
    info: the description of the data.
  """
  arrays = {name: x for name, x in found.items() if isinstance(x, np.ndarray)}
  values = {name: x for name, x in found.items() if name not in arrays}
  for name in [n for n, x in values.items() if n != "loss" and not np.isfinite(x)]:
    logger.warning(f"{name} is {values.pop(name)} for the validation examples; it is left out")
  if hasattr(info, "bytes_per_token"):
    values |= perplexity_of(values["loss"], info.bytes_per_token)
  return values, arrays


def wide(x: np.ndarray) -> np.ndarray:
  """Return an array as int64 or float64."""
  return x.astype(np.int64 if x.dtype.kind in "iub" else np.float64)
