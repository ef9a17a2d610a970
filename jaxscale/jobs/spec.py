"""`JobSpec`: the JSON description of a run, from which executors render its script.

The module also has the parts that the scripts of all executors share: the setup of the
environment, the command that starts Python, and the exit codes after which a run restarts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from jaxscale import errors
from jaxscale.errors import ConfigError
from jaxscale.jobs.site import Site, site_from

# Exit codes of processes that SIGHUP, SIGUSR1, SIGUSR2 or SIGTERM ended before they had
# handlers: they were asked to stop, as with 85. After an exit code in none of these three
# tuples, which is a crash, a run restarts if it has written a newer checkpoint.
SIGNAL_CODES = (129, 138, 140, 143)
ASKED_CODES = (errors.EXIT_PREEMPTED, *SIGNAL_CODES)
RESTARTED_CODES = (errors.EXIT_PREEMPTED, errors.EXIT_HANG, *SIGNAL_CODES)
FINAL_CODES = (errors.EXIT_DONE, errors.EXIT_USER, errors.EXIT_GIVE_UP, errors.EXIT_INTERRUPTED)


def is_restarted(code: int, progress: bool) -> bool:
  """Return whether a run restarts after its end; the sbatch script decides in bash.

  Args:
    code: the exit code of the run.
    progress: whether it has written a newer checkpoint.
  """
  return code in RESTARTED_CODES or (code not in FINAL_CODES and progress)


class JobSpec(NamedTuple):
  """One run, or a sweep of several trials.

  Attributes:
    name: the name of the run and of its folder.
    folder: the absolute path of the folder, created for this run.
    cwd: the absolute path of the directory of the submission, to which relative paths in
      the config refer.
    config: the `FILE[:arg]` of the config's copy, relative to the folder.
    overrides: the settings of all trials, as text by dotted field.
    trials: the settings of each trial of a sweep; empty for a single run.
    at_most: the number of trials that run at the same time; 0: no limit.
    nodes: the number of nodes of each run.
    site: the cluster, including the options of the command line.
    requeue: the largest number of restarts of the job.
    preflight: whether the job checks its nodes before training.
    executor: the name of the executor, a key of `EXECUTORS`.
    python: the interpreter that submits, used if the site sets none.
    made_by: the command line of the submission, for a comment in the script.
    spares: the number of additional nodes that replace lost ones.
    accept_changes: the kinds of changes accepted on resume, e.g. "data,code".
  """

  name: str
  folder: str
  cwd: str
  config: str
  overrides: dict[str, str]
  trials: tuple[dict[str, str], ...]
  at_most: int
  nodes: int
  site: Site
  requeue: int
  preflight: bool
  executor: str
  python: str
  made_by: str
  spares: int = 0
  accept_changes: str = ""

  @property
  def tasks(self) -> range:
    """Indices of the trials; 0 for a single run."""
    return range(max(len(self.trials), 1))

  @property
  def processes(self) -> int:
    """Number of processes of each trial."""
    return self.nodes * self.site.tasks

  def check_task(self, task: int) -> None:
    """Raise ConfigError if the trial does not exist."""
    if task not in self.tasks:
      raise ConfigError(f"--task={task}: give 0 … {len(self.tasks) - 1}")

  def task_id(self, job: str, task: int) -> str:
    """Return the job number of one trial: JOB_TASK in a sweep, as in Slurm's arrays."""
    return f"{job}_{task}" if self.trials else job

  def workdir(self, task: int) -> Path:
    """Return the folder where a trial writes its checkpoints and metrics."""
    return Path(self.folder, *(("trials", str(task)) if self.trials else ("train",)))

  def events_file(self, task: int) -> Path:
    """Return the file with the starts and ends of a trial, one line each."""
    return Path(self.folder, "events", f"{task}.jsonl")

  def log_file(self, job: str, task: int, rank: int | str) -> Path:
    """Return the path of a process's output file.

    The rank "batch" selects the output of the batch script or the supervisor.
    """
    return Path(self.folder, "logs", f"{self.task_id(job, task)}.{rank}.out")

  def train_options(self) -> list[str]:
    """Return the options of `jaxscale.train` that all trials share."""
    accept = [f"--accept-changes={self.accept_changes}"] * bool(self.accept_changes)
    options = *accept, *as_options(self.overrides)
    return ["--config", f"{self.folder}/{self.config}", *options]


