"""From a Config to everything that a run is made of; `fit` runs it.

`derive` has the numbers that follow, `model`, `layout`, `optimizer` and `exchange` make
the parts; here they become an `Experiment`, one phase of it after another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxscale import config as cfg
from jaxscale import data, models, optim
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.data.dataset import check_targets, with_target_range
from jaxscale.errors import ConfigError, invalid
from jaxscale.exchange import Exchange
from jaxscale.experiment import make_layout as layouts
from jaxscale.experiment.derive import Derived, derive
from jaxscale.experiment.exchange import Synchronization, make_exchange, make_sync
from jaxscale.experiment.model import (
  Model,
  bn_span,
  check_model,
  imported,
  init_fn,
  make_model,
  make_objective,
  rows_of_device,
)
from jaxscale.experiment.optimizer import make_optimizer, phase_rate, phase_schedule
from jaxscale.experiment.own_classes import build
from jaxscale.experiment.phases import Phase, phase_index, scale_velocity, step_at
from jaxscale.mesh import batch_axes, batch_sharding, make_mesh, replicated
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.parallel.run_stack import PipelineGrads
from jaxscale.parallel.specs import Layout, local_grad_shapes
from jaxscale.training import nan_guard
from jaxscale.training import state as states
from jaxscale.training import step as steps
from jaxscale.training.flops import training_flops
from jaxscale.training.local_step import make_local_train_step
from jaxscale.training.types import (
  Batch,
  EvalStep,
  LossFn,
  StepOptions,
  TrainState,
  TrainStep,
  WorkerState,
)

# What a program is compiled in, for others to wait for: `run.programs.Programs.turn`.
Turn = contextlib.AbstractContextManager[None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
  """Everything that a run, or one phase of it, is made of.

  `replace` gives it other parts, of which `train_step` is then made.
  """

  config: cfg.Config
  derived: Derived
  phase: Phase
  mesh: Mesh
  train_data: data.Dataset
  eval_data: data.Dataset
  model: Model
  layout: Layout | None  # None: everything on every device
  loss: LossFn | PipelineGrads
  tx: optax.GradientTransformation
  schedule: optax.Schedule  # step of the run -> learning rate, in this phase
  exchange: Exchange
  sync: Synchronization | None  # of workers that train alone
  eval_step: EvalStep
  notes: tuple[str, ...] = ()  # worth reading before the first step

  def replace(self, **parts: Any) -> Experiment:
    """The same experiment with some other parts."""
    return dataclasses.replace(self, **parts)

  @functools.cached_property
  def train_step(self) -> TrainStep:
    """The train step that the other parts make."""
    config, loss = self.config, cast(LossFn, self.loss)
    options = StepOptions(
      num_microbatches=self.phase.accumulate_steps,
      ema_decay=config.ema_decay,
      ema_warmup=config.ema_warmup,
      measure_noise_scale=config.noise_scale,
      skip_bad_steps=True,
      observe=trust_ratio_metrics if config.log.trust_ratios else None,
      seed=config.seed,
    )
    parts = loss, self.tx, self.mesh, self.exchange
    if self.sync is None:
      return steps.make_train_step(
        *parts, schedule=self.schedule, layout=self.layout, options=options
      )
    return make_local_train_step(
      *parts,
      self.sync.method,
      schedule=self.schedule,
      workers=self.sync.workers,
      last_step=self.derived.total_steps,
      options=options,
    )

  def init_state(self, turn: Turn | None = None) -> TrainState:
    """The state before the first step, on the mesh.

    Args:
      turn: entered to compile what makes it; None: any time will do.

    Raises:
      ConfigError: the file of `Config.init_from` is not of this model.
    """
    given, config = None, self.config
    if config.init_from is not None:
      given = imported(config, self.eval_data.info, self.abstract_state())
    return states.run_init(self._init, self.mesh, config.seed, given, turn)

  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of the state, without computing it."""
    return states.shapes_of(self._init)

  def lower_init_state(self) -> Any:
    """What makes the state, as `jax.stages.Lowered`."""
    assert self.sync is None, "workers that train alone have whole models"
    seed = jax.ShapeDtypeStruct((), "int32", sharding=replicated(self.mesh))
    return self._init.lower(seed, {})

  @functools.cached_property
  def example_flops(self) -> int:
    """Model FLOPs that an example of this phase is trained with."""
    arrays = data.batch_shapes(self.train_data.info, 1)
    one = {name: jax.ShapeDtypeStruct(*array) for name, array in arrays.items()}
    return training_flops(self.model, one)

  def abstract_batch(self) -> Batch:
    """Shapes, dtypes and shardings of a global training batch."""
    arrays = data.batch_shapes(self.train_data.info, self.phase.batch_size)
    sharding: Any = batch_sharding(self.mesh)
    abstract: Any = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    return {name: abstract(shape, dtype) for name, (shape, dtype) in arrays.items()}

  def lower_train_step(self, abstract: TrainState | None = None) -> Any:
    """The train step as `jax.stages.Lowered`, for the shapes of the run.

    Args:
      abstract: what `abstract_state` gave, if you have it already.
    """
    step: Any = self.train_step
    return step.lower(abstract or self.abstract_state(), self.abstract_batch())

  def compile_train_step(self, lowered: Any = None, turn: Turn | None = None) -> TrainStep:
    """The train step, compiled ahead of its first call.

    Args:
      lowered: what `lower_train_step` gave, if you have it already.
      turn: entered to compile it, once it is lowered; None: any time will do.
    """
    lowered = lowered or self.lower_train_step()
    with turn or contextlib.nullcontext():
      return one_at_a_time(lowered.compile(), self.mesh)

  def lower_eval_step(self, state: TrainState) -> Any:
    """The evaluation step as `jax.stages.Lowered`, for this state."""
    rows, sharding = self.derived.eval_batch_size, batch_sharding(self.mesh)
    batch: Any = {
      name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
      for name, (shape, dtype) in data.batch_shapes(self.eval_data.info, rows).items()
    }
    batch["mask"] = jax.ShapeDtypeStruct((rows,), bool, sharding=sharding)
    step: Any = self.eval_step
    return step.lower(*state.evaluated(), batch)

  @functools.cached_property
  def _init(self) -> Any:
    """What makes the state, jitted: traced once, for its shapes and to run it."""
    parts = init_fn(self.model), self.tx, self.mesh, self.exchange
    if self.sync is not None:
      return states.make_init(*parts, local=self.sync.method)
    average, noise_scale = self.config.ema_decay is not None, self.config.noise_scale
    return states.make_init(*parts, layout=self.layout, average=average, noise_scale=noise_scale)


