"""Losses and metrics per example, and their sums over a batch.

An `Objective` defines the loss of one example. `training_loss` and `eval_totals` combine
it with any `apply` into the functions that the steps take, so a model need not use Flax:

    apply(params, model_state, inputs, train, keys) -> (outputs, model_state)

The built-in losses take the targets "label", or "targets" for text, where every token
counts as an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import ConfigError, invalid
from jaxscale.models.model_fns import inputs_of
from jaxscale.training.types import Batch, EvalFn, LossFn, Totals

Apply = Callable[..., tuple[jax.Array, Any]]
# Attribute set on losses that `contract.check_loss` need not check.
IS_SUM = "is_sum"
PerExample = Callable[[Any, Batch], Any]


class Objective(NamedTuple):
  """Loss and metrics of each example.

  Attributes:
    loss: the training loss: (outputs, batch) -> float32 [rows], or [rows, tokens] for
      text.
    metrics: (outputs, batch) -> a dict of arrays of that shape, bool or numeric, whose
      means over the examples are reported.
    eval_loss: the loss in evaluation, with the signature of `loss`; None uses `loss`.
  """

  loss: PerExample
  metrics: PerExample = lambda outputs, batch: {}
  eval_loss: PerExample | None = None


def smoothed_cross_entropy(
  logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0
) -> jax.Array:
  """Return the cross entropy of each example in float32, [batch].

  The target is (1 - e) onehot + e / num_classes (arXiv:1512.00567, §7).

  Args:
    logits: logits of any float dtype, [batch, classes].
    labels: integer labels, [batch].
    label_smoothing: the share e of the target that is spread over all classes.

  Raises:
    ConfigError: logits are not one vector per label, or labels are not integers.
  """
  shape = getattr(logits, "shape", ())
  if shape[:-1] != labels.shape or not shape:
    raise _mismatch(logits, f"one vector of logits for each of the labels {labels.shape}")
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    problem = f"takes integer labels, but the labels are {labels.dtype}"
    raise invalid("Config.loss", ..., problem, "give integers, or choose SquaredError")
  logits = logits.astype(jnp.float32)
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  if label_smoothing:
    uniform = -jax.nn.log_softmax(logits).mean(axis=-1)
    loss = (1 - label_smoothing) * loss + label_smoothing * uniform
  return loss


def targets_of(batch: Batch) -> jax.Array:
  """Return a batch's "label", or a text batch's "targets" with 0 for padding (-1)."""
  return batch["label"] if "label" in batch else jnp.maximum(batch["targets"], 0)


def cross_entropy(label_smoothing: float = 0.0) -> Objective:
  """Return the objective of classification, with label smoothing in training only."""

  def loss(logits: jax.Array, batch: Batch, smoothing: float = label_smoothing):
    return smoothed_cross_entropy(logits, targets_of(batch), smoothing)

  def metrics(logits: jax.Array, batch: Batch):
    return {"accuracy": logits.argmax(-1) == targets_of(batch)}

  return Objective(loss, metrics, lambda logits, batch: loss(logits, batch, 0.0))


def binary_cross_entropy() -> Objective:
  """Return the objective of multi-label classification.

  "label" is 0 or 1, [rows] or [rows, classes].
  """

  def loss(logits: jax.Array, batch: Batch):
    pair = _aligned(logits, batch["label"])
    return optax.sigmoid_binary_cross_entropy(*pair).sum(-1)

  def metrics(logits: jax.Array, batch: Batch):
    logits, targets = _aligned(logits, batch["label"])
    return {"accuracy": ((logits > 0) == (targets > 0)).all(-1)}

  return Objective(loss, metrics)


def regression(of_error: Callable[[jax.Array], jax.Array]) -> Objective:
  """Return the objective of regression, which also reports the mean absolute error.

  Args:
    of_error: function of prediction - target; its values are summed over the outputs of
      an example.

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
  """Reshape outputs and targets to float32 [rows, n], so that they cannot broadcast.

  Raises:
    ConfigError: there is not one output per target.
  """
  shape = getattr(outputs, "shape", ())
  dims, expected = ([n for n in s[1:] if n > 1] for s in (shape, targets.shape))
  is_flat = dims == [math.prod(expected)]
  if shape[:1] != targets.shape[:1] or not (dims == expected or is_flat):
    raise _mismatch(outputs, f"one output for each of the targets {targets.shape}")
  outputs, targets = (x.astype(jnp.float32).reshape(len(targets), -1) for x in (outputs, targets))
  return outputs, targets


