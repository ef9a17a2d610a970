"""Base classes that users extend: Model, Data, Optimizer, Loss, Metric, Callback and others.

Each docstring documents the arguments and the result of `build`. docs/extending.md has an
example of each that runs.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from jaxscale.config.bounds import NonNegative, Positive
from jaxscale.config.choice import Choice
from jaxscale.errors import ConfigError

if TYPE_CHECKING:
  from jax.sharding import Mesh

__all__ = ["Callback", "CallbackContext", "Data", "Exchange", "ExchangeContext", "Growth"]
__all__ += ["GrowthContext", "GrowthPoint", "Loss", "LossContext", "Metric", "Model"]
__all__ += ["ModelContext", "Optimizer", "OptimizerContext", "Parametrization"]
__all__ += ["ParametrizationContext", "Schedule", "ScheduleContext", "Sync", "SyncContext"]
__all__ += ["Tracker", "TrackerContext"]


class ModelContext(NamedTuple):
  """Arguments of `Model.build`.

  Attributes:
    info: the description of the data, `data.DatasetInfo` or `data.TextInfo`.
    dtype: the type of activations, a `jnp.dtype`.
    label_smoothing: the label smoothing, for models that compute their own loss
      (`models.Stack`).
    bn_axis_name: the mesh axes whose devices share BatchNorm statistics, or None.
    bn_group_size: the number of examples that share BatchNorm statistics if a device has
      more; None means all of them.
  """

  info: Any
  dtype: Any = "float32"
  label_smoothing: float = 0.0
  bn_axis_name: tuple[str, ...] | None = None
  bn_group_size: int | None = None


class LossContext(NamedTuple):
  """Second argument of `Loss.build`, for losses that take it.

  Attributes:
    model: the model as `models.ModelFns`: `init`, `apply` and `inputs`.
    axes: the mesh axes that split the rows of a batch, for `lax.all_gather` and `lax.psum`.
    num_devices: the number of devices along these axes.
    dtype: the type of activations, a `jnp.dtype`.
  """

  model: Any
  axes: tuple[str, ...]
  num_devices: int
  dtype: Any = "float32"


class OptimizerContext(NamedTuple):
  """Arguments of `Optimizer.build`.

  Attributes:
    momentum: the momentum that replaces the setting after the batch size has changed; None
      keeps the setting.
    warmup_steps: the number of warm-up steps of the schedule.
    stacked: a mask of the parameters whose first dim is the layer, or None.
    embeddings: a mask of the embeddings and the head of a stack of layers, or None.
  """

  momentum: float | None = None
  warmup_steps: int = 0
  stacked: Callable[[Any], Any] | None = None
  embeddings: Callable[[Any], Any] | None = None


class ParametrizationContext(NamedTuple):
  """Arguments of `Parametrization.build`: a model beside its base model.

  Attributes:
    leaves: the shapes of each parameter in both models, `optim.Leaf` by path.
    rule: the optimizer's `update_rule`, "adam", "sgd" or "muon".
    depth: the number of layers over that of the base model; 1 without a stack of layers.
    query_scale: the square root of the base width of an attention head over its width.
    is_tied: whether the output layer uses the embedding table.
    out_first: whether kernels are [out, in], as in Equinox.
  """

  leaves: dict[str, Any]
  rule: str
  depth: float = 1.0
  query_scale: float = 1.0
  is_tied: bool = False
  out_first: bool = False


class ScheduleContext(NamedTuple):
  """Arguments of `Schedule.build`: lengths in steps of `Config.batch_size` examples.

  Attributes:
    total_steps: the number of steps of the run.
    warmup_steps: the number of warm-up steps.
    per_epoch: the number of steps per epoch, which may be fractional.
  """

  total_steps: int
  warmup_steps: int
  per_epoch: float


class ExchangeContext(NamedTuple):
  """Arguments of `Exchange.build`.

  Attributes:
    sizes: the number of devices along each mesh axis over which gradients are averaged.
    params: a function that returns shapes and dtypes of one device's parameters.
    mesh: the mesh that the axes belong to.
    seed: the random seed of the run.
    note: a function that prints a line before the first step.
  """

  sizes: dict[str, int]
  params: Callable[[], Any]
  mesh: Mesh
  seed: int
  note: Callable[[str], None]

  @property
  def axes(self) -> tuple[str, ...]:
    """Mesh axes to average over."""
    return tuple(self.sizes)

  @property
  def num_devices(self) -> int:
    """Number of devices whose gradients are averaged."""
    return math.prod(self.sizes.values())


class SyncContext(NamedTuple):
  """Arguments of `Sync.build`: workers that take local steps between synchronizations.

  Attributes:
    num_workers: the number of workers.
    worker_batch: the number of examples per step of one worker.
    num_train: the number of training examples.
    note: a function that prints a line before the first step.
  """

  num_workers: int
  worker_batch: int
  num_train: int
  note: Callable[[str], None]


class TrackerContext(NamedTuple):
  """Arguments of `Tracker.build`: the run to log.

  Attributes:
    id: an identifier of ASCII letters, digits, - and _, equal in every start of the run.
    name: the name of the workdir.
    workdir: the workdir of the run.
    config: the settings as config.json has them.
    environment: the environment of this start: commit, host, command, packages
      (`run.provenance`).
    note: a function that prints a line.
  """

  id: str
  name: str
  workdir: Path
  config: dict[str, Any]
  environment: dict[str, Any]
  note: Callable[[str], None]


class CallbackContext(NamedTuple):
  """Arguments of `Callback.build`: the run that the callback belongs to.

  Attributes:
    workdir: the workdir of the run; only process 0 may write to it.
    config: the `Config` of the run.
    total_steps: the number of steps of the run.
    steps_per_epoch: the number of steps per epoch, which may be fractional.
    eval_data: the validation examples, a `data.Dataset`; `eval_data.info` describes them.
    model: the model, `models.ModelFns` (with `apply`) or `models.Stack`.
    mesh: the mesh of the devices.
    log: a function of a step and values by name, which writes them to metrics.jsonl,
      TensorBoard and trackers as `callback/NAME`.
    note: a function that prints a line.
    signed: a function of a metric's name and the setting that has it, which returns the name
      in summary.json, with a minus sign if the lowest value is best, or raises ConfigError.
  """

  workdir: Path
  config: Any
  total_steps: int
  steps_per_epoch: float
  eval_data: Any
  model: Any
  mesh: Mesh
  log: Callable[[int, dict[str, float]], None]
  note: Callable[[str], None]
  signed: Callable[[str, str], str]


class GrowthContext(NamedTuple):
  """Arguments of `Growth.build`: the run whose batch may grow.

  Attributes:
    batch_size: the batch size at the start of the run, in examples.
    factor: the number by which a growth multiplies the batch size.
    num_train: the number of training examples.
    total_examples: the length of the run in examples.
    schedule: a function without arguments that returns the schedule's learning rates, a
      float32 array [steps + 1], by steps of `batch_size` examples.
  """

  batch_size: int
  factor: int
  num_train: int
  total_examples: float
  schedule: Callable[[], Any]


class GrowthPoint(NamedTuple):
  """Argument of `Growth.decide`: a run at a step after which its batch may grow.

  Attributes:
    step: the number of steps done.
    examples: the number of examples seen.
    batch_size: the batch size, in examples.
    larger: the batch size after a growth.
    noise_scale: the gradient noise scale in examples and the ends of its 95 % interval; None
      in place of a scale or upper end that is infinite, and of a lower end before it is
      measured.
    branch: a function of a number of steps at the larger batch size. It trains copies of the
      state at both sizes on the same next examples, and returns a float64 array [2, steps]:
      the mean losses at `batch_size` and at `larger`, of the same examples in each column.
  """

  step: int
  examples: int
  batch_size: int
  larger: int
  noise_scale: tuple[float | None, ...]
  branch: Callable[[int], Any]


class Model(Choice):
  """Model that turns a batch into predictions.

  `build(context: ModelContext)` returns a Flax Linen module; an NNX module, or a function
  of `rngs` that makes one; an Equinox module, or a function of `key` that makes one; a
  transformed Haiku function; a pair (init, apply) of functions, as in `models.ModelFns`; or
  a `models.Stack` of equal layers. A module is called with the arrays of a batch that its
  parameters name, or else with "image" or "tokens" or the whole batch; where its signature
  has them, also with `train` and random keys (`keys`, one per row; `key` in Equinox). A
  method `inputs(batch)` of the settings picks the inputs instead. A config also takes
  such an object itself as `model`, and wraps it into a `models.Module`.
  """

  inputs: ClassVar[Any] = None  # A method from a batch to the model's inputs; None: by name.
  batch_norm = False  # True if the model normalizes over examples, those of `bn_span`.
  bn_span = "device"  # A field in models with synchronized BatchNorm.
  is_stack = False  # True if `build` returns a Stack, which stage and model can split.
  takes_text = False

  @classmethod
  def wrap(cls, value: Any) -> Model | None:
    """Return settings that hold a model given in place of settings; None for other values."""
    is_pair = isinstance(value, tuple) and len(value) > 1 and all(map(callable, value))
    is_model = is_pair or (callable(value) and not isinstance(value, Choice))
    if isinstance(value, type):  # NNX makes a module from `rngs`, Equinox from `key`
      is_model = not {"rngs", "key"}.isdisjoint(inspect.signature(value.__init__).parameters)
    if cls is not Model or not is_model:
      return None
    return Model.built_in()["Module"](module=value)

  def sharding(self) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
    """Return a path pattern and the mesh axis of each dim for every parameter.

    `parallel.Rule` takes the result; () splits only the largest dim, along fsdp.
    """
    return ()


class Data(Choice):
  """Training and validation examples.

  `build()` returns a `data.Dataset` to train on and one to validate on.
  """

  def resized(self, image_size: int) -> Any:
    """Return the training examples at another image size, for `Phases.image_sizes`."""
    problem = f"{type(self).__name__} cannot resize its examples, use TFDS or ImageFolder"
    raise ConfigError(f"Phases.image_sizes={image_size}: {problem}")

  def abstract(self, batch_size: int) -> Any:
    """Return datasets with shapes but no data, for `jaxscale plan`; or None."""
    return None


class Optimizer(Choice):
  """Optimizer: a rule that updates parameters from gradients.

  `build(schedule, context: OptimizerContext)` returns an optax transformation;
  `schedule` is a function from step to learning rate, with its peak at `lr` scaled by the
  batch size.

  Attributes:
    lr: the peak learning rate; `lr_scaling` scales it with the batch size.
  """

  lr: Positive

  follows_batch_neutrally = False  # True if Phases.follow='neutral' can adapt the momentum.
  has_resettable_momentum = False
  has_matrix_state = False  # True if its state comes from optim.init_matrices.
  # "adam" (gradients divided by their size), "sgd" (proportional to gradients), "muon", or "": no
  # parametrization but Standard. Parameters may be used for weight decay only.
  update_rule = ""


class Parametrization(Choice):
  """Factors of initialization, learning rate, weight decay and eps for each parameter.

  `build(context: ParametrizationContext)` returns `optim.LeafFactors` by path; {} changes
  nothing. A field `base`, a dict, has the fields of the model that differ in the base model.
  """


class Schedule(Choice):
  """Learning rate over the run.

  `build(peak, context: ScheduleContext)` returns a function from step to learning rate.

  Attributes:
    warmup_epochs: the length of the warm-up in epochs; 0 starts at the peak learning rate.
    warmup_steps: the length of the warm-up in steps; None uses `warmup_epochs`.
  """

  warmup_epochs: NonNegative = 0.0
  warmup_steps: Annotated[int | None, ">= 0"] = None


class Exchange(Choice):
  """Averaging of gradients over the devices.

  `build(context: ExchangeContext)` returns an `exchange.Exchange`.

  Attributes:
    delayed: whether each step applies the mean gradient of the previous step, so that the
      exchange can overlap with computation.
  """

  delayed: bool = False

  averages_exactly = False  # True if the result is the mean of this step's gradients.

  @property
  def sends_whole(self) -> bool:
    """True if the exchange sums whole gradients, in any order, and does nothing else."""
    return False

  @property
  def is_plain(self) -> bool:
    """True if the exchange is XLA's sum of each tensor, which can run in the backward pass."""
    return False

  plain_epochs = 0.0  # A field in compressed exchanges.


