"""Open and close the parts of a run: its workdir, lock, records and programs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale import cluster, metrics
from jaxscale.checkpoint import lock
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cluster.environment import is_installed
from jaxscale.config import CallbackContext, Config
from jaxscale.config.loading import load_config
from jaxscale.config.phase_settings import measuring
from jaxscale.errors import invalid
from jaxscale.experiment import build, own_classes
from jaxscale.metrics.log import logger, shown
from jaxscale.parallel.layout_exchange import exchange_split
from jaxscale.run import adaptive_batch, tracking
from jaxscale.run import identity as identities
from jaxscale.run import workdir as workdirs
from jaxscale.run.activity import ActivityRecord
from jaxscale.run.callbacks import Callback, Callbacks
from jaxscale.run.nan_policy import NanPolicy
from jaxscale.run.programs import kept_programs
from jaxscale.run.run import Run
from jaxscale.run.tracer import Tracer
from jaxscale.training.settings import PythonLoss


@contextlib.contextmanager
def open_run(
  config: Config | str | os.PathLike,
  workdir: Path,
  plan: Mapping[str, Any] | None = None,
  accept_changes: Collection[str] = (),
  callbacks: Sequence[Callback] = (),
  loss_fn: Any = None,
) -> Iterator[Run]:
  """Open a run in a workdir that no other run writes to; the arguments are as for `fit`.

  `Run.checkpoints` and `Run.tracer` are created but not entered: the summary of a run is
  written after they are closed.

  Raises:
    ConfigError: config, data, devices and workdir do not fit each other.
  """
  began = time.monotonic()
  with contextlib.ExitStack() as stack:
    lines = stack.enter_context(shown(is_quiet=not cluster.is_leader()))
    config = _loaded(config, loss_fn)
    tracking.check_packages(config)
    accept = identities.accepted(accept_changes)
    experiment = with_chosen_sizes(workdir, workdirs.experiment_in(workdir, config, accept))
    identity = identities.identity_of(experiment)
    identities.check_alike(identity)
    notes = identities.without_source(identity)
    notes += workdirs.claim_workdir(workdir, config, identity, accept)
    experiment = experiment.replace(notes=(*experiment.notes, *notes))
    if held := lock.acquire_for_all(workdir):
      stack.enter_context(held)
    watch = stack.enter_context(cluster.current_watch())
    may_write = functools.partial(lock.is_held, held)
    activity = stack.enter_context(ActivityRecord(workdir, watch, may_write))
    wait_s = config.faults.compile_timeout_s
    programs = stack.enter_context(kept_programs(config.compilation, workdir, wait_s))
    if plan is not None:
      write = functools.partial(metrics.write_json, workdir / "plan.json", plan)
      cluster.on_leader(write, "plan.json")
    logger.info(workdirs.describe_text(experiment, workdir))
    if config.log.plot and not is_installed("matplotlib"):
      logger.warning("Log.plot=True: matplotlib is not installed; the run draws no pictures")
    cluster.on_leader(functools.partial(workdirs.forget_unsaved, workdir, config), "workdir")
    checks, saving = config.checks, vars(config.checkpoint).items()
    limits = checks.max_skipped_steps, checks.max_consecutive_skipped_steps
    nan_policy = NanPolicy(workdir, checks.nan_policy, *limits)
    saving = {name: v for name, v in saving if not name.startswith("every_")}
    saving["best_metric"] = experiment.best_metric
    saving |= {"lock": held, "split": exchange_split(experiment.trained_layout)}
    checkpoints = Checkpoints(workdir / "checkpoints", **saving)
    checkpoints.identity = identity
    tracer, parts = Tracer(workdir, config.log), (workdir, experiment, held, checkpoints)
    run = Run(*parts, watch, nan_policy, activity, tracer, programs, lines, began)
    run.callbacks = build_callbacks(run, callbacks)
    checkpoints.host_state = run.callbacks.saved
    yield run


def _loaded(config: Config | str | os.PathLike, loss_fn: Any) -> Config:
  """Return a config, from its file if need be, with the loss that Python gave, if any."""
  if isinstance(config, str | os.PathLike):
    config = load_config(os.fspath(config))
  if not isinstance(config, Config):
    fix = "use a Config, or the path of a config file"
    raise invalid("config", config, f"has the type {type(config).__name__}", fix)
  if loss_fn is None:
    return config
  return dataclasses.replace(config, loss=PythonLoss(function=loss_fn, replaces=config.loss))


def build_callbacks(run: Run, more: Sequence[Callback]) -> Callbacks:
  """Build the callbacks of the config, and append those from Python."""
  experiment = run.experiment
  config, derived = experiment.config, experiment.derived
  per_epoch = derived.num_train / config.batch_size
  parts = experiment.eval_data, experiment.model, experiment.mesh

  def log(step: int, values: dict[str, float]) -> None:
    run.reporter.write(step, "callback", values)

  parts = run.workdir, config, derived.total_steps, per_epoch, *parts
  parts = *parts, log, logger.info, experiment.signed
  make = functools.partial(own_classes.build, kind=Callback, expected="a jaxscale.Callback")
  members = [(make(c, CallbackContext(*parts)), c) for c in config.callbacks]
  for callback in more:
    if not isinstance(callback, Callback):
      fix = "use e.g. [jaxscale.Callback(every=10, on_step=function)]"
      raise invalid("callbacks", callback, "is not a jaxscale.Callback", fix)
  return Callbacks([*members, *((callback, None) for callback in more)])


def with_chosen_sizes(workdir: Path, experiment: build.Experiment) -> build.Experiment:
  """Return the experiment with the batch sizes that an adaptive run has chosen so far."""
  if not measuring(experiment.config.phases):
    return experiment
  return build.with_sizes(experiment, cluster.from_leader(adaptive_batch.read_chosen(workdir)))
