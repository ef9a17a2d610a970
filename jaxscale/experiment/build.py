"""Build an `Experiment` from a `Config`: model, data, layout, optimizer, exchange.

`derive` computes derived numbers, and `model`, `make_layout`, `optimizer` and `exchange`
build the parts. This module combines them into an `Experiment`, one phase at a time, for
`fit` to run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxscale import config as cfg
from jaxscale import data, models, optim
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.config.choice import is_built_in
from jaxscale.data.dataset import check_targets, with_checked_weights, with_target_range
from jaxscale.errors import invalid
from jaxscale.exchange import Exchange
from jaxscale.experiment import make_layout as layouts
from jaxscale.experiment import model as model_parts
from jaxscale.experiment import remat
from jaxscale.experiment.compiler_options import Options, compiler_options
from jaxscale.experiment.derive import Derived, derive
from jaxscale.experiment.exchange import Synchronization, make_exchange, make_sync
from jaxscale.experiment.frozen import check_paths, frozen_note, trainable
from jaxscale.experiment.loss import (
  abstract_rows,
  loss_state,
  make_objective,
  metric_notes,
  trace_steps,
)
from jaxscale.experiment.optimizer import make_optimizer, phase_rate, phase_schedule
from jaxscale.experiment.own_classes import build
from jaxscale.experiment.phases import Phase, phase_index, scale_velocity, step_at
from jaxscale.mesh import batch_axes, batch_sharding, make_mesh, on_cpu, row_blocks
from jaxscale.metrics import perplexity_of, signed
from jaxscale.metrics.text import listed
from jaxscale.models.remat import functions_with_remat
from jaxscale.parallel import deal
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.parallel.run_stack import PipelineGrads
from jaxscale.parallel.specs import Layout, local_grad_shapes, replicated_layout
from jaxscale.parallel.trainable import trainable_layout, trainable_part
from jaxscale.training import nan_guard, types
from jaxscale.training import state as states
from jaxscale.training import step as steps
from jaxscale.training.flops import training_flops
from jaxscale.training.local_step import make_local_train_step
from jaxscale.training.metrics import ROWS, SUMS, Metric, results

# Context in which a program is compiled, so that other compilations wait for it; see
# `run.programs.Programs.turn`.
Turn = contextlib.AbstractContextManager[None]


@dataclasses.dataclass(frozen=True)
class RunParts:
  """Parts of an `Experiment` that all phases share."""

  config: cfg.Config
  derived: Derived
  mesh: Mesh
  eval_data: data.Dataset
  model: model_parts.Model
  factors: model_parts.Factors  # of the parametrization, by path; {} for `Standard`
  layout: Layout | None  # None: everything is replicated
  eval_step: types.EvalStep
  metrics: Mapping[str, Metric]
  loss_state: Any  # `CustomLoss.init_state`; None: the loss has no state
  memory: int | None  # bytes of a device that a program may take; None: unknown
  compiler_options: Options  # for the train and evaluation step


@dataclasses.dataclass(frozen=True)
class PhaseParts:
  """Parts of an `Experiment` that differ between phases."""

  phase: Phase
  train_data: data.Dataset
  loss: types.LossFn | PipelineGrads
  tx: optax.GradientTransformation
  schedule: optax.Schedule  # step of the run -> learning rate, in this phase
  exchange: Exchange
  sync: Synchronization | None  # for local updates
  remat: str  # `Layout.remat`, or the policy that was chosen
  notes: tuple[str, ...]  # notes for the user, logged before the first step


@dataclasses.dataclass(frozen=True)
class Experiment(RunParts, PhaseParts):
  """All parts of a run, or of one phase of it.

  `replace` changes parts; `train_step` is built from the current parts.
  """

  def replace(self, **parts: Any) -> Experiment:
    """Return the experiment with some parts replaced."""
    return dataclasses.replace(self, **parts)

  @functools.cached_property
  def train_step(self) -> types.TrainStep:
    """Train step of the experiment."""
    config, loss = self.config, cast(types.LossFn, self.loss)
    options = types.StepOptions(
      num_microbatches=self.phase.accumulate_steps,
      ema_decay=config.ema_decay,
      ema_warmup=config.ema_warmup,
      measure_noise_scale=config.noise_scale,
      skip_bad_steps=True,
      scale_loss=config.dtype == "float16",
      trainable=self.trainable,
      observe=trust_ratio_metrics if config.log.trust_ratios else None,
      seed=config.seed,
      compiler_options=self.compiler_options,
    )
    parts = loss, self.tx, self.mesh, self.exchange
    more: Any = {"schedule": self.schedule, "options": options}
    if self.sync is None:
      return steps.make_train_step(*parts, layout=self.layout, **more)
    more |= {"workers": self.sync.workers, "last_step": self.derived.total_steps}
    return make_local_train_step(*parts, self.sync.method, **more)

  @property
  def trainable(self) -> str | None:
    """Pattern of the trained parameters, as for `trainable_part`; None means all."""
    return trainable(self.config)

  @property
  def trained_layout(self) -> Layout | None:
    """Layout of the trained parameters; None means that everything is replicated."""
    return self.layout and trainable_layout(self.layout, self.trainable)

  @property
  def dealt_out(self) -> list[str]:
    """Lines on the matrices that the optimizer deals out over the devices; [] if none."""
    if self.sync is not None or self.mesh.size == 1:
      return []
    layout = self.trained_layout or replicated_layout(self.mesh)
    return deal.summary(layout, self.tx, trainable_part(_params(self.model), self.trainable))

  @property
  def best_metric(self) -> str | None:
    """Name of `Checkpoint.best_metric`, with a minus sign if the lowest value is best."""
    best = self.config.checkpoint.best_metric
    return None if best is None else self.signed(best, "Checkpoint.best_metric")

  def signed(self, name: str, field: str) -> str:
    """Return the name of a metric, with a minus sign if the lowest value is best.

    Args:
      name: the name, with or without "val/".
      field: the setting that has the name, for the error.

    Raises:
      ConfigError: evaluations have no such metric.
    """
    lower = [name for metric in self.metrics.values() for name in metric.lower_is_better]
    known, result = self.evaluated_names, signed(name, lower)
    if known and result.removeprefix("-") not in known:
      problem = "is not a metric of this run's evaluations"
      raise invalid(field, name, problem, f"use {listed(known, 'or')}")
    return result

  @functools.cached_property
  def evaluated_names(self) -> list[str]:
    """Names of the metrics of an evaluation; [] if they depend on the examples."""
    totals = dict(self.lower_eval_step(self.abstract_state()).out_info)
    sums, (_, rows) = totals.pop(SUMS, {}), totals.pop(ROWS, ((), {}))
    names = [name for name in totals if name != "examples" and not name.startswith("_")]
    if isinstance(info := self.eval_data.info, data.TextInfo):
      names += perplexity_of(0.0, info.bytes_per_token)
    ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), (sums, rows))
    try:
      with np.errstate(all="ignore"):
        found = results(self.metrics, ones[0], [ones[1]])
        return names + [name for name, value in found if isinstance(value, float)]
    except Exception:  # `compute` may need sums of real examples.
      return []

  def init_state(self, turn: Turn | None = None) -> types.TrainState:
    """Create the state before the first step, on the mesh.

    Args:
      turn: context manager entered for the compilation; None means no context.

    Raises:
      ConfigError: the file of `Config.init_from` does not fit the model.
    """
    given, config = None, self.config
    if config.init_from is not None:
      given = model_parts.imported(config, self.eval_data.info, self.abstract_state())
    return states.run_init(self._init, self.mesh, config.seed, given, turn)

  def abstract_state(self) -> types.TrainState:
    """Return the shapes, dtypes and shardings of the state without computing it."""
    return states.shapes_of(self._init)

  @functools.cached_property
  def example_flops(self) -> int:
    """Model FLOPs of training on one example of this phase."""
    return training_flops(self.model, abstract_rows(self.train_data.info, 1))

  def abstract_batch(self) -> types.Batch:
    """Return the shapes, dtypes and shardings of a global training batch."""
    rows, sharding = self.phase.batch_size, batch_sharding(self.mesh)
    return abstract_rows(self.train_data.info, rows, sharding)

  def lower_train_step(self, abstract: types.TrainState | None = None) -> Any:
    """Return the train step as `jax.stages.Lowered`, for the shapes of the run.

    Args:
      abstract: the result of `abstract_state`; None computes it.
    """
    step: Any = self.train_step
    return step.lower(abstract or self.abstract_state(), self.abstract_batch())

  def compile_train_step(self, lowered: Any = None, turn: Turn | None = None) -> types.TrainStep:
    """Compile the train step before its first call.

    Args:
      lowered: the result of `lower_train_step`; None computes it.
      turn: context manager entered for the compilation, after lowering; None means no context.
    """
    lowered = lowered or self.lower_train_step()
    with turn or contextlib.nullcontext():
      return one_at_a_time(lowered.compile(), self.mesh)

  def lower_eval_step(self, state: types.TrainState) -> Any:
    """Return the evaluation step as `jax.stages.Lowered`, for this state."""
    rows, sharding = self.derived.eval_batch_size, batch_sharding(self.mesh)
    batch = abstract_rows(self.eval_data.info, rows, sharding)
    batch["mask"] = jax.ShapeDtypeStruct((rows,), bool, sharding=sharding)
    step: Any = self.eval_step
    return step.lower(*state.evaluated(), batch)

  @functools.cached_property
  def _init(self) -> Any:
    """Jitted function that creates the state, traced once for its shapes and to run."""
    parts = model_parts.init_fn(self.model), self.tx, self.mesh, self.exchange
    if self.sync is not None:
      return states.make_init(*parts, local=self.sync.method, trainable=self.trainable)
    return states.make_init(
      *parts,
      layout=self.layout,
      trainable=self.trainable,
      average=self.config.ema_decay is not None,
      noise_scale=self.config.noise_scale,
      loss_scale=self.config.dtype == "float16",
      loss_state=self.loss_state,
    )


def experiment(
  config: cfg.Config,
  start_devices: int | None = None,
  devices: Sequence[Any] | None = None,
  datasets: tuple[data.Dataset, data.Dataset] | None = None,
  memory: int | None = None,
) -> Experiment:
  """Build all parts for the first phase, without compiling.

  Args:
    config: the config of the run.
    start_devices: number of devices of all processes when the run started; None means that the run
      starts now.
    devices: the devices to run on; to compile only, they need not exist on this machine.
      None means all devices of all processes.
    datasets: training and validation data to use instead of the config's; shapes are
      enough to compile.
    memory: bytes of a device that a program may take, for the choice of `Layout.remat`. None
      means that of the devices of all processes, which must all call this; it is unknown for
      given `devices`.

  Raises:
    ConfigError: data or devices do not fit the config.
  """
  options, option_notes = compiler_options(config, devices)
  train_data, eval_data = datasets or make_data(config)
  sizes = train_data.num_examples, eval_data.num_examples
  here = jax.device_count() if devices is None else len(devices)
  derived = derive(config, *sizes, here, start_devices=start_devices)
  spans = [model_parts.bn_span(config, derived, phase) for phase in derived.phases]
  grid = dataclasses.asdict(config.mesh)
  mesh = make_mesh(**grid, bn_devices=max(span.bn_devices for span in spans), devices=devices)
  for phase in derived.phases:  # errors of later phases are raised now
    make_sync(config, derived, phase, mesh)
  info, rows = eval_data.info, model_parts.rows_of_device(derived, derived.phases[0])
  model = model_parts.make_model(config, info, mesh, spans[0], train=False)
  model, factors = model_parts.parametrized(config, info, model)
  objective = make_objective(config, info, model_parts.as_functions(model), mesh)
  metrics = model_parts.make_metrics(config, info)
  parts = config, model, objective, info, mesh, rows
  notes = model_parts.check_model(*parts, compute=datasets is None)
  if datasets is None and not all(is_built_in(type(m)) for m in config.metrics):
    trace, _, batch = trace_steps(model_parts.as_functions(model), objective, info, mesh, rows)
    notes += metric_notes(metrics, trace(), batch)
  params = _params(model)
  check_paths(config, params)
  if "weight" in info.arrays:
    train_data, eval_data = with_checked_weights(train_data), with_checked_weights(eval_data)
  if limits := config.loss.target_range(info):
    train_data, eval_data = (with_target_range(d, limits) for d in (train_data, eval_data))
    for name in ("y", "y_eval") if isinstance(config.data, cfg.Arrays) else ():
      if (targets := getattr(config.data, name)) is not None and datasets is None:
        check_targets(f"Arrays.{name}", np.asarray(targets), limits)
  layout = layouts.make_layout(config, mesh, model)
  totals = layouts.make_totals(model, layout, objective, mesh, metrics)
  eval_step = steps.make_eval_step(totals, mesh, layout, options)
  built = config, derived, mesh, eval_data, model, factors, layout, eval_step, metrics
  chooses = config.layout.remat is None and isinstance(model, models.Stack)
  if chooses and memory is None and devices is None and not on_cpu(mesh):
    memory = remat.device_memory()
  parts = RunParts(*built, loss_state(objective), memory, options)
  first = make_phase(parts, derived.phases[0], train_data)
  frozen = frozen_note(config, params, first.tx)
  notes = *option_notes, *train_data.notes, *eval_data.notes, *notes, *first.notes, *frozen
  built = Experiment(**vars(parts), **vars(dataclasses.replace(first, notes=notes)))
  if metrics:  # Report errors in them now, not at the first evaluation.
    built.lower_eval_step(built.abstract_state())
  return built


def make_data(config: cfg.Config) -> tuple[data.Dataset, data.Dataset]:
  """Return the training and the validation data.

  Raises:
    ConfigError: the data are not available, or a user's class returned something else.
  """
  return _built(config.data)


def _built(settings: cfg.Data) -> tuple[data.Dataset, data.Dataset]:
  if type(settings) is data.Mixture:  # Check a user's source as any data.
    return settings.mixed({name: _built(source) for name, source in settings.sources.items()})
  expected = "two data.Dataset, for training and validation (data.from_arrays makes one)"
  return build(settings, kind=_is_two_datasets, expected=expected)


def _is_two_datasets(part: Any) -> bool:
  is_pair = isinstance(part, tuple) and len(part) == 2
  return is_pair and all(isinstance(dataset, data.Dataset) for dataset in part)


def at_phase(experiment: Experiment, phase: Phase) -> Experiment:
  """Return the experiment with the parts of a phase: data, optimizer, step."""
  return experiment.replace(**vars(make_phase(experiment, phase, experiment.train_data)))


def make_phase(parts: RunParts, phase: Phase, train_data: data.Dataset) -> PhaseParts:
  """Build the parts of one phase.

  Raises:
    ConfigError: the phase's images or exchange do not fit the model or the devices.
  """
  config, derived, mesh, layout = parts.config, parts.derived, parts.mesh, parts.layout
  pattern = trainable(config)
  trained = layout and trainable_layout(layout, pattern)
  if phase.image_size is not None:
    train_data = config.data.resized(phase.image_size)
  span = model_parts.bn_span(config, derived, phase)
  model = model_parts.make_model(config, train_data.info, mesh, span)
  if phase.image_size is not None:
    shapes = [jax.tree.map(lambda x: x.shape, _params(m)) for m in (parts.model, model)]
    if shapes[0] != shapes[1]:
      problem = "does not work with this model, whose parameters depend on the image size"
      fix = "use a model that pools over the image (ResNet)"
      raise invalid("Phases.image_sizes", phase.image_size, problem, fix)
  model = model._replace(init=parts.model.init)  # with the factors of the parametrization
  # The schedule counts steps of Config.batch_size, but the optimizer counts actual steps.
  warmup = step_at(derived.phases, derived.warmup_steps * config.batch_size)
  momentum = phase_rate(config, phase)[1]
  axes = batch_axes(mesh) if trained is None else exchange_axes(trained)
  sizes = {axis: mesh.shape[axis] for axis in axes}
  layouts.check_exchange(config, layout, sizes)

  def params():
    if trained is None:
      return trainable_part(_params(model), pattern)
    return local_grad_shapes(trained)

  exchange, notes = make_exchange(config, derived, sizes, params, mesh)
  sync, more = make_sync(config, derived, phase, mesh)
  schedule = phase_schedule(config, derived, phase)
  tx = make_optimizer(config, schedule, warmup, momentum, parts.factors)
  rows = model_parts.rows_of_device(derived, phase)
  batch = abstract_rows(train_data.info, row_blocks(mesh))
  chosen, why = remat.choose(config, model, layout, tx, batch, rows, parts.memory)
  if not isinstance(model, models.Stack):
    model = functions_with_remat(model, chosen, batch)
  objective = make_objective(config, train_data.info, model_parts.as_functions(model), mesh)
  loss = layouts.make_loss(config, model, layout, objective, mesh, chosen)
  lines = *layouts.notes(config, mesh, phase.accumulate_steps), *why, *notes, *more
  return PhaseParts(phase, train_data, loss, tx, schedule, exchange, sync, chosen, lines)


def with_sizes(experiment: Experiment, chosen: Sequence[int]) -> Experiment:
  """Return the experiment after an adaptive run has chosen these batch sizes."""
  old = experiment.derived
  sizes = old.num_train, old.num_eval, old.num_devices
  return experiment.replace(derived=derive(experiment.config, *sizes, chosen, old.start_devices))


def with_length(experiment: Experiment, length: Mapping[str, Any]) -> Experiment:
  """Return the experiment with a different length, given as `epochs` or `steps`."""
  config = dataclasses.replace(experiment.config, **length)
  return with_sizes(experiment.replace(config=config), ())


def rate_at(experiment: Experiment, step: int) -> float:
  """Return the learning rate after `step` steps."""
  derived = experiment.derived
  phase = derived.phases[phase_index(derived.phases, step)]
  rate: Any = phase_schedule(experiment.config, derived, phase)(step)
  return float(rate)


def enter_phase(config: cfg.Config, old: Phase, new: Phase, state: types.TrainState):
  """Carry the state over from one phase to the next.

  The velocity settles at gradient / (1 - momentum). If the momentum changes, it is scaled
  to the value at which it would settle with the new momentum.
  """
  before, after = (phase_rate(config, phase)[1] for phase in (old, new))
  if before is None or after is None or before == after:
    return state
  scale = functools.partial(scale_velocity, factor=(1 - before) / (1 - after))
  return _map_opt_state(state, jax.jit(scale, donate_argnums=0))


def _map_opt_state(state: types.TrainState, change: Callable[[Any], Any]) -> types.TrainState:
  """Apply a function to the optimizer state, or to the workers' with local updates."""
  own = state.exchange_state
  if isinstance(own, types.WorkerState):
    return state._replace(exchange_state=own._replace(opt_state=change(own.opt_state)))
  return state._replace(opt_state=change(state.opt_state))


def skip_steps(state: types.TrainState, steps: int) -> types.TrainState:
  """Return the state after skipping steps: only step counts increase."""

  def move(opt_state: Any):
    layout = jax.tree.map(lambda x: x.sharding, opt_state)
    moved = functools.partial(nan_guard.count_steps, steps=steps)
    return jax.jit(moved, donate_argnums=0, out_shardings=layout)(opt_state)

  return _map_opt_state(state._replace(step=move(state.step)), move)


def _params(model: model_parts.Model) -> Any:
  """Return the shapes and dtypes of the parameters."""
  return models.init_shapes(model_parts.init_fn(model))[0]


def trust_ratio_metrics(opt_state: Any) -> dict[str, jax.Array]:
  """Return the trust ratios in an optimizer state as metrics, one scalar per layer."""
  return {
    f"trust_ratio/{path}" + (f"[{i}]" if ratio.ndim else ""): r
    for path, ratio in optim.trust_ratios(opt_state).items()
    for i, r in enumerate(ratio.reshape(-1))
  }