def as_options(overrides: Mapping[str, str]) -> list[str]:
  """Convert overrides to options of the command line.

  Example:
    >>> as_options({"epochs": "3"})
    ['--config.epochs=3']
  """
  return [f"--config.{path}={value}" for path, value in overrides.items()]


# Required fields of a run.json, in the form of `files.mismatch`.
SHAPE = dict.fromkeys(("name", "folder", "cwd", "config", "executor", "python", "made_by"), str)
SHAPE |= dict.fromkeys(("at_most", "nodes", "requeue"), int)
SHAPE |= dict(overrides={str: str}, trials=[{str: str}], site={}, preflight=bool)


def to_json(spec: JobSpec) -> dict[str, Any]:
  """Convert a spec to JSON values; `from_json` is the inverse."""
  return spec._asdict() | {"site": dataclasses.asdict(spec.site)}


def from_json(table: Mapping[str, Any]) -> JobSpec:
  """Convert the result of `to_json` to a spec."""
  fields = {name: table[name] for name in JobSpec._fields if name in table}
  fields |= {"site": site_from(table["site"]), "trials": tuple(table["trials"])}
  return JobSpec(**fields)


def python_command(spec: JobSpec) -> list[str]:
  """Return the command that starts Python in the job, inside its container if it has one.

  With Slurm's plugin pyxis `srun` starts the container, so the command does not.
  """
  site = spec.site
  python = [site.python or ("python" if site.container else spec.python)]
  if site.container is None or site.container.kind == "pyxis":
    return python
  nv = ["--nv"] if site.gpus_per_node and not site.container.options else []
  binds = [f"--bind={mount}" for mount in container_mounts(spec)]
  options = [*nv, *binds, f"--pwd={spec.cwd}", *site.container.options]
  return [site.container.kind, "exec", *options, site.container.image, *python]


def container_mounts(spec: JobSpec) -> list[str]:
  """Return the directories that are mounted in the container."""
  assert spec.site.container is not None
  return [spec.folder, spec.cwd, *spec.site.container.mounts]


def setup_script(spec: JobSpec) -> str:
  """Return the bash lines that set up the environment of a job and end it on errors."""
  site = spec.site
  variables = (pair.partition("=") for pair in site.env)
  lines = [f"module load {quote(module)}" for module in site.modules] + [*site.setup]
  lines += [f"export {name}={quote(value)}" for name, _, value in variables]
  return "\n".join([_BEFORE_SETUP, *lines, _AFTER_SETUP.replace("FOLDER", quote(spec.folder))])


_BEFORE_SETUP = r"""# The environment of the job; a failing line ends the job.
set -eo pipefail
trap 'echo "error: line $LINENO of $0 failed on $(hostname)" >&2; exit 2' ERR"""

_AFTER_SETUP = r"""trap - ERR
set -u +e

# The run's copy of the code comes first. Without PYTHONSAFEPATH the current directory
# would come first.
run=FOLDER
export PYTHONPATH="$run/code${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# This script restarts the processes, so they must not requeue the job themselves.
export JAXSCALE_REQUEUE=launcher
"""


class QueueEntry(NamedTuple):
  """The state of a job, or of one task of an array, from an executor.

  Attributes:
    state: the state in Slurm's terms: PENDING, RUNNING, COMPLETED, …
    nodes: the number of nodes that it has or requests; 0 if unknown.
    time_left: the time until the time limit, in Slurm's format.
    restarts: the number of restarts.
    reason: the reason why it waits.
  """

  state: str
  nodes: int = 0
  time_left: str = ""
  restarts: int = 0
  reason: str = "None"
