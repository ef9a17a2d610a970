"""What happens between the steps of a run, and when: `loop.Callbacks` of a phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import jax
from jax.sharding import Mesh

from jaxscale import data, metrics
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cluster.watch.stop_consensus import StopRequested
from jaxscale.cluster.watch.watch import Watch
from jaxscale.data.dataset import Batch
from jaxscale.experiment import phases
from jaxscale.experiment.derive import steps_of
from jaxscale.mesh import host_shard
from jaxscale.parallel.layout import backward_sum_axes
from jaxscale.run.nan_policy import NanPolicy
from jaxscale.run.reporter import Reporter
from jaxscale.training import loop, nan_guard, replica_check


class RunCallbacks(loop.Callbacks):
  """Logs, evaluates, checks, saves and stops as the config says, in a phase."""

  def __init__(
    self,
    reporter: Reporter,
    checkpoints: Checkpoints,
    watch: Watch,
    fingerprint: Future[replica_check.Fingerprint] | None = None,
    nan_policy: NanPolicy | None = None,
  ):
    """Callbacks of the reporter's phase.

    Args:
      reporter: shows what happens.
      checkpoints: where to save.
      watch: takes note where the run is, and knows when to stop.
      fingerprint: for the comparison of replicas; None: there is none.
      nan_policy: what follows a skipped step; None: the run ends.
    """
    self._reporter, self._checkpoints, self._watch = reporter, checkpoints, watch
    self._fingerprint, self._nan_policy = fingerprint, nan_policy
    experiment = reporter.experiment
    config, derived = experiment.config, experiment.derived
    self._check_every = config.checks.replicas_every_steps

    def every_epochs(epochs):
      return phases.every(
        derived.phases,
        experiment.phase,
        lambda phase: steps_of(epochs, derived.num_train, phase),
      )

    super().__init__(
      at=watch.at,
      is_logged=phases.every(
        derived.phases, experiment.phase, lambda phase: config.log.every_steps
      ),
      is_evaluated=every_epochs(config.evaluation.every_epochs),
      is_saved=every_epochs(config.checkpoint.every_epochs),
    )

  def log(self, step, metrics):
    """On the terminal and in the files."""
    if self._nan_policy is not None and self._nan_policy.action == "skip":
      metrics["skipped_steps"] = float(self._nan_policy.count(step))
    self._reporter.trained(step, metrics)

  def is_checked(self, step):
    """Whether replicas are compared after this step."""
    return self._fingerprint is not None and step % self._check_every == 0

  def check(self, step, state):
    """Compare the replicas."""
    assert self._fingerprint is not None
    self._watch.at(step, "preparing")
    with self._reporter.pause():
      replica_check.check(
        replica_check.shared(state),
        self._fingerprint.result(),
        step=step,
        before=step - self._check_every,
      )

  def evaluate(self, step, state):
    """On all held-out examples, unless all are asked to stop."""
    reporter, experiment = self._reporter, self._reporter.experiment
    reporter.evaluating(step)
    with reporter.pause():
      batches = data.eval_batches(
        experiment.eval_data,
        experiment.derived.eval_batch_size,
        shard=host_shard(experiment.mesh),
      )
      activity = "evaluating" if reporter.evaluation else "preparing"
      on_devices = until_stopped(batches, experiment.mesh, self._watch, step, activity)
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
    self._watch.at(step, "saving")
    with self._reporter.pause():
      try:
        self._checkpoints.save(state, evaluation)
      except FloatingPointError as e:  # what a delayed exchange has not sent yet
        raise loop.NonFiniteError(step, str(e)) from None

  def should_stop(self, step):
    """Whether all processes are asked to stop, or the target is reached."""
    if self.is_logged(step):
      self._checkpoints.poll()
    return self._watch.stop.poll() is not None or self._reporter.stops_at_target()

  def skipped(self, bad):
    """Name the devices that found NaN or Inf; count the step, or end the run."""
    what, in_state = bad.what, False
    self._watch.at(bad.newest, "preparing")
    with self._reporter.pause():
      if bad.codes is not None:
        found = nan_guard.describe(
          bad.codes,
          bad.state.params,
          bad.state.model_state,
          bad.state,
          backward_sum_axes(self._reporter.experiment.layout),
        )
        what, in_state = found.text or what, found.in_state
      if self._nan_policy is None:
        raise loop.NonFiniteError(bad.step, what)
      self._nan_policy.skip(bad.step, what, hopeless=in_state)
    self._reporter.say(f"step {bad.step}  skipped: {what}")


def until_stopped(
  batches: Iterable[Batch],
  mesh: Mesh,
  watch: Watch,
  step: int,
  activity: str = "preparing",
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
