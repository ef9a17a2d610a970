"""Settings of what changes during a run: batch and image sizes."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.config.bounds import Count, NonNegative, Positive
from jaxscale.config.validation import settings
from jaxscale.errors import ConfigError

# How rate and momentum follow the batch size when it changes in mid-run.
Follow = Literal["none", "linear", "sqrt", "neutral"]


@settings
class Phases:
  """What changes at given epochs: the batch grows, or the images do.

  Attributes:
    epochs: where each phase begins; the first at 0.
    batch_sizes: of each phase; (): Config.batch_size in all of them.
    accumulate_steps: of each phase; (): Config.accumulate_steps in all.
    image_sizes: of the training images of each phase; (): the data's own.
    follow: how the learning rate follows the batch size, from the rate at
      Config.batch_size: "none", "linear", "sqrt", or "neutral" (CNTK's, for
      SGD): rate per example and time constant of the momentum stay.
  """

  epochs: Annotated[tuple[float, ...], ">= 0"] = (0.0,)
  batch_sizes: Annotated[tuple[int, ...], ">= 1"] = ()
  accumulate_steps: Annotated[tuple[int, ...], ">= 1"] = ()
  image_sizes: Annotated[tuple[int, ...], ">= 1"] = ()
  follow: Follow = "linear"

  def __post_init__(self):
    if not self.epochs or self.epochs[0] != 0:
      raise ConfigError(f"Phases.epochs={self.epochs}: the first phase begins at 0")
    if list(self.epochs) != sorted(set(self.epochs)):
      raise ConfigError(f"Phases.epochs={self.epochs}: give them in rising order")
    for name in ("batch_sizes", "accumulate_steps", "image_sizes"):
      values = getattr(self, name)
      if values and len(values) != len(self.epochs):
        wanted = f"give one for each of the {len(self.epochs)} phases, or ()"
        raise ConfigError(f"Phases.{name}={values}: {wanted}")


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
