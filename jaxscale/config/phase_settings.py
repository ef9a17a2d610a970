"""Settings of batch and image sizes that change during a run."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.config.bounds import Count, NonNegative, Positive
from jaxscale.config.validation import settings
from jaxscale.errors import invalid

# Rules by which learning rate and momentum follow a batch size that changes during a run.
Follow = Literal["none", "linear", "sqrt", "neutral"]


@settings
class Phases:
  """Batch and image sizes that change at given epochs or steps.

  Attributes:
    epochs: the epoch at which each phase begins; the first is 0.
    steps: the step at which each phase begins, instead of `epochs`; the first is 0.
    batch_sizes: the batch size of each phase in examples; () uses Config.batch_size.
    accumulate_steps: the number of micro-batches of each phase; () uses
      Config.accumulate_steps.
    image_sizes: the height and width in pixels of the training images of each phase; ()
      uses the size of the data.
    follow: the rule by which the learning rate follows the batch size, relative to
      Config.batch_size; "none", "linear", "sqrt" or "neutral" (CNTK's, for SGD: keeps the
      learning rate per example and the time constant of the momentum).
  """

  epochs: Annotated[tuple[float, ...], ">= 0"] = (0.0,)
  steps: Annotated[tuple[int, ...], ">= 0"] = ()
  batch_sizes: Annotated[tuple[int, ...], ">= 1"] = ()
  accumulate_steps: Annotated[tuple[int, ...], ">= 1"] = ()
  image_sizes: Annotated[tuple[int, ...], ">= 1"] = ()
  follow: Follow = "linear"

  def __post_init__(self):
    if self.steps and self.epochs != (0.0,):
      problem = f"and epochs={self.epochs} are both set"
      raise invalid("Phases.steps", self.steps, problem, "leave out one of them")
    unit = "steps" if self.steps else "epochs"
    if not self.starts or self.starts[0] != 0:
      problem = "does not start at 0"
      raise invalid(f"Phases.{unit}", self.starts, problem, "add a phase at 0")
    if list(self.starts) != sorted(set(self.starts)):
      problem = "is not in increasing order"
      raise invalid(f"Phases.{unit}", self.starts, problem, "sort it and remove duplicates")
    for name in ("batch_sizes", "accumulate_steps", "image_sizes"):
      values, count = getattr(self, name), len(self.starts)
      if values and len(values) != count:
        fix = f"give one for each of the {count} phases, or ()"
        raise invalid(f"Phases.{name}", values, f"has {len(values)} values", fix)

  @property
  def starts(self) -> tuple[float, ...]:
    """Start of each phase, in `steps` if they are given, else in `epochs`."""
    return self.steps or self.epochs


@settings
class AdaptiveBatch:
  """Batch size chosen by trials, as in CNTK's adaptive minibatch sizing.

  At each tuning, candidates from Config.batch_size up, each sqrt(2) times the previous one,
  are tried from the same state. The largest whose loss is within the margin of the first
  candidate's is used (CNTK, SGD.cpp, AdaptiveMinibatchSizing). A trial that gives NaN is
  rejected. Learning rate and momentum follow as with Phases.follow="neutral", for SGD.

  Attributes:
    every_epochs: the number of epochs between tunings.
    trial_steps: the number of steps of a trial.
    margin: the allowed increase of the loss, as a share of the first trial's loss.
    max_batch_size: the largest candidate in examples.
    multiple: the divisor of every candidate, in examples.
  """

  every_epochs: Positive = 1.0
  trial_steps: Count = 500
  margin: NonNegative = 0.01
  max_batch_size: Count = 1_048_576
  multiple: Count = 64
