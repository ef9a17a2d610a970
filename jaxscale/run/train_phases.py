"""A run through its phases: each is compiled, entered and trained, in turn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from jaxscale import cluster, data, metrics
from jaxscale.cluster.watch.stop_consensus import StopRequested
from jaxscale.config import AdaptiveBatch
from jaxscale.experiment import build
from jaxscale.experiment.phases import Phase, examples_at, phase_index
from jaxscale.mesh import host_shard
from jaxscale.run import adaptive_batch
from jaxscale.run.callbacks import Run, RunCallbacks
from jaxscale.run.efficiency import read_program
from jaxscale.run.gc_pause import resume_gc
from jaxscale.run.reporter import Reporter
from jaxscale.training import loop, replica_check
from jaxscale.training.state import TrainState
from jaxscale.training.step import Batch, TrainStep

T = TypeVar("T")
# The phase that trains and the next one, whose step is compiled in the background.
Compiled = dict[Phase, tuple[build.Experiment, Future[TrainStep]]]


def train_phases(run: Run, state: TrainState, reporter: Reporter, compiled: Compiled) -> TrainState:
  """Train through every phase that is left, or until asked to stop."""
  experiment, step = reporter.experiment, int(state.step)
  reports_step, fingerprint = experiment.config.log.step_report, None
  callbacks = RunCallbacks(run, reporter)
  if step and callbacks.is_evaluated(step) and not reporter.has_evaluated(step):
    callbacks.evaluate(step, state)  # what a run that was asked to stop postponed
  while step < experiment.derived.total_steps and not reporter.stops_at_target():
    if run.watch.stop.poll():
      break
    run.watch.at(step + 1, "compiling")
    if 0 < step == phase_at(experiment, step).start:
      try:
        experiment, state = _enter_phase(run, state, reporter, compiled)
      except StopRequested:  # among trials: the same ones are made again
        callbacks.save(step, state, None)
        break
      reporter.enter(experiment)
      callbacks = RunCallbacks(run, reporter)
    phase = experiment.phase
    if (to := min(run.nan_policy.done_until(step), phase.stop)) > step:
      reporter.say(f"steps {step + 1} to {to} are passed over")
      state, step = build.pass_over(state, to - step), to
      if to == experiment.derived.total_steps:
        callbacks.save(to, state, callbacks.evaluate(to, state))
      continue
    batches = train_batches(experiment, step)
    with reporter.pause():
      first = next(batches)  # the input starts up while XLA compiles
      if phase not in compiled:
        compiled[phase] = experiment, compile_in_background(run, experiment)
      train_step = compiled[phase][1].result()
      _describe_program(train_step, reporter)
      if reports_step:
        reports_step = False
        _report_step(experiment, train_step, state, first, reporter)
    if fingerprint is None and _compares_replicas(experiment, step):
      turn = run.programs.turn()
      fingerprint = in_background(functools.partial(_fingerprint, experiment, turn))
    following = phase_at(experiment, phase.stop)
    for old in set(compiled) - {phase, following}:
      del compiled[old]
    if following not in compiled and not is_adaptive(experiment):
      after = build.at_phase(experiment, following)
      compiled[following] = after, compile_in_background(run, after)
    resume_gc()
    state, step = loop.train(
      state,
      train_step,
      reporter.timed(itertools.chain([first], batches)),
      RunCallbacks(run, reporter, fingerprint),
      start=step,
      total_steps=run.nan_policy.next_after(step, phase.stop),
    )
  return state


def _describe_program(train_step: TrainStep, reporter: Reporter) -> None:
  """Have the leader read the FLOPs of a compiled step."""
  if cluster.is_leader():
    reading = functools.partial(read_program, train_step)
    reporter.efficiency.program = in_background(reading)


def _report_step(
  experiment: build.Experiment,
  train_step: TrainStep,
  state: TrainState,
  batch: Batch,
  reporter: Reporter,
) -> None:
  """Say what the parts of a step take (`log.step_report`)."""
  from jaxscale.run import step_report  # seldom: the first step comes first

  report = step_report.measure(experiment, train_step, state, batch)
  sizes = {"rows": experiment.phase.batch_size, "num_devices": experiment.mesh.size}
  text = step_report.text(report, **sizes)
  reporter.measured(int(state.step), text, report.metrics())


def train_batches(experiment: build.Experiment, step: int) -> Iterator[Batch]:
  """Global batches of this phase on the devices, from those of step `step` + 1 on."""
  config = experiment.config
  batches = data.train_batches(
    experiment.train_data,
    experiment.phase.batch_size,
    seed=config.seed,
    position=examples_at(experiment.derived.phases, step),
    shard=host_shard(experiment.mesh),
    num_threads=config.input_threads,
  )
  return data.to_device(batches, experiment.mesh)


def _compares_replicas(experiment: build.Experiment, step: int) -> bool:
  """Whether there are replicas, and a check of them is due in what is left."""
  every = experiment.config.checks.replicas_every_steps
  if not every or experiment.mesh.size == 1:
    return False
  # Where devices have parts of one copy there is nothing to compare.
  return experiment.derived.total_steps // every > step // every


def _fingerprint(experiment: build.Experiment, turn: build.Turn) -> replica_check.Fingerprint:
  """The function that hashes a state, compiled."""
  shared = replica_check.shared(experiment.abstract_state())
  lowered = replica_check.make_fingerprint(experiment.mesh, shared).lower(shared)
  with turn:
    return lowered.compile()


def _enter_phase(
  run: Run, state: TrainState, reporter: Reporter, compiled: Compiled
) -> tuple[build.Experiment, TrainState]:
  """The next phase's experiment, and the state as it begins with it."""
  experiment, step = reporter.experiment, int(state.step)
  before, phase = phase_at(experiment, step - 1), phase_at(experiment, step)
  if is_adaptive(experiment):
    chosen = tuple(cluster.from_leader(adaptive_batch.read_chosen(run.workdir)))
    chosen = chosen or (experiment.config.batch_size,)
    if phase.ordinal >= len(chosen):
      ended, poll = build.at_phase(experiment, before), lambda: _poll(run, step)
      with reporter.pause():
        size = adaptive_batch.choose(
          ended, state, lambda tried: train_batches(tried, step), reporter.say, poll
        )
      chosen += (chosen[-1],) * (phase.ordinal - len(chosen)) + (size,)
      path = run.workdir / adaptive_batch.FILE
      # So that a resumed run needs no second trial.
      cluster.on_leader(lambda: metrics.write_json(path, chosen), "batch sizes")
    experiment = build.with_sizes(experiment, chosen)
    phase = phase_at(experiment, step)
  state = build.enter_phase(experiment.config, before, phase, state)
  if phase in compiled:
    return compiled[phase][0].replace(derived=experiment.derived), state
  return build.at_phase(experiment, phase), state


