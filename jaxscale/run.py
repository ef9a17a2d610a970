"""`fit(config, workdir)`: one run from its first step, or from where it was."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale import adaptive, build, cluster, data, loop, metrics
from jaxscale.checkpoint import Checkpoints
from jaxscale.config import AdaptiveBatch, Config
from jaxscale.derive import steps_of
from jaxscale.mesh import host_shard
from jaxscale.report import Reporter
from jaxscale.stages import Stage, examples_at, stage_index
from jaxscale.state import TrainState
from jaxscale.workdir import claim_workdir, describe, describe_text


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
    loop.NonFiniteError: training diverged; the checkpoints are good ones.

  Example:
    >>> result = fit(load_config("configs/digits.py"), "runs/digits")
    >>> result.summary["accuracy"] > 0.97                  # doctest: +SKIP
    True
  """
  began = time.time()
  workdir = Path(workdir)
  experiment = build.experiment(config)
  described = describe(experiment)
  claim_workdir(workdir, described["config"])
  if cluster.is_leader():
    print(describe_text(experiment, workdir))
  cluster.on_leader(
    lambda: metrics.write_json(workdir / "config.json", described), "config.json"
  )
  keep = config.checkpoint
  with (
    _Stop() as stop,
    Checkpoints(
      workdir / "checkpoints", keep_last=keep.keep_last, keep_best=keep.keep_best
    ) as checkpoints,
  ):
    state, reporter = _train(experiment, checkpoints, workdir, stop, began)

  summary = _summary(reporter, int(state.step), workdir, began)

  def finish():
    metrics.write_json(workdir / "summary.json", summary)
    if summary["outcome"] == "done":
      metrics.plot_metrics(workdir)

  cluster.on_leader(finish, "summary")
  return Result(state, summary)


def _summary(
  reporter: Reporter, done: int, workdir: Path, began: float
) -> dict[str, Any]:
  experiment = reporter.experiment
  config, total = experiment.config, experiment.derived.total_steps
  step, seconds = reporter.target() or (None, None)
  stopped = config.stop_at_target and step is not None
  return {
    "outcome": "done" if done == total or stopped else "interrupted",
    "step": done,
    "total_steps": total,
    **reporter.evaluation,
    "target_accuracy": config.target_accuracy,
    "target_step": step,
    "target_seconds": None if seconds is None else round(seconds, 1),
    "noise_scale": reporter.noise_scale,
    "damaged_examples": reporter.damaged,
    "seconds": round(time.time() - began, 1),
    "devices": f"{experiment.mesh.size} x {jax.devices()[0].device_kind}",
    "workdir": str(workdir),
  }


def _train(
  experiment: build.Experiment,
  checkpoints: Checkpoints,
  workdir: Path,
  stop: _Stop,
  began: float,
) -> tuple[TrainState, Reporter]:
  """The last state, and what was reported on the way."""
  if _is_adaptive(experiment):
    experiment = build.with_sizes(experiment, adaptive.read_chosen(workdir))
  newest = max(checkpoints.steps(), default=0)
  experiment = build.at_stage(experiment, _stage(experiment, newest))
  abstract = experiment.abstract_state()
  # XLA compiles the step beside what the main thread does until it needs it.
  compiled = {}
  if newest < experiment.derived.total_steps:
    compiled[experiment.stage] = _in_background(
      functools.partial(experiment.compile_train_step, abstract)
    )
  state = checkpoints.restore(abstract)
  if state is None:
    state = experiment.init_state()
  start = int(state.step)

  with Reporter(experiment, workdir, start) as reporter:
    stopped = experiment.config.stop_at_target and reporter.target()
    if start == experiment.derived.total_steps or stopped:
      reporter.say(f"all {start} steps are done already; evaluating")
      _events(reporter, checkpoints, stop).evaluate(start, state)
      return state, reporter
    if start:
      reporter.say(f"going on from the checkpoint of step {start}")
    if experiment.config.log.mllog:
      reporter.begin_mllog(workdir, began)
    try:
      state = _train_stages(state, reporter, checkpoints, stop, compiled, workdir)
      checkpoints.wait()
    except loop.NonFiniteError as e:
      checkpoints.wait()
      steps = checkpoints.steps()
      last = f"step {steps[-1]}" if steps else "none yet"
      e.args = (f"{e.args[0]}; last good checkpoint: {last} in {workdir}",)
      raise
  return state, reporter


