"""`fit(config, workdir)`: one run from its first step, or from where it was."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale import build, cluster, data, loop, metrics
from jaxscale.checkpoint import Checkpoints
from jaxscale.config import Config
from jaxscale.mesh import batch_sharding, host_shard, one_at_a_time
from jaxscale.settings import ConfigError
from jaxscale.state import TrainState, abstract_state, init_state
from jaxscale.step import TrainStep

# What may change when a run goes on: where it runs and what it writes down.
_NOT_IDENTITY = ("mesh", "evaluation", "checkpoint", "log", "target_accuracy")


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
  _claim_workdir(workdir, described["config"])
  say = print if cluster.is_leader() else lambda *_: None
  say(describe_text(experiment, workdir))
  cluster.on_leader(
    lambda: metrics.write_json(workdir / "config.json", described),
    "config.json",
  )
  with _Interrupt() as interrupt:
    return _run(experiment, workdir, interrupt, say, began)


def _run(experiment: build.Experiment, workdir: Path, interrupt, say, began) -> Result:
  config, derived, mesh = experiment.config, experiment.derived, experiment.mesh
  parts = experiment.model.init, experiment.tx, mesh, experiment.exchange
  keep, average = config.checkpoint, config.ema_decay is not None
  abstract = abstract_state(*parts, average=average)
  # XLA compiles the step beside what the main thread does until it needs it.
  compiler = ThreadPoolExecutor(1)
  compiling = compiler.submit(_compile_step, experiment, abstract)
  compiler.shutdown(wait=False)

  checkpoints = Checkpoints(
    workdir / "checkpoints", keep_last=keep.keep_last, keep_best=keep.keep_best
  )
  state = checkpoints.restore(abstract)
  start = int(state.step) if state is not None else 0
  if state is None:
    state = init_state(*parts, seed=config.seed, average=average)
  else:
    say(f"going on from the checkpoint of step {start}")

  total, shard = derived.total_steps, host_shard(mesh)
  progress = metrics.Progress(
    total, config.batch_size, start=start, quiet=not cluster.is_leader()
  )
  writer = (
    metrics.MetricWriter(workdir, start=start, tensorboard=config.log.tensorboard)
    if cluster.is_leader()
    else None
  )
  last_eval: dict[str, float] = {}

  def write(step, prefix, values):
    if writer is not None:
      writer.write(step, {f"{prefix}/{name}": v for name, v in values.items()})

  def log(step, values):
    rate = progress.train(step, values)
    values = values | {"epoch": step * config.batch_size / derived.num_train}
    write(step, "train", values)
    write(step, "perf", {"examples_per_s": rate})

  def evaluate(step, state):
    clock = time.perf_counter()
    batches = data.eval_batches(
      experiment.eval_data, derived.eval_batch_size, shard=shard
    )
    params, model_state = state.evaluated()
    values = loop.evaluate(
      experiment.eval_step, params, model_state, data.to_device(batches, mesh)
    )
    write(step, "eval", values)
    progress.evaluated(step, values)
    progress.pause(time.perf_counter() - clock)
    last_eval.update(values)
    return values

  def save(step, state, values):
    clock = time.perf_counter()
    checkpoints.save(state, values)
    progress.pause(time.perf_counter() - clock)

  def every(steps):
    return lambda step: step % steps == 0 or step == total

  is_logged = every(config.log.every_steps)

  def should_stop(step):
    if jax.process_count() == 1:
      return interrupt.requested
    # Processes must stop after the same step; they agree where they log.
    return is_logged(step) and cluster.any_process(interrupt.requested)

  batches = data.train_batches(
    experiment.train_data,
    config.batch_size,
    seed=config.seed,
    start=start,
    shard=shard,
  )
  try:
    state, done = loop.train(
      state,
      compiling.result(),
      data.to_device(batches, mesh),
      loop.Events(
        is_logged=is_logged,
        is_evaluated=every(derived.eval_every),
        is_saved=every(derived.save_every),
        log=log,
        evaluate=evaluate,
        save=save,
        should_stop=should_stop,
      ),
      start=start,
      total_steps=total,
    )
    checkpoints.wait()
    if start == total:
      say(f"all {total} steps are done already; evaluating")
      evaluate(total, state)
  except loop.NonFiniteError as e:
    checkpoints.wait()
    steps = checkpoints.steps()
    last = f"step {steps[-1]}" if steps else "none yet"
    e.args = (f"{e.args[0]}; last good checkpoint: {last} in {workdir}",)
    raise
  finally:
    progress.close()
    if writer is not None:
      writer.close()
  checkpoints.close()

  summary = {
    "outcome": "done" if done == total else "interrupted",
    "step": done,
    "total_steps": total,
    **last_eval,
    "target_accuracy": config.target_accuracy,
    "seconds": round(time.perf_counter() - began, 1),
    "devices": f"{mesh.size} x {jax.devices()[0].device_kind}",
    "workdir": str(workdir),
  }

  def finish():
    metrics.write_json(workdir / "summary.json", summary)
    if done == total:
      metrics.plot_metrics(workdir)

  cluster.on_leader(finish, "summary")
  return Result(state, summary)


def _compile_step(experiment: build.Experiment, abstract: TrainState) -> TrainStep:
  """The train step, compiled for the shapes that the run will give it."""
  sharding, info = batch_sharding(experiment.mesh), experiment.train_data.info
  rows = experiment.config.batch_size
  batch = {
    "image": jax.ShapeDtypeStruct(
      (rows, *info.image_shape), "uint8", sharding=sharding
    ),
    "label": jax.ShapeDtypeStruct((rows,), "int32", sharding=sharding),
  }
  train_step: Any = experiment.train_step
  return one_at_a_time(train_step.lower(abstract, batch).compile(), experiment.mesh)


def describe(experiment: build.Experiment) -> dict[str, Any]:
  """The resolved config, what was derived from it, and the software, as JSON."""
  packages = ("jaxscale", "jax", "flax", "optax", "orbax-checkpoint", "grain")
  return {
    "config": _plain(experiment.config),
    "derived": experiment.derived._asdict(),
    "data": experiment.train_data.info._asdict(),
    "python": platform.python_version(),
    "versions": {name: metadata.version(name) for name in packages},
    "devices": [str(d) for d in jax.devices()],
    "processes": jax.process_count(),
  }


def describe_text(experiment: build.Experiment, workdir: Path) -> str:
  """The same for a person: a line a setting, a line a derived quantity."""
  lines = [
    f"jaxscale {metadata.version('jaxscale')}  workdir {workdir}",
    "config",
  ]
  for field in dataclasses.fields(experiment.config):
    lines.append(f"  {field.name:24} {getattr(experiment.config, field.name)}")
  lines.append("derived")
  for name, value in experiment.derived._asdict().items():
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    lines.append(f"  {name:24} {shown}")
  return "\n".join(lines)


def _plain(node: Any) -> Any:
  """A settings tree as JSON; "class" tells which alternative was chosen."""
  if dataclasses.is_dataclass(node):
    values = {f.name: _plain(getattr(node, f.name)) for f in dataclasses.fields(node)}
    return {"class": type(node).__name__, **values}
  return list(node) if isinstance(node, tuple) else node


def _claim_workdir(workdir: Path, config: dict[str, Any]) -> None:
  """Make the directory, or check that what it holds is this experiment.

  Raises:
    ConfigError: it cannot be made, or belongs to another experiment.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise ConfigError(f"--workdir={workdir}: {e.strerror}, use another one") from None
  path = workdir / "config.json"
  if not path.exists():
    return
  try:
    before = json.loads(path.read_text())["config"]
  except (ValueError, KeyError):
    raise ConfigError(
      f"--workdir={workdir}: its config.json is unreadable; use another one"
    ) from None
  for name, (old, new) in _differences(before, config).items():
    if name.split(".")[0] not in _NOT_IDENTITY:
      raise ConfigError(
        f"--workdir={workdir}: holds another experiment, {name} is {old!r} there "
        f"and {new!r} now; use another --workdir"
      )


def _differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
  if isinstance(old, dict) and isinstance(new, dict):
    found = {}
    for name in {**old, **new}:
      path = f"{prefix}.{name}" if prefix else name
      found |= _differences(old.get(name), new.get(name), path)
    return found
  return {} if old == new else {prefix: (old, new)}


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
