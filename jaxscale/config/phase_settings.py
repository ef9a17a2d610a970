"""Settings of batch and image sizes that change during a run."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxscale.config.bases import Growth
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
    accumulate_steps: the number of micro-batches per optimizer step in each phase; () uses
      Config.accumulate_steps.
    image_sizes: the height and width in pixels of the training images in each phase; () uses
      the size in the data settings.
    follow: the rule by which the learning rate follows the batch size of a phase, relative to
      Config.batch_size; "none", "linear", "sqrt" or "neutral" (for SGD: keeps the learning rate
      per example and the time constant of the momentum in examples, as in CNTK).
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
  """Batch size tuned by short trials during the run (CNTK's adaptive minibatch sizing).

  At each tuning, candidate batch sizes are tried from the same state in increasing order,
  each sqrt(2) times the previous one, from half the current batch size to twice it. None is
  below Config.batch_size times the initial learning rate over the current one. The last
  candidate before the first whose loss exceeds the margin is used (CNTK, SGD.cpp,
  AdaptiveMinibatchSizing). A trial that gives NaN is rejected. Learning rate and momentum
  follow as with Phases.follow="neutral", for SGD.

  Attributes:
    every_epochs: the number of epochs between two tunings of the batch size.
    trial_steps: the number of training steps for which each candidate batch size is tried.
    margin: the largest increase of a candidate batch size's mean loss over that of the first
      (smallest) candidate, as a fraction of the latter.
    max_batch_size: the largest candidate batch size, in examples.
    multiple: the number of examples of which every candidate batch size is a multiple.
  """

  every_epochs: Positive = 1.0
  trial_steps: Count = 500
  margin: NonNegative = 0.01
  max_batch_size: Count = 1_048_576
  multiple: Count = 64


@settings
class Growing:
  """Batch size that grows during the run, by a factor at a time, where it pays.

  The defaults are Seesaw (arXiv:2510.14717, abstract): where the schedule would have halved
  the learning rate, the batch size doubles and the learning rate is divided by sqrt(2).
  With follow="linear" it is not divided at all (arXiv:1711.00489). In between, the learning
  rate continues to follow the schedule, times the factor of the batch size.

  Attributes:
    when: the rule that decides when the batch grows; a class of your own also works.
    follow: the rule by which the learning rate follows the batch size, relative to the schedule
      at Config.batch_size and the same number of examples; "none", "linear", "sqrt" or
      "neutral" as in Phases.
    factor: the whole number by which a growth multiplies the batch size.
    max_batch_size: the largest batch size in examples; None stops at the number of training
      examples.
    more_micro_batches: whether a larger batch is split into more micro-batches of the same
      size, so that it needs no more memory, and not into larger ones.
  """

  when: Growth = dataclasses.field(default_factory=lambda: Growth.built_in()["BySchedule"]())
  follow: Follow = "sqrt"
  factor: Annotated[int, ">= 2"] = 2
  max_batch_size: Count | None = None
  more_micro_batches: bool = False

  def micro_batches(self, batch_size: int, config: Any) -> int:
    """Return the number of micro-batches per step at a batch size."""
    return config.accumulate_steps * (batch_size // config.batch_size) ** self.more_micro_batches


def measuring(phases: Phases | AdaptiveBatch | Growing) -> str:
  """Return the name of the class that chooses batch sizes during the run; "" without one."""
  rule = phases.when if isinstance(phases, Growing) and phases.when.decide else phases
  return "" if isinstance(rule, Phases | Growing) else type(rule).__name__
