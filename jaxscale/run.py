"""`fit(config, workdir)`: one run from its first step, or from where it was."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from jaxscale import (
  adaptive,
  build,
  cluster,
  lease,
  loop,
  metrics,
  noise_scale,
  replicas,
)
from jaxscale.checkpoint import Checkpoints, UnsavedError
from jaxscale.config import AdaptiveBatch, Config
from jaxscale.events import Stop, make_events
from jaxscale.holder import job_of
from jaxscale.refusals import Limits, Refusals
from jaxscale.replicas import ReplicaDivergenceError
from jaxscale.reporter import Reporter
from jaxscale.stages import Stage, examples_at, stage_index
from jaxscale.state import TrainState
from jaxscale.step import TrainStep
from jaxscale.workdir import claim_workdir, describe, describe_text

T = TypeVar("T")
# Stages that are being made ready while another one trains.
Ahead = dict[Stage, tuple[build.Experiment, Future[TrainStep]]]


class Result(NamedTuple):
  """How a run ended.

  Attributes:
    state: the last state.
    summary: what `summary.json` says; "outcome" is "done" or "interrupted".
  """

  state: TrainState
  summary: dict[str, Any]


def fit(config: Config, workdir: str | os.PathLike) -> Result:
  """Train, evaluate and save as the config says; go on if the workdir can.

  Writes config.json, metrics.jsonl, tensorboard/, checkpoints/, summary.json
  and metrics.png into the workdir.

  Args:
    config: the experiment.
    workdir: its own directory, made if need be.

  Raises:
    ConfigError: config, data, devices and workdir do not fit each other.
    loop.NonFiniteError: a step's loss or gradient was no number and was refused, and
      `config.checks` says to stop, or it were too many; the checkpoints are good ones.
    UnsavedError: the last checkpoint could not be written; all else was done.
    lease.LostError: another run has taken over the workdir.
    ReplicaDivergenceError: devices no longer hold the same parameters; the
      message says up to which step checkpoints are good.

  Example:
    >>> result = fit(load_config("configs/digits.py"), "runs/digits")
    >>> result.summary["accuracy"] > 0.97                  # doctest: +SKIP
    True
  """
  began = time.time()
  workdir = Path(workdir)
  experiment = build.experiment(config)
  described = describe(experiment)
  claim_workdir(workdir, config)
  held = lease.take_for_all(workdir, job_of(os.environ))
  with held or contextlib.nullcontext():
    return _fit(experiment, described, workdir, held, began)


def _fit(
  experiment: build.Experiment,
  described: dict[str, Any],
  workdir: Path,
  held: lease.Lease | None,
  began: float,
) -> Result:
  """`fit`, in a directory that no other run writes to."""
  if cluster.is_leader():
    print(describe_text(experiment, workdir))
  cluster.on_leader(
    lambda: metrics.write_json(workdir / "config.json", described), "config.json"
  )
  keep, checks = experiment.config.checkpoint, experiment.config.checks
  limits = Limits(checks.most_skipped, checks.most_skipped_in_a_row)
  refusals = Refusals(workdir, checks.non_finite, limits)
  with (
    Stop() as stop,
    Checkpoints(
      workdir / "checkpoints",
      keep_last=keep.keep_last,
      keep_best=keep.keep_best,
      on_failure=keep.on_failure,
      lease=held,
    ) as checkpoints,
  ):
    parts = experiment, checkpoints, workdir, stop, refusals, began, held
    ended = None
    while ended is None:  # again after each roll back, as a run that goes on
      ended = _train_or_roll_back(*parts)
    state, reporter = ended

  summary = _summary(reporter, state, refusals, workdir, began)

  def finish():
    metrics.write_json(workdir / "summary.json", summary)
    if summary["outcome"] == "done":
      metrics.plot_metrics(workdir)

  lease.check_for_all(held)
  try:
    cluster.on_leader(finish, "summary")
  except OSError:
    if not checkpoints.unsaved:  # which is worse, and for the same reason
      raise
  if checkpoints.unsaved:
    raise UnsavedError(checkpoints.unsaved)
  return Result(state, summary)


def _summary(
  reporter: Reporter,
  state: TrainState,
  refusals: Refusals,
  workdir: Path,
  began: float,
) -> dict[str, Any]:
  experiment, done = reporter.experiment, int(state.step)
  config, total = experiment.config, experiment.derived.total_steps
  step, seconds = reporter.target() or (None, None)
  stopped = config.stop_at_target and step is not None
  if seconds is None and step is not None:  # only evaluated again, maybe
    before = _summary_before(workdir)
    if before.get("target_step") == step:
      seconds = before.get("target_seconds")
  return {
    "outcome": "done" if done == total or stopped else "interrupted",
    "step": done,
    "total_steps": total,
    **reporter.evaluation,
    "target_accuracy": config.target_accuracy,
    "target_step": step,
    "target_seconds": None if seconds is None else round(seconds, 1),
    "noise_scale": noise_scale.read(state.noise) if config.noise_scale else None,
    "damaged_examples": reporter.count_damaged(),
    **refusals.summary(),
    "seconds": round(time.time() - began, 1),
    "devices": f"{experiment.mesh.size} x {jax.devices()[0].device_kind}",
    "workdir": str(workdir),
  }


def _summary_before(workdir: Path) -> dict[str, Any]:
  """What the directory's last run wrote of itself."""
  try:
    return json.loads((workdir / "summary.json").read_text())
  except (OSError, ValueError):
    return {}


