"""Settings of the built-in losses and metrics. Imports no JAX."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import numpy as np

from jaxscale import training  # Lazy: its names load on first use.
from jaxscale.config.bases import Loss, LossContext, Metric, snake_case
from jaxscale.config.bounds import Count, Fraction, Positive
from jaxscale.errors import ConfigError, invalid

# The names for --config.loss= (HOMES in config/choice.py lists this module).
__all__ = ["AUROC", "F1", "R2", "BinaryCrossEntropy", "CalibrationError", "ConfusionMatrix"]
__all__ += ["Contrastive", "CrossEntropy", "Huber", "Pearson", "SquaredError"]


class CrossEntropy(Loss):
  """Cross entropy of one class per example; reports accuracy.

  Attributes:
    label_smoothing: the fraction of the target probability that is spread evenly over all
      classes or the vocabulary, in training only; 0 disables it. With smoothing, no training
      perplexity is logged.
    class_weights: the weight of each class in the loss, in the order of the labels; () weights
      all classes alike. The loss is the weighted mean over the examples; metrics ignore it.
  """

  label_smoothing: Fraction = 0.0
  class_weights: Annotated[tuple[float, ...], ">= 0"] = ()

  def build(self, info: Any) -> training.Objective:
    if getattr(info, "label_shape", ()):
      problem = f"needs one class per example, but {info.name} has targets {info.label_shape}"
      fix = "use BinaryCrossEntropy or SquaredError"
      raise invalid("Config.loss", "CrossEntropy", problem, fix)
    if "int" not in str(getattr(info, "label_dtype", "int32")):
      problem, fix = f"needs integer targets, but they are {info.label_dtype}", "give integers, or "
      raise invalid("Config.loss", "CrossEntropy", problem, f"{fix}choose SquaredError")
    weights, (_, most) = self.class_weights, self.target_range(info)
    if weights and (len(weights) != most + 1 or not sum(weights)):
      problem = f"needs one weight for each of the {most + 1} classes, not all 0"
      raise invalid("CrossEntropy.class_weights", weights, problem, "change them")
    return training.losses.cross_entropy(self.label_smoothing, weights)

  @property
  def is_cross_entropy(self) -> bool:  # A subclass that overrides `build` may not be.
    return type(self).build is CrossEntropy.build

  def classify(self, outputs: Any) -> tuple[Any, Any] | None:
    """Return softmax of the logits, float32 [rows, ..., classes], and the likeliest classes."""
    scores = _float32(outputs)
    exp = np.exp(scores - scores.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True), outputs.argmax(-1).astype(np.int32)

  def target_range(self, info: Any) -> tuple[int, int]:
    return 0, (getattr(info, "num_classes", None) or info.vocab_size) - 1


class BinaryCrossEntropy(Loss):
  """Binary cross entropy, with one target of 0 or 1 for each class of an example.

  Accuracy is the share of examples with every class right.
  """

  takes_numbers = True

  def build(self, info: Any) -> training.Objective:
    classes = 0 if getattr(info, "label_shape", ()) else getattr(info, "num_classes", 0)
    if classes > 2 and "int" in info.label_dtype:
      problem = f"takes targets 0 or 1, but {info.name} has {classes} classes"
      raise invalid("Config.loss", type(self).__name__, problem, "use CrossEntropy")
    return _losses(self, info).binary_cross_entropy()

  def classify(self, outputs: Any) -> tuple[Any, Any] | None:
    """Return sigmoid of the logits, float32 [rows, classes], and whether it is above 1/2."""
    return 0.5 * (1 + np.tanh(0.5 * _float32(outputs))), outputs > 0

  def target_range(self, info: Any) -> tuple[int, int]:
    return 0, 1


class SquaredError(Loss):
  """Half the squared error, summed over all outputs of an example, such as the points of a field.

  Reports the mean absolute error, which is a mean over the outputs.
  """

  takes_numbers = True

  def build(self, info: Any) -> training.Objective:
    return _losses(self, info).regression(lambda error: 0.5 * error**2)


class Huber(Loss):
  """Huber loss: squared error that grows linearly beyond `delta` (Huber, 1964).

  Attributes:
    delta: the absolute error above which the loss is linear.
  """

  delta: Positive = 1.0

  takes_numbers = True

  def build(self, info: Any) -> training.Objective:
    import optax

    return _losses(self, info).regression(functools.partial(optax.huber_loss, delta=self.delta))


class Contrastive(Loss):
  """Contrastive loss of pairs of embeddings over the whole batch of all devices.

  The model returns two arrays [rows, dim], in a tuple or a dict, and optionally "scale" and
  "bias", [rows] each, if it learns them. Reports the accuracy of finding the partner of an
  embedding among all rows, in both directions.

  Attributes:
    kind: the loss; "infonce" (CLIP), "nt_xent" (SimCLR, whose two views are one set) or
      "siglip" (a sigmoid for each pair).
    temperature: the temperature by which cosines are divided, unless the model returns "scale".
    bias: the bias of "siglip", unless the model returns "bias".
    chunk: the number of columns of the matrix of all pairs that a device computes at a time.
  """

  kind: Literal["infonce", "nt_xent", "siglip"] = "infonce"
  temperature: Positive = 0.07
  bias: float = -10.0
  chunk: Count = 1024

  def build(self, info: Any, context: LossContext) -> training.GatheredObjective:
    make = training.contrastive.contrastive
    return make(self.kind, temperature=self.temperature, bias=self.bias, chunk=self.chunk)


class PythonLoss(Loss):
  """Loss that a Python program gave to `fit(..., loss_fn=...)`.

  Attributes:
    function: the loss: a `LossFn`, `Objective`, `GatheredObjective` or `CustomLoss`.
    replaces: the loss of the config, which evaluates if `function` is a `LossFn`.
  """

  function: Any
  replaces: Loss

  holds_user_code = True

  @property
  def takes_numbers(self) -> bool:
    return self.replaces.takes_numbers

  @property
  def user_code(self) -> Any:
    parts = self.function if isinstance(self.function, tuple) else [self.function]
    return next((x.__code__ for x in parts if hasattr(x, "__code__")), None)

  def build(self, info: Any, context: LossContext) -> Any:
    function: Any = self.function
    if isinstance(self.function, tuple) or not callable(self.function):
      return function  # The caller checks its type.
    evaluation = self.replaces.build(*self.replaces.arguments(info, context))
    evaluation: Any = getattr(evaluation, "evaluation", evaluation)
    return training.CustomLoss(loss_fn=function, evaluation=evaluation)


def _float32(outputs: Any) -> np.ndarray:
  return np.asarray(outputs).astype(np.float32)


def _losses(loss: Loss, info: Any) -> Any:
  """Return the module of losses for examples whose targets have any shape."""
  if not hasattr(info, "label_shape"):
    raise ConfigError(f"Config.loss={type(loss).__name__}: {info.name} is text; use CrossEntropy")
  return training.losses


class _OfLabels(Metric):
  """Metric of outputs and labels; `training.built_in_metrics` has a function of its name."""

  numbers = False

  def build(self, info: Any) -> Any:
    if getattr(info, "label_shape", None if self.numbers else ()) is None:
      problem = f"needs an array 'label', which {info.name} does not have"
      raise invalid("Config.metrics", type(self).__name__, problem, "remove it")
    kind = next(c for c in type(self).__mro__ if c.__module__ == __name__)
    return getattr(training.built_in_metrics, snake_case(kind.__name__))(**vars(self))


class ConfusionMatrix(_OfLabels):
  """Number of validation examples by true and predicted class, as a picture."""


class F1(_OfLabels):
  """F1 score, precision and recall, averaged over the classes.

  Attributes:
    average: the average over classes; "macro" (all classes alike), "weighted" (by their
      examples), "micro" (over all examples) or "binary" (class 1 of two).
  """

  average: Literal["macro", "weighted", "micro", "binary"] = "macro"


class AUROC(_OfLabels):
  """Area under the ROC curve; of several classes the mean of one class against the rest."""


class R2(_OfLabels):
  """Coefficient of determination of a regression, the mean over its outputs."""

  numbers = True


class Pearson(R2):
  """Pearson correlation of outputs and targets, the mean over outputs."""


class CalibrationError(_OfLabels):
  """Expected calibration error (arXiv:1706.04599), with a reliability diagram.

  Attributes:
    bins: the number of bins of equal width for the probability of the predicted class.
  """

  bins: Count = 15
