"""Settings of the built-in optimizers and schedules."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxscale import optim  # its names are imported on first access, without JAX here
from jaxscale.config import bounds
from jaxscale.config.bases import Optimizer, OptimizerContext, Schedule, ScheduleContext
from jaxscale.config.bounds import Count, Fraction, NonNegative, Positive
from jaxscale.errors import ConfigError, invalid, message_of

if TYPE_CHECKING:
  import optax

# Names that --config.optimizer accepts (see HOMES in config/choice.py).
__all__ = ["LAMB", "LARS", "SGD", "AdamW", "Cosine", "Muon", "Optax", "Polynomial", "Steps"]

_Published = Literal["paper", "nvidia", "tf_contrib", "tf_contrib_l2_in_loss", "torch", "optax"]
_Clipped = Literal["larc_clip", "larc_scale", "nvcaffe_clip", "nvcaffe_scale", "timm", "timm_clip"]
LarsVariant = Literal[_Published, _Clipped]


def _options(chosen: Optimizer, context: OptimizerContext) -> dict[str, Any]:
  """Return the fields as keyword arguments of the functions in `jaxscale.optim`."""
  given = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen)}
  del given["lr"]  # part of the schedule
  if context.momentum is not None and "momentum" in given:
    given["momentum"] = context.momentum
  if "momentum_correction" in given:
    correct = {"never": False, "warmup": context.warmup_steps, "always": True}
    given["momentum_correction"] = correct[given["momentum_correction"]]
  given["mask"] = optim.including(given.pop("include"))
  if context.stacked is not None:
    given["stacked"] = context.stacked
  return given


class _Decaying(Optimizer):
  """An optimizer with weight decay.

  Attributes:
    include: parameters that decay, and have a trust ratio or are Muon's where there
      is such a thing: "kernels" (two dims or more), "timm" (those without position
      embeddings, as timm decays), "all", or a regular expression of their paths.
  """

  include: str = "kernels"

  def __post_init__(self):
    remedy = "give 'kernels', 'timm', 'all' or e.g. 'kernel$'"
    bounds.check_pattern(f"{type(self).__name__}.include", self.include, remedy)


class SGD(_Decaying):
  """Stochastic gradient descent with momentum; L2 decay in the gradient.

  Attributes:
    momentum: decay of the velocity.
    nesterov: look ahead.
    weight_decay: L2 coefficient.
    momentum_correction: momentum times lr_t / lr_{t-1} (arXiv:1706.02677, §3):
      "never", in the "warmup" or "always".
  """

  momentum: Fraction = 0.9
  nesterov: bool = True
  weight_decay: NonNegative = 0.0
  momentum_correction: Literal["never", "warmup", "always"] = "never"

  follows_batch_neutrally = has_resettable_momentum = True

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    return optim.sgd(schedule, **_options(self, context))


class LARS(_Decaying):
  """Layer-wise adaptive rate scaling (arXiv:1708.03888), MLPerf's form.

  Attributes:
    variant: whose equations: "paper" (Intel Caffe, Flax, MLPerf), "nvidia",
      "tf_contrib", "tf_contrib_l2_in_loss", "torch", "optax", "larc_clip",
      "larc_scale" (apex), "nvcaffe_clip", "nvcaffe_scale", "timm" or "timm_clip"
      (timm's lars and larc); see `optim.lars`.
    momentum: decay of the velocity.
    weight_decay: L2 coefficient.
    trust_coefficient: eta of the paper.
    eps: added to the denominator of the trust ratio.
    nesterov: look ahead.
    momentum_correction: "never", in the "warmup" (Intel Caffe) or "always".
  """

  variant: LarsVariant = "paper"
  momentum: Fraction = 0.9
  weight_decay: NonNegative = 1e-4
  trust_coefficient: Positive = 1e-3
  eps: NonNegative = 0.0
  nesterov: bool = False
  momentum_correction: Literal["never", "warmup", "always"] = "never"

  has_resettable_momentum = True
  not_shared = ("eps",)  # in the other optimizers eps is added to a moment

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    return optim.lars(schedule, **_options(self, context))


class AdamW(_Decaying):
  """Adam with decoupled weight decay (arXiv:1711.05101).

  Attributes:
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the square root of the second moment.
    weight_decay: decoupled decay.
  """

  b1: Fraction = 0.9
  b2: Fraction = 0.999
  eps: Positive = 1e-8
  weight_decay: NonNegative = 1e-4

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    return optim.adamw(schedule, **_options(self, context))


class LAMB(AdamW):
  """Layer-wise Adam for large batches (arXiv:1904.00962): AdamW's and more.

  Attributes:
    variant: whose rules: "paper", or "timm", which clips gradients to a global norm
      of 1 and has no trust ratio without decay.
    bias_correction: divide the moments by 1 - b^t.
    phi_max: the norm of a layer's weights counts as this at most; None: as is.
    trust_clip: no trust ratio above 1 (LAMBC).
  """

  variant: Literal["paper", "timm"] = "paper"
  eps: Positive = 1e-6
  weight_decay: NonNegative = 1e-2
  bias_correction: bool = True
  phi_max: Annotated[float | None, "> 0"] = None
  trust_clip: bool = False

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    return optim.lamb(schedule, **_options(self, context))


class Muon(_Decaying):
  """Orthogonalised momentum for kernels, AdamW for the rest.

  Embeddings and head of a Transformer or ViT are among the rest; see `optim.muon`.

  Attributes:
    variant: whose equations: "optax" or "torch".
    momentum: decay of the velocity.
    nesterov: look ahead.
    weight_decay: decoupled decay, on kernels.
    ns_steps: iterations that bring singular values near 1.
    ns_coeffs: the three coefficients of an iteration.
    adjust: size of an update: "match_rms_adamw" (0.2 sqrt(max(in, out))) or
      "original" (sqrt(max(1, out / in)), with rates above AdamW's).
    adam_lr: peak rate of what AdamW moves; None: that of Muon.
    b1: AdamW's decay of the first moment.
    b2: AdamW's decay of the second moment.
    eps: AdamW's, added to the square root of the second moment.
  """

  variant: Literal["optax", "torch"] = "optax"
  momentum: Fraction = 0.95
  nesterov: bool = True
  weight_decay: NonNegative = 0.0
  ns_steps: Count = 5
  ns_coeffs: tuple[float, ...] = (3.4445, -4.7750, 2.0315)
  adjust: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
  adam_lr: Annotated[float | None, "> 0"] = None
  b1: Fraction = 0.9
  b2: Fraction = 0.999
  eps: Positive = 1e-8

  def __post_init__(self):
    super().__post_init__()
    if len(self.ns_coeffs) != 3:
      given = f"Muon.ns_coeffs={self.ns_coeffs}"
      raise ConfigError(f"{given} must be three coefficients; give those of x, x^3 and x^5")

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    options = _options(self, context)
    if (adam_lr := options.pop("adam_lr")) is not None:
      options["adam_rate_factor"] = adam_lr / self.lr
    if context.embeddings is not None:
      options["by_adam"] = context.embeddings
    return optim.muon(schedule, **options)


class Optax(Optimizer):
  """Any optax transformation, for notebooks.

  In a config file write a class of your own that extends `Optimizer`, so that config.json
  can record it.

  Attributes:
    make: learning rate (a schedule) -> transformation, such as `optax.adafactor`.
    lr: peak learning rate at the reference batch size.
  """

  make: Any

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    import optax

    fix = "give a function of the learning rate, such as optax.adafactor"
    if not callable(self.make):
      raise invalid("Optax.make", type(self.make).__name__, "is not a function", fix)
    made = _one_line("Optax.make", fix)(self.make)(schedule)
    if not (hasattr(made, "init") and hasattr(made, "update")):
      why = f"returned {type(made).__name__} instead of an optax transformation; {fix}"
      raise ConfigError(f"Optax.make {why}")
    if not isinstance(made, optax.GradientTransformation):
      return made
    fix = "give a transformation that works with the model's parameters"
    parts = made._asdict().items()
    guarded = {name: _one_line(f"{name} of Optax.make", fix)(f) for name, f in parts}
    return made._replace(**guarded)


@contextlib.contextmanager
def _one_line(what: str, fix: str) -> Generator[None, None, None]:
  """Turn an exception of the user's function into a ConfigError of one line."""
  try:
    yield
  except ConfigError:
    raise
  except Exception as e:
    why = f"failed with {type(e).__name__}: {message_of(e)}"
    raise invalid(what, ..., why, fix) from e


class Warmup(Schedule):
  """Base class of schedules with a warm-up.

  Attributes:
    warmup: how it rises: "linear", "quadratic" or "exponential".
    warmup_lr: rate of step 0, as it is: it does not grow with the batch.
  """

  warmup: Literal["linear", "quadratic", "exponential"] = "linear"
  warmup_lr: NonNegative = 0.0

  def __post_init__(self):
    if self.warmup == "exponential" and self.warmup_lr == 0:
      why = "does not work with an exponential warm-up; give a learning rate > 0"
      raise ConfigError(f"{type(self).__name__}.warmup_lr=0.0 {why}")

  def rise(self, peak: float, context: ScheduleContext) -> dict[str, Any]:
    """Return the warm-up as keyword arguments of `optim.warmup_*`."""
    if not context.warmup_steps:
      return {}
    if self.warmup_lr > peak:
      why = f"is above the peak learning rate {peak:.6g}; give less"
      raise ConfigError(f"{type(self).__name__}.warmup_lr={self.warmup_lr} {why}")
    return {"warmup": self.warmup, "start": self.warmup_lr}


class Cosine(Warmup):
  """Warm-up, then half a cosine.

  Attributes:
    end_lr: rate at the end.
    restart: the decay counts from the end of the warm-up, or else (timm without
      warmup_prefix, Intel Caffe) from step 0, so that the rate drops where the
      warm-up ends.
  """

  end_lr: NonNegative = 0.0
  restart: bool = True

  def build(self, peak: float, context: ScheduleContext) -> optax.Schedule:
    options: Any = {"end": self.end_lr, "restart": self.restart} | self.rise(peak, context)
    return optim.warmup_cosine(peak, context.warmup_steps, context.total_steps, **options)


class Polynomial(Cosine):
  """Warm-up, then (1 - t)**power; power 2 to 1e-4 is MLPerf's.

  Attributes:
    power: exponent of the decay.
    decay_epochs: epochs of the decay; None: up to the end of the run.
    decay_steps: steps of the decay, instead of `decay_epochs`.
  """

  end_lr: NonNegative = 1e-4
  power: Positive = 2.0
  decay_epochs: Annotated[float | None, "> 0"] = None
  decay_steps: Annotated[int | None, "> 0"] = None

  def __post_init__(self):
    super().__post_init__()
    epochs, steps = self.decay_epochs, self.decay_steps
    if epochs is not None and steps is not None:
      why = f"and decay_epochs={epochs} are both set"
      raise invalid("Polynomial.decay_steps", steps, why, "leave out one of them")
    if (epochs, steps) != (None, None) and not self.restart:
      unit = "epochs" if steps is None else "steps"
      why = "is counted from the end of the warm-up, which restart=False does not use"
      fix = "set restart=True or leave it out"
      raise invalid(f"Polynomial.decay_{unit}", steps or epochs, why, fix)

  def build(self, peak: float, context: ScheduleContext) -> optax.Schedule:
    epochs, steps = self.decay_epochs, self.decay_steps
    options: Any = {"end": self.end_lr, "restart": self.restart} | self.rise(peak, context)
    options |= {"decay_steps": steps if epochs is None else epochs * context.per_epoch}
    length = context.warmup_steps, context.total_steps
    return optim.warmup_polynomial(peak, *length, power=self.power, **options)


class Steps(Warmup):
  """Warm-up, then a constant learning rate that is reduced at given epochs.

  Attributes:
    boundaries: epochs at which the rate is multiplied by `factor`.
    factor: the cut; 0.1 at 30, 60 and 80 is the recipe of arXiv:1706.02677.
  """

  boundaries: Annotated[tuple[float, ...], "> 0"] = (30.0, 60.0, 80.0)
  factor: Annotated[float, "in (0, 1]"] = 0.1

  def __post_init__(self):
    super().__post_init__()
    if list(self.boundaries) != sorted(set(self.boundaries)):
      given = self.boundaries
      raise ConfigError(f"Steps.boundaries={given} are out of order; give increasing epochs")

  def build(self, peak: float, context: ScheduleContext) -> optax.Schedule:
    boundaries = [round(epoch * context.per_epoch) for epoch in self.boundaries]
    steps, rise = context.warmup_steps, self.rise(peak, context)
    return optim.warmup_steps(peak, steps, boundaries, factor=self.factor, **rise)