def experiment(
  config: cfg.Config,
  start_devices: int | None = None,
  devices: Sequence[Any] | None = None,
  datasets: tuple[data.Dataset, data.Dataset] | None = None,
) -> Experiment:
  """Make every part, for the first phase; compiles nothing yet.

  Args:
    config: of the run.
    start_devices: over all processes when the run began; None: it begins now.
    devices: to run on, which need not be there to compile for them; None: all of
      every process.
    datasets: to train and to evaluate on, in place of the config's: shapes alone are
      enough to compile for.

  Raises:
    ConfigError: data or devices do not fit the config.
  """
  train_data, eval_data = datasets or make_data(config)
  sizes = train_data.num_examples, eval_data.num_examples
  here = jax.device_count() if devices is None else len(devices)
  derived = derive(config, *sizes, here, start_devices=start_devices)
  spans = [bn_span(config, derived, phase) for phase in derived.phases]
  grid = dataclasses.asdict(config.mesh)
  bn_devices = max(span.bn_devices for span in spans)
  mesh = make_mesh(**grid, bn_devices=bn_devices, devices=devices)
  for phase in derived.phases:  # those to come are refused now
    make_sync(config, derived, phase, mesh)
  model = make_model(config, eval_data.info, mesh, spans[0], train=False)
  rows = rows_of_device(derived, derived.phases[0])
  objective = make_objective(config, eval_data.info)
  notes = check_model(
    config, model, objective, eval_data.info, mesh, rows, compute=datasets is None
  )
  _check_paths(config, model)
  if limits := config.loss.target_range(eval_data.info):
    train_data, eval_data = (
      with_target_range(dataset, limits) for dataset in (train_data, eval_data)
    )
    for name in ("y", "y_eval") if isinstance(config.data, cfg.Arrays) else ():
      if (targets := getattr(config.data, name)) is not None and datasets is None:
        check_targets(f"Arrays.{name}", np.asarray(targets), limits)
  layout = layouts.make_layout(config, mesh, model)
  totals = layouts.make_totals(model, layout, objective)
  eval_step = steps.make_eval_step(totals, mesh, layout)
  parts = RunParts(config, derived, mesh, eval_data, model, layout, eval_step)
  first = make_phase(parts, derived.phases[0], train_data)
  notes = *train_data.notes, *eval_data.notes, *notes, *first.notes
  return Experiment(**parts._asdict(), **first._replace(notes=notes)._asdict())


