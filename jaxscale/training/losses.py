"""Losses and metrics: values per example, summed exactly.

An `Objective` says what one example's loss is; `training_loss` and `eval_totals` make
of it and of any `apply` what the steps take, so a model need not be Flax:

    apply(params, model_state, inputs, train, keys) -> (outputs, model_state)

Inputs and targets are a batch's "image" and "label", or of text "tokens" and "targets",
where every token counts as an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import ConfigError, invalid
from jaxscale.training.types import Batch, EvalFn, LossFn, Totals

Apply = Callable[..., tuple[jax.Array, Any]]
# Set on a loss whose sums over rows need no check (`contract.check_sums`).
IS_SUM = "is_sum"
PerExample = Callable[[Any, Batch], Any]


class Objective(NamedTuple):
  """Loss and metrics of each example.

  Attributes:
    loss: (outputs, batch) -> float32 [rows], of text [rows, tokens]; what training
      minimizes.
    metrics: (outputs, batch) -> a dict of such arrays, bool or numbers, whose means
      over the examples are reported.
    eval_loss: as `loss`, where evaluation has another; None: the same.
  """

  loss: PerExample
  metrics: PerExample = lambda outputs, batch: {}
  eval_loss: PerExample | None = None


def smoothed_cross_entropy(
  logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0
) -> jax.Array:
  """Cross entropy per example in float32, [batch].

  The target is (1 - e) onehot + e / num_classes (arXiv:1512.00567, §7).

  Args:
    logits: [batch, classes], any float dtype.
    labels: int [batch].
    label_smoothing: e.

  Raises:
    ConfigError: logits are not one vector per label, or labels are not integers.
  """
  shape = getattr(logits, "shape", ())
  if shape[:-1] != labels.shape or not shape:
    raise _mismatch(logits, f"one vector of classes for each of {labels.shape} labels")
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    why = f"takes classes, and the labels are {labels.dtype}"
    raise invalid("Config.loss", ..., why, "give integers, or choose SquaredError")
  logits = logits.astype(jnp.float32)
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  if label_smoothing:
    uniform = -jax.nn.log_softmax(logits).mean(axis=-1)
    loss = (1 - label_smoothing) * loss + label_smoothing * uniform
  return loss


def targets_of(batch: Batch) -> jax.Array:
  """A batch's "label", or of text its "targets", in which padding (-1) is 0 here."""
  return batch["label"] if "label" in batch else jnp.maximum(batch["targets"], 0)


def cross_entropy(label_smoothing: float = 0.0) -> Objective:
  """Classification: one class per example; smoothed in training alone."""

  def loss(logits: jax.Array, batch: Batch, smoothing: float = label_smoothing):
    return smoothed_cross_entropy(logits, targets_of(batch), smoothing)

  def metrics(logits: jax.Array, batch: Batch):
    return {"accuracy": logits.argmax(-1) == targets_of(batch)}

  return Objective(loss, metrics, lambda logits, batch: loss(logits, batch, 0.0))


def binary_cross_entropy() -> Objective:
  """Multi-label classification: "label" is 0 or 1, [rows] or [rows, classes]."""

  def loss(logits: jax.Array, batch: Batch):
    pair = _aligned(logits, batch["label"])
    return optax.sigmoid_binary_cross_entropy(*pair).sum(-1)

  def metrics(logits: jax.Array, batch: Batch):
    logits, targets = _aligned(logits, batch["label"])
    return {"accuracy": ((logits > 0) == (targets > 0)).all(-1)}

  return Objective(loss, metrics)


def regression(of_error: Callable[[jax.Array], jax.Array]) -> Objective:
  """Numbers: `of_error` of prediction - target, summed over an example's outputs.

  Example:
    >>> objective = regression(lambda error: error**2)
    >>> objective.loss(jnp.array([[3.0]]), {"label": jnp.array([1.0])})
    Array([4.], dtype=float32)
  """

  def error(outputs: Any, batch: Batch):
    return jnp.subtract(*_aligned(outputs, batch["label"]))

  def loss(outputs: Any, batch: Batch):
    return of_error(error(outputs, batch)).sum(-1)

  def metrics(outputs: Any, batch: Batch):
    return {"mean_absolute_error": jnp.abs(error(outputs, batch)).mean(-1)}

  return Objective(loss, metrics)