def _poll(run: Run, step: int) -> None:
  """Note that there is progress between two phases; raises if all are to stop."""
  run.watch.at(step + 1, "compiling")
  if run.watch.stop.poll():
    raise StopRequested


def is_adaptive(experiment: build.Experiment) -> bool:
  """Whether the run itself chooses its batch sizes."""
  return isinstance(experiment.config.phases, AdaptiveBatch)


def phase_at(experiment: build.Experiment, step: int) -> Phase:
  """The phase of the step after `step`."""
  phases = experiment.derived.phases
  return phases[phase_index(phases, step)]


def compile_in_background(
  run: Run, experiment: build.Experiment, lowering: Future[Any] | None = None
) -> Future[TrainStep]:
  """The train step of this phase; the main threads of all processes start it.

  Args:
    run: whose programs it is among.
    experiment: at the phase.
    lowering: of `lower_train_step`, if it has begun.
  """
  turn = run.programs.turn()

  def compile_step():
    return experiment.compile_train_step(lowering and lowering.result(), turn)

  return in_background(compile_step)


def in_background(function: Callable[[], T]) -> Future[T]:
  """Start it in a thread; the future of its result."""
  pool = ThreadPoolExecutor(1)
  future = pool.submit(function)
  pool.shutdown(wait=False)
  return future
