"""A run as one value that JSON can hold: all that its script is made of.

Also what the scripts of every executor share: how the environment is set up, how
Python is started, and after which exit codes a run is restarted.
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

# Any other exit code is a crash, after which a run is restarted if it has left a
# newer checkpoint than it found.
# Of processes that SIGHUP, SIGUSR1, SIGUSR2 or SIGTERM ended before they had handlers:
# they were asked to stop, as with 85.
SIGNAL_CODES = (129, 138, 140, 143)
RESTARTED_CODES = (errors.EXIT_PREEMPTED, errors.EXIT_HANG, *SIGNAL_CODES)
FINAL_CODES = (errors.EXIT_DONE, errors.EXIT_USER, errors.EXIT_GIVE_UP, errors.EXIT_INTERRUPTED)


def is_restarted(code: int, progress: bool) -> bool:
  """Return whether a run that ended is started again; batch scripts do it in bash.

  Args:
    code: the exit code of the run.
    progress: whether it left a newer checkpoint than it found.
  """
  return code in RESTARTED_CODES or (code not in FINAL_CODES and progress)


class JobSpec(NamedTuple):
  """One run, or a sweep of several trials.

  Attributes:
    name: name of the run and of its folder.
    folder: absolute path, created for this run alone.
    cwd: absolute path of the directory of the submission, to which relative paths in
      the config refer.
    config: `FILE[:arg]` of the copy, relative to the folder.
    overrides: settings of all trials, as text by dotted field.
    trials: settings of each trial of a sweep; empty: a single run.
    at_most: trials that run at the same time; 0: as many as there is room for.
    nodes: nodes of each run.
    site: the cluster, with the options of the command line.
    requeue: how many times the job may be restarted.
    preflight: check the nodes before training.
    executor: name of the executor, a key of `EXECUTORS`.
    python: the interpreter that submits, for a site that names none.
    made_by: the command line, for readers of the script.
    spares: additional nodes of the job that replace lost ones.
    accept_changes: kinds of changes that are accepted when it resumes, "data,code".
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
    """Indices of the trials; 0 alone for a single run."""
    return range(max(len(self.trials), 1))

  @property
  def processes(self) -> int:
    """Number of processes of each trial."""
    return self.nodes * self.site.tasks

  def check_task(self, task: int) -> None:
    """Raise ConfigError unless there is such a trial."""
    if task not in self.tasks:
      raise ConfigError(f"--task={task}: give 0 … {len(self.tasks) - 1}")

  def task_id(self, job: str, task: int) -> str:
    """The job number of one trial: JOB_TASK in a sweep, as Slurm numbers arrays."""
    return f"{job}_{task}" if self.trials else job

  def workdir(self, task: int) -> Path:
    """Return the folder where a trial writes its checkpoints and metrics."""
    return Path(self.folder, *(("trials", str(task)) if self.trials else ("train",)))

  def events_file(self, task: int) -> Path:
    """The starts and ends of a trial, one line each."""
    return Path(self.folder, "events", f"{task}.jsonl")

  def log_file(self, job: str, task: int, rank: int | str) -> Path:
    """The output of a process; of the script, or the supervisor, if rank is "batch"."""
    return Path(self.folder, "logs", f"{self.task_id(job, task)}.{rank}.out")

  def train_options(self) -> list[str]:
    """The options of `jaxscale.train` that all trials have."""
    accept = [f"--accept-changes={self.accept_changes}"] * bool(self.accept_changes)
    options = *accept, *as_options(self.overrides)
    return ["--config", f"{self.folder}/{self.config}", *options]


def as_options(overrides: Mapping[str, str]) -> list[str]:
  """Overrides as options of the command line.

  Example:
    >>> as_options({"epochs": "3"})
    ['--config.epochs=3']
  """
  return [f"--config.{path}={value}" for path, value in overrides.items()]


# What may not be missing in a run.json, as `files.mismatch` takes it.
SHAPE = dict.fromkeys(("name", "folder", "cwd", "config", "executor", "python", "made_by"), str)
SHAPE |= dict.fromkeys(("at_most", "nodes", "requeue"), int)
SHAPE |= dict(overrides={str: str}, trials=[{str: str}], site={}, preflight=bool)


def to_json(spec: JobSpec) -> dict[str, Any]:
  """A spec as JSON; `from_json` is the inverse."""
  return spec._asdict() | {"site": dataclasses.asdict(spec.site)}


def from_json(table: Mapping[str, Any]) -> JobSpec:
  """A spec from what `to_json` returned."""
  fields = {name: table[name] for name in JobSpec._fields if name in table}
  fields |= {"site": site_from(table["site"]), "trials": tuple(table["trials"])}
  return JobSpec(**fields)


def python_command(spec: JobSpec) -> list[str]:
  """The command that starts Python in the job, inside its container if it has one.

  Slurm's plugin pyxis is not part of it: there `srun` starts the container.
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
  """The directories that are mounted in the container."""
  assert spec.site.container is not None
  return [spec.folder, spec.cwd, *spec.site.container.mounts]


def setup_script(spec: JobSpec) -> str:
  """The lines of bash that prepare the environment of a job, or end it."""
  site = spec.site
  variables = (pair.partition("=") for pair in site.env)
  lines = [f"module load {quote(module)}" for module in site.modules] + [*site.setup]
  lines += [f"export {name}={quote(value)}" for name, _, value in variables]
  return "\n".join([_BEFORE_SETUP, *lines, _AFTER_SETUP.replace("FOLDER", quote(spec.folder))])


_BEFORE_SETUP = r"""# The environment of the job; a line that fails ends it.
set -eo pipefail
trap 'echo "error: line $LINENO of $0 failed on $(hostname)" >&2; exit 2' ERR"""

_AFTER_SETUP = r"""trap - ERR
set -u +e

# The copy of the code that the submission made comes first. Without PYTHONSAFEPATH the
# current directory would, which jaxscale adds behind Python's own modules.
run=FOLDER
export PYTHONPATH="$run/code${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# The launcher restarts processes, they do not requeue their job themselves.
export JAXSCALE_REQUEUE=launcher
"""


class QueueEntry(NamedTuple):
  """Report of an executor about a job, or about one task of an array.

  Attributes:
    state: in Slurm's words: PENDING, RUNNING, COMPLETED, …
    nodes: nodes that it has, or asks for; 0: not known.
    time_left: until the time limit, as Slurm writes it.
    restarts: how many times it was restarted.
    reason: why it waits.
  """

  state: str
  nodes: int = 0
  time_left: str = ""
  restarts: int = 0
  reason: str = "None"
