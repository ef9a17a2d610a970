"""Schedulers of clusters, as a process of a job sees them: the job, its times, its requeue.

A new scheduler, such as LSF or PBS, is a module in this package with the functions of
`Scheduler`, like `slurm`, and an entry in `SCHEDULERS`. The rest of jaxscale calls them by
`ask`. A scheduler to which `jaxscale submit` can submit is also an executor: a module in
`jobs/` and an entry in `EXECUTORS` (jobs/executors.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, TypeVar

from jaxscale.cluster.launch import Env, Job, Launch
from jaxscale.cluster.schedulers import slurm

T = TypeVar("T")


class Scheduler(Protocol):
  """Interface of a module for one scheduler; outside of its jobs, the functions return None.

  Attributes:
    PREFIX: the beginning of the variables that the scheduler sets in a job.
    CANCEL: the command that cancels a job, without the job's ID.
    GPU_SHARING: the variables of jobs whose processes share GPUs.
  """

  PREFIX: str
  CANCEL: str
  GPU_SHARING: tuple[str, ...]

  def job(self, env: Env) -> Job | None:
    """Return the job of this process."""

  def detect(self, env: Env) -> Launch | None:
    """Identify this process among those of the job; see `LAUNCHERS` (cluster/detect)."""

  def hosts(self, env: Env) -> list[str] | None:
    """Return the hosts of the job, in the scheduler's order."""

  def node_name(self, env: Env) -> str | None:
    """Return the scheduler's name of this host."""

  def node_address(self, env: Env, node: str) -> str | None:
    """Return the address of a node whose name does not resolve."""

  def has_own_gpus(self, env: Env, num_visible: int) -> bool | None:
    """Return whether the visible GPUs were selected for this process only."""

  def end_time(self, env: Env, is_near: bool) -> float | None:
    """Return the end of the job in seconds since 1970; None if unlimited or unknown.

    Args:
      env: the environment variables.
      is_near: whether the known end is near and must be confirmed, as it may have moved.
    """

  def queue_times(self, env: Env) -> tuple[float, float] | None:
    """Return the last times of queueing and starting the job, if this is its first step."""

  def ending_state(self, job: Job) -> str | None:
    """Return the state of a job that must not be requeued, such as a cancelled one."""

  def requeue(self, job: Job) -> str | None:
    """Requeue the job; return the error, or None if it is requeued.

    The scheduler may end all processes of the job at once, also this one.
    """


SCHEDULERS: dict[str, Scheduler] = {"slurm": slurm}


def ask(question: Callable[[Scheduler], T | None]) -> T | None:
  """Return the first answer of a scheduler that is not None.

  Example:
    >>> str(ask(lambda scheduler: scheduler.job({"SLURM_JOB_ID": "17"})))
    'slurm-17-r0'
  """
  answers = map(question, SCHEDULERS.values())
  return next((answer for answer in answers if answer is not None), None)


def detect(env: Env) -> Launch | None:
  """Identify this process in a scheduler's job; see `Scheduler.detect`."""
  return ask(lambda scheduler: scheduler.detect(env))


def current_job(env: Env = os.environ) -> Job | None:
  """Return the job of this process; None outside of a job."""
  return ask(lambda scheduler: scheduler.job(env))
