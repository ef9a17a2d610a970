"""Hooks that a run calls between steps, and its control of the training loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import jax
from jax.sharding import Mesh

from jaxscale import cluster, data
from jaxscale.cluster.watch.stop_consensus import StopRequested
from jaxscale.cluster.watch.watch import Watch
from jaxscale.data.dataset import Batch
from jaxscale.experiment import phases
from jaxscale.experiment.derive import interval
from jaxscale.mesh import host_shard
from jaxscale.metrics.log import logger
from jaxscale.parallel.specs import backward_sum_axes
from jaxscale.parallel.trainable import trainable_part
from jaxscale.run.run import Run
from jaxscale.training import loop, nan_guard, replica_check
from jaxscale.training.loop import Hook
from jaxscale.training.replica_check import Fingerprint
from jaxscale.training.types import TrainState


def run_control(run: Run) -> loop.LoopControl:
  """Return a control that informs the watch, the tracer and the reporter during one phase."""

  def log(step: int, metrics: loop.Values) -> None:
    if run.nan_policy.action == "skip":
      metrics["skipped_steps"] = float(run.nan_policy.count(step))
    run.reporter.trained(step, metrics)

  return loop.LoopControl(
    is_logged=log_interval(run),
    is_traced=run.tracer.is_due,
    should_stop=run.should_stop,
    skipped=functools.partial(skipped, run),
    at=functools.partial(note, run),
    trace=functools.partial(turn_trace, run),
    log=log,
  )


def skipped(run: Run, bad: loop.BadStep) -> None:
  """Report the devices that found NaN or Inf; count the skipped step, or end the run."""
  what, in_state = bad.what, False
  note(run, bad.newest, "inspecting")
  with run.reporter.pause():
    if bad.codes is not None:
      state, summed = bad.state, backward_sum_axes(run.experiment.layout)
      trained = trainable_part(state.params, run.experiment.trainable)
      trees = trained, state.model_state, state
      diagnosis = nan_guard.describe(bad.codes, *trees, summed)
      what, in_state = diagnosis.text or what, diagnosis.in_state
    run.nan_policy.skip(bad.step, what, hopeless=in_state)
  logger.warning(f"step {bad.step}  skipped: {what}")


def run_hooks(run: Run, fingerprint: Future[Fingerprint] | None) -> Sequence[Hook]:
  """Return the hooks to run between the steps of a phase, in order.

  Replicas are compared before anything that relies on them. Callbacks only see a good
  state. A checkpoint comes last, and always if the run ends early.

  Args:
    run: the run, in the phase.
    fingerprint: the program that compares replicas; None if they are not compared.
  """
  config, derived = run.experiment.config, run.experiment.derived
  every = functools.partial(phases.every, derived.phases, run.experiment.phase)
  is_saved = every(lambda phase: interval(config.checkpoint, derived.num_train, phase))
  is_logged = log_interval(run)

  def is_save_due(step: int) -> bool:
    if is_logged(step):  # All processes log after the same steps, so they poll together.
      run.checkpoints.poll()
    return run.should_stop(step) or is_saved(step)

  hooks = [
    Hook(evaluation_interval(run), functools.partial(evaluate, run)),
    *(after_step(run, name) for name in run.callbacks.names("on_step")),
    Hook(is_save_due, functools.partial(save, run)),
  ]
  if fingerprint is not None:
    check = functools.partial(check_replicas, run, fingerprint)
    hooks.insert(0, Hook(config.checks.replicas_every_steps, check))
  return hooks


def log_interval(run: Run) -> Callable[[int], bool]:
  """Return a function that tells whether a step's metrics are logged in this phase."""
  experiment, every = run.experiment, run.experiment.config.log.every_steps
  return phases.every(experiment.derived.phases, experiment.phase, lambda phase: every)


def evaluation_interval(run: Run) -> Callable[[int], bool]:
  """Return a function that tells whether an evaluation follows a step in this phase."""
  config, derived = run.experiment.config, run.experiment.derived
  steps = functools.partial(interval, config.evaluation, derived.num_train)
  return phases.every(derived.phases, run.experiment.phase, steps)


def note(run: Run, step: int, activity: str) -> None:
  """Report an activity of the host to the watch and to a trace."""
  run.watch.at(step, activity)
  run.tracer.at(step, activity)


def turn_trace(run: Run, step: int) -> None:
  """Begin a trace at this step, or end the current one."""
  note(run, step - 1, "preparing")  # Other processes that wait are at this step already.
  with run.reporter.pause():
    run.tracer.turn(step)


