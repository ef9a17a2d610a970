"""What every command that trains does before and after: its session, and its end."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from jaxscale import cluster
from jaxscale.cluster import cpu_settings, requeue
from jaxscale.cluster.watch.stop_consensus import StopRequest
from jaxscale.cluster.watch.watch import Watch
from jaxscale.config import Config
from jaxscale.errors import EXIT_INTERRUPTED, GiveUpError


def open_session(config: Config, workdir: Path) -> AbstractContextManager[Watch]:
  """`cluster.open_session` as the config says.

  Args:
    config: what all processes must be given alike.
    workdir: of the run; stacks of processes that a fault ends go to `faults/`.
  """
  set_cpu_threads()
  return cluster.open_session(
    config, timeouts=config.faults, folder=workdir / "faults", gpu_settings=config.gpu_settings
  )


def set_cpu_threads() -> None:
  """Give simulated devices threads for all that they may wait in at once.

  Before the first use of a backend (see `cpu_workarounds`). A pool has a thread per
  device or core. With eight devices on two cores, four had two threads each in two
  collectives, the others none, and XLA aborted the process after 40 s (jax 0.10.2).
  The client reads the size of its pool from NPROC; what is set there stays.
  """
  if (devices := cpu_settings.simulated_devices()) > 1:
    os.environ.setdefault("NPROC", str(max(8 * devices, os.cpu_count() or 1)))


def report_stop(config: Config, request: StopRequest | None, line: str) -> int:
  """Report that a run was asked to stop and has saved, and have its job resumed.

  All processes call it, as the last thing inside `open_session`; process 0 prints, and
  asks Slurm to requeue the job, unless it was Ctrl-C, or somebody has cancelled the
  job, or `jaxscale submit` made it (JAXSCALE_REQUEUE=launcher).

  Args:
    config: says how often a job may be requeued.
    request: why all stop, from `watch.stop.agreed`; None: Ctrl-C.
    line: what was saved, and how to resume.

  Returns:
    The exit code: 85, for Ctrl-C 130, and 93 where the job was requeued too often.
  """
  cluster.mark_saved()
  code = request.exit_code if request else EXIT_INTERRUPTED
  if not cluster.is_leader():
    return code
  print(line, flush=True)
  # Under `jaxscale submit` the job's script restarts it, which sees more than we do.
  by_launcher = os.environ.get("JAXSCALE_REQUEUE") == "launcher"
  if (job := requeue.job_name()) is None or code == EXIT_INTERRUPTED or by_launcher:
    return code
  requeued = requeue.requeue(job, requeue.restarts(), config.faults.max_restarts)
  print(requeued.line, flush=True)
  return requeued.code


def check_progress(config: Config, workdir: Path, step: int) -> None:
  """Count this start of a job; all processes call it, before training.

  Args:
    config: says how many restarts without progress are too many.
    workdir: of the run.
    step: of its newest checkpoint.

  Raises:
    GiveUpError: so many restarts in a row found no newer checkpoint.
  """
  job, error = requeue.job_name(), None
  if cluster.is_leader() and job is not None:
    idle = requeue.count_start(workdir, job, requeue.restarts(), step)
    error = requeue.loop_error(idle, step, config.faults.max_idle_restarts)
  if error := cluster.from_leader(error):
    raise GiveUpError(error)
