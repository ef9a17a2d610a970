"""Restarts of a preempted job, and the limits on them.

A preempted job resumes as long as it makes progress. A job that always crashes at the
same step would be requeued forever. So, as in NVIDIA's resiliency extension, consecutive
starts without a newer checkpoint are counted.
"""

from __future__ import annotations

from pathlib import Path

from jaxscale.cluster.launch import Job
from jaxscale.cluster.schedulers import SCHEDULERS
from jaxscale.errors import EXIT_GIVE_UP, EXIT_PREEMPTED
from jaxscale.files import read_json, write_json


def requeue(job: Job, limit: int, remedy: str) -> tuple[int, str]:
  """Ask the scheduler to requeue this job; only one process should, as its last action.

  Args:
    job: the job.
    limit: the largest number of requeues.
    remedy: how to resume without a requeue, the end of the line that reports it.

  Returns:
    The exit code, and a line for the user.
  """
  scheduler, name, code = SCHEDULERS[job.scheduler], f"job {job.id}", EXIT_PREEMPTED
  if job.restarts >= limit:
    code, problem = EXIT_GIVE_UP, f"it was requeued {job.restarts} times (limit {limit})"
  elif state := scheduler.ending_state(job):
    problem = f"it is already {state}"
  elif not (problem := scheduler.requeue(job)):
    return code, f"{name} is requeued, restart {job.restarts + 1}"
  return code, f"{name} is not requeued: {problem}; {remedy}"


def count_start(workdir: Path, job: Job, step: int) -> int:
  """Record a start of the job; return the number of consecutive starts without progress.

  Only one process may call this, before training. A new job starts at 0, since a person
  has submitted it.

  Args:
    workdir: the workdir of the run, which holds `restarts.json`.
    job: the job.
    step: the step of the newest checkpoint; 0 if there is none.

  Example:
    >>> import tempfile
    >>> workdir = Path(tempfile.mkdtemp())
    >>> jobs = [Job("slurm", "7", restarts) for restarts in range(4)]
    >>> [count_start(workdir, job, step) for job, step in zip(jobs, [0, 40, 40, 40])]
    [0, 0, 1, 2]
  """
  path = workdir / "restarts.json"
  idle, newest = 0, step
  # The first start finds no file, and a damaged one is ignored.
  shape = dict.fromkeys(("step", "idle", "restarts"), int) | {"job": str}
  before = read_json(path, shape)
  if before and before["job"] == job.id and before["restarts"] < job.restarts:
    # The step decreases if the newest checkpoint was damaged, which is no progress.
    last = before["step"]
    newest, idle = max(step, last), before["idle"] + 1 if step <= last else 0
  write_json(path, {"job": job.id, "restarts": job.restarts, "idle": idle, "step": newest})
  return idle


def loop_error(idle: int, step: int, limit: int) -> str | None:
  """Return the error of a job that must not restart (exit code 93); None if it may.

  Args:
    idle: the result of `count_start`.
    step: the step of the newest checkpoint.
    limit: the number of consecutive restarts without progress that ends the job.
  """
  if idle < limit:
    return None
  what = f"{idle} restart{'s' if idle > 1 else ''} without progress, still at step {step}"
  fix = "see the first error of each attempt, then submit the job again"
  return f"{what}: not requeued again; {fix}"