def make_data(config: cfg.Config) -> tuple[data.Dataset, data.Dataset]:
  """The training and the held-out examples.

  Raises:
    ConfigError: they cannot be had, or a class of the user's gave something else.
  """
  wanted = "two data.Dataset, to train on and held-out (data.from_arrays makes one)"
  return build(config.data, kind=_is_two_datasets, wanted=wanted)


def _is_two_datasets(part: Any) -> bool:
  is_pair = isinstance(part, tuple) and len(part) == 2
  return is_pair and all(isinstance(dataset, data.Dataset) for dataset in part)


class RunParts(NamedTuple):
  """The parts of an `Experiment` that all phases share; each is described there."""

  config: cfg.Config
  derived: Derived
  mesh: Mesh
  eval_data: data.Dataset
  model: Model
  layout: Layout | None
  eval_step: EvalStep


class PhaseParts(NamedTuple):
  """The parts of an `Experiment` that differ between phases; each is described there."""

  phase: Phase
  train_data: data.Dataset
  loss: LossFn | PipelineGrads
  tx: optax.GradientTransformation
  schedule: optax.Schedule
  exchange: Exchange
  sync: Synchronization | None
  notes: tuple[str, ...]


def at_phase(experiment: Experiment, phase: Phase) -> Experiment:
  """The same experiment with the parts of one phase: data, optimizer, step."""
  parts = make_phase(experiment, phase, experiment.train_data)
  return experiment.replace(**parts._asdict())


def make_phase(parts: RunParts | Experiment, phase: Phase, train_data: data.Dataset) -> PhaseParts:
  """Make the parts of one phase.

  Raises:
    ConfigError: the phase's images, or its exchange, do not fit the model or devices.
  """
  config, derived, mesh, layout = parts.config, parts.derived, parts.mesh, parts.layout
  if phase.image_size is not None:
    train_data = config.data.resized(phase.image_size)
  model = make_model(config, train_data.info, mesh, bn_span(config, derived, phase))
  if phase.image_size is not None:
    shapes = [jax.tree.map(lambda x: x.shape, _params(m)) for m in (parts.model, model)]
    if shapes[0] != shapes[1]:
      why = "the parameters of this model depend on the image size"
      fix = "use a model that pools over the image (ResNet)"
      raise invalid("Phases.image_sizes", phase.image_size, why, fix)
  # The schedule counts in steps of Config.batch_size, the optimizer in the run's.
  warmup = step_at(derived.phases, derived.warmup_steps * config.batch_size)
  momentum = phase_rate(config, phase)[1]
  axes = batch_axes(mesh) if layout is None else exchange_axes(layout)
  sizes = {axis: mesh.shape[axis] for axis in axes}
  layouts.check_exchange(config, layout, sizes)

  def params():
    return _params(model) if layout is None else local_grad_shapes(layout)

  exchange, notes = make_exchange(config, derived, sizes, params, mesh)
  sync, more = make_sync(config, derived, phase, mesh)
  schedule = phase_schedule(config, derived, phase)
  objective = make_objective(config, train_data.info)
  return PhaseParts(
    phase=phase,
    train_data=train_data,
    loss=layouts.make_loss(config, model, layout, objective),
    tx=make_optimizer(config, schedule, warmup, momentum),
    schedule=schedule,
    exchange=exchange,
    sync=sync,
    notes=(*layouts.notes(config, mesh, phase.accumulate_steps), *notes, *more),
  )


