"""`fit(config, workdir)`: one run from its first step, or from where it was."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale import build, cluster, data, loop, metrics
from jaxscale.checkpoint import Checkpoints
from jaxscale.config import Config
from jaxscale.mesh import host_shard
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
  began = time.perf_counter()
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
    _Interrupt() as interrupt,
    Checkpoints(
      workdir / "checkpoints", keep_last=keep.keep_last, keep_best=keep.keep_best
    ) as checkpoints,
  ):
    state, done, evaluation = _train(experiment, checkpoints, workdir, interrupt)

  total = experiment.derived.total_steps
  summary = {
    "outcome": "done" if done == total else "interrupted",
    "step": done,
    "total_steps": total,
    **evaluation,
    "target_accuracy": config.target_accuracy,
    "seconds": round(time.perf_counter() - began, 1),
    "devices": f"{experiment.mesh.size} x {jax.devices()[0].device_kind}",
    "workdir": str(workdir),
  }

  def finish():
    metrics.write_json(workdir / "summary.json", summary)
    if done == total:
      metrics.plot_metrics(workdir)

  cluster.on_leader(finish, "summary")
  return Result(state, summary)


def _train(
  experiment: build.Experiment,
  checkpoints: Checkpoints,
  workdir: Path,
  interrupt: _Interrupt,
) -> tuple[TrainState, int, dict[str, float]]:
  """The state, steps done, and the last evaluation of this process's run."""
  total = experiment.derived.total_steps
  abstract = experiment.abstract_state()
  compile_step = functools.partial(experiment.compile_train_step, abstract)
  # XLA compiles the step beside what the main thread does until it needs it.
  finished = total in checkpoints.steps()
  compiling = None if finished else _in_background(compile_step)
  state = checkpoints.restore(abstract)
  if state is None:
    state = experiment.init_state()
  start = done = int(state.step)

  with _Reporter(experiment, workdir, start) as reporter:
    if 0 < start < total:
      reporter.say(f"going on from the checkpoint of step {start}")
    events = _events(experiment, checkpoints, reporter, interrupt)
    if start == total:
      reporter.say(f"all {total} steps are done already; evaluating")
      events.evaluate(total, state)
      return state, total, reporter.evaluation
    batches = data.train_batches(
      experiment.train_data,
      experiment.config.batch_size,
      seed=experiment.config.seed,
      start=start,
      shard=host_shard(experiment.mesh),
    )
    try:
      state, done = loop.train(
        state,
        # The newest checkpoint was the last step's, but is damaged: compile now.
        compiling.result() if compiling else compile_step(),
        data.to_device(batches, experiment.mesh),
        events,
        start=start,
        total_steps=total,
      )
      checkpoints.wait()
    except loop.NonFiniteError as e:
      checkpoints.wait()
      steps = checkpoints.steps()
      last = f"step {steps[-1]}" if steps else "none yet"
      e.args = (f"{e.args[0]}; last good checkpoint: {last} in {workdir}",)
      raise
  return state, done, reporter.evaluation


def _in_background(function):
  """Start it in a thread; the future of its result."""
  pool = ThreadPoolExecutor(1)
  future = pool.submit(function)
  pool.shutdown(wait=False)
  return future


def _events(
  experiment: build.Experiment,
  checkpoints: Checkpoints,
  reporter: _Reporter,
  interrupt: _Interrupt,
) -> loop.Events:
  """What happens between the steps of this run, and when."""
  derived, mesh = experiment.derived, experiment.mesh

  def every(steps):
    return lambda step: step % steps == 0 or step == derived.total_steps

  is_logged = every(experiment.config.log.every_steps)

  def evaluate(step, state):
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
    if jax.process_count() == 1:
      return interrupt.requested
    # Processes must stop after the same step; they agree where they log.
    return is_logged(step) and cluster.any_process(interrupt.requested)

  return loop.Events(
    is_logged=is_logged,
    is_evaluated=every(derived.eval_every),
    is_saved=every(derived.save_every),
    log=reporter.trained,
    evaluate=evaluate,
    save=save,
    should_stop=should_stop,
  )


class _Reporter:
  """Shows a run on the terminal and in its files; silent but in the leader."""

  def __init__(self, experiment: build.Experiment, workdir: Path, start: int):
    config, derived = experiment.config, experiment.derived
    leader = cluster.is_leader()
    self.evaluation: dict[str, float] = {}  # the last one
    self._epochs_per_step = config.batch_size / derived.num_train
    self._progress = metrics.Progress(
      derived.total_steps, config.batch_size, start=start, quiet=not leader
    )
    self.say = self._progress.say
    self._writer = (
      metrics.MetricWriter(workdir, start=start, tensorboard=config.log.tensorboard)
      if leader
      else None
    )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._progress.close()
    if self._writer is not None:
      self._writer.close()

  def trained(self, step: int, values: dict[str, float]) -> None:
    rate = self._progress.train(step, values)
    self._write(step, "train", values | {"epoch": step * self._epochs_per_step})
    self._write(step, "perf", {"examples_per_s": rate})

  def evaluated(self, step: int, values: dict[str, float]) -> None:
    self.evaluation = values
    self._write(step, "eval", values)
    self._progress.evaluated(step, values)

  @contextlib.contextmanager
  def pause(self):
    """What happens inside is not training and counts for no rate."""
    clock = time.perf_counter()
    yield
    self._progress.pause(time.perf_counter() - clock)

  def _write(self, step, prefix, values):
    if self._writer is not None:
      self._writer.write(step, {f"{prefix}/{k}": v for k, v in values.items()})


class _Interrupt:
  """Turns the first Ctrl-C into a wish to stop; the second one is Python's."""

  requested = False

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
