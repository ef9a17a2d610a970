"""What happens between the steps of a run, and when: `loop.Callbacks` of a phase."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxscale import data, metrics
from jaxscale.checkpoint import lock
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cluster.watch.stop_consensus import StopRequested
from jaxscale.cluster.watch.watch import Watch
from jaxscale.data.dataset import Batch
from jaxscale.experiment import phases
from jaxscale.experiment.derive import interval
from jaxscale.mesh import host_shard
from jaxscale.parallel.specs import backward_sum_axes
from jaxscale.run.activity import ActivityRecord
from jaxscale.run.nan_policy import NanPolicy
from jaxscale.run.programs import Programs
from jaxscale.run.reporter import Reporter
from jaxscale.run.tracer import Tracer
from jaxscale.training import loop, nan_guard, replica_check
from jaxscale.training.replica_check import Fingerprint


class Run(NamedTuple):
  """What a run has from its beginning to its end, whatever phase it is in.

  Attributes:
    workdir: where it writes.
    lock: on the workdir, in process 0.
    checkpoints: where it saves.
    watch: takes note where it is, and knows when to stop.
    nan_policy: what follows a skipped step.
    began: when, on the clock `time.monotonic`, which nobody sets.
    activity: the record of what it does.
    tracer: of this process.
    programs: where compiled ones are kept.
  """

  workdir: Path
  lock: lock.WorkdirLock | None
  checkpoints: Checkpoints
  watch: Watch
  nan_policy: NanPolicy
  began: float
  activity: ActivityRecord
  tracer: Tracer
  programs: Programs


class RunCallbacks(loop.Callbacks):
  """Logs, evaluates, checks, saves and stops as the config says, in a phase."""

  def __init__(self, run: Run, reporter: Reporter, fingerprint: Future[Fingerprint] | None = None):
    """Callbacks of the reporter's phase.

    Args:
      run: that they are of.
      reporter: shows what happens.
      fingerprint: for the comparison of replicas; None: there is none.
    """
    self._run, self._reporter, self._fingerprint = run, reporter, fingerprint
    experiment = reporter.experiment
    config, derived = experiment.config, experiment.derived
    self._check_every = config.checks.replicas_every_steps
    every = functools.partial(phases.every, derived.phases, experiment.phase)

    def every_interval(settings):
      return every(lambda phase: interval(settings, derived.num_train, phase))

    super().__init__(
      is_logged=every(lambda phase: config.log.every_steps),
      is_evaluated=every_interval(config.evaluation),
      is_saved=every_interval(config.checkpoint),
    )

  def at(self, step, activity):
    """Note it for the watch, and in a trace."""
    self._run.watch.at(step, activity)
    self._run.tracer.at(step, activity)

  def is_traced(self, step):
    """Whether a trace of this process begins or ends before this step."""
    return self._run.tracer.is_due(step)

  def trace(self, step):
    """Begin or end a trace, which may take a while to write."""
    self.at(step - 1, "preparing")  # others that wait are at this step already
    with self._reporter.pause():
      self._run.tracer.turn(step)

  def log(self, step, metrics):
    """On the terminal and in the files."""
    if self._run.nan_policy.action == "skip":
      metrics["skipped_steps"] = float(self._run.nan_policy.count(step))
    self._reporter.trained(step, metrics)

  def is_checked(self, step):
    """Whether replicas are compared after this step."""
    return self._fingerprint is not None and step % self._check_every == 0

  def check(self, step, state):
    """Compare the replicas."""
    assert self._fingerprint is not None
    self.at(step, "inspecting")
    with self._reporter.pause(), jax.profiler.TraceAnnotation("check"):
      shared, fingerprint = replica_check.shared(state), self._fingerprint.result()
      self.at(step, "checking")
      before = step - self._check_every
      replica_check.check(shared, fingerprint, step=step, before=before)

  def evaluate(self, step, state):
    """On all held-out examples, unless all are asked to stop."""
    reporter, experiment = self._reporter, self._reporter.experiment
    if self._run.tracer.is_complete:
      self.trace(step + 1)
    with reporter.pause(), jax.profiler.TraceAnnotation("evaluation"):
      if not reporter.evaluation:
        self.at(step, "preparing")
        lowered = experiment.lower_eval_step(experiment.abstract_state())
        with self._run.programs.turn():
          lowered.compile()  # which the first call finds, in JAX or on disk
      size, mesh = experiment.derived.eval_batch_size, experiment.mesh
      batches = data.eval_batches(experiment.eval_data, size, shard=host_shard(mesh))
      # From the first batch on: what hangs now is the input, not a compilation.
      on_devices = until_stopped(batches, mesh, self._run.watch, step, "evaluating")
      try:
        values = loop.evaluate(experiment.eval_step, *state.evaluated(), on_devices)
      except StopRequested:
        reporter.say(f"step {step}  the evaluation is postponed to the resumed run")
        return None
    if isinstance(info := experiment.eval_data.info, data.TextInfo):
      values |= metrics.perplexity_of(values["loss"], info.bytes_per_token)
    reporter.evaluated(step, values)
    return values

  def save(self, step, state, evaluation):
    """A checkpoint, in the background."""
    self.at(step, "saving")
    reporter = self._reporter
    is_end = step == reporter.experiment.derived.total_steps
    is_end |= reporter.stops_at_target() or self._run.watch.stop.agreed is not None
    with reporter.pause(), jax.profiler.TraceAnnotation("saving"):
      self._run.checkpoints.save(state, evaluation, is_needed=is_end)

  def should_stop(self, step):
    """Whether all processes are asked to stop, or the target is reached."""
    if self.is_logged(step):
      self._run.checkpoints.poll()
    return self._run.watch.stop.poll() is not None or self._reporter.stops_at_target()

  def skipped(self, bad):
    """Name the devices that found NaN or Inf; count the step, or end the run."""
    what, in_state = bad.what, False
    self.at(bad.newest, "inspecting")
    with self._reporter.pause():
      if bad.codes is not None:
        state, summed = bad.state, backward_sum_axes(self._reporter.experiment.layout)
        trees = state.params, state.model_state, state
        found = nan_guard.describe(bad.codes, *trees, summed)
        what, in_state = found.text or what, found.in_state
      self._run.nan_policy.skip(bad.step, what, hopeless=in_state)
    self._reporter.say(f"step {bad.step}  skipped: {what}")


def until_stopped(
  batches: Iterable[Batch], mesh: Mesh, watch: Watch, step: int, activity="preparing"
) -> Iterator[dict[str, jax.Array]]:
  """The batches of an evaluation on the devices, until all are asked to stop.

  Args:
    batches: this host's rows of each. Several are loaded before the first is used.
    mesh: where they go.
    watch: takes note of each batch, and knows when to stop.
    step: after which it is.
    activity: until the second batch is asked for; the first may compile.

  Raises:
    StopRequested: all are asked to stop.
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
