"""The whole of a run's settings: a tree of frozen dataclasses that hold no bad value.

Only primary quantities are settings. What follows from them (steps from epochs, the
peak rate from the batch size) is computed in `experiment.derive`, printed, and recorded
with the run. An alternative is a class of its own, so a setting that the chosen
optimizer does not have cannot be set. The lines under `Attributes:` are what `--help`
shows.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxscale.config.bases import Data, Exchange, Loss, Model, Optimizer, Schedule, Sync
from jaxscale.config.bounds import Count, check_pattern
from jaxscale.config.layout_settings import Layout, check_layout
from jaxscale.config.phase_settings import AdaptiveBatch, Phases
from jaxscale.config.plain import check_forms, shared_texts
from jaxscale.config.running import Checkpoint, Checks, Compilation, Evaluation, Faults, Log, Mesh
from jaxscale.config.validation import UnsetError, settings
from jaxscale.errors import ConfigError, invalid


def built_in(base: Any, name: str) -> Any:
  """The default of a field: a built-in alternative, imported when it is needed."""
  return dataclasses.field(default_factory=lambda: base.built_in()[name]())


@settings
class Config:
  """One experiment.

  Attributes:
    model: what is trained; of each of these seven a class of your own will do as well.
    data: the examples.
    optimizer: how parameters follow gradients.
    schedule: the learning rate over the run.
    loss: what is minimized and reported.
    batch_size: examples per optimizer step, over all devices.
    epochs: passes over the training examples; or `steps`, exactly one of them.
    steps: optimizer steps of the run.
    phases: batch and image sizes that change during the run: Phases or
      AdaptiveBatch; by default a single phase.
    accumulate_steps: micro-batches per step; gradients are exchanged once. A run
      that resumes on fewer devices than it began on has more of them.
    lr_scaling: how optimizer.lr grows with the batch: "none", "linear"
      (arXiv:1706.02677) or "sqrt".
    lr_reference_batch_size: the batch size that optimizer.lr belongs to.
    layer_decay: each layer's rate, as a share of the rate of the layer above it;
      None: one rate for all.
    layer_order: regular expressions of parameter paths, from the lowest layer
      to the highest, for `layer_decay`.
    clip_norm: largest global norm of the gradient; None: no clipping.
    ema_decay: decay of an average of parameters and BatchNorm statistics,
      which is then what is evaluated; None: no average.
    ema_warmup: the decay of step t is 1 - t^(-2/3) until that is above `ema_decay`.
    noise_scale: measure the gradient-noise scale (arXiv:1812.06162) during training,
      in examples as `batch_size` counts them: of text windows, not tokens. Needs two
      devices or micro-batches at least.
    dtype: type of activations; parameters and the exchange stay float32.
    init_from: a safetensors file, or a folder as Hugging Face's, whose parameters
      training starts from, in the names of timm or torchvision (ResNet, ViT),
      Hugging Face (Llama, Qwen, ViT) or `jaxscale export`; None: initialised. How
      images are normalised for them is in `jaxscale.weights.names`.
    init_head: initialise the classifier, whatever `init_from` has.
    seed: of initial parameters, order, augmentation and dropout.
    target_accuracy: held-out accuracy that makes the run a success.
    target_loss: or the held-out loss.
    stop_at_target: end (and save) at the first evaluation that reaches it.
    input_threads: threads that load and augment; None: one per processor core.
    gpu_settings: choose environment variables of JAX, CUDA and NCCL for the GPUs that
      are found, but for those that you have set (docs/accelerators.md).
    mesh: the grid of devices.
    layout: how the model is sharded over them.
    exchange: how gradients cross the network.
    sync: when workers synchronize: every step, or now and then.
    compilation: where compiled programs are kept.
    evaluation: when and how to evaluate.
    checkpoint: when to save and what to keep.
    checks: what to watch during training.
    faults: when a run counts as broken, and how it ends.
    log: what to log.
  """

  model: Model
  data: Data
  optimizer: Optimizer
  schedule: Schedule = built_in(Schedule, "Cosine")
  loss: Loss = built_in(Loss, "CrossEntropy")
  batch_size: Count
  epochs: Annotated[float | None, "> 0"] = None
  steps: Annotated[int | None, ">= 1"] = None
  phases: Phases | AdaptiveBatch = Phases()
  accumulate_steps: Count = 1
  lr_scaling: Literal["none", "linear", "sqrt"] = "none"
  lr_reference_batch_size: Count = 256
  layer_decay: Annotated[float | None, "in (0, 1]"] = None
  layer_order: tuple[str, ...] = ()
  clip_norm: Annotated[float | None, "> 0"] = None
  ema_decay: Annotated[float | None, "in (0, 1)"] = None
  ema_warmup: bool = False
  noise_scale: bool = False
  dtype: Literal["float32", "bfloat16"] = "float32"
  init_from: str | None = None
  init_head: bool = False
  seed: Annotated[int, "in [0, 4294967296)"] = 0  # jax.random.key drops higher bits
  target_accuracy: Annotated[float | None, "in (0, 1]"] = None
  target_loss: Annotated[float | None, "> 0"] = None
  stop_at_target: bool = False
  input_threads: Annotated[int | None, "in [1, 1024]"] = None
  gpu_settings: bool = True
  mesh: Mesh = Mesh()
  layout: Layout = Layout()
  exchange: Exchange = built_in(Exchange, "AllReduce")
  sync: Sync = built_in(Sync, "EveryStep")
  compilation: Compilation = Compilation()
  evaluation: Evaluation = Evaluation()
  checkpoint: Checkpoint = Checkpoint()
  checks: Checks = Checks()
  faults: Faults = Faults()
  log: Log = Log()

  @property
  def is_local_sgd(self) -> bool:
    """Whether workers take steps of their own between synchronizations."""
    return self.sync.is_local_sgd

  def shared(self) -> dict[str, str]:
    """Texts that must be the same in all processes of a run, by name."""
    return shared_texts(self)

  def __post_init__(self):
    if self.batch_size % (steps := self.accumulate_steps):
      why = f"not divisible by accumulate_steps={steps}, change one of them"
      raise ConfigError(f"Config.batch_size={self.batch_size}: {why}")
    _check_length(self)
    accuracy, loss = self.target_accuracy, self.target_loss
    if accuracy is not None and loss is not None:
      why = f"there is a target_accuracy ({accuracy}) already"
      raise ConfigError(f"Config.target_loss={loss}: {why}, set one of them to None")
    if self.stop_at_target and {accuracy, loss} == {None}:
      raise ConfigError("Config.stop_at_target=True: set target_accuracy or target_loss")
    if self.ema_warmup and self.ema_decay is None:
      raise ConfigError("Config.ema_warmup=True: set ema_decay too")
    if self.init_head and self.init_from is None:
      raise ConfigError("Config.init_head=True: set init_from too")
    if (self.layer_decay is None) != (not self.layer_order):
      both = f"Config.layer_decay={self.layer_decay}, layer_order={self.layer_order}"
      raise ConfigError(f"{both}: set both or neither")
    for pattern in self.layer_order:
      check_pattern("Config.layer_order", pattern, "give e.g. '^Conv_0/'")
    _check_neutral(self)
    _check_exchange(self)
    if self.is_local_sgd:
      _check_local(self)
    check_layout(self)
    check_forms(self)


def _check_length(config: Config) -> None:
  """Refuse a run without a length, with two, or too short for its parts.

  What is counted in the other unit is compared where the data are known
  (`experiment.derive`).
  """
  if config.epochs is None and config.steps is None:
    raise UnsetError("Config.epochs and Config.steps are not set; set one of them")
  if config.epochs is not None and config.steps is not None:
    why = f"and epochs={config.epochs} are both set"
    raise invalid("Config.steps", config.steps, why, "set one of them to None")
  if config.steps is not None and isinstance(config.phases, AdaptiveBatch):
    why = "does not say how many phases AdaptiveBatch tunes"
    raise invalid("Config.steps", config.steps, why, "set epochs instead")
  for unit in ("epochs", "steps"):
    length, name = getattr(config, unit), f"warmup_{unit}"
    if length is None:
      continue
    why = f"is too long, the run has only {length} {unit}"
    if (warmup := getattr(config.schedule, name) or 0) >= length:
      field = f"{type(config.schedule).__name__}.{name}"
      raise invalid(field, warmup, why, "make the warm-up shorter")
    starts = getattr(config.phases, unit, ())
    if starts and starts[-1] >= length:
      why = f"is too late, the run has only {length} {unit}"
      fix = f"leave out the phases that begin later, or set Config.{unit} higher"
      raise invalid(f"Phases.{unit}", starts, why, fix)


def _check_neutral(config: Config) -> None:
  """Batch sizes that change neutrally are for SGD's momentum."""
  phases = config.phases
  if isinstance(phases, Phases) and (phases.follow != "neutral" or not phases.batch_sizes):
    return
  neutral = "batch sizes that change neutrally"
  if not config.optimizer.follows_batch_neutrally:
    field = f"Config.optimizer={type(config.optimizer).__name__}"
    remedy = "use SGD, or Phases with follow='linear' or 'sqrt'"
    why = f"{neutral} keep the time constant of SGD's momentum"
    raise ConfigError(f"{field}: {why}; {remedy}")
  correction = getattr(config.optimizer, "momentum_correction", "never")
  if correction != "never":
    why = f"{neutral} carry the velocity over themselves, use 'never'"
    raise ConfigError(f"SGD.momentum_correction={correction!r}: {why}")


