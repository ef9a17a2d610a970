"""What a user extends: Model, Data, Optimizer, Schedule, Exchange, Sync, Loss, Tracker.

Each says what its `build` is given and what it returns. docs/extending.md has an
example of each that runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from jaxscale.config.bounds import NonNegative, Positive
from jaxscale.config.choice import Choice
from jaxscale.errors import ConfigError

if TYPE_CHECKING:
  from jax.sharding import Mesh

__all__ = ["Data", "Exchange", "ExchangeContext", "Loss", "Model", "ModelContext", "Optimizer"]
__all__ += ["OptimizerContext", "Schedule", "ScheduleContext", "Sync", "SyncContext", "Tracker"]
__all__ += ["TrackerContext"]


class ModelContext(NamedTuple):
  """What a model is built for.

  Attributes:
    info: of the data: `data.DatasetInfo` or `data.TextInfo`.
    dtype: of activations, a `jnp.dtype`.
    label_smoothing: of models that compute their own loss (`models.Stack`).
    bn_axis_name: mesh axes whose devices share BatchNorm statistics, or None.
    bn_group_size: examples that share them, where a device holds more.
  """

  info: Any
  dtype: Any = "float32"
  label_smoothing: float = 0.0
  bn_axis_name: tuple[str, ...] | None = None
  bn_group_size: int | None = None


class OptimizerContext(NamedTuple):
  """What an optimizer is built for.

  Attributes:
    momentum: in place of the settings' own, where the batch size has changed.
    warmup_steps: of the schedule.
    stacked: mask of parameters whose first dim are layers, or None.
    embeddings: mask of embeddings and head of a stack of layers, or None.
  """

  momentum: float | None = None
  warmup_steps: int = 0
  stacked: Callable[[Any], Any] | None = None
  embeddings: Callable[[Any], Any] | None = None


class ScheduleContext(NamedTuple):
  """Lengths in steps of `Config.batch_size`; `per_epoch` need not be whole."""

  total_steps: int
  warmup_steps: int
  per_epoch: float


class ExchangeContext(NamedTuple):
  """What a gradient exchange is built for.

  Attributes:
    sizes: devices along each mesh axis that gradients are averaged over.
    params: gives shapes and dtypes of one device's parameters.
    mesh: that the axes are of.
    seed: of the run.
    note: takes a line that the user should read before the first step.
  """

  sizes: dict[str, int]
  params: Callable[[], Any]
  mesh: Mesh
  seed: int
  note: Callable[[str], None]

  @property
  def axes(self) -> tuple[str, ...]:
    """The mesh axes to average over."""
    return tuple(self.sizes)

  @property
  def num_devices(self) -> int:
    """Devices whose gradients are averaged."""
    return math.prod(self.sizes.values())


class SyncContext(NamedTuple):
  """Workers that train alone between synchronizations.

  Attributes:
    num_workers: how many.
    worker_batch: examples per step of one worker.
    num_train: training examples.
    note: takes a line that the user should read before the first step.
  """

  num_workers: int
  worker_batch: int
  num_train: int
  note: Callable[[str], None]


class TrackerContext(NamedTuple):
  """The run that a tracker is built for.

  Attributes:
    id: of ASCII letters, digits, - and _; the same in every start of the run.
    name: for people: that of the workdir.
    workdir: of the run.
    config: as config.json has it.
    environment: of this start: commit, host, command, packages (`run.provenance`).
    note: takes a line that the user should read.
  """

  id: str
  name: str
  workdir: Path
  config: dict[str, Any]
  environment: dict[str, Any]
  note: Callable[[str], None]


class Model(Choice):
  """What turns a batch into predictions.

  `build(context: ModelContext)` returns a Flax module, called with the batch's "image"
  and, where its signature has them, `train` and `keys` (one per row); or
  `models.ModelFns`, two pure functions; or a `models.Stack` of equal layers.
  """

  batch_norm = False  # normalises over examples; then `bn_span` says over which
  bn_span = "device"  # of models with synchronised BatchNorm it is a field
  is_stack = False  # build returns a Stack: what layout splits along stage and model
  takes_text = False

  def sharding(self) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
    """Of each parameter: a pattern of its path and the mesh axis of each dim.

    For `parallel.Rule`; () splits the largest dim along fsdp alone.
    """
    return ()


class Data(Choice):
  """The examples.

  `build()` returns the `data.Dataset` to train on and the held-out one.
  """

  def resized(self, image_size: int) -> Any:
    """The training examples at another size, for `Phases.image_sizes`."""
    why = f"{type(self).__name__} cannot resize its examples, use TFDS or ImageFolder"
    raise ConfigError(f"Phases.image_sizes={image_size}: {why}")

  def abstract(self, batch_size: int) -> Any:
    """Datasets of the same shapes without the data, for `jaxscale plan`; or None."""
    del batch_size
    return None


class Optimizer(Choice):
  """How parameters follow gradients.

  `build(schedule, context: OptimizerContext)` returns an optax transformation;
  `schedule` is step -> learning rate and has its peak at `lr`, scaled by the batch.

  Attributes:
    lr: peak learning rate at the reference batch size.
  """

  lr: Positive

  follows_batch_neutrally = False  # has a momentum whose time constant can be kept
  has_resettable_momentum = False


class Schedule(Choice):
  """The learning rate over the run.

  `build(peak, context: ScheduleContext)` returns step -> learning rate.

  Attributes:
    warmup_epochs: epochs until the peak.
    warmup_steps: steps until the peak, instead of `warmup_epochs`.
  """

  warmup_epochs: NonNegative = 0.0
  warmup_steps: Annotated[int | None, ">= 0"] = None


class Exchange(Choice):
  """How gradients are averaged over the devices.

  `build(context: ExchangeContext)` returns an `exchange.Exchange`.

  Attributes:
    delayed: apply the mean of the step before, so that the exchange can hide.
  """

  delayed: bool = False

  averages_exactly = False  # gives the mean of the step's own gradients

  @property
  def sends_whole(self) -> bool:
    """Whether it is the sum of whole gradients, in any order, and nothing else."""
    return False

  @property
  def is_plain(self) -> bool:
    """Whether it is XLA's own sum of each tensor, which a backward pass can do."""
    return False

  plain_epochs = 0.0  # where it is a field: epochs of uncompressed gradients before


