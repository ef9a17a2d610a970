"""The owner of a lock: a process as others on the cluster see it; is it alive."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxscale.cluster import requeue


class LockOwner(NamedTuple):
  """A run, as others see it.

  Attributes:
    host: its name.
    pid: of process 0, as numbered on that host.
    job: as `job_of` gives it; "" for none.
    since: when it acquired the lock, seconds since the epoch, by its own clock.
    process: identifies this process among all others, also after a reboot, in
      containers and where numbers are used again; "" where that is unknown.
  """

  host: str
  pid: int
  job: str
  since: float
  process: str

  def __str__(self) -> str:
    job = f", job {self.job}" if self.job else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
    return f"host {self.host}, pid {self.pid}{job}, since {since}"


def job_of(env: Mapping[str, str]) -> str:
  """The Slurm job, step and restart of this process: "slurm-12.0-r1"; "" if none.

  Of an array task it is "slurm-9_3.0-r1" (srun(1), sbatch(1): SLURM_STEP_ID).
  """
  if not (job := requeue.job_name(env)):
    return ""
  step = f".{env['SLURM_STEP_ID']}" if "SLURM_STEP_ID" in env else ""
  return f"slurm-{job}{step}-r{requeue.restarts(env)}"


def is_restart(job: str, before: str) -> bool:
  """Whether `job` is a later restart of the job `before`, which so has ended.

  Example:
    >>> is_restart("slurm-12.0-r1", "slurm-12.3-r0")
    True
    >>> is_restart("slurm-12.1-r0", "slurm-12.0-r0")
    False
  """
  new, old = job_parts(job), job_parts(before)
  return bool(new and old and new[0] == old[0] and new[1] > old[1])


def job_parts(job: str) -> tuple[str, int] | None:
  """The job without its step, and its restart."""
  found = re.fullmatch(r"(.+?)(?:\.\w+)?-r(\d+)", job)
  return (found[1], int(found[2])) if found else None


def this_process(job: str) -> LockOwner:
  """What others see of this process, from now on."""
  pid = os.getpid()
  return LockOwner(socket.gethostname(), pid, job, time.time(), _identity(pid) or "")


def is_alive(owner: LockOwner) -> bool | None:
  """Whether its process is there; None if that cannot be known from here."""
  here = _identity(os.getpid())
  if not here or not owner.process or owner.host != socket.gethostname():
    return None
  if owner.process.split()[:2] != here.split()[:2]:
    return None  # another machine, another boot, or another container
  found = _identity(owner.pid)
  if found is None:
    try:
      os.kill(owner.pid, 0)
    except PermissionError:
      return None  # another user's process that /proc does not show (hidepid)
    except OSError:
      return False
  return found == owner.process


def _identity(pid: int) -> str | None:
  """Boot, namespace and start of a process, by proc(5); None if there is none."""
  try:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid")
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return None
  # Field 3 is the state and field 22 the start; the split begins at field 3.
  return None if stat[0] in "ZX" else f"{boot} {namespace} {stat[19]}"
