"""Settings of optimizers and learning rates."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.config.bounds import (
  Count,
  Fraction,
  NonNegative,
  Positive,
  check_pattern,
)
from jaxscale.config.validation import settings
from jaxscale.errors import ConfigError


@settings
class SGD:
  """Stochastic gradient descent with momentum; L2 decay in the gradient.

  Attributes:
    lr: peak learning rate at the reference batch size.
    momentum: decay of the velocity.
    nesterov: look ahead.
    weight_decay: L2 coefficient, on kernels only.
    momentum_correction: momentum times lr_t / lr_{t-1} (arXiv:1706.02677, §3):
      "never", in the "warmup" or "always".
  """

  lr: Positive
  momentum: Fraction = 0.9
  nesterov: bool = True
  weight_decay: NonNegative = 0.0
  momentum_correction: Literal["never", "warmup", "always"] = "never"


@settings
class LARS:
  """Layer-wise adaptive rate scaling (arXiv:1708.03888), MLPerf's form.

  Attributes:
    lr: peak learning rate at the reference batch size.
    variant: whose equations: "paper" (Intel Caffe, Flax, MLPerf), "nvidia",
      "tf_contrib", "tf_contrib_l2_in_loss", "torch", "optax", "larc_clip",
      "larc_scale" (apex), "nvcaffe_clip" or "nvcaffe_scale"; see `optim.lars`.
    momentum: decay of the velocity.
    weight_decay: L2 coefficient.
    trust_coefficient: eta of the paper.
    eps: added to the denominator of the trust ratio.
    nesterov: look ahead.
    momentum_correction: "never", in the "warmup" (Intel Caffe) or "always".
    include: parameters with decay and trust ratio: "kernels" (two dims or
      more), "all", or a regular expression of their paths.
  """

  lr: Positive
  variant: Literal[
    "paper", "nvidia", "tf_contrib", "tf_contrib_l2_in_loss", "torch", "optax",
    "larc_clip", "larc_scale", "nvcaffe_clip", "nvcaffe_scale",
  ] = "paper"  # fmt: skip
  momentum: Fraction = 0.9
  weight_decay: NonNegative = 1e-4
  trust_coefficient: Positive = 1e-3
  eps: NonNegative = 0.0
  nesterov: bool = False
  momentum_correction: Literal["never", "warmup", "always"] = "never"
  include: str = "kernels"

  def __post_init__(self):
    _check_include(self)


@settings
class AdamW:
  """Adam with decoupled weight decay (arXiv:1711.05101).

  Attributes:
    lr: peak learning rate at the reference batch size.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the square root of the second moment.
    weight_decay: decoupled decay, on kernels only.
  """

  lr: Positive
  b1: Fraction = 0.9
  b2: Fraction = 0.999
  eps: Positive = 1e-8
  weight_decay: NonNegative = 1e-4


@settings
class LAMB(AdamW):
  """Layer-wise Adam for large batches (arXiv:1904.00962): AdamW's and more.

  Attributes:
    bias_correction: divide the moments by 1 - b^t.
    phi_max: the norm of a layer's weights counts as this at most; None: as is.
    include: parameters with decay and trust ratio; see LARS.
  """

  eps: Positive = 1e-6
  weight_decay: NonNegative = 1e-2
  bias_correction: bool = True
  phi_max: Annotated[float | None, "> 0"] = None
  include: str = "kernels"

  def __post_init__(self):
    _check_include(self)


def _check_include(optimizer: LARS | LAMB) -> None:
  remedy = "give 'kernels', 'all' or e.g. 'kernel$'"
  check_pattern(f"{type(optimizer).__name__}.include", optimizer.include, remedy)


@settings
class Muon:
  """Orthogonalised momentum for kernels, AdamW for the rest (optax.contrib).

  Embeddings and head of a Transformer or ViT are among the rest; see `optim.muon`.

  Attributes:
    lr: peak learning rate at the reference batch size.
    momentum: decay of the velocity.
    weight_decay: decoupled decay, on kernels only.
  """

  lr: Positive
  momentum: Fraction = 0.95
  weight_decay: NonNegative = 0.0


@settings
class Warmup:
  """How a schedule comes to its peak.

  Attributes:
    warmup_epochs: epochs from `warmup_lr` to the peak.
    warmup: how it rises: "linear", "quadratic" or "exponential".
    warmup_lr: rate of step 0, as it is: it does not grow with the batch.
  """

  warmup_epochs: NonNegative = 0.0
  warmup: Literal["linear", "quadratic", "exponential"] = "linear"
  warmup_lr: NonNegative = 0.0

  def __post_init__(self):
    if self.warmup == "exponential" and self.warmup_lr == 0:
      raise ConfigError(
        f"{type(self).__name__}.warmup_lr=0.0: an exponential warm-up cannot "
        "start at 0, give a rate > 0"
      )


@settings
class Cosine(Warmup):
  """Warm-up, then half a cosine.

  Attributes:
    end_lr: rate at the end.
  """

  end_lr: NonNegative = 0.0


@settings
class Polynomial(Cosine):
  """Warm-up, then (1 - t)**power; power 2 to 1e-4 is MLPerf's.

  Attributes:
    power: exponent of the decay.
    restart: t counts from the end of the warm-up, as in MLPerf, or else (Intel
      Caffe) from step 0, so that the rate drops where the warm-up ends.
    decay_epochs: epochs of the decay; None: up to the end of the run.
  """

  end_lr: NonNegative = 1e-4
  power: Positive = 2.0
  restart: bool = True
  decay_epochs: Annotated[float | None, "> 0"] = None

  def __post_init__(self):
    super().__post_init__()
    if self.decay_epochs is not None and not self.restart:
      raise ConfigError(
        f"Polynomial.decay_epochs={self.decay_epochs}: is counted from the end of "
        "the warm-up, set restart=True or leave it out"
      )


@settings
class Steps(Warmup):
  """Warm-up, then a constant rate cut at given epochs.

  Attributes:
    boundaries: epochs at which the rate is multiplied by `factor`.
    factor: the cut; 0.1 at 30, 60 and 80 is the recipe of arXiv:1706.02677.
  """

  boundaries: Annotated[tuple[float, ...], "> 0"] = (30.0, 60.0, 80.0)
  factor: Annotated[float, "in (0, 1]"] = 0.1

  def __post_init__(self):
    super().__post_init__()
    if list(self.boundaries) != sorted(set(self.boundaries)):
      raise ConfigError(
        f"Steps.boundaries={self.boundaries}: give them in rising order"
      )


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
      SGD): rate an example and time constant of the momentum stay.
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
        raise ConfigError(
          f"Phases.{name}={values}: give one for each of the {len(self.epochs)} "
          "phases, or ()"
        )


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
