"""Folder of a run, which holds its code, config, script and versions.

Changes outside the folder do not affect a submitted run.

run.json            the spec; `resume` submits it again
job.sbatch          the script (process.sh on this machine)
code/               jaxscale and the configs at the time of the submission
environment.json    commit, Python, versions of all packages, variables
submissions.jsonl   one line per submission: executor, job, time, trials
events/TASK.jsonl   one line per start and end
logs/JOB.RANK.out   the output of each process
train/              the workdir: metrics, checkpoints (trials/TASK in a sweep)
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError, invalid, remedy_for
from jaxscale.files import expand, read_json_lines, replace_text, require_json, write_json
from jaxscale.jobs.spec import SHAPE, JobSpec, from_json, to_json
from jaxscale.owners import user_name
from jaxscale.run.goodput import Goodput, goodput, is_time, read_activities
from jaxscale.run.provenance import environment, git

_PACKAGE = Path(__file__).absolute().parent.parent
_ROOT = _PACKAGE.parent
_MOST_PROCESSES = 1 << 20  # of a run
_LEFT_OUT = {"__pycache__", ".git", ".ipynb_checkpoints"}
# What decides which code, job and processes belong to a run, in its folder.
_DECISIVE = ". run.json code submissions.jsonl supervisor.jsonl processes.jsonl".split()


@contextlib.contextmanager
def one_line(path: object, fix: str) -> Iterator[None]:
  """Report an error of a file as a ConfigError: the path, the error, and the fix."""
  try:
    yield
  except OSError as e:
    raise ConfigError(f"{path}: {e.strerror}; {fix}") from None


def new_folder(runs: str, name: str | None, config: str) -> Path:
  """Choose the absolute path of a new folder, which `make` creates.

  Args:
    runs: the directory of all runs.
    name: the name of the folder; None means the config's name and the time.
    config: the config as `FILE[:arg]`.

  Raises:
    ConfigError: the name is invalid or already exists.
  """
  parent = directory(runs).absolute()
  if re.search(r'[:\\"\n]', str(parent)):
    expected = "a path without colon, backslash, double quote or line break"
    raise ConfigError(f"--runs={runs}: give {expected}")
  if name is not None:
    if not re.fullmatch(r"[A-Za-z0-9_][\w.+=-]{0,99}", name):
      raise ConfigError(f"--name={name}: give letters, digits and _ . + = - only")
    if (folder := parent / name).exists():
      hint = f", or continue it by `resume {name}`" * (folder / "run.json").exists()
      raise ConfigError(f"--name={name}: {folder} exists; use a different name{hint}")
    return folder
  file, _, arg = config.partition(":")
  words = [Path(file).stem, arg, time.strftime("%Y%m%d-%H%M%S")]
  stem = re.sub(r"[^\w.+=-]+", "-", "-".join(filter(None, words)))
  names = [stem, *(f"{stem}-{i}" for i in range(2, 1000))]
  return next(parent / n for n in names if not (parent / n).exists())


def directory(runs: str) -> Path:
  """Return the path of the directory of all runs.

  Raises:
    ConfigError: the text is the address of a bucket.
  """
  if "://" in runs:
    raise ConfigError(f"--runs={runs}: give a mounted directory that all nodes see, not an address")
  return Path(expand(runs))


def copied_path(config: str) -> str:
  """Return the path of the copy of a config, `FILE[:arg]`, in a run's folder.

  A config in the source tree of jaxscale keeps its relative path, so that configs may
  import each other; a config from elsewhere goes into code/config/.
  """
  file, _, arg = config.partition(":")
  path = Path(file).absolute()
  inside = path.is_relative_to(_ROOT)
  relative = path.relative_to(_ROOT) if inside else Path("config", path.name)
  return str(Path("code", relative)) + (f":{arg}" if arg else "")


def make(spec: JobSpec, script: tuple[str, str], config: str, text: str | None) -> None:
  """Create the folder of a run with everything in it.

  Args:
    spec: the run.
    script: the file name and the text of the script.
    config: the user's `FILE[:arg]`; the file is copied with the Python files next to it.
    text: the source of the config, if it is not in a file.

  Raises:
    ConfigError: the folder exists or cannot be written.
  """
  folder = Path(spec.folder)
  with one_line(folder, "use a different --name or --runs"):
    folder.mkdir(parents=True)  # atomic, so that one of two equal submissions fails
    for name in ("code", "events", "logs"):
      (folder / name).mkdir()
    for source, target in sources(None if text else config):
      (folder / target).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(source, folder / target)
    if text:
      path = folder / spec.config
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text, encoding="utf-8")
    write_json(folder / "environment.json", environment())
    write_spec(spec, script)


def write_spec(spec: JobSpec, script: tuple[str, str]) -> None:
  """Write run.json and the script, which is given as (file name, text)."""
  replace_text(Path(spec.folder, script[0]), script[1])
  write_json(Path(spec.folder, "run.json"), to_json(spec))


def sources(config: str | None) -> list[tuple[Path, str]]:
  """Return (file, path in the folder) of all files to copy: the package and the config.

  In a git checkout these are the files that git tracks or would track, otherwise all files
  of the package. The Python files of the config's directory are added, since the config may
  import them.
  """
  listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
  names = filter(None, listed.split("\0"))
  paths = [_PACKAGE / n for n in names] or _PACKAGE.rglob("*")
  whole = (p for p in sorted(paths) if p.is_file() and not _LEFT_OUT & {*p.parts[:-1]})
  files = [(p, str(Path("code", p.relative_to(_ROOT)))) for p in whole]
  if config is not None:
    path = Path(config.partition(":")[0]).absolute()
    if not path.is_relative_to(_PACKAGE):
      files += [(p, copied_path(str(p))) for p in sorted(path.parent.glob("*.py"))]
  return files


def read_spec(folder: Path) -> JobSpec:
  """Read the spec in a folder, with the folder's present path.

  Raises:
    ConfigError: the spec is missing or damaged.
  """
  if not os.path.isfile(folder / "run.json"):
    raise ConfigError(f"{folder}: has no run.json; give the folder of a run")
  path, remedy = folder / "run.json", "restore it from a copy, or submit the run again"
  table = require_json(path, SHAPE, remedy)
  try:
    spec = from_json(table)._replace(folder=str(folder.absolute()))
    least = min(spec.nodes - 1, spec.at_most, spec.spares, spec.requeue)
    if least < 0 or spec.processes > _MOST_PROCESSES:
      raise ConfigError(f"invalid size: {spec.nodes} nodes with {spec.site.tasks} processes each")
  except (ConfigError, TypeError) as e:
    raise ConfigError(f"{path}: {e}; {remedy}") from None
  return spec


def require_own(folder: Path, fix: str) -> None:
  """Check that nobody else has chosen the code, job and processes of a run.

  Args:
    folder: the folder of the run.
    fix: what to do otherwise; the end of the error line.

  Raises:
    ConfigError: the folder, or a file that decides on these, belongs to another user.
  """
  for path in (folder / name for name in _DECISIVE):
    with contextlib.suppress(FileNotFoundError):
      if (owner := path.lstat().st_uid) not in (os.geteuid(), 0):
        raise invalid(str(path), ..., f"belongs to another user ({user_name(owner)})", fix)


def locate(name: str, runs: str, *files: str) -> Path | None:
  """Return the folder of a name or path that has one of these files; None if none has."""
  for folder in (directory(runs) / name, Path(name)):
    if any(os.path.isfile(folder / file) for file in files):
      return folder
  return None


def find(name: str, runs: str, *, workdirs: bool = False) -> Path:
  """Find the folder of a run by its path, or by its name in the directory of runs.

  Args:
    name: the name or path of the run.
    runs: the directory of runs.
    workdirs: whether to accept a workdir of `jaxscale train`, too.

  Raises:
    ConfigError: the run does not exist.
  """
  if folder := locate(name, runs, "run.json", *["config.json"] * workdirs):
    return folder.absolute()
  others = unsubmitted(runs)
  if name in others:
    remedy = f"see `jaxscale report {directory(runs) / name}`"
    raise invalid(name, ..., "was not submitted, so it has no job", remedy)
  known = [*(p.name for p in all_folders(runs)), *all_studies(runs)]
  known += others if workdirs else ()
  hint = nearest(name, known) if known else f"there is none in {runs}/"
  hint += "; a hub's model is no run, train it with init_from first" * bool(remedy_for(name, ""))
  raise ConfigError(f"{name or '(an empty name)'}: no such run, {hint}")


def find_study(name: str, runs: str) -> tuple[Path, list[Path]] | None:
  """Find the folder of a scaling study and those of its runs; None if it is not a study.

  Raises:
    ConfigError: the study's file is damaged, or one of its runs is missing.
  """
  if (folder := locate(name, runs, "scaling.json")) is None:
    return None
  path, remedy = folder / "scaling.json", "give the names of the study's runs instead"
  names = require_json(path, {"runs": [str]}, remedy)["runs"]
  if bad := [n for n in names if n != Path(n).name or "\0" in n]:
    raise ConfigError(f"{path}: {bad[0]!r} is not a valid run name; {remedy}")
  return folder.absolute(), [find(str(folder.absolute().parent / n), runs) for n in names]


def find_all(names: Iterable[str], runs: str, *, workdirs: bool = False) -> list[Path]:
  """Find the folders of runs by `find`; a study's name stands for all of its runs.

  Raises:
    ConfigError: a run does not exist.
  """
  paths: list[Path] = []
  for name in names:
    study = find_study(name, runs)
    paths += study[1] if study else [find(name, runs, workdirs=workdirs)]
  return paths


def all_folders(runs: str) -> list[Path]:
  """Return the folders of all runs, oldest first."""

  def written(path: Path) -> float:
    with contextlib.suppress(OSError):  # a broken link, or a folder that was just removed
      return path.stat().st_mtime
    return 0.0

  files = sorted(directory(runs).glob("*/run.json"), key=written)
  return [p.parent.absolute() for p in files]


def unsubmitted(runs: str) -> list[str]:
  """Return the names of directories that `jaxscale train` wrote without a job."""
  folders = sorted(p.parent for p in directory(runs).glob("*/config.json"))
  return [p.name for p in folders if not (p / "run.json").exists()]


def all_studies(runs: str) -> list[str]:
  """Return the names of all scaling studies."""
  return [p.parent.name for p in directory(runs).glob("*/scaling.json")]


def last_job(folder: str | Path, task: int | None = None) -> str:
  """Return the job number of the last submission, of a trial if given; "" if there is none."""
  shape = {"job": str, "tasks": (None, [int])}
  for line in reversed(read_json_lines(Path(folder, "submissions.jsonl"), None, shape)):
    tasks = line["tasks"]
    known = re.fullmatch(r"\w[\w-]{0,39}", line["job"], re.ASCII)
    if known and (task is None or tasks is None or task in tasks):
      return line["job"]
  return ""


def read_events(spec: JobSpec, task: int) -> list[dict[str, Any]]:
  """Return the recorded starts and ends of a trial."""
  shape = dict.fromkeys(("event", "job", "next"), str)
  shape |= dict.fromkeys(("restarts", "nodes", "code"), int)
  return read_json_lines(spec.events_file(task), None, shape)


def read_goodput(spec: JobSpec, task: int) -> Goodput | None:
  """Return the goodput of a trial, including its time in the queue; None if it has not started."""
  lines = read_json_lines(Path(spec.folder, "submissions.jsonl"), None, {"job": str, "time": float})
  queued = {line["job"]: line["time"] for line in lines}
  waits, ended = [], 0.0
  for event in filter(lambda e: is_time(e.get("time")), read_events(spec, task)):
    job, now = event["job"], event["time"]
    if event["event"] == "start":
      # A task of an array, JOB_TASK, was submitted as JOB.
      before = queued.pop(job, None) or queued.pop(job.partition("_")[0], None)
      waits += [(before, now)] if is_time(before) else []
    elif event["event"] == "end":
      ended = now
      queued |= {job: now} if event["next"] == "requeue" else {}
  return goodput(read_activities(spec.workdir(task)), waits, ended)


def last_event(spec: JobSpec, job: str, task: int) -> dict[str, Any]:
  """Return the last start or end of a trial; empty if it is from a different job."""
  last = (read_events(spec, task) or [{}])[-1]
  return last if last.get("job") in (job, spec.task_id(job, task)) else {}
