"""Settings of the built-in losses. Imports no JAX."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

from jaxscale.config.bases import Loss
from jaxscale.config.bounds import Count, Fraction, Positive
from jaxscale.errors import ConfigError, invalid

if TYPE_CHECKING:
  from jaxscale.config.bases import LossContext
  from jaxscale.training.gathered import GatheredObjective
  from jaxscale.training.losses import Objective

# The names for --config.loss= (HOMES in config/choice.py lists this module).
__all__ = ["BinaryCrossEntropy", "Contrastive", "CrossEntropy", "Huber", "SquaredError"]


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

  def build(self, info: Any, context: LossContext) -> GatheredObjective:
    from jaxscale.training.contrastive import contrastive

    return contrastive(self.kind, temperature=self.temperature, bias=self.bias, chunk=self.chunk)


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
    from jaxscale.training.custom_loss import CustomLoss

    function: Any = self.function
    if isinstance(function, tuple) or not callable(function):
      return function  # The caller checks its type.
    evaluation = self.replaces.build(*self.replaces.arguments(info, context))
    evaluation: Any = getattr(evaluation, "evaluation", evaluation)
    return CustomLoss(loss_fn=function, evaluation=evaluation)


def _losses(loss: Loss, info: Any) -> Any:
  """Return the module of losses for examples whose targets have any shape."""
  from jaxscale.training import losses

  if not hasattr(info, "label_shape"):
    raise ConfigError(f"Config.loss={type(loss).__name__}: {info.name} is text; use CrossEntropy")
  return losses
