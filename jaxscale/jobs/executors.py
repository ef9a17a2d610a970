"""Executors of jobs: Slurm and this machine. A new one is a module and an entry in `EXECUTORS`.

An executor submits, lists and cancels jobs. What the processes inside a job ask the scheduler
(the job's ID, time limit, requeue, …) is a second module, in `cluster/schedulers/`; without it
a job runs, but does not save before its time limit, and a restart does not take over its
workdir at once. `Site.time` and `Site.signal` have the formats of sbatch(1), which a different
scheduler's `render` converts.
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
  """Interface of a module that runs jobs; `slurm` and `local` implement it.

  `spec.JobSpec` has everything for a script: it begins with `setup_script(spec)` and
  `python_command(spec)`, and `spec.train_options()` end the command. The script, or a
  supervisor, starts `spec.processes` processes for each of `spec.tasks` and

  - appends a line of JSON for each start and end to `spec.events_file(task)`: "event"
    ("start" or "end"), "job", "restarts", "nodes", "hosts", "code", "next" ("requeue"
    or "stop" after an end, else ""), "time" (Unix seconds),
  - writes the output of process RANK to `spec.log_file(job, task, rank)`,
  - forwards SIGTERM to the processes, which save and exit with 85,
  - restarts a run if `spec.is_restarted` returns True, at most `spec.requeue` times, and
    never after the file `cancelled` has appeared in the folder.

  Attributes:
    SCRIPT: the file name of the script in the folder of a run.
  """

  SCRIPT: str

  def is_available(self) -> bool:
    """Return whether this machine can submit jobs to the executor."""
    ...

  def render(self, spec: JobSpec) -> str:
    """Render the script of a run; raise ConfigError if the executor cannot run it."""
    ...

  def submit(self, spec: JobSpec, tasks: Sequence[int] | None, after: Path | None) -> str:
    """Start or queue the script in the run's folder; return the number of the job.

    Args:
      spec: the run.
      tasks: the trials to run; None means all.
      after: the folder of a run that must end first; only executors without a queue use
        it.

    Raises:
      ConfigError: the submission is refused.
    """
    ...

  def queue(self, runs: Mapping[str, JobSpec]) -> dict[str, QueueEntry]:
    """Return the known tasks of runs by `spec.task_id`; ended ones may be missing.

    A `QueueEntry` has `state` in Slurm's terms (PENDING, RUNNING, COMPLETED, FAILED,
    TIMEOUT, CANCELLED; `status` shows others unchanged) and, if known, `nodes`,
    `time_left`, `restarts`, and the `reason` why it waits.

    Args:
      runs: the specs by the number of their last job.
    """
    ...

  def cancel(self, spec: JobSpec, job: str) -> None:
    """End all tasks of a job: SIGTERM, some seconds to save, SIGKILL."""
    ...


# Without --executor the first available one is used; `local` is always available.
EXECUTORS: dict[str, Executor] = {"slurm": slurm_executor, "local": local_executor}


def choose(name: str | None) -> str:
  """Check the name of an executor; None selects the first available one."""
  if name is None:
    return next(n for n, executor in EXECUTORS.items() if executor.is_available())
  if name not in EXECUTORS:
    raise ConfigError(f"--executor={name}: {nearest(name, EXECUTORS)}")
  return name
