"""Settings of the built-in losses. Imports no JAX."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.config.bases import Loss
from jaxscale.config.bounds import Fraction, Positive
from jaxscale.errors import ConfigError, invalid

if TYPE_CHECKING:
  from jaxscale.training.losses import Objective

# The names for --config.loss= (HOMES in config/choice.py lists this module).
__all__ = ["BinaryCrossEntropy", "CrossEntropy", "Huber", "SquaredError"]


class CrossEntropy(Loss):
  """Cross entropy of one class per example; reports accuracy.

  Attributes:
    label_smoothing: the fraction of the target probability that is spread evenly over all
      classes or the vocabulary, in training only; 0 disables it. With smoothing, no training
      perplexity is logged.
  """

  label_smoothing: Fraction = 0.0

  def build(self, info: Any) -> Objective:
    from jaxscale.training import losses

    if getattr(info, "label_shape", ()):
      raise ConfigError(
        f"Config.loss=CrossEntropy needs one class per example, but {info.name} has targets "
        f"{info.label_shape}; use BinaryCrossEntropy or SquaredError"
      )
    if "int" not in str(getattr(info, "label_dtype", "int32")):
      raise ConfigError(
        f"Config.loss=CrossEntropy needs integer targets, but they are {info.label_dtype}; "
        "give integers, or choose SquaredError"
      )
    return losses.cross_entropy(self.label_smoothing)

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

  def build(self, info: Any) -> Objective:
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
  """Half the squared error, summed over the outputs; reports the mean absolute error."""

  takes_numbers = True

  def build(self, info: Any) -> Objective:
    return _losses(self, info).regression(lambda error: 0.5 * error**2)


class Huber(Loss):
  """Huber loss: squared error that grows linearly beyond `delta` (Huber, 1964).

  Attributes:
    delta: the absolute error above which the loss is linear.
  """

  delta: Positive = 1.0

  takes_numbers = True

  def build(self, info: Any) -> Objective:
    import optax

    huber = functools.partial(optax.huber_loss, delta=self.delta)
    return _losses(self, info).regression(huber)


def _float32(outputs: Any) -> np.ndarray:
  return np.asarray(outputs).astype(np.float32)


def _losses(loss: Loss, info: Any) -> Any:
  """Return the module of losses for examples whose targets have any shape."""
  from jaxscale.training import losses

  if not hasattr(info, "label_shape"):
    raise ConfigError(f"Config.loss={type(loss).__name__}: {info.name} is text; use CrossEntropy")
  return losses
