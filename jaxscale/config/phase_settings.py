"""Settings of what changes during a run: batch and image sizes."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.config.bounds import Count, NonNegative, Positive
from jaxscale.config.validation import settings
from jaxscale.errors import invalid

# How rate and momentum follow the batch size when it changes in mid-run.
Follow = Literal["none", "linear", "sqrt", "neutral"]


@settings
class Phases:
  """What changes at given epochs: the batch grows, or the images do.

  Attributes:
    epochs: where each phase begins; the first at 0.
    steps: optimizer steps before each phase, instead of `epochs`; the first has 0.
    batch_sizes: of each phase; (): Config.batch_size in all of them.
    accumulate_steps: of each phase; (): Config.accumulate_steps in all.
    image_sizes: of the training images of each phase; (): the data's own.
    follow: how the learning rate follows the batch size, from the rate at
      Config.batch_size: "none", "linear", "sqrt", or "neutral" (CNTK's, for
      SGD): rate per example and time constant of the momentum stay.
  """

  epochs: Annotated[tuple[float, ...], ">= 0"] = (0.0,)
  steps: Annotated[tuple[int, ...], ">= 0"] = ()
  batch_sizes: Annotated[tuple[int, ...], ">= 1"] = ()
  accumulate_steps: Annotated[tuple[int, ...], ">= 1"] = ()
  image_sizes: Annotated[tuple[int, ...], ">= 1"] = ()
  follow: Follow = "linear"

  def __post_init__(self):
    if self.steps and self.epochs != (0.0,):
      why = f"and epochs={self.epochs} both say where phases begin"
      raise invalid("Phases.steps", self.steps, why, "leave out one of them")
    unit = "steps" if self.steps else "epochs"
    if not self.starts or self.starts[0] != 0:
      why = "has no phase at the start of the run"
      raise invalid(f"Phases.{unit}", self.starts, why, "begin at 0")
    if list(self.starts) != sorted(set(self.starts)):
      why = "is not in rising order"
      raise invalid(f"Phases.{unit}", self.starts, why, "sort it, each value once")
    for name in ("batch_sizes", "accumulate_steps", "image_sizes"):
      values, count = getattr(self, name), len(self.starts)
      if values and len(values) != count:
        fix = f"give one for each of the {count} phases, or ()"
        raise invalid(f"Phases.{name}", values, f"has {len(values)} values", fix)

  @property
  def starts(self) -> tuple[float, ...]:
    """Where each phase begins, in `steps` if they are given, else in `epochs`."""
    return self.steps or self.epochs


@settings
class AdaptiveBatch:
  """CNTK's adaptive minibatch: the largest batch whose trial loses nothing.

  From Config.batch_size on; at the tuning epochs candidates, each sqrt(2) times
  the one before, are tried from the same state, and the last one whose loss is
  within the margin of the first's is taken (CNTK, SGD.cpp,
  AdaptiveMinibatchSizing). A trial that gives NaN is refused. Rate and momentum
  follow as in Phases.follow="neutral", which is for SGD.

  Attributes:
    every_epochs: epochs between tunings.
    trial_steps: steps of a trial.
    margin: how much larger the loss may be, as a share of the first trial's.
    max_batch_size: no candidate is larger.
    multiple: candidates are rounded to multiples of it.
  """

  every_epochs: Positive = 1.0
  trial_steps: Count = 500
  margin: NonNegative = 0.01
  max_batch_size: Count = 1_048_576
  multiple: Count = 64
