"""Losses and metrics per example, and their sums over a batch.

An `Objective` defines the loss of one example. `training_loss` and `eval_totals` combine
it with any `apply` into the functions that the steps take, so a model need not use Flax:

    apply(params, model_state, inputs, train, keys) -> (outputs, model_state)

The built-in losses take the targets "label", or "targets" for text, where every token
counts as an example. An array "weight" of the batch weights the examples: loss and metrics
are then sums of weight * value, divided by the sum of all weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import ConfigError, invalid
from jaxscale.models.cross_entropy import cross_entropy as of_logits
from jaxscale.models.model_fns import inputs_of
from jaxscale.training.metrics import Metric, updates
from jaxscale.training.types import LOSS_WEIGHT, Batch, EvalFn, LossFn, Totals

Apply = Callable[..., tuple[Any, Any]]
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
    weights: weights of the loss alone, such as class weights: batch -> float32 of the
      shape of `loss`. The mean loss is sum(weight * loss) / sum(weight). They multiply the
      batch's "weight". None weights all examples alike.
  """

  loss: PerExample
  metrics: PerExample = lambda outputs, batch: {}
  eval_loss: PerExample | None = None
  weights: Callable[[Batch], jax.Array] | None = None


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
  return of_logits(logits, None, labels, shape[-1], label_smoothing)[0]


def targets_of(batch: Batch) -> jax.Array:
  """Return a batch's "label", or a text batch's "targets" with 0 for padding (-1)."""
  return batch["label"] if "label" in batch else jnp.maximum(batch["targets"], 0)


def cross_entropy(label_smoothing: float = 0.0, class_weights: Sequence[float] = ()) -> Objective:
  """Return the objective of classification, with label smoothing in training only.

  With class weights w the mean loss is sum_i w[y_i] l_i / sum_i w[y_i], and smoothing
  spreads e w[c] / num_classes over the classes c, as torch.nn.CrossEntropyLoss (PyTorch
  2.9). A label without a class and the target of a token that is not learned, both -1, have
  the weight 0.

  Args:
    label_smoothing: the share e of the target that is spread over all classes.
    class_weights: the weight of each class in the loss; () weights all alike.
  """

  def weights(batch: Batch):
    one_hot = jax.nn.one_hot(targets_of(batch), len(class_weights), dtype=jnp.float32)
    return one_hot @ jnp.asarray(class_weights, jnp.float32)

  def loss(logits: jax.Array, batch: Batch, smoothing: float = label_smoothing):
    if not (class_weights and smoothing):
      return smoothed_cross_entropy(logits, targets_of(batch), smoothing)
    hard, own = smoothed_cross_entropy(logits, targets_of(batch)), weights(batch)
    spread = -jax.nn.log_softmax(logits.astype(jnp.float32))[..., : len(class_weights)]
    soft = spread @ jnp.asarray(class_weights, jnp.float32) / logits.shape[-1]
    return (1 - smoothing) * hard + smoothing * soft / jnp.where(own > 0, own, jnp.inf)

  def metrics(logits: jax.Array, batch: Batch):
    return {"accuracy": logits.argmax(-1) == targets_of(batch)}

  plain = functools.partial(loss, smoothing=0.0)
  return Objective(loss, metrics, plain, weights if class_weights else None)


def binary_cross_entropy() -> Objective:
  """Return the objective of multi-label classification.

  "label" is 0 or 1, [rows] or [rows, classes].
  """

  def loss(logits: jax.Array, batch: Batch):
    return optax.sigmoid_binary_cross_entropy(*aligned(logits, batch["label"])).sum(-1)

  def metrics(logits: jax.Array, batch: Batch):
    logits, targets = aligned(logits, batch["label"])
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
    return jnp.subtract(*aligned(outputs, batch["label"]))

  def loss(outputs: Any, batch: Batch):
    return of_error(error(outputs, batch)).sum(-1)

  def metrics(outputs: Any, batch: Batch):
    return {"mean_absolute_error": jnp.abs(error(outputs, batch)).mean(-1)}

  return Objective(loss, metrics)