def call(
  run: Run, hook: str, step: int, state: TrainState, *values: loop.Values, only: str = ""
) -> TrainState:
  """Call a function of all callbacks, or of one; return the state to train on.

  Its time, which may be long, does not count as training.
  """
  if not (names := [only] if only else run.callbacks.names(hook)):
    return state
  note(run, step, "hook")
  with run.reporter.pause():
    return run.callbacks.call(hook, names, step, state, *values)


def after_step(run: Run, name: str) -> Hook:
  """Return a hook that calls `on_step` of a callback, and evaluates if it ends the run."""

  def on_step(step: int, state: TrainState, metrics: loop.Values) -> TrainState:
    return evaluate_if_stopped(run, step, call(run, "on_step", step, state, metrics, only=name))

  return Hook(run.callbacks.of[name][0].every, on_step, takes_metrics=True)


def evaluate_if_stopped(run: Run, step: int, state: TrainState) -> TrainState:
  """Evaluate the last step of a run that a callback has stopped, unless it is evaluated."""
  if run.callbacks.stopped and run.evaluation_at(step) is None:
    return evaluate(run, step, state)
  return state


def check_replicas(
  run: Run, fingerprint: Future[Fingerprint], step: int, state: TrainState
) -> None:
  """Compare the parameters of all replicas.

  Raises:
    ReplicaDivergenceError: the replicas differ.
  """
  note(run, step, "inspecting")
  with run.reporter.pause(), jax.profiler.TraceAnnotation("check"):
    shared, program = replica_check.shared(state), fingerprint.result()
    note(run, step, "checking")
    before = step - run.experiment.config.checks.replicas_every_steps
    replica_check.check(shared, program, step=step, before=before)


def evaluate(run: Run, step: int, state: TrainState) -> TrainState:
  """Evaluate all validation examples; stop early if all processes are asked to stop.

  Returns:
    The state to train on, which a callback may have changed.
  """
  experiment = run.experiment
  if run.tracer.is_complete:
    turn_trace(run, step + 1)
  with run.reporter.pause(), jax.profiler.TraceAnnotation("evaluation"):
    if not run.evaluation:
      note(run, step, "preparing")
      lowered = experiment.lower_eval_step(experiment.abstract_state())
      with run.programs.turn():
        lowered.compile()  # The first call finds the program in JAX's cache.
    size, mesh = experiment.derived.eval_batch_size, experiment.mesh
    threads = experiment.config.input_threads or cluster.share_of_cores()
    options = {"shard": host_shard(mesh), "num_threads": threads}
    batches = data.eval_batches(experiment.eval_data, size, **options)
    # After the first batch a hang is a fault of the input, not a compilation.
    on_devices = until_stopped(batches, mesh, run.watch, step, "evaluating")
    try:
      evaluated = experiment.eval_step, *state.evaluated(), on_devices
      values = run.separate(loop.evaluate(*evaluated, experiment.metrics))
    except StopRequested:
      logger.info(f"step {step}  the evaluation is postponed to the resumed run")
      return state
  is_new = run.add_evaluation(step, values)
  if is_new:
    state = call(run, "on_evaluation", step, state, values)
  run.reporter.evaluated(step, values, is_new=is_new, is_last=run.is_over(step))
  return state


def save(run: Run, step: int, state: TrainState) -> TrainState:
  """Save a checkpoint in the background, with the metrics of this step's evaluation.

  Returns:
    The saved state, which a callback may have changed.
  """
  state = evaluate_if_stopped(run, step, call(run, "on_save", step, state))
  note(run, step, "saving")
  is_end = run.is_over(step) or run.watch.stop.agreed is not None
  with run.reporter.pause(), jax.profiler.TraceAnnotation("saving"):
    run.checkpoints.save(state, run.evaluation_at(step), is_needed=is_end)
  return state


def until_stopped(
  batches: Iterable[Batch], mesh: Mesh, watch: Watch, step: int, activity="preparing"
) -> Iterator[dict[str, jax.Array]]:
  """Yield the batches of an evaluation on the devices, until all are asked to stop.

  Args:
    batches: this host's rows of each batch; several are loaded before the first is used.
    mesh: the mesh that batches are put on.
    watch: the watch, which records each batch and knows when to stop.
    step: the step before the evaluation.
    activity: the activity until the second batch is requested, which may compile.

  Raises:
    StopRequested: all processes are asked to stop.
  """
  watch.at(step, activity)

  def noted():
    for batch in batches:
      watch.at(step, activity)
      yield batch

  for i, batch in enumerate(data.to_device(noted(), mesh)):
    if watch.stop.poll():
      raise StopRequested
    if i:
      activity = "evaluating"
      watch.at(step, activity)
    yield batch
