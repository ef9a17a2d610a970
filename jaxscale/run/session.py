"""What every command that trains does before and after: join the others, end well."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from jaxscale import cluster
from jaxscale.cluster import requeue
from jaxscale.cluster.watch.signals import exit_code
from jaxscale.cluster.watch.watch import Watch
from jaxscale.config import Config
from jaxscale.errors import EXIT_INTERRUPTED, GiveUpError

# By `launch submit`: the job's script starts it again, which sees more than we do.
_BY_LAUNCHER = "launcher"


def joined(config: Config, workdir: Path) -> contextlib.AbstractContextManager[Watch]:
  """`cluster.joined` as the config says.

  Args:
    config: what all processes have to be given alike.
    workdir: of the run; stacks of processes that a fault ends go to `faults/`.
  """
  enough_threads()
  return cluster.joined(
    config,
    timeouts=cluster.Timeouts(**_pick(config, cluster.Timeouts)),
    limits=cluster.Limits(**_pick(config, cluster.Limits)),
    folder=workdir / "faults",
  )


def enough_threads() -> None:
  """Give simulated devices threads for all that they may wait in at once.

  Before the first use of a backend (see `simulated`). A pool has a thread a device or
  core. With eight devices on two cores, four had two threads each in two collectives,
  the others none, and XLA aborted the process after 40 s (jax 0.10.2). The client
  reads the size of its pool from NPROC; what is set there stays.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
  counts = [*forced, os.environ.get("JAX_NUM_CPU_DEVICES", "")]
  devices = max((int(n) for n in counts if n.isdigit()), default=1)
  if devices > 1:
    os.environ.setdefault("NPROC", str(max(8 * devices, os.cpu_count() or 1)))


def _pick(config: Config, cls: Any) -> dict[str, float]:
  """The settings that a class of `cluster` has under the same names."""
  return {f.name: getattr(config.faults, f.name) for f in dataclasses.fields(cls)}


def stopped(config: Config, reason: str | None, line: str) -> int:
  """Say that a run was asked to stop and has saved, and have its job go on later.

  All processes call it, as the last thing inside `joined`; process 0 says what there
  is to say, and asks Slurm to requeue the job, unless it was Ctrl-C, or somebody has
  cancelled the job, or `launch submit` made it (JAXSCALE_REQUEUE=launcher).

  Args:
    config: says how often a job may be requeued.
    reason: why all stop; None: Ctrl-C.
    line: what was saved, and how to go on.

  Returns:
    The exit code: 85, for Ctrl-C 130, and 93 where the job was requeued too often.
  """
  cluster.saved()
  code = exit_code(reason) if reason else EXIT_INTERRUPTED
  if not cluster.is_leader():
    return code
  print(line, flush=True)
  job, launcher = requeue.job_name(), os.environ.get("JAXSCALE_REQUEUE")
  if job is None or code == EXIT_INTERRUPTED or launcher == _BY_LAUNCHER:
    return code
  requeued = requeue.requeue(job, requeue.restarts(), config.faults.restarts)
  print(requeued.line, flush=True)
  return requeued.code


def refuse_loop(config: Config, workdir: Path, step: int) -> None:
  """Count this start of a job; all processes call it, before training.

  Args:
    config: says how many restarts without progress are too many.
    workdir: of the run.
    step: of its newest checkpoint.

  Raises:
    GiveUpError: so many restarts in a row found no newer checkpoint.
  """
  job, refusal = requeue.job_name(), None
  if cluster.is_leader() and job is not None:
    idle = requeue.count_start(workdir, job, requeue.restarts(), step)
    refusal = requeue.refuse_loop(idle, step, config.faults.idle_restarts)
  if refusal := cluster.from_leader(refusal):
    raise GiveUpError(refusal)