def _aligned(outputs: Any, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Outputs and targets as float32 [rows, n], which cannot broadcast.

  Raises:
    ConfigError: there is not one output for each target.
  """
  shape = getattr(outputs, "shape", ())
  dims, wanted = ([n for n in s[1:] if n > 1] for s in (shape, targets.shape))
  is_flat = dims == [math.prod(wanted)]
  if shape[:1] != targets.shape[:1] or not (dims == wanted or is_flat):
    raise _mismatch(outputs, f"one output for each of the targets {targets.shape}")
  outputs, targets = (x.astype(jnp.float32).reshape(len(targets), -1) for x in (outputs, targets))
  return outputs, targets


def _mismatch(outputs: Any, wanted: str) -> ConfigError:
  """The error of outputs that a built-in loss is not made for."""
  match outputs:
    case dict():
      what = f"a dict of {', '.join(map(repr, outputs))}"
    case tuple() | list():
      what = f"a {type(outputs).__name__} of {len(outputs)}"
    case _:
      what = f"{jnp.shape(outputs)}"
  fix = "return one array of that shape, or write a config.Loss for these outputs"
  return invalid("Config.loss", ..., f"takes {wanted}, and the model gives {what}", fix)


def training_loss(apply: Apply, objective: Objective) -> LossFn:
  """Return the loss of a train step, with the training metrics.

  Args:
    apply: (params, model_state, inputs, train, keys) -> (outputs, model_state).
    objective: loss and metrics per example.
  """

  def loss_fn(params: Any, model_state: Any, batch: Batch, keys: jax.Array):
    outputs, model_state = apply(params, model_state, inputs_of(batch), True, keys)
    totals = _sums(objective.loss, objective.metrics, outputs, batch, None)
    return totals["loss"], (model_state, totals)

  own = getattr(objective.loss, "__module__", None) or ""
  setattr(loss_fn, IS_SUM, own.startswith("jaxscale."))
  return loss_fn


def eval_totals(apply: Apply, objective: Objective) -> EvalFn:
  """Return the totals of an eval step: every example once, padding never.

  Batches also have "mask" (bool [rows]). Sums of bool metrics are int32, so accuracy
  is exact to the last example.
  """

  def eval_fn(params: Any, model_state: Any, batch: Batch):
    outputs, _ = apply(params, model_state, inputs_of(batch), False, None)
    loss = objective.eval_loss or objective.loss
    return _sums(loss, objective.metrics, outputs, batch, batch["mask"])

  return eval_fn


def inputs_of(batch: Batch) -> jax.Array:
  """A batch's "image", or of text its "tokens"."""
  return batch["image"] if "image" in batch else batch["tokens"]


def _sums(
  loss: PerExample, metrics: PerExample, outputs: Any, batch: Batch, mask: jax.Array | None
) -> Totals:
  """Return sums over the examples that count, and their number."""
  # Made from the batch, so that it varies over devices as its rows do.
  if "targets" in batch:
    counts = batch["targets"] >= 0
  else:
    first = batch["label"].reshape(len(batch["label"]), -1)[:, 0]
    counts = (first == first) | True
  if mask is not None:
    counts &= mask.reshape(-1, *[1] * (counts.ndim - 1))
  totals = {"examples": counts.sum(dtype=jnp.int32)}
  values, more = {"loss": loss(outputs, batch)}, metrics(outputs, batch)
  if not isinstance(more, dict) or {"loss", "examples"} & more.keys():
    why = f"gives metrics {', '.join(more) if isinstance(more, dict) else type(more)}"
    fix = "return a dict of names other than 'loss' and 'examples'"
    raise invalid("Config.loss", ..., why, fix)
  for name, value in (values | more).items():
    try:
      shape, dtype = jnp.shape(value), jnp.result_type(value)
    except TypeError:
      why, fix = (f"gives {name!r} as {type(value).__name__}", "give one number per example")
      raise invalid("Config.loss", ..., why, fix) from None
    if shape != counts.shape:
      why = f"gives {name!r} of shape {shape} for examples {counts.shape}"
      fix = "give one value per example, not their mean or sum"
      raise invalid("Config.loss", ..., why, fix)
    if name == "loss" and not jnp.issubdtype(dtype, jnp.floating):
      raise invalid("Config.loss", ..., f"gives a loss of {dtype}", "return floats")
    if mask is not None or "targets" in batch:
      value = jnp.where(counts, value, jnp.zeros_like(value))
    totals[name] = value.sum(dtype=jnp.int32 if value.dtype == bool else None)
  return totals


def classification_loss(apply: Apply, *, label_smoothing: float = 0.0) -> LossFn:
  """`training_loss` of `cross_entropy`, for notebooks."""
  return training_loss(apply, cross_entropy(label_smoothing))


def classification_totals(apply: Apply) -> EvalFn:
  """`eval_totals` of `cross_entropy`, for notebooks."""
  return eval_totals(apply, cross_entropy())