class Sync(Choice):
  """When workers synchronize their parameters.

  `build(context: SyncContext)` returns an `exchange.local_updates.LocalUpdate`, or None
  where all devices take every step together.
  """

  is_local_sgd = True  # workers train alone in between: `build` does not return None
  workers = "device"


class Loss(Choice):
  """What training minimizes and evaluation reports.

  `build(info)` returns a `training.losses.Objective`: loss and metrics per example.
  """

  label_smoothing = 0.0
  takes_numbers = False  # integer targets [n] are numbers, one output each

  @property
  def is_cross_entropy(self) -> bool:
    """Whether it is cross entropy of one class per row, as `models.Stack` computes."""
    return False

  def target_range(self, info: Any) -> tuple[int, int] | None:
    """The lowest and the highest target that the loss takes; None: any."""
    del info
    return None


class Tracker(Choice):
  """Where metrics go as well.

  `build(context: TrackerContext)` returns a `metrics.Tracker`. It is called in process
  0, in the tracker's own thread, and again a minute after a failure; neither it nor
  what it returns can stop or slow the run.

  Attributes:
    flush_s: seconds that the end of a run waits for it; at most 5 where it was asked
      to stop.
  """

  flush_s: Annotated[float, "in (0, 40]"] = 20.0  # less than Faults.hang_timeout_s

  package = ""  # that build imports: without it no run starts
  install = ""  # what pip calls it
