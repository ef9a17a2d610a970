"""Executors of jobs: Slurm, or this machine. A further one is a module and a line.

Also Slurm's alone, and to be written for another scheduler where it is wanted: requeue
and the count of restarts (cluster/requeue.py), the stop before the time limit
(cluster/detect/walltime.py), the takeover of a workdir by a restarted job (`job_of` in
checkpoint/lock.py, which also names scancel), and the forms of times and signals in a
site's profile (site.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.jobs import local_executor, slurm_executor
from jaxscale.jobs.spec import JobSpec, QueueEntry


class Executor(Protocol):
  """Interface of a module that runs jobs; `slurm` and `local` are the examples.

  `spec.JobSpec` has all that a script is made of: `setup_script(spec)` and
  `python_command(spec)` begin it, `spec.train_options()` end the command. The script,
  or a supervisor, starts `spec.processes` processes for each of `spec.tasks` and

  - appends a line of JSON for each start and end to `spec.events_file(task)`: "event"
    ("start" or "end"), "job", "restarts", "nodes", "hosts", "code", "next" ("requeue"
    or "stop" after an end, else ""), "time" (Unix seconds),
  - writes the output of process RANK to `spec.log_file(job, task, rank)`,
  - passes SIGTERM on to the processes, which save and leave with 85,
  - restarts a run where `spec.is_restarted` says so, at most `spec.requeue` times, and
    not after the file `cancelled` has appeared in the folder.

  Attributes:
    SCRIPT: file name of the script in the folder of a run.
  """

  SCRIPT: str

  def is_available(self) -> bool:
    """Return whether this machine can submit to it."""
    ...

  def render(self, spec: JobSpec) -> str:
    """The script of a run; ConfigError if this executor cannot run it."""
    ...

  def submit(self, spec: JobSpec, tasks: Sequence[int] | None, after: Path | None) -> str:
    """Start or queue the script in the run's folder; returns the number of the job.

    Args:
      spec: the run.
      tasks: the trials to run; None: all.
      after: folder of a run that has to end before; only for an executor without a
        queue of its own.

    Raises:
      ConfigError: the submission is refused.
    """
    ...

  def queue(self, runs: Mapping[str, JobSpec]) -> dict[str, QueueEntry]:
    """Return the known tasks of runs by `spec.task_id`; ended ones may be missing.

    A `QueueEntry` has `state` in Slurm's words (PENDING, RUNNING, COMPLETED, FAILED,
    TIMEOUT, CANCELLED; `status` shows others as they are), and where it is known
    `nodes`, `time_left`, `restarts`, and `reason` for which it waits.

    Args:
      runs: specs by the number of their last job.
    """
    ...

  def cancel(self, spec: JobSpec, job: str) -> None:
    """End all tasks of a job: SIGTERM, some seconds to save, SIGKILL."""
    ...


# In the order in which they are tried where none is named; `local` is always there.
EXECUTORS: dict[str, Executor] = {"slurm": slurm_executor, "local": local_executor}


def choose(name: str | None) -> str:
  """An executor's name, checked; None: the first one that is available here."""
  if name is None:
    return next(n for n, executor in EXECUTORS.items() if executor.is_available())
  if name not in EXECUTORS:
    raise ConfigError(f"--executor={name}: {nearest(name, EXECUTORS)}")
  return name