def _check_exchange(config: Config) -> None:
  """What is measured of gradients must be of the gradients themselves."""
  exchange = config.exchange
  if config.noise_scale and (not exchange.averages_exactly or exchange.delayed):
    name = type(exchange).__name__ + ".delayed" * exchange.delayed
    why = f"{name} does not give the mean of the step's own gradients, which it is "
    remedy = "use AllReduce or HalfPrecision, not delayed"
    raise ConfigError(f"Config.noise_scale=True: {why}measured by; {remedy}")


def _check_local(config: Config) -> None:
  """What workers that train alone cannot have."""
  sync, exchange = f"sync={type(config.sync).__name__}", type(config.exchange).__name__
  if config.exchange.delayed:
    why = f"{exchange}.delayed=True would move them by the one before; set it to False"
    raise ConfigError(f"Config.{sync}: workers wait to synchronize, {why}")
  if config.ema_decay is not None:
    why = "an average over steps (ema_decay) needs parameters that all share in every "
    raise ConfigError(f"Config.{sync}: {why}step; set ema_decay to None")
  if config.noise_scale:
    why = "the noise scale compares gradients at the same parameters, and workers have "
    raise ConfigError(f"Config.{sync}: {why}their own; set noise_scale to False")
  if isinstance(config.phases, AdaptiveBatch):
    why = "AdaptiveBatch tries steps that all share; use Phases"
    raise ConfigError(f"Config.{sync}: {why}")
  if config.lr_scaling != "none":
    why = f"{sync} has rates of one worker and its part of the batch"
    remedy = "set it to 'none' and optimizer.lr for that part"
    raise ConfigError(f"Config.lr_scaling={config.lr_scaling!r}: {why}; {remedy}")
  if plain := config.exchange.plain_epochs:
    why = f"workers send only when they synchronize ({sync}), set it to 0"
    raise ConfigError(f"{exchange}.plain_epochs={plain}: {why}")
  resets = getattr(config.sync, "reset_momentum", False)
  if resets and not config.optimizer.has_resettable_momentum:
    why = f"{type(config.optimizer).__name__}'s moments cannot be emptied alone "
    why += "(bias correction takes them for full), set it to False"
    raise ConfigError(f"BlockMomentum.reset_momentum=True: {why}")
