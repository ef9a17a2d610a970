"""`fit(config, workdir)`: one run from its first step, or from where it was.

The place in the data is one integer and saved with the state: `TrainState.step`.
`examples_at` (experiment/phases.py) turns it into examples seen, and `train_batches`
(run/train_phases.py) starts the pipeline (data/pipeline.py) there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Collection, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale import cluster, data, metrics
from jaxscale.checkpoint import lock
from jaxscale.checkpoint.manager import Checkpoints, UnsavedError
from jaxscale.cluster.watch.watch import Watch
from jaxscale.config import AdaptiveBatch, Config
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError, invalid
from jaxscale.experiment import build
from jaxscale.files import expand
from jaxscale.parallel.layout_exchange import exchange_split
from jaxscale.run import adaptive_batch, provenance, tracking
from jaxscale.run import identity as identities
from jaxscale.run import workdir as workdirs
from jaxscale.run.activity import ActivityRecord
from jaxscale.run.callbacks import Run, RunCallbacks
from jaxscale.run.nan_policy import NanPolicy
from jaxscale.run.programs import Programs, kept_programs
from jaxscale.run.reporter import Reporter
from jaxscale.run.session import check_progress
from jaxscale.run.tracer import Tracer
from jaxscale.run.train_phases import (
  Compiled,
  compile_in_background,
  in_background,
  phase_at,
  train_phases,
)
from jaxscale.training import loop, noise_scale
from jaxscale.training.replica_check import ReplicaDivergenceError
from jaxscale.training.state import TrainState

_PLAN = "plan.json"


class Result(NamedTuple):
  """How a run ended.

  Attributes:
    state: the last state.
    summary: what `summary.json` says; "outcome" is "done" or "interrupted".
  """

  state: TrainState
  summary: dict[str, Any]


def fit(
  config: Config | str | os.PathLike,
  workdir: str | os.PathLike,
  *,
  plan: Mapping[str, Any] | None = None,
  accept_changes: Collection[str] = (),
) -> Result:
  """Train, evaluate and save as the config says; resume if there is a checkpoint.

  Writes config.json, metrics.jsonl, tensorboard/, checkpoints/, summary.json
  and metrics.png into the workdir.

  Args:
    config: the experiment, or its file (`load_config`).
    workdir: its own directory, made if need be.
    plan: of it, as `planning.plan.as_json` gives; it becomes plan.json, with which
      `jaxscale report` and `status` compare the run.
    accept_changes: resume although these have changed: "data" (examples, class names,
      tokenizer) or "code" (of your own classes). The run records it.

  Raises:
    ConfigError: config, data, devices and workdir do not fit each other, or data or
      code have changed since the run began, or differ between processes.
    loop.NonFiniteError: a step's loss or gradient was NaN or Inf, and `config.checks`
      says to stop, or there were too many; the checkpoints are good ones.
    UnsavedError: the last checkpoint could not be written; all else was done.
    lock.LockLostError: another run has taken over the workdir.
    GiveUpError: this job was started again several times, and made no progress.
    ReplicaDivergenceError: devices no longer hold the same parameters; the
      message says up to which step checkpoints are good.

  Example:
    >>> config = load_config("configs/digits.py")               # doctest: +SKIP
    >>> fit(config, "runs/digits").summary["accuracy"] > 0.97   # doctest: +SKIP
    True
  """
  began = time.monotonic()
  workdir = Path(expand(workdir))
  if isinstance(config, str | os.PathLike):
    config = load_config(os.fspath(config))
  if not isinstance(config, Config):
    fix = "give a Config, or the path of a config file"
    raise invalid("config", config, f"is a {type(config).__name__}", fix)
  tracking.check_packages(config)
  accept = identities.accepted(accept_changes)
  experiment = workdirs.experiment_in(workdir, config, accept)
  experiment = _with_chosen_sizes(workdir, experiment)
  identity = identities.identity_of(experiment)
  identities.check_alike(identity)
  changed = workdirs.claim_workdir(workdir, config, identity, accept)
  experiment = experiment.replace(notes=(*experiment.notes, *changed))
  held, wait_s = lock.acquire_for_all(workdir), config.faults.compile_timeout_s
  with (
    held or contextlib.nullcontext(),
    cluster.current_watch() as watch,
    ActivityRecord(workdir, watch, functools.partial(lock.is_held, held)) as activity,
    kept_programs(config.compilation, workdir, _print, wait_s) as programs,
  ):
    if plan is not None:
      cluster.on_leader(functools.partial(_store_plan, plan, workdir), _PLAN)
    return _fit(experiment, identity, workdir, held, activity, programs, watch, began)


def _fit(
  experiment: build.Experiment,
  identity: dict[str, Any],
  workdir: Path,
  held: lock.WorkdirLock | None,
  activity: ActivityRecord,
  programs: Programs,
  watch: Watch,
  began: float,
) -> Result:
  """`fit`, in a directory that no other run writes to."""
  config = experiment.config
  checks, saving = config.checks, config.checkpoint
  _print(workdirs.describe_text(experiment, workdir))
  forget = functools.partial(workdirs.forget_unsaved, workdir, config)
  cluster.on_leader(forget, "workdir")
  limits = checks.max_skipped_steps, checks.max_consecutive_skipped_steps
  nan_policy = NanPolicy(workdir, checks.nan_policy, *limits)
  kept = {k: v for k, v in vars(saving).items() if not k.startswith("every_")}
  split = exchange_split(experiment.layout)
  with (
    Checkpoints(workdir / "checkpoints", lock=held, split=split, **kept) as checkpoints,
    Tracer(workdir, config.log) as tracer,
  ):
    checkpoints.identity = identity
    run = Run(
      workdir=workdir,
      lock=held,
      checkpoints=checkpoints,
      watch=watch,
      nan_policy=nan_policy,
      began=began,
      activity=activity,
      tracer=tracer,
      programs=programs,
    )
    check_progress(config, workdir, checkpoints.newest())
    # What git takes the first step does not wait for.
    recorded = in_background(functools.partial(_record_start, workdir, experiment))
    ended = None
    while ended is None:  # again after each roll back, as a run that resumes
      try:
        ended = _train(run, experiment)
      except loop.NonFiniteError as e:
        if nan_policy.action != "roll_back":
          raise
        good = [s for s in checkpoints.steps() if s <= e.good_until]
        newest = checkpoints.newest()
        good += [newest] * (newest <= e.good_until)
        nan_policy.roll_back(e, cluster.from_leader(max(good, default=0)))
        _print(f"{e.args[0]}; rolling back to it")
    state, reporter = ended

  watch.at(int(state.step), "leaving")
  summary = _summary(run, reporter, state)
  recorded.result()

  def finish():
    metrics.write_json(workdir / "summary.json", summary)
    if summary["outcome"] == "done":
      metrics.plot_metrics(workdir)

  lock.check_for_all(held)
  # Where checkpoints are unsaved, the summary may fail for the same reason.
  with contextlib.suppress(*[OSError] if checkpoints.unsaved else []):
    cluster.on_leader(finish, "summary")
  if checkpoints.unsaved:
    raise UnsavedError(checkpoints.unsaved)
  if summary["outcome"] == "done":
    activity.finish()
  watch.at(summary["step"], "outside")
  return Result(state, summary)


def _record_start(workdir: Path, experiment: build.Experiment) -> None:
  devices = workdirs.devices_of(experiment)
  accepted = [x for x in experiment.notes if x.startswith(workdirs.ACCEPTED)]
  with contextlib.suppress(OSError):  # a full disk costs a line, not the run
    if cluster.is_leader():
      provenance.record_start(workdir, devices, accepted)


def _begin(run: Run, experiment: build.Experiment) -> tuple[build.Experiment, TrainState, Compiled]:
  """Where training begins: the state, the experiment at its phase, its compilation."""
  workdir, checkpoints = run.workdir, run.checkpoints
  experiment = _with_chosen_sizes(workdir, experiment)
  newest = checkpoints.newest()
  experiment = build.at_phase(experiment, phase_at(experiment, newest))
  abstract = experiment.abstract_state()
  # XLA compiles the step while the main thread makes or restores the state.
  compiled: Compiled = {}
  lowering = None
  if newest < experiment.derived.total_steps:
    for dataset in (experiment.train_data, experiment.eval_data):
      data.check_readable(dataset)
    lowering = in_background(lambda: experiment.lower_train_step(abstract))
    compiling = compile_in_background(run, experiment, lowering)
    compiled[experiment.phase] = experiment, compiling
  state = checkpoints.restore(abstract, experiment.exchange.resize)
  if state is None:
    turn = run.programs.turn()
    if lowering is not None:  # two threads that trace are slower than one
      futures.wait([lowering])
    state = experiment.init_state(_print, turn)
  start, end = int(state.step), experiment.derived.total_steps
  if start > end:  # config.json, which shows that it is another run, is gone
    raise ConfigError(
      f"--workdir={workdir}: its checkpoint is of step {start:,}, and --config has "
      f"{end:,} steps; give the config of that run, or use another --workdir"
    )
  if (phase := phase_at(experiment, start)) != experiment.phase:
    # The newest checkpoint was damaged, and the one before is of another phase.
    experiment = build.at_phase(experiment, phase)
  return experiment, state, compiled


def _train(run: Run, experiment: build.Experiment) -> tuple[TrainState, Reporter]:
  """The last state, and what was reported on the way."""
  workdir, checkpoints, watch = run.workdir, run.checkpoints, run.watch
  watch.at(0, "starting")
  experiment, state, compiled = _begin(run, experiment)
  start = int(state.step)
  run.nan_policy.start_from(start)
  run.activity.resumes(start)

  # Only now: a config whose state cannot be made or restored is not this run's.
  grown = _growth(workdir, experiment, start)
  described = workdirs.describe(experiment, checkpoints.identity)
  write = functools.partial(workdirs.write_config, workdir, described)
  cluster.on_leader(functools.partial(write, experiment.config), "config.json")
  may_write = functools.partial(lock.is_held, run.lock)
  with Reporter(experiment, workdir, start, may_write) as reporter:
    checkpoints.say = reporter.say
    run.tracer.attach(reporter.say, experiment.derived.total_steps)
    if cluster.is_leader() and (line := _planned(workdir, described)):
      reporter.say(line)
    at_target = reporter.stops_at_target()
    if at_target or start == experiment.derived.total_steps:
      done = f"reached its target by step {start}" if at_target else ""
      reporter.say(f"{done or f'all {start} steps are done'} already; evaluating")
      RunCallbacks(run, reporter).evaluate(start, state)
      return state, reporter
    if start:
      reporter.say(f"resuming from the checkpoint of step {start}{grown}")
    try:
      state = train_phases(run, state, reporter, compiled)
      watch.at(int(state.step), "saving")
      run.tracer.finish()
      checkpoints.wait()
    except (loop.NonFiniteError, ReplicaDivergenceError) as e:
      checkpoints.wait()
      if not checkpoints.steps():  # then the workdir takes another config
        e.advice = e.advice.replace(", in a new --workdir", "")
      last = _last_good(checkpoints.steps(), e.good_until)
      e.args = (f"{e.args[0]}; last good checkpoint: {last} in {workdir}",)
      raise
  return state, reporter


def _store_plan(plan: Mapping[str, Any], workdir: Path) -> None:
  from jaxscale.planning import stored  # seldom: the first step comes first

  stored.store(plan, workdir)


def _planned(workdir: Path, described: dict[str, Any]) -> str | None:
  """What the plan in the workdir has of this run, as a line; None: there is none."""
  if not os.path.lexists(workdir / _PLAN):
    return None
  from jaxscale.planning import stored

  found = stored.of_workdir(workdir, described)
  return stored.expectation(found) if found else None


def _growth(workdir: Path, experiment: build.Experiment, start: int) -> str:
  """Describe what a longer run than before means for the schedule; else ""."""
  config, derived = experiment.config, experiment.derived
  length = cluster.from_leader(workdirs.length_before(workdir, config))
  if not start or length == {unit: getattr(config, unit) for unit in length}:
    return ""
  before = _with_chosen_sizes(workdir, build.with_length(experiment, length))
  total = f"{before.derived.total_steps:,} to {derived.total_steps:,} steps"
  rates = build.rate_at(before, start - 1), build.rate_at(experiment, start)
  schedule = "the schedule is of the new length, the learning rate jumps from "
  return f": from {total}; {schedule}{rates[0]:.3g} to {rates[1]:.3g}"


def _summary(run: Run, reporter: Reporter, state: TrainState) -> dict[str, Any]:
  experiment, done = reporter.experiment, int(state.step)
  config, total = experiment.config, experiment.derived.total_steps
  names = getattr(experiment.train_data.info, "class_names", ())
  step, seconds = reporter.target() or (None, None)
  is_at_end = done == total or (config.stop_at_target and step is not None)
  before = metrics.read_json(run.workdir / "summary.json")
  if seconds is None and before.get("target_step") == step:  # only evaluated again
    seconds = before.get("target_seconds")
  took = time.monotonic() - run.began
  if reporter.start == done == before.get("step"):
    took = before.get("seconds", took)
  return {
    "outcome": "done" if is_at_end and reporter.has_evaluated(done) else "interrupted",
    "step": done,
    "total_steps": total,
    **reporter.evaluation,
    "target_accuracy": config.target_accuracy,
    "target_loss": config.target_loss,
    "target_step": step,
    "target_seconds": None if seconds is None else round(seconds, 1),
    **noise_scale.read(state.noise),
    "damaged_examples": reporter.count_damaged(),
    **run.nan_policy.summary(),
    **reporter.efficiency.summary(),
    **run.activity.summary(),
    "seconds": round(took, 1),
    "devices": f"{experiment.mesh.size} x {jax.devices()[0].device_kind}",
    "workdir": str(run.workdir),
    **({"class_names": list(names)} if names else {}),
  }


def _print(line: str) -> None:
  if cluster.is_leader():
    print(line, flush=True)


def _with_chosen_sizes(workdir: Path, experiment: build.Experiment) -> build.Experiment:
  """With the batch sizes that an adaptive run has chosen by now."""
  if not isinstance(experiment.config.phases, AdaptiveBatch):
    return experiment
  chosen = cluster.from_leader(adaptive_batch.read_chosen(workdir))
  return build.with_sizes(experiment, chosen)


def _last_good(steps: list[int], good_until: int) -> str:
  """The newest checkpoint that a fault cannot have reached, as words."""
  good = [s for s in steps if s <= good_until]
  later = [str(s) for s in steps if s > good_until]
  last = f"step {good[-1]}" if good else "none" if steps else "none yet"
  if later:
    last += f" (move {' and '.join(later)} away, saved since the last good check)"
  return last