def aligned(outputs: Any, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Reshape outputs and targets to float32 [rows, n], so that they cannot broadcast.

  Raises:
    ConfigError: there is not one output per target.
  """
  shape = getattr(outputs, "shape", ())
  dims, expected = ([n for n in s[1:] if n > 1] for s in (shape, targets.shape))
  if shape[:1] != targets.shape[:1] or not (dims == expected or dims == [math.prod(expected)]):
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
    totals = _sums(objective, objective.loss, outputs, batch, None)
    return totals["loss"], (model_state, totals)

  own = getattr(objective.loss, "__module__", None) or ""
  setattr(loss_fn, IS_SUM, own.startswith("jaxscale."))
  return loss_fn


def eval_totals(
  apply: Apply,
  objective: Objective,
  inputs: Callable[[Batch], Any] = inputs_of,
  metrics: Mapping[str, Metric] = MappingProxyType({}),
) -> EvalFn:
  """Return the function that computes an eval step's totals, without padding.

  Batches also have "mask" (bool [rows]), which is False for padding. Sums of bool metrics
  are int32, so that accuracy is exact.

  Args:
    apply: (params, model_state, inputs, train, keys) -> (outputs, model_state).
    objective: loss and metrics per example.
    inputs: batch -> inputs of `apply`.
    metrics: further metrics by name, for `loop.evaluate`.
  """

  def eval_fn(params: Any, model_state: Any, batch: Batch):
    outputs, _ = apply(params, model_state, inputs(batch), False, None)
    loss, mask = objective.eval_loss or objective.loss, batch["mask"]
    totals = _sums(objective, loss, outputs, batch, mask)
    return totals | updates(metrics, outputs, batch, _weights(batch, mask))

  return eval_fn


def _weights(batch: Batch, mask: jax.Array | None) -> jax.Array:
  """Return float32 weights if the batch has "weight", else a bool per example.

  Padding has the weight 0 or False.
  """
  # Computed from the batch, so that it is typed as varying over devices like the rows.
  if "targets" in batch:
    counts = batch["targets"] >= 0
  else:
    first = jax.tree.leaves(batch)[0]
    first = first.reshape(len(first), -1)[:, 0]
    counts = (first == first) | True
  if mask is not None:
    counts &= mask.reshape(-1, *[1] * (counts.ndim - 1))
  if "weight" not in batch:
    return counts
  weight = batch["weight"].astype(jnp.float32)
  if weight.shape not in (counts.shape, counts.shape[:1]):
    fix = f"give one number per example, {counts.shape}"
    raise invalid("batch['weight']", ..., f"has the shape {weight.shape}", fix)
  weight = weight.reshape(*weight.shape, *[1] * (counts.ndim - weight.ndim))
  return jnp.where(counts, weight, 0.0)


def _sums(
  objective: Objective, loss: PerExample, outputs: Any, batch: Batch, mask: jax.Array | None
) -> Totals:
  """Return weighted sums over the examples, and the sum of weights as "examples".

  Without weights, "examples" is the number of examples that are not padding.
  """
  weights = _weights(batch, mask)
  totals = {"examples": _summed(weights)}
  values, more = {"loss": loss(outputs, batch)}, objective.metrics(outputs, batch)
  if not isinstance(more, dict) or {"loss", "examples"} & more.keys():
    problem = (
      f"returns metrics ({', '.join(more) if isinstance(more, dict) else type(more).__name__})"
    )
    fix = "return a dict of names other than 'loss' and 'examples'"
    raise invalid("Config.loss", ..., problem, fix)
  own = {} if objective.weights is None else {"loss weights": objective.weights(batch)}
  for name, value in (values | more | own).items():
    try:
      shape, dtype = jnp.shape(value), jnp.result_type(value)
    except TypeError:
      problem, fix = f"returns {name!r} as {type(value).__name__}", "return one number per example"
      raise invalid("Config.loss", ..., problem, fix) from None
    if shape != weights.shape:
      problem = f"returns {name!r} of shape {shape} for examples {weights.shape}"
      fix = "return one value per example, not their mean or sum"
      raise invalid("Config.loss", ..., problem, fix)
    if name == "loss" and not jnp.issubdtype(dtype, jnp.floating):
      raise invalid("Config.loss", ..., f"returns a loss of {dtype}", "return floats")
  for name, value in (values | more).items():
    weight = weights
    if name == "loss" and own:
      weight = weights.astype(jnp.float32) * own["loss weights"]
      totals[LOSS_WEIGHT] = weight.sum()
    if weight.dtype != bool:
      dtype = value.dtype if value.dtype == jnp.float64 else jnp.float32
      value = jnp.where(weight > 0, weight.astype(dtype) * value.astype(dtype), 0.0)
    elif mask is not None or "targets" in batch:
      value = jnp.where(weight, value, jnp.zeros_like(value))
    totals[name] = _summed(value)
  return totals


def _summed(value: jax.Array) -> jax.Array:
  return value.sum(dtype=jnp.int32 if value.dtype == bool else None)


def classification_loss(apply: Apply, *, label_smoothing: float = 0.0) -> LossFn:
  """Return `training_loss` for `cross_entropy`, a shorthand for notebooks."""
  return training_loss(apply, cross_entropy(label_smoothing))


def classification_totals(apply: Apply) -> EvalFn:
  """Return `eval_totals` for `cross_entropy`, a shorthand for notebooks."""
  return eval_totals(apply, cross_entropy())
