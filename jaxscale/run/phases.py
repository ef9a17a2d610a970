"""A run through its phases: what is made ready, entered and trained, in turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxscale import cluster
from jaxscale.checkpoint import lock
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cluster.watch.stop_consensus import LeftOff
from jaxscale.cluster.watch.watch import Watch
from jaxscale.config import AdaptiveBatch
from jaxscale.experiment import build
from jaxscale.experiment.phases import Phase, examples_at, phase_index
from jaxscale.run import adaptive_batch
from jaxscale.run.callbacks import has_reached, make_events
from jaxscale.run.nan_policy import Refusals
from jaxscale.run.reporter import Reporter
from jaxscale.training import loop, replica_check
from jaxscale.training.state import TrainState
from jaxscale.training.step import TrainStep

T = TypeVar("T")
# Phases that are being made ready while another one trains.
Ahead = dict[Phase, tuple[build.Experiment, Future[TrainStep]]]


class Run(NamedTuple):
  """What a run has from its beginning to its end, whatever phase it is in.

  Attributes:
    workdir: where it writes.
    held: the lease of it, in process 0.
    checkpoints: where it saves.
    watch: is told where it is, and says when to stop.
    refusals: of steps that were no number.
    began: when, seconds since the epoch.
  """

  workdir: Path
  held: lock.Lease | None
  checkpoints: Checkpoints
  watch: Watch
  refusals: Refusals
  began: float


def train_phases(
  run: Run, state: TrainState, reporter: Reporter, ahead: Ahead
) -> TrainState:
  """Train through every phase that is left, or until asked to stop."""
  experiment, step = reporter.experiment, int(state.step)
  report, fingerprint = experiment.config.log.step_report, None
  compiled: dict[Phase, TrainStep] = {}
  _catch_up(run, state, step, reporter)
  while step < experiment.derived.total_steps and not has_reached(reporter):
    if run.watch.stop.poll():
      break
    run.watch.at(step + 1, "compiling")
    if 0 < step == phase_at(experiment, step).start:
      try:
        experiment, state = _enter_phase(run, experiment, state, reporter, ahead)
      except LeftOff:  # among trials: the same ones come again
        make_events(reporter, run.checkpoints, run.watch).save(step, state, None)
        break
      reporter.enter(experiment)
    phase = experiment.phase
    if (to := min(run.refusals.done_until(step), phase.stop)) > step:
      events = make_events(reporter, run.checkpoints, run.watch)
      state = _pass_over(experiment, state, to, reporter, events)
      step = to
      continue
    position = examples_at(experiment.derived.phases, step)
    batches = adaptive_batch.train_batches(experiment, position)
    with reporter.pause():
      first = next(batches)  # the input starts up while XLA compiles
      _, compiling = ahead.pop(phase, (None, None))
      if phase not in compiled:
        compiled = {phase: _compiled(experiment, compiling)}
      train_step = compiled[phase]
      if report:
        report = False
        _report_step(reporter, train_step, state, step, first)
    if fingerprint is None and _compares_replicas(experiment, step):
      fingerprint = in_background(functools.partial(_fingerprint, experiment))
    following = phase_at(experiment, phase.stop)
    if following not in (phase, *ahead) and not is_adaptive(experiment):
      after = build.at_phase(experiment, following)
      ahead[following] = after, in_background(after.compile_train_step)
    state, step = loop.train(
      state,
      train_step,
      reporter.timed(itertools.chain([first], batches)),
      make_events(reporter, run.checkpoints, run.watch, fingerprint, run.refusals),
      start=step,
      total_steps=run.refusals.next_after(step, phase.stop),
    )
  return state


def _catch_up(run: Run, state: TrainState, step: int, reporter: Reporter) -> None:
  """Evaluate what a run that was asked to stop left for later."""
  events = make_events(reporter, run.checkpoints, run.watch)
  if step and events.is_evaluated(step) and not reporter.has_evaluated(step):
    events.evaluate(step, state)


def _compiled(
  experiment: build.Experiment, compiling: Future[TrainStep] | None
) -> TrainStep:
  return compiling.result() if compiling else experiment.compile_train_step()


def _pass_over(
  experiment: build.Experiment,
  state: TrainState,
  to: int,
  reporter: Reporter,
  events: loop.Events,
) -> TrainState:
  """The state as it goes on after steps that are left out; the last one is saved."""
  step = int(state.step)
  reporter.say(f"steps {step + 1} to {to} are passed over")
  state = build.pass_over(state, to - step)
  if to == experiment.derived.total_steps:
    events.save(to, state, events.evaluate(to, state))
  return state


def _compares_replicas(experiment: build.Experiment, step: int) -> bool:
  """Whether there are replicas, and a check of them is due in what is left."""
  every = experiment.config.checks.replicas_every_steps
  if not every or experiment.mesh.size == 1:
    return False
  # Where devices have parts of one copy there is nothing to compare.
  return experiment.derived.total_steps // every > step // every


def _fingerprint(experiment: build.Experiment) -> replica_check.Fingerprint:
  """The function that hashes a state, compiled."""
  shared = replica_check.shared(experiment.abstract_state())
  fingerprint = replica_check.make_fingerprint(experiment.mesh, shared)
  return fingerprint.lower(shared).compile()


def _report_step(
  reporter: Reporter, train_step: TrainStep, state: TrainState, step: int, batch: Any
) -> None:
  """Measure compute and exchange before the first step; changes nothing."""
  from jaxscale.run import step_report  # seldom needed, and the first step comes first

  experiment = reporter.experiment
  found = step_report.measure(experiment, train_step, state, batch)
  said = step_report.text(
    found, rows=experiment.phase.batch_size, num_devices=experiment.mesh.size
  )
  reporter.measured(step, said, found.metrics())


def _enter_phase(
  run: Run,
  experiment: build.Experiment,
  state: TrainState,
  reporter: Reporter,
  ahead: Ahead,
) -> tuple[build.Experiment, TrainState]:
  """The next phase's experiment, and the state as it finds it."""
  step, phases = int(state.step), experiment.derived.phases
  phase = phases[phase_index(phases, step)]
  before = phases[phase_index(phases, step) - 1]
  if is_adaptive(experiment):
    chosen = tuple(cluster.from_leader(adaptive_batch.read_chosen(run.workdir)))
    chosen = chosen or (experiment.config.batch_size,)
    if phase.ordinal >= len(chosen):
      with reporter.pause():
        last = build.at_phase(experiment, before)
        size = adaptive_batch.choose(
          last, state, reporter.say, lambda: _poll(run, step)
        )
      chosen += (chosen[-1],) * (phase.ordinal - len(chosen)) + (size,)
      adaptive_batch.write_chosen(run.workdir, chosen)
    experiment = build.with_sizes(experiment, chosen)
    phase = phase_at(experiment, step)
  state = build.enter_phase(experiment.config, before, phase, state)
  if phase in ahead:
    return ahead[phase][0]._replace(derived=experiment.derived), state
  return build.at_phase(experiment, phase), state


def _poll(run: Run, step: int) -> None:
  """Note that there is progress between two phases, and leave off if all stop."""
  run.watch.at(step + 1, "compiling")
  if run.watch.stop.poll():
    raise LeftOff


def is_adaptive(experiment: build.Experiment) -> bool:
  """Whether the run itself chooses its batch sizes."""
  return isinstance(experiment.config.phases, AdaptiveBatch)


def phase_at(experiment: build.Experiment, step: int) -> Phase:
  """The phase of the step after `step`."""
  phases = experiment.derived.phases
  return phases[phase_index(phases, step)]


def in_background(function: Callable[[], T]) -> Future[T]:
  """Start it in a thread; the future of its result."""
  pool = ThreadPoolExecutor(1)
  future = pool.submit(function)
  pool.shutdown(wait=False)
  return future
