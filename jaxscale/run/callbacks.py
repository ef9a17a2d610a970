"""What happens between the steps of a run, and when: `loop.Events` of a phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import jax
from jax.sharding import Mesh

from jaxscale import data, metrics
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cluster.watch.stop_consensus import LeftOff
from jaxscale.cluster.watch.watch import Watch
from jaxscale.data.dataset import Batch
from jaxscale.experiment import phases
from jaxscale.experiment.derive import steps_of
from jaxscale.mesh import host_shard
from jaxscale.parallel.layout import backward_sum_axes
from jaxscale.run.nan_policy import Refusals
from jaxscale.run.reporter import Reporter
from jaxscale.training import loop, nan_guard, replica_check


def make_events(
  reporter: Reporter,
  checkpoints: Checkpoints,
  watch: Watch,
  fingerprint: Future[replica_check.Fingerprint] | None = None,
  refusals: Refusals | None = None,
) -> loop.Events:
  """Log, evaluate, check, save and stop as the config says, in the reporter's phase.

  Args:
    reporter: shows what happens.
    checkpoints: where to save.
    watch: is told where the run is, and says when to stop.
    fingerprint: for the comparison of replicas; None: there is none.
    refusals: what follows a step that was refused; None: the end.
  """
  experiment = reporter.experiment
  config, derived, mesh = experiment.config, experiment.derived, experiment.mesh

  def every_epochs(epochs):
    return phases.every(
      derived.phases,
      experiment.phase,
      lambda phase: steps_of(epochs, derived.num_train, phase),
    )

  is_logged = phases.every(
    derived.phases, experiment.phase, lambda phase: config.log.every_steps
  )

  def log(step, values):
    if refusals is not None and refusals.policy == "skip":
      values["skipped_steps"] = float(refusals.count(step))
    reporter.trained(step, values)

  def refused(bad):
    text, in_state = bad.what, False
    watch.at(bad.now, "preparing")
    with reporter.pause():
      if bad.seen is not None:
        params, model_state = bad.state.params, bad.state.model_state
        story = nan_guard.describe(
          bad.seen, params, model_state, bad.state, backward_sum_axes(experiment.layout)
        )
        text, in_state = story.text or bad.what, story.in_state
      if refusals is None:
        raise loop.NonFiniteError(bad.step, text)
      refusals.skip(bad.step, text, hopeless=in_state)
    reporter.say(f"step {bad.step}  skipped: {text}")

  def evaluate(step, state):
    reporter.evaluating(step)
    with reporter.pause():
      batches = data.eval_batches(
        experiment.eval_data, derived.eval_batch_size, shard=host_shard(mesh)
      )
      params, model_state = state.evaluated()
      activity = "evaluating" if reporter.evaluation else "preparing"
      on_devices = polled(batches, mesh, watch, step, activity)
      try:
        values = loop.evaluate(experiment.eval_step, params, model_state, on_devices)
      except LeftOff:
        reporter.say(f"step {step}  the evaluation is left for later")
        return None
    if isinstance(info := experiment.eval_data.info, data.TextInfo):
      values |= metrics.perplexity_of(values["loss"], info.bytes_per_token)
    reporter.evaluated(step, values)
    return values

  check_every = config.checks.replicas_every_steps

  def check(step, state):
    assert fingerprint is not None
    watch.at(step, "preparing")
    with reporter.pause():
      replica_check.check(
        replica_check.shared(state),
        fingerprint.result(),
        step=step,
        before=step - check_every,
      )

  def save(step, state, values):
    watch.at(step, "saving")
    with reporter.pause():
      try:
        checkpoints.save(state, values)
      except FloatingPointError as e:  # what a delayed exchange has not sent yet
        raise loop.NonFiniteError(step, str(e)) from None

  def should_stop(step):
    if is_logged(step):
      checkpoints.poll()
    asked = watch.stop.poll() is not None
    return asked or has_reached(reporter)

  return loop.Events(
    is_logged=is_logged,
    is_evaluated=every_epochs(config.evaluation.every_epochs),
    is_saved=every_epochs(config.checkpoint.every_epochs),
    log=log,
    evaluate=evaluate,
    save=save,
    should_stop=should_stop,
    is_checked=lambda step: fingerprint is not None and step % check_every == 0,
    check=check,
    at=watch.at,
    refused=refused,
  )


def has_reached(reporter: Reporter) -> bool:
  """Whether the run ends here, at its target; all have seen the same evaluations."""
  return reporter.experiment.config.stop_at_target and reporter.target() is not None


def polled(
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
    watch: is told of each batch, and says when to stop.
    step: after which it is.
    activity: until the second batch is asked for; the first may compile.

  Raises:
    LeftOff: all are asked to stop.
  """
  watch.at(step, activity)

  def noted():
    for batch in batches:
      watch.at(step, activity)
      yield batch

  for i, batch in enumerate(data.to_device(noted(), mesh)):
    if watch.stop.poll():
      raise LeftOff
    if i:
      activity = "evaluating"
      watch.at(step, activity)
    yield batch
