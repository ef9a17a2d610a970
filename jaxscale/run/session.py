"""Session of every command that trains: the start and the end of its processes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jaxscale import cluster
from jaxscale.cluster import cpu_settings, requeue, schedulers
from jaxscale.cluster.watch.signals import StopRequest
from jaxscale.cluster.watch.watch import Watch
from jaxscale.config import Config
from jaxscale.errors import EXIT_INTERRUPTED, GiveUpError


def open_session(config: Config, workdir: Path | None) -> AbstractContextManager[Watch]:
  """Open `cluster.open_session` with the settings of a config.

  Args:
    config: the config, which all processes must share.
    workdir: the run's workdir; stacks of processes that fail are saved in its `faults/`. None
      saves none, since a folder of another user may lead anywhere.
  """
  set_cpu_threads()
  folder = workdir and workdir / "faults"
  options: Any = {"timeouts": config.faults, "gpu_settings": config.gpu_settings}
  return cluster.open_session(config, folder=folder, **options)


def set_cpu_threads() -> None:
  """Give simulated devices enough threads for all collectives that may wait at once.

  Must be called before the first use of a backend (see `cpu_workarounds`). XLA's pool has
  one thread per device or core. With eight devices on two cores, two collectives took all
  threads of four devices, the other four had none, and XLA aborted the process after 40 s
  (jax 0.10.2). The client reads the size of the pool from NPROC, unless the user has set it.
  """
  if (devices := cpu_settings.simulated_devices()) > 1:
    os.environ.setdefault("NPROC", str(max(8 * devices, os.cpu_count() or 1)))


def report_stop(config: Config, request: StopRequest | None, saved: str, remedy: str) -> int:
  """Report that a run stopped on request and has saved, and have its job requeued.

  All processes call it at the end of `open_session`. Process 0 prints a line, and asks
  the scheduler to requeue the job, unless the request was Ctrl-C, the job was cancelled, or
  `jaxscale submit` made the job (JAXSCALE_REQUEUE=launcher).

  Args:
    config: the config, which limits how often a job is requeued.
    request: the reason to stop, from `watch.stop.agreed`; None means Ctrl-C.
    saved: what was saved.
    remedy: how to resume; printed unless the job restarts by itself.

  Returns:
    The exit code: 85, or 130 for Ctrl-C, or 93 if the job was requeued too often.
  """
  cluster.mark_saved()
  code = request.exit_code if request else EXIT_INTERRUPTED
  if not cluster.is_leader():
    return code
  job = schedulers.current_job()
  # Under `jaxscale submit` the job's script restarts it, as it also sees hardware faults.
  by_launcher = os.environ.get("JAXSCALE_REQUEUE") == "launcher"
  if by_launcher and code != EXIT_INTERRUPTED:
    restarted = f"job {job.id} is requeued" if job else "it restarts by itself"
    remedy = f"{restarted} unless it was cancelled or has no restarts left"
  if job is None or code == EXIT_INTERRUPTED or by_launcher:
    print(f"{saved}; {remedy}", flush=True)
    return code
  print(saved, flush=True)  # before the requeue, which ends the processes of the job
  code, line = requeue.requeue(job, config.faults.max_restarts, remedy)
  print(line, flush=True)
  return code


def check_progress(config: Config, workdir: Path, step: int) -> None:
  """Count this start of a job and check its progress; all processes call it before training.

  Args:
    config: the config, which limits the restarts without progress.
    workdir: the run's workdir.
    step: the step of its newest checkpoint.

  Raises:
    GiveUpError: too many restarts in a row found no newer checkpoint.
  """
  job, error = schedulers.current_job(), None
  if cluster.is_leader() and job is not None:
    idle = requeue.count_start(workdir, job, step)
    error = requeue.loop_error(idle, step, config.faults.max_idle_restarts)
  if error := cluster.from_leader(error):
    raise GiveUpError(error)