def _train_or_roll_back(
  experiment: build.Experiment,
  checkpoints: Checkpoints,
  workdir: Path,
  stop: Stop,
  refusals: Refusals,
  began: float,
  held: lease.Lease | None,
) -> tuple[TrainState, Reporter] | None:
  """What `_train` gives, or None if it is to be called again, from a checkpoint."""
  try:
    return _train(experiment, checkpoints, workdir, stop, refusals, began, held)
  except loop.NonFiniteError as e:
    if refusals.policy != "roll_back":
      raise
    good = [s for s in checkpoints.steps() if s <= e.good_until]
    last = cluster.from_leader(max(good, default=0))
    refusals.roll_back(e, last)
    if cluster.is_leader():
      print(f"{e.args[0]}; rolling back to it", flush=True)
    return None


def _train(
  experiment: build.Experiment,
  checkpoints: Checkpoints,
  workdir: Path,
  stop: Stop,
  refusals: Refusals,
  began: float,
  held: lease.Lease | None,
) -> tuple[TrainState, Reporter]:
  """The last state, and what was reported on the way."""
  if _is_adaptive(experiment):
    chosen = cluster.from_leader(adaptive.read_chosen(workdir))
    experiment = build.with_sizes(experiment, chosen)
  newest = cluster.from_leader(max(checkpoints.steps(), default=0))
  experiment = build.at_stage(experiment, _stage(experiment, newest))
  abstract = experiment.abstract_state()
  # XLA compiles the step beside what the main thread does until it needs it.
  ahead: Ahead = {}
  if newest < experiment.derived.total_steps:
    compiling = functools.partial(experiment.compile_train_step, abstract)
    ahead[experiment.stage] = experiment, _in_background(compiling)
  state = checkpoints.restore(abstract, experiment.exchange.resize)
  if state is None:
    state = experiment.init_state()
  start = int(state.step)
  refusals.start_from(start)
  if (stage := _stage(experiment, start)) != experiment.stage:
    # The newest checkpoint was damaged, and the one before is of another stage.
    experiment = build.at_stage(experiment, stage)

  may_write = functools.partial(lease.held, held)
  with Reporter(experiment, workdir, start, may_write) as reporter:
    checkpoints.say = reporter.say
    stopped = experiment.config.stop_at_target and reporter.target()
    if start == experiment.derived.total_steps or stopped:
      done = (
        f"reached its target by step {start}"
        if stopped
        else f"all {start} steps are done"
      )
      reporter.say(f"{done} already; evaluating")
      make_events(reporter, checkpoints, stop).evaluate(start, state)
      return state, reporter
    if start:
      reporter.say(f"going on from the checkpoint of step {start}")
    if experiment.config.log.mllog:
      reporter.begin_mllog(workdir, began)
    try:
      parts = reporter, checkpoints, stop, refusals
      state = _train_stages(state, *parts, ahead, workdir)
      checkpoints.wait()
    except (loop.NonFiniteError, ReplicaDivergenceError) as e:
      checkpoints.wait()
      last = _last_good(checkpoints.steps(), e.good_until)
      e.args = (f"{e.args[0]}; last good checkpoint: {last} in {workdir}",)
      raise
  return state, reporter


def _last_good(steps: list[int], good_until: int) -> str:
  """The newest checkpoint that a fault cannot have reached, as words."""
  good = [s for s in steps if s <= good_until]
  later = [str(s) for s in steps if s > good_until]
  last = f"step {good[-1]}" if good else "none" if steps else "none yet"
  if later:
    last += f" (move {' and '.join(later)} away, saved since the last good check)"
  return last


