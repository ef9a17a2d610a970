"""A run's folder: code, config, script, versions; nothing outside it can change it.

run.json            what was asked for; `resume` submits it again
job.sbatch          the script (Slurm)
code/               jaxscale and the configs as they were when it was submitted
environment.json    commit, Python, versions of all packages, variables
submissions.jsonl   a line a submission: executor, job, time
events/TASK.jsonl   a line a start and a line an end
logs/JOB.RANK.out   what every process printed
train/              the workdir: metrics, checkpoints (trials/TASK in a sweep)
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jaxscale
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.launch import spec
from jaxscale.launch.render import render, render_process
from jaxscale.launch.spec import Run
from jaxscale.metrics import write_json

_PACKAGE = Path(jaxscale.__file__).parent.absolute()
# Variables that change what a run does; no others, which may hold secrets.
_VARIABLES = ("JAX", "XLA_", "NCCL_", "TF_", "LIBTPU_", "TPU_", "CUDA_VISIBLE")
_LEFT_OUT = ("__pycache__", ".git", ".ipynb_checkpoints")


def new_folder(runs: str, name: str | None, config: str) -> Path:
  """An absolute path that nothing has yet; made by `make`.

  Args:
    runs: the directory of all runs.
    name: of the folder; None: the config's name and the time.
    config: `FILE[:arg]`.

  Raises:
    ConfigError: the name cannot be one, or is taken.
  """
  parent = directory(runs).absolute()
  if re.search(r'[:\\"\n]', str(parent)):
    raise ConfigError(
      f"--runs={runs}: a path without colon, backslash, double quote or line break"
    )
  if name is not None:
    if not re.fullmatch(r"[A-Za-z0-9_][\w.+=-]{0,99}", name):
      raise ConfigError(f"--name={name}: give letters, digits and _ . + = - only")
    if (parent / name).exists():
      raise ConfigError(
        f"--name={name}: {parent / name} is there already; give another name, or go "
        f"on with it by `resume {name}`"
      )
    return parent / name
  file, _, arg = config.partition(":")
  words = [Path(file).stem, arg, time.strftime("%Y%m%d-%H%M%S")]
  stem = re.sub(r"[^\w.+=-]+", "-", "-".join(filter(None, words)))
  names = [stem, *(f"{stem}-{i}" for i in range(2, 1000))]
  return next(parent / n for n in names if not (parent / n).exists())


def directory(runs: str) -> Path:
  """The directory of all runs.

  Raises:
    ConfigError: it is the address of a bucket.

  Example:
    >>> directory("runs")
    PosixPath('runs')
  """
  if "://" in runs:
    raise ConfigError(
      f"--runs={runs}: give a mounted directory that all nodes see, not an address"
    )
  return Path(runs)


def place_of(config: str) -> str:
  """Where the copy of a config, `FILE[:arg]`, lies in a run's folder.

  In the tree that jaxscale is in it keeps its place, so that configs which import
  each other still do; from elsewhere it goes into code/config/.
  """
  file, _, arg = config.partition(":")
  path = Path(file).absolute()
  inside = path.is_relative_to(_PACKAGE.parent)
  place = path.relative_to(_PACKAGE.parent) if inside else Path("config", path.name)
  return str(Path("code", place)) + (f":{arg}" if arg else "")


def make(run: Run, config: str, text: str | None = None) -> None:
  """Make the folder with all that belongs into it.

  Args:
    run: whose `folder` is made.
    config: `FILE[:arg]` as it was given, which is copied with its neighbours.
    text: of the config, where it is in no file.

  Raises:
    ConfigError: it cannot be written, or is there already.
  """
  folder = Path(run.folder)
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()  # the one call that tells whose it is
    for name in ("code", "events", "logs"):
      (folder / name).mkdir()
    for source, place in sources(None if text else config):
      (folder / place).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(source, folder / place)
    if text:
      path = folder / run.config
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
    write_json(folder / "environment.json", environment())
    write_scripts(run)
  except FileExistsError:
    raise ConfigError(f"{folder}: is there already, give another --name") from None
  except OSError as e:
    raise ConfigError(f"{folder}: {e.strerror}; give another --runs") from None


def write_scripts(run: Run) -> None:
  """Write what was asked for, and the script that follows from it."""
  folder = Path(run.folder)
  if run.executor == "slurm":
    (folder / "job.sbatch").write_text(render(run))
  else:
    (folder / "process.sh").write_text(render_process(run))
  write_json(folder / "run.json", spec.to_json(run))


def sources(config: str | None) -> list[tuple[Path, str]]:
  """(file, place in the folder) of all that is copied: the package and the config.

  Of a git checkout, what git tracks or would track; else every file. Of the config's
  directory, its Python files: a config may import its neighbours.
  """
  root = _PACKAGE.parent
  files = [(p, str(Path("code", p.relative_to(root)))) for p in _files_of(_PACKAGE)]
  if config is not None:
    path = Path(config.partition(":")[0]).absolute()
    if not path.is_relative_to(_PACKAGE):
      files += [(p, place_of(str(p))) for p in sorted(path.parent.glob("*.py"))]
  return files


def _files_of(package: Path) -> list[Path]:
  listed = _git(package, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
  paths: Iterable[Path] = package.rglob("*")
  if listed:
    paths = (package / name for name in listed.split("\0") if name)
  return sorted(
    p for p in paths if p.is_file() and not set(_LEFT_OUT) & set(p.parts[:-1])
  )


def _git(directory: Path, *args: str) -> str:
  """What git says, or nothing where there is no git or no repository."""
  command = ["git", "-C", str(directory), *args]
  try:
    return subprocess.run(
      command, capture_output=True, text=True, check=True, timeout=20
    ).stdout
  except (OSError, subprocess.SubprocessError):
    return ""


def environment() -> dict[str, Any]:
  """What a run depends on beside its own code, as JSON."""
  found = importlib.metadata.distributions()
  packages = {d.metadata["Name"]: d.version for d in found if d.metadata["Name"]}
  return {
    "commit": _git(_PACKAGE, "rev-parse", "HEAD").strip() or None,
    "changed": _git(_PACKAGE, "status", "--porcelain", "--", ".").splitlines(),
    "python": platform.python_version(),
    "platform": platform.platform(),
    "host": platform.node(),
    "packages": dict(sorted(packages.items(), key=lambda kv: kv[0].lower())),
    "variables": {
      k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)
    },
  }


def read_run(folder: Path) -> Run:
  """The run that a folder holds, as of where the folder is now.

  Raises:
    ConfigError: it holds none.
  """
  try:
    run = spec.from_json(json.loads((folder / "run.json").read_text()))
    return run._replace(folder=str(folder.absolute()))
  except FileNotFoundError:
    raise ConfigError(
      f"{folder}: no run.json in it, give the folder of a run"
    ) from None
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise ConfigError(f"{folder}/run.json: unreadable ({e})") from None


def find(name: str, runs: str) -> Path:
  """The folder of a run, by its path, or by its name in the directory of runs.

  Raises:
    ConfigError: there is no such run.
  """
  for folder in (directory(runs) / name, Path(name)):
    if (folder / "run.json").is_file():
      return folder.absolute()
  known = [p.name for p in all_folders(runs)]
  known += [p.parent.name for p in Path(runs).glob("*/scaling.json")]
  hint = nearest(name, known) if known else f"there is none in {runs}/"
  raise ConfigError(f"{name}: no such run, {hint}")


def find_study(name: str, runs: str) -> tuple[Path, list[Path]] | None:
  """The folder of a scaling study and those of its runs; None: `name` is none.

  Raises:
    ConfigError: its file is damaged, or one of its runs is gone.
  """
  for folder in (directory(runs) / name, Path(name)):
    try:
      names = json.loads((folder / "scaling.json").read_text())["runs"]
    except (FileNotFoundError, NotADirectoryError):
      continue
    except (OSError, ValueError, KeyError) as e:
      raise ConfigError(f"{folder}/scaling.json: unreadable ({e})") from None
    folder = folder.absolute()
    return folder, [find(str(folder.parent / n), runs) for n in names]
  return None


def find_all(names: Iterable[str], runs: str) -> list[Path]:
  """The folders of runs; the name of a study stands for all of its runs.

  Raises:
    ConfigError: there is no such run.
  """
  found: list[Path] = []
  for name in names:
    study = find_study(name, runs)
    found += study[1] if study else [find(name, runs)]
  return found


def all_folders(runs: str) -> list[Path]:
  """Folders of runs, the oldest first."""
  files = sorted(directory(runs).glob("*/run.json"), key=lambda p: p.stat().st_mtime)
  return [p.parent.absolute() for p in files]


def append(path: Path, line: Mapping[str, Any]) -> None:
  """Add a line to a file of JSON lines."""
  with path.open("a") as file:
    file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
  """The lines of such a file; one that is cut short is left out."""
  lines = []
  for line in path.read_text().splitlines() if path.exists() else ():
    try:
      lines.append(json.loads(line))
    except json.JSONDecodeError:
      continue
  return lines


def submitted(folder: Path, job: str, executor: str) -> None:
  """Write down that the run was handed to an executor."""
  line = {"job": job, "executor": executor, "time": round(time.time(), 3)}
  append(folder / "submissions.jsonl", line)


def last_job(folder: Path) -> str | None:
  """The number that the executor gave the last submission."""
  lines = read_lines(folder / "submissions.jsonl")
  return lines[-1]["job"] if lines else None
