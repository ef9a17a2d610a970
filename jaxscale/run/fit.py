"""Train one run with `fit(config, workdir)`, from the beginning or from a checkpoint.

The position in the data is a single integer, `TrainState.step`, which is saved with the
state. `examples_at` (experiment/phases.py) converts it to examples seen, and
`train_batches` (run/train_phases.py) starts the pipeline (data/pipeline.py) at it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale import cluster, data
from jaxscale.checkpoint import lock
from jaxscale.cluster.environment import refuse_fallback
from jaxscale.config import Config
from jaxscale.config.config_file import check_not_loading
from jaxscale.errors import ConfigError, NonFiniteError
from jaxscale.experiment import build
from jaxscale.files import expand
from jaxscale.metrics.log import logger
from jaxscale.run import hooks as run_hooks
from jaxscale.run import workdir as workdirs
from jaxscale.run.callbacks import Callback
from jaxscale.run.open_run import open_run, with_chosen_sizes
from jaxscale.run.reporter import Reporter
from jaxscale.run.run import Run
from jaxscale.run.session import check_progress, set_cpu_threads
from jaxscale.run.step_compiler import StepCompiler, in_background
from jaxscale.run.summary import finish
from jaxscale.run.train_phases import phase_at, train_phases
from jaxscale.training.replica_check import ReplicaDivergenceError
from jaxscale.training.types import TrainState


class Result(NamedTuple):
  """Result of a run.

  Attributes:
    state: the final training state.
    summary: the content of `summary.json`; "outcome" is "done" or "interrupted".
  """

  state: TrainState
  summary: dict[str, Any]


def fit(
  config: Config | str | os.PathLike,
  workdir: str | os.PathLike,
  *,
  plan: Mapping[str, Any] | None = None,
  accept_changes: Collection[str] = (),
  callbacks: Sequence[Callback] = (),
  loss_fn: Any = None,
) -> Result:
  """Train, evaluate and save as configured; resume if the workdir has a checkpoint.

  Writes config.json, metrics.jsonl, tensorboard/, checkpoints/, summary.json and
  metrics.png to the workdir.

  Args:
    config: the config, or the path of a config file or of a run. For other settings, or a run
      that others could have written, pass `jaxscale.load_config(path, {"epochs": "3"})`, which
      has an option `trust`.
    workdir: the run's own directory, which is created if it does not exist.
    plan: a plan of the run, from `planning.plan.as_json`. It is saved as plan.json, and
      `jaxscale report` and `status` compare the run with it.
    accept_changes: kinds of changes to resume with: "data" (examples, class names,
      tokenizer) and "code" (your own classes). The run records accepted changes.
    callbacks: callbacks from Python, which are called after those of `config.callbacks`.
    loss_fn: a loss from Python in place of `config.loss`: an `Objective`, a
      `GatheredObjective`, a `CustomLoss`, or a function (params, model_state, batch, keys)
      -> (sum, (model_state, totals)), with the evaluation of `config.loss`. A resumed run
      must have the same code. None uses `config.loss`.

  Raises:
    ConfigError: config, data, devices and workdir do not fit each other; or data or code
      have changed since the run began, or differ between processes.
    NonFiniteError: the loss or gradient of a step was NaN or Inf, and `config.checks`
      says to stop, or too many steps were skipped. Saved checkpoints are good.
    UnsavedError: the last checkpoint could not be written; all other work is done.
    LockLostError: another run has taken over the workdir.
    GiveUpError: the job was restarted several times without progress.
    ReplicaDivergenceError: devices no longer hold the same parameters. The message has
      the last step whose checkpoint is good.

  Example:
    >>> config = load_config("configs/digits.py")               # doctest: +SKIP
    >>> fit(config, "runs/digits").summary["accuracy"] > 0.97   # doctest: +SKIP
    True
  """
  check_not_loading("trains")
  set_cpu_threads()  # from a script or notebook, in time unless it has already used a device
  refuse_fallback()
  parts = config, Path(expand(workdir)), plan, accept_changes, callbacks, loss_fn
  with open_run(*parts) as run:
    with run.checkpoints, run.tracer:
      check_progress(run.experiment.config, run.workdir, run.checkpoints.newest())
      run.record_start()
      state = None
      while state is None:  # Each roll back resumes from a checkpoint.
        try:
          state = train(run)
        except NonFiniteError as error:
          roll_back(run, error)
    return Result(state, finish(run, state))


def train(run: Run) -> TrainState:
  """Train from the newest checkpoint, or from the beginning, to the end of the run.

  Raises:
    NonFiniteError, ReplicaDivergenceError: as for `fit`; a pending save completes first.
  """
  run.watch.at(0, "starting")
  compiler = StepCompiler(run.programs)
  state = restore(run, compiler)
  run.start_from(start := int(state.step))
  # Write config.json only now: making or restoring the state may show that the config is wrong.
  grown = _growth(run, start)
  described = workdirs.describe(run.experiment, run.checkpoints.identity)
  write = functools.partial(workdirs.write_config, run.workdir, described)
  cluster.on_leader(functools.partial(write, run.experiment.config), "config.json")
  may_write = functools.partial(lock.is_held, run.lock)
  run.reporter = Reporter(run.experiment, run.workdir, start, may_write, run.lines)
  with run.reporter:
    run.tracer.check_plan(run.total_steps)
    if run.is_over(start):
      logger.info(f"{_end_of(run, start)}; evaluating again")
      return run_hooks.call(run, "on_end", start, run_hooks.evaluate(run, start, state))
    if start:
      logger.info(f"resuming from the checkpoint of step {start}{grown}")
    try:
      state = run_hooks.call(run, "on_start", start, state)
      state = train_phases(run, state, compiler)
      if run.callbacks.stopped:
        logger.info(f"stopped by {run.callbacks.stop_text()}")
      if run.is_over(int(state.step)):
        run_hooks.call(run, "on_end", int(state.step), state)
      run.watch.at(int(state.step), "saving")
      run.tracer.finish()
      run.checkpoints.wait()
    except (NonFiniteError, ReplicaDivergenceError) as e:
      run.checkpoints.wait()
      steps = run.checkpoints.steps()
      if not steps:  # Without a checkpoint the workdir accepts a changed config.
        e.advice = e.advice.replace(", in a new --workdir", "")
      e.args = (
        f"{e.args[0]}; last good checkpoint: {_last_good(steps, e.good_until)} in {run.workdir}",
      )
      raise
  return state


def restore(run: Run, compiler: StepCompiler) -> TrainState:
  """Return the state to train from, and set the experiment to its phase.

  XLA compiles the train step while the main thread creates or restores the state.
  """
  experiment, newest = with_chosen_sizes(run.workdir, run.experiment), run.checkpoints.newest()
  experiment = build.at_phase(experiment, phase_at(experiment, newest))
  abstract, lowering = experiment.abstract_state(), None
  if newest < experiment.derived.total_steps:
    for dataset in (experiment.train_data, experiment.eval_data):
      for part in dataset.parts or (dataset,):
        data.check_readable(part)
    lowering = in_background(lambda: experiment.lower_train_step(abstract))
    compiler.begin(experiment, lowering)
  state = run.checkpoints.restore(abstract, experiment.exchange.resize)
  run.callbacks.restore(run.checkpoints.restored, 0 if state is None else int(state.step))
  if state is None:
    if lowering is not None:  # Two threads trace slower than one.
      futures.wait([lowering])
    state = experiment.init_state(run.programs.turn())
  start, end = int(state.step), experiment.derived.total_steps
  if start > end:  # Happens if config.json was deleted.
    problem = f"the checkpoint is at step {start:,}, but --config has only {end:,} steps"
    fix = "use the config of that run, or another --workdir"
    raise ConfigError(f"--workdir={run.workdir}: {problem}; {fix}")
  if (phase := phase_at(experiment, start)) != experiment.phase:
    # The newest checkpoint was damaged, and the previous one is in an earlier phase.
    experiment = build.at_phase(experiment, phase)
  run.experiment = experiment
  return state


def _end_of(run: Run, step: int) -> str:
  """Describe why a run that is started again has nothing left to train."""
  if text := run.callbacks.stop_text():
    return f"stopped by {text}"
  is_at_target, done = run.stops_at_target(), f"all {step} steps are already done"
  return f"the target was already reached by step {step}" if is_at_target else done


def roll_back(run: Run, error: NonFiniteError) -> None:
  """Make the run resume from its last good checkpoint and skip the steps since.

  Raises:
    NonFiniteError: `checks.nan_policy` is not "roll_back", or the run has rolled back too
      often.
  """
  if run.nan_policy.action != "roll_back":
    raise error
  newest = run.checkpoints.newest()
  good = [step for step in (*run.checkpoints.steps(), newest) if step <= error.good_until]
  run.nan_policy.roll_back(error, cluster.from_leader(max(good, default=0)))
  logger.warning(f"{error.args[0]}; rolling back to it")


def _growth(run: Run, start: int) -> str:
  """Return a note on the changed schedule if the run got longer; "" if it did not."""
  experiment, config, derived = run.experiment, run.experiment.config, run.experiment.derived
  length = cluster.from_leader(workdirs.length_before(run.workdir, config))
  if not start or length == {unit: getattr(config, unit) for unit in length}:
    return ""
  before = with_chosen_sizes(run.workdir, build.with_length(experiment, length))
  total = f"{before.derived.total_steps:,} to {derived.total_steps:,} steps"
  rates = build.rate_at(before, start - 1), build.rate_at(experiment, start)
  schedule = "the schedule has the new length, so lr jumps from "
  return f": from {total}; {schedule}{rates[0]:.3g} to {rates[1]:.3g}"


def _last_good(steps: list[int], good_until: int) -> str:
  """Describe the newest checkpoint that was saved before the fault."""
  good = [s for s in steps if s <= good_until]
  later = [str(s) for s in steps if s > good_until]
  last = f"step {good[-1]}" if good else "none" if steps else "none yet"
  if later:
    last += f" (move {' and '.join(later)} away: saved since the last good check)"
  return last
