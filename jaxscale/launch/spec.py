"""What a run is: all that its script is made of, as one value that JSON can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.launch.profile import Site, site_from


class Run(NamedTuple):
  """One run, or a sweep of several trials.

  Attributes:
    name: of the run and its folder.
    folder: absolute, made for this run alone.
    cwd: absolute; where it was submitted, and what relative paths in the config
      belong to.
    config: `FILE[:arg]` of the copy, from the folder.
    overrides: settings that all trials have, as text by dotted field.
    trials: settings of each trial of a sweep; empty: a single run.
    at_most: trials that run at a time; 0: as many as there is room for.
    nodes: of each run.
    site: the cluster, with what was asked for on the command line.
    requeue: how often the job may be started again.
    preflight: check the nodes before training starts.
    executor: "slurm" or "local".
    python: the interpreter that submits, where the site names none.
    made_by: the command line, for whoever reads the script.
    spares: nodes of the job beyond those that train, for those that are lost.
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

  @property
  def tasks(self) -> range:
    """Indices of what runs: of the trials, or 0 alone."""
    return range(max(len(self.trials), 1))

  @property
  def processes(self) -> int:
    """Of each trial."""
    return self.nodes * self.site.tasks


def config(run: Run) -> str:
  """`FILE[:arg]` of the folder's own copy."""
  return f"{run.folder}/{run.config}"


def workdir(run: Run, task: int) -> Path:
  """Where a trial writes its checkpoints and metrics."""
  folder = Path(run.folder)
  return folder / "trials" / str(task) if run.trials else folder / "train"


def events_file(run: Run, task: int) -> Path:
  """The diary of a trial: a line a start, and a line an end."""
  return Path(run.folder) / "events" / f"{task}.jsonl"


def settings_of(run: Run, task: int) -> dict[str, str]:
  """The overrides of a trial: the sweep's win over those of all."""
  return run.overrides | (run.trials[task] if run.trials else {})


def options(overrides: Mapping[str, str]) -> list[str]:
  """Overrides as a command line has them.

  Example:
    >>> options({"epochs": "3"})
    ['--config.epochs=3']
  """
  return [f"--config.{path}={value}" for path, value in overrides.items()]


def interpreter(run: Run) -> str:
  """The Python of the job."""
  return run.site.python or ("python" if run.site.container else run.python)


def to_json(run: Run) -> dict[str, Any]:
  """A run as JSON has it; `from_json` reads it back."""
  return run._asdict() | {"site": dataclasses.asdict(run.site)}


def from_json(table: Mapping[str, Any]) -> Run:
  """A run that `to_json` wrote."""
  fields = {name: table[name] for name in Run._fields if name in table}
  fields |= {"site": site_from(table["site"]), "trials": tuple(table["trials"])}
  return Run(**fields)