class Sync(Choice):
  """Synchronization of the workers' parameters.

  `build(context: SyncContext)` returns an `exchange.local_updates.LocalUpdate`, or None
  if all devices take every step together.
  """

  is_local_sgd = True  # False if `build` returns None.
  workers = "device"


class Loss(Choice):
  """Training loss, and the metrics that evaluation reports.

  `build(info)` or `build(info, context: LossContext)` returns a `training.losses.Objective`,
  loss and metrics per example; a `training.GatheredObjective`, whose examples see all rows
  of the global batch; or a `training.CustomLoss`, a loss function of the parameters.
  """

  label_smoothing = 0.0
  class_weights = ()  # A field in CrossEntropy.
  takes_numbers = False  # True if integer targets [n] are numbers, not classes.

  @property
  def is_cross_entropy(self) -> bool:
    """True if the loss is cross entropy of one class per row, as `models.Stack` computes it."""
    return False

  def arguments(self, info: Any, context: LossContext) -> tuple[Any, ...]:
    """Return the arguments that this class's `build` takes: the second one is optional."""
    try:
      inspect.signature(self.build).bind(info, context)
    except TypeError:
      return (info,)
    return info, context

  def target_range(self, info: Any) -> tuple[int, int] | None:
    """Return the lowest and the highest valid target; None allows any."""
    return None

  def classify(self, outputs: Any) -> tuple[Any, Any] | None:
    """Return probabilities and predicted classes; None if outputs are not scores of classes.

    Args:
      outputs: the model's outputs, a tree of NumPy arrays [rows, ...].
    """
    return None