def _mismatch(outputs: Any, expected: str) -> ConfigError:
  """Return the error for outputs whose structure or shape does not fit a built-in loss."""
  match outputs:
    case dict():
      what = f"a dict of {', '.join(map(repr, outputs))}"
    case tuple() | list():
      what = f"a {type(outputs).__name__} of {len(outputs)}"
    case _:
      what = f"{jnp.shape(outputs)}"
  fix = "return one array of that shape, or write a config.Loss for these outputs"
  return invalid("Config.loss", ..., f"takes {expected}, but the model returns {what}", fix)


def training_loss(
  apply: Apply, objective: Objective, inputs: Callable[[Batch], Any] = inputs_of
) -> LossFn:
  """Return the loss function of a train step, with the training metrics.

  Args:
    apply: (params, model_state, inputs, train, keys) -> (outputs, model_state).
    objective: loss and metrics per example.
    inputs: batch -> inputs of `apply`.
  """

  def loss_fn(params: Any, model_state: Any, batch: Batch, keys: jax.Array):
    outputs, model_state = apply(params, model_state, inputs(batch), True, keys)
    totals = _sums(objective.loss, objective.metrics, outputs, batch, None)
    return totals["loss"], (model_state, totals)

  own = getattr(objective.loss, "__module__", None) or ""
  setattr(loss_fn, IS_SUM, own.startswith("jaxscale."))
  return loss_fn


def eval_totals(
  apply: Apply, objective: Objective, inputs: Callable[[Batch], Any] = inputs_of
) -> EvalFn:
  """Return the function that computes an eval step's totals, without padding.

  Batches also have "mask" (bool [rows]), which is False for padding. Sums of bool metrics
  are int32, so that accuracy is exact.
  """

  def eval_fn(params: Any, model_state: Any, batch: Batch):
    outputs, _ = apply(params, model_state, inputs(batch), False, None)
    loss = objective.eval_loss or objective.loss
    return _sums(loss, objective.metrics, outputs, batch, batch["mask"])

  return eval_fn


def _sums(
  loss: PerExample, metrics: PerExample, outputs: Any, batch: Batch, mask: jax.Array | None
) -> Totals:
  """Return sums over the examples that are not padding, and the number of examples."""
  # Computed from the batch, so that it is typed as varying over devices like the rows.
  if "targets" in batch:
    counts = batch["targets"] >= 0
  else:
    first = jax.tree.leaves(batch)[0]
    first = first.reshape(len(first), -1)[:, 0]
    counts = (first == first) | True
  if mask is not None:
    counts &= mask.reshape(-1, *[1] * (counts.ndim - 1))
  totals = {"examples": counts.sum(dtype=jnp.int32)}
  values, more = {"loss": loss(outputs, batch)}, metrics(outputs, batch)
  if not isinstance(more, dict) or {"loss", "examples"} & more.keys():
    problem = (
      f"returns metrics ({', '.join(more) if isinstance(more, dict) else type(more).__name__})"
    )
    fix = "return a dict of names other than 'loss' and 'examples'"
    raise invalid("Config.loss", ..., problem, fix)
  for name, value in (values | more).items():
    try:
      shape, dtype = jnp.shape(value), jnp.result_type(value)
    except TypeError:
      problem, fix = f"returns {name!r} as {type(value).__name__}", "return one number per example"
      raise invalid("Config.loss", ..., problem, fix) from None
    if shape != counts.shape:
      problem = f"returns {name!r} of shape {shape} for examples {counts.shape}"
      fix = "return one value per example, not their mean or sum"
      raise invalid("Config.loss", ..., problem, fix)
    if name == "loss" and not jnp.issubdtype(dtype, jnp.floating):
      raise invalid("Config.loss", ..., f"returns a loss of {dtype}", "return floats")
    if mask is not None or "targets" in batch:
      value = jnp.where(counts, value, jnp.zeros_like(value))
    totals[name] = value.sum(dtype=jnp.int32 if value.dtype == bool else None)
  return totals


def classification_loss(apply: Apply, *, label_smoothing: float = 0.0) -> LossFn:
  """Return `training_loss` for `cross_entropy`, a shorthand for notebooks."""
  return training_loss(apply, cross_entropy(label_smoothing))


def classification_totals(apply: Apply) -> EvalFn:
  """Return `eval_totals` for `cross_entropy`, a shorthand for notebooks."""
  return eval_totals(apply, cross_entropy())