def _train_stages(
  state: TrainState,
  reporter: Reporter,
  checkpoints: Checkpoints,
  stop: _Stop,
  compiled: dict[Stage, Any],
  workdir: Path,
) -> TrainState:
  """Train through every stage that is left, or until asked to stop."""
  experiment, step = reporter.experiment, int(state.step)
  while step < experiment.derived.total_steps and not stop.agreed:
    if 0 < step == _stage(experiment, step).start:
      experiment, state = _enter_stage(experiment, state, reporter, workdir)
      reporter.enter(experiment)
    with reporter.pause():
      ahead = compiled.pop(experiment.stage, None)
      train_step = ahead.result() if ahead else experiment.compile_train_step()
    following = _stage(experiment, experiment.stage.stop)
    if following != experiment.stage and not _is_adaptive(experiment):
      after = build.at_stage(experiment, following)
      compiled[following] = _in_background(after.compile_train_step)
    position = examples_at(experiment.derived.stages, step)
    state, step = loop.train(
      state,
      train_step,
      reporter.timed(adaptive.train_batches(experiment, position)),
      _events(reporter, checkpoints, stop),
      start=step,
      total_steps=experiment.stage.stop,
    )
  return state


def _is_adaptive(experiment: build.Experiment) -> bool:
  return isinstance(experiment.config.stages, AdaptiveBatch)


def _stage(experiment: build.Experiment, step: int) -> Stage:
  stages = experiment.derived.stages
  return stages[stage_index(stages, step)]


def _enter_stage(
  experiment: build.Experiment, state: TrainState, reporter: Reporter, workdir: Path
) -> tuple[build.Experiment, TrainState]:
  """The next stage's experiment, and the state as it finds it."""
  step, stages = int(state.step), experiment.derived.stages
  stage = stages[stage_index(stages, step)]
  before = stages[stage_index(stages, step) - 1]
  if _is_adaptive(experiment):
    chosen = adaptive.read_chosen(workdir) or (experiment.config.batch_size,)
    if stage.ordinal >= len(chosen):
      with reporter.pause():
        size = adaptive.choose(build.at_stage(experiment, before), state, reporter.say)
      chosen += (chosen[-1],) * (stage.ordinal - len(chosen)) + (size,)
      adaptive.write_chosen(workdir, chosen)
    experiment = build.with_sizes(experiment, chosen)
    stage = _stage(experiment, step)
  state = build.enter_stage(experiment.config, before, stage, state)
  return build.at_stage(experiment, stage), state


def _in_background(function):
  """Start it in a thread; the future of its result."""
  pool = ThreadPoolExecutor(1)
  future = pool.submit(function)
  pool.shutdown(wait=False)
  return future


def _events(reporter: Reporter, checkpoints: Checkpoints, stop: _Stop) -> loop.Events:
  """What happens between the steps of this stage, and when."""
  experiment = reporter.experiment
  config, derived, mesh = experiment.config, experiment.derived, experiment.mesh
  stage = experiment.stage

  def every(steps):
    def due(step):
      return (step - stage.start) % steps == 0 or step == derived.total_steps

    return due

  def every_epochs(epochs):
    return every(steps_of(epochs, derived.num_train, stage))

  is_logged = every(config.log.every_steps)

  def evaluate(step, state):
    reporter.evaluating(step)
    with reporter.pause():
      batches = data.eval_batches(
        experiment.eval_data, derived.eval_batch_size, shard=host_shard(mesh)
      )
      params, model_state = state.evaluated()
      values = loop.evaluate(
        experiment.eval_step, params, model_state, data.to_device(batches, mesh)
      )
    reporter.evaluated(step, values)
    return values

  def save(step, state, values):
    del step
    with reporter.pause():
      checkpoints.save(state, values)

  def should_stop(step):
    # Every process has seen the same evaluations, but not the same Ctrl-C: on
    # that they agree where they log, so that they stop after the same step.
    asked = stop.requested
    if jax.process_count() > 1:
      asked = is_logged(step) and cluster.any_process(asked)
    reached = config.stop_at_target and reporter.target() is not None
    stop.agreed = asked or reached
    return stop.agreed

  return loop.Events(
    is_logged=is_logged,
    is_evaluated=every(
      steps_of(config.evaluation.every_epochs, derived.num_train, stage)
    ),
    is_saved=every(steps_of(config.checkpoint.every_epochs, derived.num_train, stage)),
    log=reporter.trained,
    evaluate=evaluate,
    save=save,
    should_stop=should_stop,
  )


class _Stop:
  """Turns the first Ctrl-C into a wish to stop; the second one is Python's."""

  requested = False  # in this process
  agreed = False  # by all of them

  def __enter__(self):
    self._before = None
    # Only the main thread may set handlers; elsewhere Ctrl-C stays Python's.
    if threading.current_thread() is threading.main_thread():
      self._before = signal.signal(signal.SIGINT, self._request)
    return self

  def _request(self, *_):
    self.requested = True
    signal.signal(signal.SIGINT, self._before or signal.default_int_handler)
    if cluster.is_leader():
      print("\nCtrl-C: saving after this step; again to stop at once", flush=True)

  def __exit__(self, *_):
    if self._before is not None:
      signal.signal(signal.SIGINT, self._before)
