"""Executors of jobs: Slurm and this machine. A new one is a module and an entry in `EXECUTORS`.

An executor submits, lists and cancels jobs. What the processes inside a job ask the scheduler
(the job's ID, time limit, requeue, …) is a second module, in `cluster/schedulers/`; without it
a job runs, but does not save before its time limit, and a restart does not take over its
workdir at once. `Site.time` and `Site.signal` have the formats of sbatch(1), which a different
scheduler's `render` converts.

The module of an executor has, as `slurm_executor` and `local_executor`:

- `SCRIPT`, the file name of the script in the folder of a run.
- `is_available() -> bool`: whether this machine can submit jobs to the executor.
- `render(spec) -> str`: the script of a run; ConfigError if the executor cannot run it.
- `submit(spec, tasks, after) -> str`: start or queue the script in the run's folder; return the
  number of the job. `tasks` are the trials to run, None for all. `after` is the folder of a run
  that must end first; only executors without a queue use it. ConfigError if it is refused.
- `queue(runs) -> dict[str, QueueEntry]`: the known tasks of runs by `spec.task_id`; ended ones
  may be missing. `runs` are the specs by the number of their last job. A `QueueEntry` has
  `state` in Slurm's terms (PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, CANCELLED; `status`
  shows others unchanged) and, if known, `nodes`, `time_left`, `restarts`, and the `reason` why
  it waits.
- `cancel(spec, job)`: end all tasks of a job: SIGTERM, some seconds to save, SIGKILL.

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
"""

from __future__ import annotations

from types import ModuleType

from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.jobs import local_executor, slurm_executor

# Without --executor the first available one is used; `local` is always available.
EXECUTORS: dict[str, ModuleType] = {"slurm": slurm_executor, "local": local_executor}


def choose(name: str | None) -> str:
  """Check the name of an executor; None selects the first available one."""
  if name is None:
    return next(n for n, executor in EXECUTORS.items() if executor.is_available())
  if name not in EXECUTORS:
    raise ConfigError(f"--executor={name}: {nearest(name, EXECUTORS)}")
  return name
