"""Settings of the built-in optimizers and schedules."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxscale import optim  # Lazy: its names load on first use.
from jaxscale.config import bases, bounds
from jaxscale.config.bases import Optimizer, OptimizerContext, Schedule, ScheduleContext
from jaxscale.config.bounds import Count, Fraction, NonNegative, Positive
from jaxscale.errors import ConfigError, invalid, message_of

if TYPE_CHECKING:
  import optax

  from jaxscale.optim.parametrization import LeafFactors

# The names for --config.optimizer= (HOMES in config/choice.py lists this module).
__all__ = ["LAMB", "LARS", "SGD", "SOAP", "AdamW", "Cosine", "Muon", "Optax", "Polynomial"]
__all__ += ["CompleteP", "MuP", "Standard", "Steps"]

_Published = Literal["paper", "nvidia", "tf_contrib", "tf_contrib_l2_in_loss", "torch", "optax"]
_Clipped = Literal["larc_clip", "larc_scale", "nvcaffe_clip", "nvcaffe_scale", "timm", "timm_clip"]
LarsVariant = Literal[_Published, _Clipped]
NewtonSchulz = Literal["jordan", "you", "polar_express"]


def _options(chosen: Optimizer, context: OptimizerContext) -> dict[str, Any]:
  """Return the fields as keyword arguments of the functions in `jaxscale.optim`."""
  # The schedule contains the learning rate.
  values = {name: value for name, value in vars(chosen).items() if name != "lr"}
  if context.momentum is not None and "momentum" in values:
    values["momentum"] = context.momentum
  if "momentum_correction" in values:
    correct = {"never": False, "warmup": context.warmup_steps, "always": True}
    values["momentum_correction"] = correct[values["momentum_correction"]]
  values["mask"] = optim.including(values.pop("include"))
  values["stacked"] = context.stacked
  return values


class _Decaying(Optimizer):
  """Optimizer with weight decay.

  Attributes:
    include: the parameters that get weight decay (and LARS/LAMB trust ratios, or Muon updates);
      "kernels" (two or more dimensions), "timm" (kernels except position embeddings, as in
      timm), "all", or a regular expression that is searched for in the parameter paths.
  """

  include: str = "kernels"

  def __post_init__(self):
    remedy = "give 'kernels', 'timm', 'all' or e.g. 'kernel$'"
    bounds.check_pattern(f"{type(self).__name__}.include", self.include, remedy)


class SGD(_Decaying):
  """Stochastic gradient descent with momentum and L2 weight decay.

  Attributes:
    momentum: the momentum (decay of the velocity); 0 disables it.
    nesterov: whether to use Nesterov momentum.
    weight_decay: the L2 coefficient, added to the gradient; 0 disables it.
    momentum_correction: the steps in which momentum is multiplied by lr_t / lr_{t-1}
      (arXiv:1706.02677, section 3); "never", "warmup" (only during the warm-up) or "always".
  """

  momentum: Fraction = 0.9
  nesterov: bool = True
  weight_decay: NonNegative = 0.0
  momentum_correction: Literal["never", "warmup", "always"] = "never"

  follows_batch_neutrally = has_resettable_momentum = True
  update_rule = "sgd"

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    return optim.sgd(schedule, **_options(self, context))


class LARS(_Decaying):
  """Layer-wise adaptive rate scaling (arXiv:1708.03888).

  Attributes:
    variant: the implementation to reproduce; "paper" (Intel Caffe, Flax, MLPerf), "nvidia"
      (MLPerf), "tf_contrib" or "tf_contrib_l2_in_loss" (TensorFlow), "torch" (lightning-bolts),
      "optax", "larc_clip" or "larc_scale" (apex), "nvcaffe_clip" or "nvcaffe_scale" (NVCaffe),
      "timm" or "timm_clip" (timm's lars and larc). `jaxscale.optim.lars_variants` has the
      equations.
    momentum: the momentum (decay of the velocity); 0 disables it.
    weight_decay: the L2 coefficient, added to the gradient; 0 disables it.
    trust_coefficient: the factor by which the trust ratio is multiplied (eta in arXiv:1708.03888).
    eps: the constant added to the denominator of the trust ratio; 0 adds none.
    nesterov: whether to use Nesterov momentum.
    momentum_correction: the steps in which momentum is multiplied by lr_t / lr_{t-1}
      (arXiv:1706.02677, section 3); "never", "warmup" (only during the warm-up, as in Intel
      Caffe) or "always".
  """

  variant: LarsVariant = "paper"
  momentum: Fraction = 0.9
  weight_decay: NonNegative = 1e-4
  trust_coefficient: Positive = 1e-3
  eps: NonNegative = 0.0
  nesterov: bool = False
  momentum_correction: Literal["never", "warmup", "always"] = "never"

  has_resettable_momentum = True
  not_shared = ("eps",)  # Other optimizers add eps to a moment.

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    return optim.lars(schedule, **_options(self, context))


class AdamW(_Decaying):
  """Adam with decoupled weight decay (arXiv:1711.05101).

  Attributes:
    b1: the decay of the first moment.
    b2: the decay of the second moment.
    eps: the constant added to the square root of the second moment.
    weight_decay: the decoupled weight decay; 0 disables it.
  """

  b1: Fraction = 0.9
  b2: Fraction = 0.999
  eps: Positive = 1e-8
  weight_decay: NonNegative = 1e-4

  update_rule = "adam"

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    return optim.adamw(schedule, **_options(self, context))


class LAMB(AdamW):
  """AdamW with a trust ratio per layer, for large batches (arXiv:1904.00962).

  Attributes:
    variant: the implementation to reproduce; "paper", or "timm", which clips gradients to a
      global norm of 1 and uses no trust ratios if weight_decay is 0.
    bias_correction: whether to divide the moments by 1 - b1^t and 1 - b2^t in step t, as Adam
      does.
    phi_max: the upper limit of a layer's weight norm in the numerator of its trust ratio; None
      sets no limit.
    trust_clip: whether to limit trust ratios to 1 (LAMBC).
  """

  variant: Literal["paper", "timm"] = "paper"
  eps: Positive = 1e-6
  weight_decay: NonNegative = 1e-2
  bias_correction: bool = True
  phi_max: Annotated[float | None, "> 0"] = None
  trust_clip: bool = False

  update_rule = ""  # The trust ratio multiplies the rate by the norm of the parameter.

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    return optim.lamb(schedule, **_options(self, context))


class Muon(_Decaying):
  """Orthogonalized momentum for weight matrices, AdamW for all other parameters.

  AdamW also updates the embeddings and the head of a Transformer or ViT; see `optim.muon`.

  Attributes:
    variant: the implementation to reproduce; "optax" (optax.contrib.muon) or "torch"
      (torch.optim.Muon).
    momentum: the momentum (decay of the velocity); 0 disables it.
    nesterov: whether to use Nesterov momentum.
    weight_decay: the decoupled weight decay of the weight matrices in `include`; 0 disables it.
    ns_steps: the number of Newton-Schulz iterations.
    ns_coeffs: the three coefficients of a Newton-Schulz iteration, those of x, x^3 and x^5, or
      three for each iteration, of which the last are repeated; or a published set, "jordan"
      (the default), "you" or "polar_express" (arXiv:2505.16932).
    ns_dtype: the dtype of the iteration; "float32" or "bfloat16", which is faster on GPUs.
    adjust: the scale of the update of an [in, out] matrix; "match_rms_adamw" (0.2 sqrt(max(in,
      out)), for AdamW's learning rates) or "original" (sqrt(max(1, out / in)), for higher
      learning rates).
    adam_lr: the peak learning rate of the parameters that AdamW updates; None uses `lr`.
    b1: the decay of AdamW's first moment.
    b2: the decay of AdamW's second moment.
    eps: the constant added to the square root of AdamW's second moment.
  """

  variant: Literal["optax", "torch"] = "optax"
  momentum: Fraction = 0.95
  nesterov: bool = True
  weight_decay: NonNegative = 0.0
  ns_steps: Count = 5
  ns_coeffs: NewtonSchulz | tuple[float | tuple[float, ...], ...] = (3.4445, -4.7750, 2.0315)
  ns_dtype: Literal["float32", "bfloat16"] = "float32"
  adjust: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
  adam_lr: Annotated[float | None, "> 0"] = None
  b1: Fraction = 0.9
  b2: Fraction = 0.999
  eps: Positive = 1e-8

  update_rule = "muon"

  def __post_init__(self):
    super().__post_init__()
    given = self.ns_coeffs
    sizes = {len(x) if isinstance(x, tuple) else -len(given) for x in given}
    if not isinstance(given, str) and sizes not in ({3}, {-3}):
      fix = "give those of x, x^3 and x^5, or three for each iteration"
      raise ConfigError(f"Muon.ns_coeffs={given} must be three coefficients; {fix}")

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    options = _options(self, context)
    factor = (options.pop("adam_lr") or self.lr) / self.lr
    return optim.muon(schedule, by_adam=context.embeddings, adam_rate_factor=factor, **options)


class SOAP(AdamW):
  """Adam in the eigenbasis of Shampoo's preconditioners (arXiv:2409.11321).

  AdamW updates vectors and, by default, the embeddings and the head of a Transformer or ViT;
  see `optim.soap`.

  Attributes:
    shampoo_beta: the decay of the preconditioners; None uses `b2`.
    precondition_frequency: the number of steps between two updates of the eigenbasis.
    max_precond_dim: the longest side of a matrix that has a preconditioner; longer sides are
      not rotated.
    embeddings: the optimizer of the embeddings and the head; "adamw", or "soap" as in the paper,
      which has no preconditioner on the side of a vocabulary above `max_precond_dim`.
  """

  b1: Fraction = 0.95
  b2: Fraction = 0.95
  weight_decay: NonNegative = 1e-2
  shampoo_beta: Annotated[float | None, "in [0, 1)"] = None
  precondition_frequency: Count = 10
  max_precond_dim: Count = 10_000
  embeddings: Literal["adamw", "soap"] = "adamw"

  update_rule = ""  # No rule of transfer is published for its rotated moments.
  has_matrix_state = True

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    options = _options(self, context)
    by_adam = context.embeddings if options.pop("embeddings") == "adamw" else None
    return optim.soap(schedule, by_adam=by_adam, **options)


class Optax(Optimizer):
  """Any optax transformation, for notebooks.

  In a config file, write a class that extends `Optimizer` instead, so that config.json
  records it.

  Attributes:
    make: a function from a learning-rate schedule to an optax transformation, such as
      `optax.adafactor`.
    lr: the peak learning rate; `lr_scaling` scales it with the batch size.
  """

  make: Any

  def build(self, schedule: optax.Schedule, context: OptimizerContext):
    import optax

    fix = "give a function of the learning rate, such as optax.adafactor"
    if not callable(self.make):
      raise invalid("Optax.make", type(self.make).__name__, "is not a function", fix)
    transform = _one_line("Optax.make", fix)(self.make)(schedule)
    if not (hasattr(transform, "init") and hasattr(transform, "update")):
      problem = f"returned {type(transform).__name__} instead of an optax transformation; {fix}"
      raise ConfigError(f"Optax.make {problem}")
    if not isinstance(transform, optax.GradientTransformation):
      return transform
    fix = "give a transformation that works with the model's parameters"
    parts = transform._asdict().items()
    guarded = {name: _one_line(f"{name} of Optax.make", fix)(f) for name, f in parts}
    return transform._replace(**guarded)


@contextlib.contextmanager
def _one_line(what: str, fix: str) -> Generator[None, None, None]:
  """Report any error of the user's function that this decorates as a ConfigError of one line."""
  try:
    yield
  except ConfigError:
    raise
  except Exception as e:
    raise invalid(what, ..., f"failed with {type(e).__name__}: {message_of(e)}", fix) from e


class Warmup(Schedule):
  """Warm-up of a schedule.

  Attributes:
    warmup: the shape of the warm-up; "linear", "quadratic" or "exponential".
    warmup_lr: the learning rate at step 0, where the warm-up starts; it is not scaled with the
      batch size.
  """

  warmup: Literal["linear", "quadratic", "exponential"] = "linear"
  warmup_lr: NonNegative = 0.0

  def __post_init__(self):
    if self.warmup == "exponential" and self.warmup_lr == 0:
      problem = "does not work with an exponential warm-up; give a learning rate > 0"
      raise ConfigError(f"{type(self).__name__}.warmup_lr=0.0 {problem}")

  def rise(self, peak: float, context: ScheduleContext) -> dict[str, Any]:
    """Return the warm-up as keyword arguments of `optim.warmup_*`."""
    if not context.warmup_steps:
      return {}
    if self.warmup_lr > peak:
      problem = f"is above the peak learning rate {peak:.6g}; give less"
      raise ConfigError(f"{type(self).__name__}.warmup_lr={self.warmup_lr} {problem}")
    return {"warmup": self.warmup, "start": self.warmup_lr}


class Cosine(Warmup):
  """Warm-up, then cosine decay.

  Attributes:
    end_lr: the learning rate at the end of the decay; it is not scaled with the batch size.
    restart: whether the decay starts at the end of the warm-up. False starts it at step 0 (timm
      without warmup_prefix, Intel Caffe), so that the learning rate drops abruptly at the end
      of the warm-up.
  """

  end_lr: NonNegative = 0.0
  restart: bool = True

  def build(self, peak: float, context: ScheduleContext) -> optax.Schedule:
    options: Any = {"end": self.end_lr, "restart": self.restart} | self.rise(peak, context)
    return optim.warmup_cosine(peak, context.warmup_steps, context.total_steps, **options)


class Polynomial(Cosine):
  """Warm-up, then polynomial decay; the defaults are those of MLPerf's ResNet-50.

  Attributes:
    power: the exponent of the decay (1 - t)^power, with t from 0 to 1 over the decay.
    decay_epochs: the length of the decay in epochs; None uses `decay_steps`, or decays until
      the end of the run.
    decay_steps: the length of the decay in steps; None uses `decay_epochs`, or decays until the
      end of the run.
  """

  end_lr: NonNegative = 1e-4
  power: Positive = 2.0
  decay_epochs: Annotated[float | None, "> 0"] = None
  decay_steps: Annotated[int | None, "> 0"] = None

  def __post_init__(self):
    super().__post_init__()
    epochs, steps = self.decay_epochs, self.decay_steps
    if epochs is not None and steps is not None:
      problem = f"and decay_epochs={epochs} are both set"
      raise invalid("Polynomial.decay_steps", steps, problem, "leave out one of them")
    if (epochs, steps) != (None, None) and not self.restart:
      unit = "epochs" if steps is None else "steps"
      problem = "is counted from the end of the warm-up, which restart=False does not use"
      fix = "set restart=True or leave it out"
      raise invalid(f"Polynomial.decay_{unit}", steps or epochs, problem, fix)

  def build(self, peak: float, context: ScheduleContext) -> optax.Schedule:
    epochs, steps = self.decay_epochs, self.decay_steps
    options: Any = {"end": self.end_lr, "restart": self.restart} | self.rise(peak, context)
    options |= {"decay_steps": steps if epochs is None else epochs * context.per_epoch}
    length = context.warmup_steps, context.total_steps
    return optim.warmup_polynomial(peak, *length, power=self.power, **options)


class Steps(Warmup):
  """Warm-up, then a constant learning rate that is multiplied by `factor` at given epochs.

  Attributes:
    boundaries: the epochs at which the learning rate is multiplied by `factor`.
    factor: the factor of the learning rate at each boundary; 0.1 at epochs 30, 60 and 80 in
      arXiv:1706.02677.
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


class Standard(bases.Parametrization):
  """Initialization of the model, and one learning rate for all parameters."""

  def build(self, context: bases.ParametrizationContext) -> dict[str, LeafFactors]:
    return {}


class MuP(bases.Parametrization):
  """Maximal update parametrization (arXiv:2203.03466): learning rates transfer across widths.

  Initialization, learning rate, weight decay and eps of each parameter follow from the growth of
  its dims since a base model; with the sizes of the base model nothing changes. For AdamW, Muon
  and SGD. `jaxscale describe` prints the factors.

  Attributes:
    base: the fields of the model that differ in the base model, e.g. {"width": 64,
      "num_layers": 2}.
    outputs: the regular expression that selects the kernels of output layers by their paths;
      None decides by shapes, which Equinox's do not allow.
  """

  base: dict[str, int | float | str | tuple[int, ...]] = dataclasses.field(default_factory=dict)
  outputs: str | None = None

  def __post_init__(self):
    if self.outputs is not None:
      bounds.check_pattern("MuP.outputs", self.outputs, "give e.g. '^head/kernel$'")

  def build(self, context: bases.ParametrizationContext) -> dict[str, LeafFactors]:
    leaves, options = context.leaves, dict(outputs=self.outputs, out_first=context.out_first)
    factors = optim.mup(leaves, context.rule, **options, **self._of_depth(context))
    if context.is_tied:  # The table cannot hold the multiplier, but the norm before it can.
      norms = [path for path in leaves if path.startswith("head/")]
      if not norms:
        problem = "has no place for the multiplier of a tied output layer without a norm in `head`"
        raise invalid("Config.parametrization", type(self).__name__, problem, "untie it")
      for path in norms:
        out = leaves[path].shape[0] / leaves[path].base[0]
        factors[path] = factors[path]._replace(multiplier=1 / out)
    name = "q_norm" if any("/q_norm/" in path for path in leaves) else "q"
    for path in (path for path in leaves if path.startswith(f"layers/{name}/")):
      scale = factors[path].multiplier * context.query_scale
      factors[path] = factors[path]._replace(multiplier=scale)
    return factors

  def _of_depth(self, context: bases.ParametrizationContext) -> dict[str, Any]:
    return {}


class CompleteP(MuP):
  """CompleteP (arXiv:2505.01618): learning rates transfer across widths and depths.

  MuP, with the outputs of residual branches scaled by (num_layers / base num_layers)^-alpha. For
  AdamW and Muon, and models that are a stack of layers.

  Attributes:
    alpha: the exponent of the depth; 1 in CompleteP, 0.5 to compare.
    branch_ends: the regular expression that selects the last kernel and bias of residual branches.
  """

  alpha: Annotated[float, "in [0.5, 1]"] = 1.0
  branch_ends: str = "^layers/(o|down)/"

  def __post_init__(self):
    super().__post_init__()
    bounds.check_pattern("CompleteP.branch_ends", self.branch_ends, "give e.g. '^layers/(o|down)/'")

  def _of_depth(self, context: bases.ParametrizationContext) -> dict[str, Any]:
    problem, fix = "", "use MuP"
    if not any(leaf.in_layers for leaf in context.leaves.values()):
      problem = "needs a model that is a stack of layers (Transformer, ViT, models.Stack)"
    elif context.rule == "sgd" and context.depth != 1:
      problem = "has no rule for SGD and another number of layers"
      fix = "use AdamW or Muon, or the number of layers of the base model"
    if problem:
      raise invalid("Config.parametrization", "CompleteP", problem, fix)
    return {"depth": context.depth, "alpha": self.alpha, "ends": self.branch_ends}
