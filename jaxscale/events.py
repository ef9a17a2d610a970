"""What happens between the steps of a run, and when: `loop.Events` of a stage."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future

import jax

from jaxscale import cluster, data, loop, non_finite, replicas, stages
from jaxscale.checkpoint import Checkpoints
from jaxscale.derive import steps_of
from jaxscale.mesh import host_shard
from jaxscale.refusals import Refusals
from jaxscale.reporter import Reporter


def make_events(
  reporter: Reporter,
  checkpoints: Checkpoints,
  stop: Stop,
  fingerprint: Future[replicas.Fingerprint] | None = None,
  refusals: Refusals | None = None,
) -> loop.Events:
  """Log, evaluate, check, save and stop as the config says, in the reporter's stage.

  Args:
    reporter: shows what happens.
    checkpoints: where to save.
    stop: whether to.
    fingerprint: for the comparison of replicas; None: there is none.
    refusals: what follows a step that was refused; None: the end.
  """
  experiment = reporter.experiment
  config, derived, mesh = experiment.config, experiment.derived, experiment.mesh

  def every_epochs(epochs):
    return stages.every(
      derived.stages,
      experiment.stage,
      lambda stage: steps_of(epochs, derived.num_train, stage),
    )

  is_logged = stages.every(
    derived.stages, experiment.stage, lambda stage: config.log.every_steps
  )

  def log(step, values):
    if refusals is not None and refusals.policy == "skip":
      values["skipped_steps"] = float(refusals.count(step))
    reporter.trained(step, values)

  def refused(bad):
    text, in_state = bad.what, False
    with reporter.pause():
      if bad.seen is not None:
        params, model_state = bad.state.params, bad.state.model_state
        story = non_finite.describe(bad.seen, params, model_state, bad.state)
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
      values = loop.evaluate(
        experiment.eval_step, params, model_state, data.to_device(batches, mesh)
      )
    reporter.evaluated(step, values)
    return values

  check_every = config.checks.replicas_every_steps

  def check(step, state):
    assert fingerprint is not None
    with reporter.pause():
      replicas.check(
        replicas.shared(state),
        fingerprint.result(),
        step=step,
        before=step - check_every,
      )

  def save(step, state, values):
    with reporter.pause():
      try:
        checkpoints.save(state, values)
      except FloatingPointError as e:  # what a delayed exchange has not sent yet
        raise loop.NonFiniteError(step, str(e)) from None

  def should_stop(step):
    # Every process has seen the same evaluations, but not the same Ctrl-C: on
    # that they agree where they log, so that they stop after the same step.
    if is_logged(step):
      checkpoints.poll()
    asked = stop.requested
    if jax.process_count() > 1:
      asked = is_logged(step) and cluster.any_process(asked)
    reached = config.stop_at_target and reporter.target() is not None
    stop.agreed = asked or reached
    return stop.agreed

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
    refused=refused,
  )


class Stop:
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