def _train_stages(
  state: TrainState,
  reporter: Reporter,
  checkpoints: Checkpoints,
  stop: Stop,
  refusals: Refusals,
  ahead: Ahead,
  workdir: Path,
) -> TrainState:
  """Train through every stage that is left, or until asked to stop."""
  experiment, step = reporter.experiment, int(state.step)
  report, fingerprint = experiment.config.log.step_report, None
  compiled: dict[Stage, TrainStep] = {}
  while step < experiment.derived.total_steps and not stop.agreed:
    if 0 < step == _stage(experiment, step).start:
      experiment, state = _enter_stage(experiment, state, reporter, ahead, workdir)
      reporter.enter(experiment)
    stage = experiment.stage
    if (to := min(refusals.done_until(step), stage.stop)) > step:
      events = make_events(reporter, checkpoints, stop)
      state = _pass_over(experiment, state, to, reporter, events)
      step = to
      continue
    position = examples_at(experiment.derived.stages, step)
    batches = adaptive.train_batches(experiment, position)
    with reporter.pause():
      first = next(batches)  # the input starts up while XLA compiles
      _, compiling = ahead.pop(stage, (None, None))
      if stage not in compiled:
        compiled = {stage: _compiled(experiment, compiling)}
      train_step = compiled[stage]
      if report:
        report = False
        _report_step(reporter, train_step, state, step, first)
    if fingerprint is None and _compares_replicas(experiment, step):
      fingerprint = _in_background(functools.partial(_fingerprint, experiment))
    following = _stage(experiment, stage.stop)
    if following not in (stage, *ahead) and not _is_adaptive(experiment):
      after = build.at_stage(experiment, following)
      ahead[following] = after, _in_background(after.compile_train_step)
    state, step = loop.train(
      state,
      train_step,
      reporter.timed(itertools.chain([first], batches)),
      make_events(reporter, checkpoints, stop, fingerprint, refusals),
      start=step,
      total_steps=refusals.next_after(step, stage.stop),
    )
  return state


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
  return experiment.derived.total_steps // every > step // every


def _fingerprint(experiment: build.Experiment) -> replicas.Fingerprint:
  """The function that hashes a state, compiled."""
  shared = replicas.shared(experiment.abstract_state())
  return replicas.make_fingerprint(experiment.mesh).lower(shared).compile()


def _report_step(
  reporter: Reporter, train_step: TrainStep, state: TrainState, step: int, batch: Any
) -> None:
  """Measure compute and exchange before the first step; changes nothing."""
  from jaxscale import step_report  # seldom needed, and the first step comes first

  experiment = reporter.experiment
  found = step_report.measure(experiment, train_step, state, batch)
  said = step_report.text(
    found, rows=experiment.stage.batch_size, num_devices=experiment.mesh.size
  )
  reporter.measured(step, said, found.metrics())


def _is_adaptive(experiment: build.Experiment) -> bool:
  return isinstance(experiment.config.stages, AdaptiveBatch)


def _stage(experiment: build.Experiment, step: int) -> Stage:
  stages = experiment.derived.stages
  return stages[stage_index(stages, step)]


def _enter_stage(
  experiment: build.Experiment,
  state: TrainState,
  reporter: Reporter,
  ahead: Ahead,
  workdir: Path,
) -> tuple[build.Experiment, TrainState]:
  """The next stage's experiment, and the state as it finds it."""
  step, stages = int(state.step), experiment.derived.stages
  stage = stages[stage_index(stages, step)]
  before = stages[stage_index(stages, step) - 1]
  if _is_adaptive(experiment):
    chosen = tuple(cluster.from_leader(adaptive.read_chosen(workdir)))
    chosen = chosen or (experiment.config.batch_size,)
    if stage.ordinal >= len(chosen):
      with reporter.pause():
        size = adaptive.choose(build.at_stage(experiment, before), state, reporter.say)
      chosen += (chosen[-1],) * (stage.ordinal - len(chosen)) + (size,)
      adaptive.write_chosen(workdir, chosen)
    experiment = build.with_sizes(experiment, chosen)
    stage = _stage(experiment, step)
  state = build.enter_stage(experiment.config, before, stage, state)
  if stage in ahead:
    return ahead[stage][0]._replace(derived=experiment.derived), state
  return build.at_stage(experiment, stage), state


def _in_background(function: Callable[[], T]) -> Future[T]:
  """Start it in a thread; the future of its result."""
  pool = ThreadPoolExecutor(1)
  future = pool.submit(function)
  pool.shutdown(wait=False)
  return future