class Metric(Choice):
  """Metric of evaluations that is not a mean over examples, such as F1.

  `build(info)` returns a `training.metrics.Metric`: `update`, which sums over rows, and
  `compute`. A single value gets the name of the class in snake_case.
  """


def snake_case(name: str) -> str:
  """Return the name of a metric's value from the name of its class.

  Example:
    >>> snake_case("AUROC"), snake_case("TopKRecall"), snake_case("F1")
    ('auroc', 'top_k_recall', 'f1')
  """
  return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


class Tracker(Choice):
  """Experiment tracker that receives the metrics of a run.

  `build(context: TrackerContext)` returns a `metrics.Tracker`. Process 0 calls it in a
  thread for this tracker, and again a minute after a failure; neither `build` nor the
  tracker can stop or slow the run.

  Attributes:
    flush_s: the time in seconds that a run waits at its end until the tracker has received all
      metrics; at most 5 s in a run that is asked to stop.
  """

  flush_s: Annotated[float, "in (0, 40]"] = 20.0  # The bound is below Faults.hang_timeout_s.

  package = ""  # The package that `build` imports; a run without it does not start.
  install = ""  # The name of the package for pip.


class Callback(Choice):
  """Functions that a run calls at its start, between steps, at evaluations, saves and its end.

  `build(context: CallbackContext)` returns a `jaxscale.Callback`.
  """


class Growth(Choice):
  """Rule that decides when the batch grows, for `Growing.when`.

  `build(context: GrowthContext)` returns the numbers of examples after which the batch may
  grow, in increasing order. It grows at each of them, unless the class has a method
  `decide(point: GrowthPoint)`, which returns whether it grows, the reason for the log, and
  numbers by name for metrics.jsonl.
  """

  decide: ClassVar[Callable[..., tuple[bool, str, dict[str, float]]] | None] = None
  why: ClassVar[str] = "as planned"  # The reason for the log, for growths without `decide`.
  reads_noise_scale = False  # True if `decide` uses `GrowthPoint.noise_scale`.
