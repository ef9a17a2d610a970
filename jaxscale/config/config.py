"""Settings of a run: a tree of frozen dataclasses that are checked when they are made.

Only primary quantities are settings. Quantities that follow from them (steps from epochs,
the peak learning rate from the batch size) are computed in `experiment.derive`, printed,
and recorded with the run. Each alternative is a class of its own, so a setting that the
chosen optimizer does not have cannot be set. `--help` shows the text under `Attributes:`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jaxscale.config import bases
from jaxscale.config.adapter_settings import LoRA, NoAdapter
from jaxscale.config.bounds import Count, check_distinct, check_pattern
from jaxscale.config.layout_settings import Layout, check_layout
from jaxscale.config.phase_settings import AdaptiveBatch, Growing, Phases, measuring
from jaxscale.config.plain import check_forms, shared_texts
from jaxscale.config.running import Checkpoint, Checks, Compilation, Evaluation, Faults, Log, Mesh
from jaxscale.config.validation import UnsetError, settings
from jaxscale.errors import ConfigError, invalid


def built_in(base: Any, name: str) -> Any:
  """Return a field whose default is a built-in alternative, imported when it is needed."""
  return dataclasses.field(default_factory=lambda: base.built_in()[name]())


@settings
class Config:
  """Settings of one run.

  Attributes:
    model: the model to train; a class of your own also works.
    data: the training and validation examples; a class of your own also works.
    optimizer: the optimizer; a class of your own also works.
    schedule: the learning-rate schedule; a class of your own also works.
    parametrization: the scales of initialization and learning rate; MuP or CompleteP keep the
      best learning rate of a small model for a large one. A class of your own also works.
    loss: the training loss and its metrics; a class of your own also works.
    metrics: the further metrics of evaluations, e.g. "F1,ConfusionMatrix"; () computes only
      those of `loss`. Classes of your own also work.
    batch_size: the number of examples per optimizer step, summed over all devices.
    epochs: the length of the run in passes over the training examples; None uses `steps`.
    steps: the length of the run in optimizer steps; None uses `epochs`.
    phases: the changes of batch and image size during the run; the default keeps both constant.
    accumulate_steps: the number of micro-batches per optimizer step (gradient accumulation);
      gradients are exchanged once per step. A run that resumes on fewer devices uses more
      micro-batches.
    lr_scaling: the rule that scales optimizer.lr with the batch size; "none", "linear" (times
      batch_size / lr_reference_batch_size, arXiv:1706.02677) or "sqrt" (times the square root
      of that).
    lr_reference_batch_size: the batch size in examples for which optimizer.lr was tuned;
      used by `lr_scaling`.
    layer_decay: the learning rate of each layer divided by that of the next layer towards the
      output; None uses one learning rate for all layers.
    layer_order: the regular expressions that select the parameters of each layer by their
      paths, in order from the input to the output, e.g. ("^Conv_0/", "^Dense_0/"); required by
      `layer_decay`, otherwise (). Every parameter must match exactly one of them.
    clip_norm: the global norm to which larger gradients are scaled down; None disables
      clipping.
    ema_decay: the decay per step of a moving average of the parameters (EMA); None disables
      averaging. Evaluation uses the average, which includes BatchNorm statistics.
    ema_warmup: whether the EMA decay in step t is 1 - t^(-2/3) until that exceeds `ema_decay`.
    noise_scale: whether to measure the gradient noise scale (arXiv:1812.06162), in examples; an
      example of text is a sequence, not a token. Needs at least two devices or two
      micro-batches.
    dtype: the type of activations; "float32", "bfloat16", "float16" (for GPUs without bfloat16,
      with dynamic loss scaling, arXiv:1710.03740) or "float8" (bfloat16, with the products of
      layers in FP8, for Transformer and ViT). Parameters and the exchange of gradients stay
      float32.
    init_from: the pretrained parameters, a safetensors file or Hugging Face folder; None
      initializes at random. Accepts the parameter names of timm and torchvision (ResNet, ViT),
      Hugging Face (Llama, Qwen, ViT) and `jaxscale export`. `jaxscale.weights.names` documents
      the normalization of images that pretrained weights expect.
    init_head: whether to initialize the classifier at random although `init_from` contains one.
    trainable: the regular expression that selects the trained parameters by their paths, e.g.
      "^head/"; the others are frozen: they have no gradients, optimizer state or exchange. None
      trains all, or, with an adapter, only the adapter.
    adapter: the adapter that is trained in place of the parameters, e.g. LoRA.
    seed: the random seed of initialization, data order, augmentation and dropout.
    target_accuracy: the validation accuracy to reach, as a fraction; None sets no target.
    target_loss: the validation loss to reach; None sets no target.
    stop_at_target: whether to save and stop at the first evaluation that reaches the target;
      False only reports when it was reached.
    input_threads: the number of threads per process that load and augment examples; None uses
      one per CPU core available to the process, divided by the processes that share the cores.
    gpu_settings: whether to set recommended environment variables of JAX, CUDA and NCCL on
      GPUs, and to bind processes to CPUs; what is already set is kept (docs/accelerators.md).
    mesh: the grid of devices.
    layout: the sharding of model and optimizer over the mesh.
    exchange: the method that averages gradients over devices; a class of your own also works.
    sync: the synchronization of the devices; EveryStep averages gradients in every step. With
      the other classes, workers train separately and synchronize at intervals.
    compilation: the cache of compiled programs.
    compiler_options: the options of XLA's compiler by name, for the train and evaluation step,
      e.g. {"xla_gpu_enable_triton_gemm": False}. Unlike in XLA_FLAGS, a name that the installed
      compiler does not have is refused.
    compiler_preset: the options of XLA's compiler that a vendor recommends for a GPU; "none",
      "h100", "b200" or "mi300x" (docs/accelerators.md; their speed is untested). Names that the
      installed compiler does not have are left out and reported; `compiler_options` replaces
      single values.
    evaluation: the interval and batch size of evaluations.
    checkpoint: the interval, number and location of checkpoints.
    checks: the comparison of the devices' copies of the state, and the reaction to NaN and Inf.
    faults: timeouts for processes, and limits on restarts.
    log: metrics, trackers and profiles.
    callbacks: the callbacks that the run calls, e.g. "EarlyStopping,SampleWriter"; () uses none.
  """

  model: bases.Model
  data: bases.Data
  optimizer: bases.Optimizer
  schedule: bases.Schedule = built_in(bases.Schedule, "Cosine")
  parametrization: bases.Parametrization = built_in(bases.Parametrization, "Standard")
  loss: bases.Loss = built_in(bases.Loss, "CrossEntropy")
  metrics: tuple[bases.Metric, ...] = ()
  batch_size: Count
  epochs: Annotated[float | None, "> 0"] = None
  steps: Annotated[int | None, ">= 1"] = None
  phases: Phases | AdaptiveBatch | Growing = Phases()
  accumulate_steps: Count = 1
  lr_scaling: Literal["none", "linear", "sqrt"] = "none"
  lr_reference_batch_size: Count = 256
  layer_decay: Annotated[float | None, "in (0, 1]"] = None
  layer_order: tuple[str, ...] = ()
  clip_norm: Annotated[float | None, "> 0"] = None
  ema_decay: Annotated[float | None, "in (0, 1)"] = None
  ema_warmup: bool = False
  noise_scale: bool = False
  dtype: Literal["float32", "bfloat16", "float16", "float8"] = "float32"
  init_from: str | None = None
  init_head: bool = False
  trainable: str | None = None
  adapter: NoAdapter | LoRA = NoAdapter()
  seed: Annotated[int, "in [0, 4294967296)"] = 0  # jax.random.key drops higher bits.
  target_accuracy: Annotated[float | None, "in (0, 1]"] = None
  target_loss: Annotated[float | None, "> 0"] = None
  stop_at_target: bool = False
  input_threads: Annotated[int | None, "in [1, 1024]"] = None
  gpu_settings: bool = True
  mesh: Mesh = Mesh()
  layout: Layout = Layout()
  exchange: bases.Exchange = built_in(bases.Exchange, "AllReduce")
  sync: bases.Sync = built_in(bases.Sync, "EveryStep")
  compilation: Compilation = Compilation()
  compiler_options: dict[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
  compiler_preset: Literal["none", "h100", "b200", "mi300x"] = "none"
  evaluation: Evaluation = Evaluation()
  checkpoint: Checkpoint = Checkpoint()
  checks: Checks = Checks()
  faults: Faults = Faults()
  log: Log = Log()
  callbacks: tuple[bases.Callback, ...] = ()

  @property
  def activations(self) -> str:
    """The dtype of activations; with dtype "float8" only products of layers are in FP8."""
    return "bfloat16" if self.dtype == "float8" else self.dtype

  @property
  def is_local_sgd(self) -> bool:
    """True if workers take local steps between synchronizations."""
    return self.sync.is_local_sgd

  def shared(self) -> dict[str, str]:
    """Return texts that must be equal in all processes of a run, by name."""
    return shared_texts(self)

  def __post_init__(self):
    if self.batch_size % (steps := self.accumulate_steps):
      problem = f"not divisible by accumulate_steps={steps}; change one of them"
      raise ConfigError(f"Config.batch_size={self.batch_size}: {problem}")
    _check_length(self)
    accuracy, loss = self.target_accuracy, self.target_loss
    if accuracy is not None and loss is not None:
      problem = f"target_accuracy={accuracy} is also set"
      raise ConfigError(f"Config.target_loss={loss}: {problem}; set one of them to None")
    if self.stop_at_target and {accuracy, loss} == {None}:
      raise ConfigError("Config.stop_at_target=True: set a target_accuracy or target_loss")
    if self.ema_warmup and self.ema_decay is None:
      raise ConfigError("Config.ema_warmup=True: needs ema_decay; set it, or use False")
    if self.init_head and self.init_from is None:
      raise ConfigError("Config.init_head=True: needs init_from; set it, or use False")
    if (self.layer_decay is None) != (not self.layer_order):
      both = f"Config.layer_decay={self.layer_decay}, layer_order={self.layer_order}"
      raise ConfigError(f"{both}: set both or neither")
    for pattern in self.layer_order:
      check_pattern("Config.layer_order", pattern, "give e.g. '^Conv_0/'")
    if self.trainable is not None:
      check_pattern("Config.trainable", self.trainable, "give e.g. '^head/'")
    check_distinct("Config.metrics", self.metrics)
    _check_neutral(self)
    _check_growing(self)
    _check_exchange(self)
    if self.is_local_sgd:
      _check_local(self)
    check_distinct("Config.callbacks", self.callbacks)
    check_layout(self)
    check_forms(self)


def _check_length(config: Config) -> None:
  """Refuse a run without a length, with two lengths, or shorter than its warm-up or phases.

  Lengths in different units are compared once the data are known (`experiment.derive`).
  """
  if config.epochs is None and config.steps is None:
    raise UnsetError("Config.epochs and Config.steps are not set; set one of them")
  if config.epochs is not None and config.steps is not None:
    problem = f"and epochs={config.epochs} are both set"
    raise invalid("Config.steps", config.steps, problem, "set one of them to None")
  if config.steps is not None and not isinstance(config.phases, Phases):
    problem = f"cannot be combined with {type(config.phases).__name__}, which counts in epochs"
    raise invalid("Config.steps", config.steps, problem, "set epochs instead")
  for unit in ("epochs", "steps"):
    length, name = getattr(config, unit), f"warmup_{unit}"
    if length is None:
      continue
    if (warmup := getattr(config.schedule, name) or 0) >= length:
      field = f"{type(config.schedule).__name__}.{name}"
      raise invalid(field, warmup, f"is too long for a run of {length} {unit}", "make it shorter")
    starts = getattr(config.phases, unit, ())
    if starts and starts[-1] >= length:
      problem = f"has a phase that begins at {starts[-1]}, but the run has only {length} {unit}"
      fix = f"leave out phases that begin after the end, or set Config.{unit} higher"
      raise invalid(f"Phases.{unit}", starts, problem, fix)


def _check_neutral(config: Config) -> None:
  """Refuse follow="neutral" for optimizers other than SGD, and with momentum correction."""
  phases = config.phases
  is_constant = isinstance(phases, Phases) and not phases.batch_sizes
  if getattr(phases, "follow", "neutral") != "neutral" or is_constant:
    return
  neutral = "AdaptiveBatch and phases with follow='neutral'"
  if not config.optimizer.follows_batch_neutrally:
    field = f"Config.optimizer={type(config.optimizer).__name__}"
    remedy = "use SGD, or Phases with follow='linear' or 'sqrt'"
    problem = f"{neutral} need SGD, whose momentum they adapt"
    raise ConfigError(f"{field}: {problem}; {remedy}")
  correction = getattr(config.optimizer, "momentum_correction", "never")
  if correction != "never":
    problem = f"{neutral} already correct the momentum; use 'never'"
    raise ConfigError(f"SGD.momentum_correction={correction!r}: {problem}")


def _check_growing(config: Config) -> None:
  """Refuse a rule for growing batches without the noise scale that it reads."""
  rule = getattr(config.phases, "when", None)
  if rule is not None and rule.reads_noise_scale and not config.noise_scale:
    problem, fix = "reads the noise scale, which is not measured", "set Config.noise_scale=True"
    raise invalid("Growing.when", type(rule).__name__, problem, fix)


def _check_exchange(config: Config) -> None:
  """Refuse a noise scale measured from gradients that are not exact means."""
  exchange = config.exchange
  if config.noise_scale and (not exchange.averages_exactly or exchange.delayed):
    name = type(exchange).__name__ + ".delayed" * exchange.delayed
    problem = f"needs the exact mean of each step's gradients, which {name} does not give"
    fix = "use AllReduce or HalfPrecision without delayed, or noise_scale=False"
    raise invalid("Config.noise_scale", True, problem, fix)


def _check_local(config: Config) -> None:
  """Refuse settings that need all devices to take the same step."""
  sync, exchange = f"sync={type(config.sync).__name__}", type(config.exchange).__name__
  if config.exchange.delayed:
    problem = f"needs the current mean at each synchronization; set {exchange}.delayed to False"
    raise ConfigError(f"Config.{sync}: {problem}")
  if config.ema_decay is not None:
    problem = "ema_decay needs parameters that are equal on all devices in every step"
    raise ConfigError(f"Config.{sync}: {problem}; set ema_decay to None")
  if config.noise_scale:
    problem = "noise_scale compares gradients at equal parameters, and workers differ"
    raise ConfigError(f"Config.{sync}: {problem}; set noise_scale to False")
  if config.dtype in ("float16", "float8"):
    problem = f"{config.dtype} needs scales, which all devices must share in every step"
    raise ConfigError(f"Config.{sync}: {problem}; set dtype to 'bfloat16' or 'float32'")
  if rule := measuring(config.phases):
    problem = f"{rule} needs all devices to take the same steps; use Phases"
    raise ConfigError(f"Config.{sync}: {problem}")
  if config.lr_scaling != "none":
    problem = f"with {sync} each worker takes its own steps, on its share of the batch"
    remedy = "use 'none', and choose optimizer.lr for the batch size of one worker"
    raise ConfigError(f"Config.lr_scaling={config.lr_scaling!r}: {problem}; {remedy}")
  if plain := config.exchange.plain_epochs:
    problem = f"with {sync} workers exchange only when they synchronize; set it to 0"
    raise ConfigError(f"{exchange}.plain_epochs={plain}: {problem}")
  resets = getattr(config.sync, "reset_momentum", False)
  if resets and not config.optimizer.has_resettable_momentum:
    problem = f"{type(config.optimizer).__name__}'s moments cannot be reset without its step "
    problem += "count, which bias correction uses; set it to False"
    raise ConfigError(f"BlockMomentum.reset_momentum=True: {problem}")
