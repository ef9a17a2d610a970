"""Train the phases of a run in turn: compile, enter and train each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from jaxscale import cluster, data, metrics
from jaxscale.cluster.watch.stop_consensus import StopRequested
from jaxscale.experiment import build
from jaxscale.experiment.phases import Phase, examples_at, phase_index
from jaxscale.files import append_json_line
from jaxscale.mesh import host_shard
from jaxscale.metrics.log import logger
from jaxscale.run import adaptive_batch, hooks
from jaxscale.run.branches import Branches
from jaxscale.run.efficiency import read_program
from jaxscale.run.gc_pause import resume_gc
from jaxscale.run.run import Run
from jaxscale.run.settings import DECISIONS
from jaxscale.run.step_compiler import StepCompiler, in_background
from jaxscale.training import loop
from jaxscale.training.types import Batch, TrainState, TrainStep


def train_phases(run: Run, state: TrainState, compiler: StepCompiler) -> TrainState:
  """Train all remaining phases, or until asked to stop."""
  step, reports_step = int(state.step), run.experiment.config.log.step_report
  if step and hooks.evaluation_interval(run)(step) and run.evaluation_at(step) is None:
    # An earlier start stopped before this evaluation.
    state = hooks.evaluate(run, step, state)
  while not run.is_over(step) and not run.watch.stop.poll():
    run.watch.at(step + 1, "compiling")
    if 0 < step == phase_at(run.experiment, step).start:
      try:
        run.experiment, state = _enter_phase(run, state, compiler)
      except StopRequested:  # The resumed run repeats the trials.
        state = hooks.save(run, step, state)
        break
      run.reporter.enter(run.experiment, step)
    if (to := min(run.nan_policy.done_until(step), run.experiment.phase.stop)) > step:
      logger.info(f"skipping steps {step + 1} to {to}")
      state, step = build.skip_steps(state, to - step), to
      if to == run.total_steps:
        state = hooks.save(run, to, hooks.evaluate(run, to, state))
    else:
      state, step = _train_phase(run, state, step, compiler, reports_step)
      reports_step = False
  return state


def _train_phase(
  run: Run, state: TrainState, step: int, compiler: StepCompiler, reports_step: bool
) -> tuple[TrainState, int]:
  """Train to the end of the phase, or to the next steps that the NaN policy skips."""
  experiment, reporter = run.experiment, run.reporter
  batches = train_batches(experiment, step)
  with reporter.pause():
    first = next(batches)  # The input starts while XLA compiles.
    train_step = compiler.wait(experiment)
    if cluster.is_leader():
      reporter.efficiency.program = in_background(functools.partial(read_program, train_step))
    if reports_step:
      _report_step(run, train_step, state, first)
  fingerprint = compiler.fingerprint(experiment) if _compares_replicas(experiment, step) else None
  following = phase_at(experiment, experiment.phase.stop)
  compiler.forget_all_but(experiment.phase, following)
  if following.is_decided and compiler.experiment_at(following) is None:
    compiler.begin(build.at_phase(experiment, following))
  resume_gc()
  timed = reporter.timed(itertools.chain([first], batches))
  between = hooks.run_control(run), hooks.run_hooks(run, fingerprint)
  stop = run.nan_policy.next_after(step, experiment.phase.stop)
  return loop.train(state, train_step, timed, *between, start=step, total_steps=stop)


def _report_step(run: Run, train_step: TrainStep, state: TrainState, batch: Batch) -> None:
  """Log the times of the parts of a step (`log.step_report`)."""
  from jaxscale.run import step_report  # Seldom used, and imports delay the first step.

  report = step_report.measure(run.experiment, train_step, state, batch)
  sizes = {"rows": run.experiment.phase.batch_size, "num_devices": run.experiment.mesh.size}
  logger.info(step_report.text(report, **sizes))
  run.reporter.write(int(state.step), "perf", report.metrics())


def train_batches(experiment: build.Experiment, step: int) -> Iterator[Batch]:
  """Yield this phase's global batches on the devices, from step `step` + 1 on."""
  batches = data.train_batches(
    experiment.train_data,
    experiment.phase.batch_size,
    seed=experiment.config.seed,
    position=examples_at(experiment.derived.phases, step),
    shard=host_shard(experiment.mesh),
    num_threads=experiment.config.input_threads or cluster.share_of_cores(),
  )
  return data.to_device(batches, experiment.mesh)


def _compares_replicas(experiment: build.Experiment, step: int) -> bool:
  """Return whether a check of replicas is due in the remaining steps."""
  every = experiment.config.checks.replicas_every_steps
  if not every or experiment.mesh.size == 1:
    return False
  # Devices that each hold a part of one copy have nothing to compare.
  return experiment.derived.total_steps // every > step // every


def _enter_phase(
  run: Run, state: TrainState, compiler: StepCompiler
) -> tuple[build.Experiment, TrainState]:
  """Return the next phase's experiment, and the state with which it begins."""
  experiment, step = run.experiment, int(state.step)
  before = phase_at(experiment, step - 1)
  while not phase_at(experiment, step).is_decided:
    experiment = build.with_sizes(experiment, _choose(run, experiment, state))
  phase = phase_at(experiment, step)
  state = build.enter_phase(experiment.config, before, phase, state)
  if (compiled := compiler.experiment_at(phase)) is not None:
    return compiled.replace(derived=experiment.derived, phase=phase), state
  return build.at_phase(experiment, phase), state


def _choose(run: Run, experiment: build.Experiment, state: TrainState) -> tuple[int, ...]:
  """Return the batch sizes of the run so far, with the one that it chooses now."""
  step, workdir = int(state.step), run.workdir
  ended = build.at_phase(experiment, phase_at(experiment, step - 1))
  parts = ended, state, lambda tried: train_batches(tried, step), lambda: _poll(run, step)
  chosen = tuple(cluster.from_leader(adaptive_batch.read_chosen(workdir)))
  chosen = chosen or (experiment.config.batch_size,)
  with run.reporter.pause():
    size, why, values = adaptive_batch.choose(Branches(*parts))
  finite = {name: x for name, x in values.items() if math.isfinite(x)}
  decision = {"step": step, "batch_size": size, "why": why, "values": finite}
  chosen += (size,)

  def write() -> None:
    append_json_line(workdir / DECISIONS, decision)
    # A resumed run reads this choice and needs no second trial.
    metrics.write_json(workdir / adaptive_batch.FILE, chosen)

  cluster.on_leader(write, "batch sizes")
  if finite:
    run.reporter.write(step + 1, "growth", finite)
  return chosen


def _poll(run: Run, step: int) -> None:
  """Record progress between two phases; raise if all processes are asked to stop."""
  run.watch.at(step + 1, "compiling")
  if run.watch.stop.poll():
    raise StopRequested


def phase_at(experiment: build.Experiment, step: int) -> Phase:
  """Return the phase of the step after `step`."""
  phases = experiment.derived.phases
  return phases[phase_index(phases, step)]
