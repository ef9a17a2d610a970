"""From a Config to the parts of a run; `fit` puts them together.

The only module, beside the command line, that reads a Config: everything
below it takes plain arguments, and a notebook can call it the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxscale import config as cfg
from jaxscale import data, losses, models, optim
from jaxscale.exchange import Exchange, plain
from jaxscale.mesh import batch_sharding, make_mesh, one_at_a_time
from jaxscale.settings import ConfigError
from jaxscale.state import TrainState, abstract_state, init_state
from jaxscale.step import Batch, EvalStep, TrainStep, make_eval_step, make_train_step


class Derived(NamedTuple):
  """What follows from a Config, the data and the devices.

  Attributes:
    num_train: training examples.
    num_eval: held-out examples.
    total_steps: optimizer steps of the run.
    warmup_steps: steps until the peak rate.
    peak_lr: learning rate at the end of the warm-up.
    eval_every: steps between evaluations.
    save_every: steps between checkpoints.
    num_devices: over all processes.
    device_batch_size: examples a device and step.
    micro_batch_size: examples a device and micro-batch.
    eval_batch_size: over all devices, rounded up to a multiple of them.
  """

  num_train: int
  num_eval: int
  total_steps: int
  warmup_steps: int
  peak_lr: float
  eval_every: int
  save_every: int
  num_devices: int
  device_batch_size: int
  micro_batch_size: int
  eval_batch_size: int


class Experiment(NamedTuple):
  """Everything that a run is made of."""

  config: cfg.Config
  derived: Derived
  mesh: Mesh
  train_data: data.Dataset
  eval_data: data.Dataset
  model: models.ModelFns
  tx: optax.GradientTransformation
  exchange: Exchange
  train_step: TrainStep
  eval_step: EvalStep

  def init_state(self) -> TrainState:
    """The state before the first step, on the mesh."""
    return init_state(*self._parts(), average=self._average(), seed=self.config.seed)

  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of the state, without computing it."""
    return abstract_state(*self._parts(), average=self._average())

  def abstract_batch(self) -> Batch:
    """Shapes, dtypes and shardings of a global training batch."""
    info, rows = self.train_data.info, self.config.batch_size
    sharding: Any = batch_sharding(self.mesh)
    abstract: Any = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    return {
      "image": abstract((rows, *info.image_shape), "uint8"),
      "label": abstract((rows,), "int32"),
    }

  def lower_train_step(self, abstract: TrainState | None = None) -> Any:
    """The train step as `jax.stages.Lowered`, for the shapes of the run.

    Args:
      abstract: what `abstract_state` gave, if you have it already.
    """
    step: Any = self.train_step
    return step.lower(abstract or self.abstract_state(), self.abstract_batch())

  def compile_train_step(self, abstract: TrainState | None = None) -> TrainStep:
    """The train step, compiled ahead of its first call."""
    return one_at_a_time(self.lower_train_step(abstract).compile(), self.mesh)

  def _parts(self):
    return self.model.init, self.tx, self.mesh, self.exchange

  def _average(self) -> bool:
    return self.config.ema_decay is not None


def experiment(config: cfg.Config) -> Experiment:
  """Make every part; compiles nothing yet.

  Raises:
    ConfigError: data or devices do not fit the config.
  """
  mesh = make_mesh(replica=config.mesh.replica, data=config.mesh.data)
  train_data, eval_data = make_data(config)
  derived = derive(config, train_data.num_examples, eval_data.num_examples, mesh.size)
  model = make_model(config, train_data.info, mesh)
  schedule = make_schedule(config, derived)
  tx = make_optimizer(config, schedule)
  exchange = plain(mesh.axis_names)
  train_step = make_train_step(
    losses.classification_loss(model.apply, label_smoothing=config.label_smoothing),
    tx,
    mesh,
    exchange,
    accumulate_steps=config.accumulate_steps,
    ema_decay=config.ema_decay,
    schedule=schedule,
    seed=config.seed,
  )
  eval_step = make_eval_step(losses.classification_totals(model.apply), mesh)
  return Experiment(
    config, derived, mesh, train_data, eval_data, model, tx, exchange, train_step,
    eval_step,
  )  # fmt: skip