def with_sizes(experiment: Experiment, chosen: Sequence[int]) -> Experiment:
  """The experiment when an adaptive run has settled on these batch sizes."""
  old = experiment.derived
  sizes = old.num_train, old.num_eval, old.num_devices
  derived = derive(experiment.config, *sizes, chosen, old.start_devices)
  return experiment.replace(derived=derived)


def with_length(experiment: Experiment, length: Mapping[str, Any]) -> Experiment:
  """The experiment as it was when its run had these `epochs` or `steps`."""
  config = dataclasses.replace(experiment.config, **length)
  return with_sizes(experiment.replace(config=config), ())


def rate_at(experiment: Experiment, step: int) -> float:
  """The learning rate of the step after `step` steps."""
  derived = experiment.derived
  phase = derived.phases[phase_index(derived.phases, step)]
  rate: Any = phase_schedule(experiment.config, derived, phase)(step)
  return float(rate)


def enter_phase(config: cfg.Config, old: Phase, new: Phase, state: TrainState):
  """The state carried over from one phase into the next.

  The velocity settles at gradient / (1 - momentum), so a new momentum finds it
  scaled as if it had been there all the time.
  """
  before, after = (phase_rate(config, phase)[1] for phase in (old, new))
  if before is None or after is None or before == after:
    return state
  scale = functools.partial(scale_velocity, factor=(1 - before) / (1 - after))
  return _map_opt_state(state, jax.jit(scale, donate_argnums=0))


def _map_opt_state(state: TrainState, change: Callable[[Any], Any]) -> TrainState:
  """The state with another optimizer state; workers that train alone have their own."""
  own = state.exchange_state
  if isinstance(own, WorkerState):
    return state._replace(exchange_state=own._replace(opt_state=change(own.opt_state)))
  return state._replace(opt_state=change(state.opt_state))


def skip_steps(state: TrainState, steps: int) -> TrainState:
  """The state after so many steps that were not taken: only counts move on."""

  def move(opt_state: Any):
    layout = jax.tree.map(lambda x: x.sharding, opt_state)
    moved = functools.partial(nan_guard.count_steps, steps=steps)
    return jax.jit(moved, donate_argnums=0, out_shardings=layout)(opt_state)

  return _map_opt_state(state._replace(step=move(state.step)), move)


def _params(model: Model) -> Any:
  """Shapes and dtypes of the parameters."""
  return models.init_shapes(init_fn(model))[0]


def _check_paths(config: cfg.Config, model: Model) -> None:
  """Refuse patterns that no parameter fits: they would change the method silently."""
  order, include = config.layer_order, getattr(config.optimizer, "include", "all")
  fields = {pattern: "Config.layer_order" for pattern in order}
  if include not in optim.NAMED:
    fields = {include: f"{type(config.optimizer).__name__}.include"} | fields
  if not fields:
    return
  paths = [path_name(path) for path, _ in jax.tree.leaves_with_path(_params(model))]
  for pattern, field in fields.items():
    if not any(re.search(pattern, path) for path in paths):
      # The first, the middle and the last ones.
      some = sorted({0, 1, len(paths) // 2, len(paths) - 1} & set(range(len(paths))))
      raise ConfigError(
        f"{field}={pattern!r}: no parameter's path fits it, there are "
        + ", ".join(paths[i] for i in some)
      )
  for path in paths if order else ():
    fits = [repr(pattern) for pattern in order if re.search(pattern, path)]
    if len(fits) != 1:
      raise ConfigError(
        f"Config.layer_order={order}: {path} fits {' and '.join(fits) or 'none'} of "
        "them, it must be exactly one"
      )


def trust_ratio_metrics(opt_state: Any) -> dict[str, jax.Array]:
  """The trust ratios in an optimizer's state, a scalar per layer."""
  return {
    f"trust_ratio/{path}" + (f"[{i}]" if ratio.ndim else ""): r
    for path, ratio in optim.trust_ratios(opt_state).items()
    for i, r in enumerate(ratio.reshape(-1))
  }