def derive(
  config: cfg.Config, num_train: int, num_eval: int, num_devices: int
) -> Derived:
  """Compute what follows from the settings.

  Args:
    config: the settings.
    num_train: training examples.
    num_eval: held-out examples.
    num_devices: over all processes.

  Raises:
    ConfigError: the batch does not divide over devices and micro-batches.
  """
  unit = num_devices * config.accumulate_steps
  if config.batch_size % unit:
    below = config.batch_size // unit * unit
    raise ConfigError(
      f"Config.batch_size={config.batch_size}: not divisible by {num_devices} "
      f"devices x {config.accumulate_steps} accumulate_steps; give "
      + (f"{below} or {below + unit}" if below else f"{unit}")
    )

  def steps(epochs: float) -> int:
    return round(epochs * num_train / config.batch_size)

  total_steps = max(math.ceil(config.epochs * num_train / config.batch_size), 1)
  warmup_steps = steps(config.schedule.warmup_epochs)
  if warmup_steps >= total_steps > 1:
    raise ConfigError(
      f"schedule.warmup_epochs={config.schedule.warmup_epochs}: {warmup_steps} "
      f"steps of a run of {total_steps}, make it shorter"
    )
  return Derived(
    num_train=num_train,
    num_eval=num_eval,
    total_steps=total_steps,
    warmup_steps=warmup_steps,
    peak_lr=optim.scale_learning_rate(
      config.optimizer.lr,
      config.batch_size,
      config.lr_reference_batch_size,
      config.lr_scaling,
    ),
    eval_every=max(steps(config.evaluation.every_epochs), 1),
    save_every=max(steps(config.checkpoint.every_epochs), 1),
    num_devices=num_devices,
    device_batch_size=config.batch_size // num_devices,
    micro_batch_size=config.batch_size // unit,
    eval_batch_size=-(-config.evaluation.batch_size // num_devices) * num_devices,
  )


def make_data(config: cfg.Config) -> tuple[data.Dataset, data.Dataset]:
  """The training and the held-out examples."""
  match config.data:
    case cfg.Digits(augment=augment):
      return data.digits("train", augment=augment), data.digits("test")
    case cfg.Synthetic() as d:
      shape = (d.image_size, d.image_size, d.channels)
      make = data.synthetic
      num_eval = max(d.num_examples // 10, 1)
      return (
        make(d.num_examples, shape, d.num_classes),
        make(num_eval, shape, d.num_classes, first=d.num_examples),
      )
    case cfg.TFDS() as d:

      def load(split, augment):
        return data.tfds_images(
          d.name,
          split,
          data_dir=d.data_dir,
          image_size=d.image_size,
          augment=augment,
          cache=d.cache,
        )

      return load(d.train_split, d.augment), load(d.eval_split, "none")


def make_model(
  config: cfg.Config, info: data.DatasetInfo, mesh: Mesh
) -> models.ModelFns:
  """The model as pure functions of raw images."""
  common = {"num_classes": info.num_classes, "dtype": jnp.dtype(config.dtype)}
  match config.model:
    case cfg.MLP(hidden=hidden):
      module = models.MLP(hidden=hidden, **common)
    case cfg.CNN() as m:
      if min(info.image_shape[:2]) >> len(m.features) == 0:
        raise ConfigError(
          f"CNN.features={m.features}: {len(m.features)} stages halve images of "
          f"{info.image_shape[0]} pixels to nothing, give fewer"
        )
      module = models.CNN(
        features=m.features,
        convs_per_stage=m.convs_per_stage,
        dense=m.dense,
        batch_norm=m.batch_norm != "none",
        bn_axis_name=mesh.axis_names if m.batch_norm == "global" else None,
        dropout=m.dropout,
        **common,
      )
    case cfg.ResNet() as m:
      module = getattr(models, f"ResNet{m.depth}")(
        width=m.width,
        stem=m.stem,
        bn_axis_name=mesh.axis_names if m.batch_norm == "global" else None,
        bn_momentum=m.bn_momentum,
        bn_epsilon=m.bn_epsilon,
        zero_init_residual=m.zero_init_residual,
        **common,
      )
  return models.functions(module, info.image_shape, mean=info.mean, std=info.std)


def make_schedule(config: cfg.Config, derived: Derived) -> optax.Schedule:
  """Step -> learning rate."""
  peak, warmup, total = (
    derived.peak_lr,
    derived.warmup_steps,
    derived.total_steps,
  )
  match config.schedule:
    # Polynomial before Cosine, whose fields it extends.
    case cfg.Polynomial(end_lr=end, power=power):
      return optim.warmup_polynomial(peak, warmup, total, end=end, power=power)
    case cfg.Cosine(end_lr=end):
      return optim.warmup_cosine(peak, warmup, total, end=end)
    case cfg.Steps(boundaries=epochs, factor=factor):
      per_epoch = derived.num_train / config.batch_size
      boundaries = [round(epoch * per_epoch) for epoch in epochs]
      return optim.warmup_steps(peak, warmup, boundaries, factor=factor)


def make_optimizer(
  config: cfg.Config, schedule: optax.Schedule
) -> optax.GradientTransformation:
  """Clip by the global norm, then optimize."""
  settings = dataclasses.asdict(config.optimizer)
  del settings["lr"]  # the schedule has it
  make: Any = getattr(optim, type(config.optimizer).__name__.lower())
  parts = [make(schedule, **settings)]
  if config.clip_norm is not None:
    parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
  return optax.chain(*parts)
