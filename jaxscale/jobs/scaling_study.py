"""Scaling study: one config at several numbers of nodes, one run each.

A study has a folder next to those of its runs, with its definition (scaling.json) and its
results (scaling.csv, scaling.png). On this machine its runs are executed one after another,
because simultaneous runs would slow each other down.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config import Config, Phases
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.jobs import folder as folders
from jaxscale.jobs import job_handle, sweeps
from jaxscale.jobs.job_handle import Job, Prepared
from jaxscale.jobs.measured import CHANGES
from jaxscale.jobs.scaling_report import Report, report
from jaxscale.jobs.status import StatusTable, statuses
from jaxscale.metrics import write_json

BATCHES = ("fixed", "grows")


class PreparedStudy(NamedTuple):
  """A checked study before its submission.

  Attributes:
    folder: the path of its folder, which does not exist yet.
    batch: "fixed" or "grows".
    runs: one run per size, in the user's order.
  """

  folder: Path
  batch: str
  runs: tuple[Prepared, ...]


def prepare(
  config: str | Config,
  nodes: Sequence[int],
  *,
  batch: str = "fixed",
  name: str | None = None,
  overrides: Mapping[str, Any] | None = None,
  runs: str = "runs",
  trust: bool = False,
  **options: Any,
) -> PreparedStudy:
  """Check a study as far as possible before its submission; see `scaling`."""
  if batch not in BATCHES:
    raise ConfigError(f"--batch={batch}: {nearest(batch, BATCHES)}")
  if not nodes or len({*nodes}) < len(nodes) or min(nodes) < 1:
    counts = ",".join(map(str, nodes))
    raise ConfigError(f"--nodes={counts}: give different numbers of nodes, e.g. 1,2,4,8")
  path = config if isinstance(config, str) else "notebook.py"
  folder = folders.new_folder(runs, name, path)
  # The scaling report shows the parts of a step, which log.step_report measures.
  texts = sweeps.as_texts({"log.step_report": True, **(overrides or {})})
  first = job_handle.checked_loader(config, trust=trust)(texts)
  phases = first.phases
  if not isinstance(phases, Phases) or phases.batch_sizes or phases.image_sizes:
    raise ConfigError(f"{path}: the {CHANGES}; give --config.phases=Phases")
  prepared = []
  for size in nodes:
    if batch == "grows":
      texts = {**texts, "batch_size": str(first.batch_size * size // nodes[0])}
    own = {"nodes": size, "name": f"{folder.name}-{size}n", "overrides": texts}
    prepared.append(job_handle.prepare(config, **own, runs=runs, trust=trust, **options))
  return PreparedStudy(folder, batch, tuple(prepared))


def launch(prepared: PreparedStudy) -> Study:
  """Create the folder of a study and submit its runs.

  Raises:
    ConfigError: a run cannot be submitted; the runs before it are cancelled.
  """
  folder, submitted = prepared.folder, []
  try:
    with folders.one_line(folder, "use a different --runs"):
      for run in prepared.runs:
        submitted.append(job_handle.launch(run, after=submitted[-1] if submitted else None))
      folder.mkdir()
      record = {"made_by": prepared.runs[0].spec.made_by, "time": round(time.time(), 3)}
      names = [job.name for job in submitted]
      write_json(folder / "scaling.json", {"batch": prepared.batch, "runs": names} | record)
  except ConfigError:
    Study(folder, tuple(submitted)).cancel()
    raise
  return Study(folder, tuple(submitted))


def scaling(config: str | Config, nodes: Sequence[int], **options: Any) -> Study:
  """Submit a scaling study: the same config at several numbers of nodes.

  Args:
    config: the config; see `submit`.
    nodes: the numbers of nodes; the first one runs with the batch size of the config.
    options: `batch`, either "fixed" (strong scaling, the default) or "grows" with the nodes
      (weak scaling); `name`, the name of the study, whose runs are NAME-1n, NAME-2n, …; and
      the options of `submit`.

  Raises:
    ConfigError: an option is invalid, or the batch size changes during the run.

  Example:
    >>> study = scaling("configs/digits.py", [1, 2, 4])       # doctest: +SKIP
    >>> study.wait(), study.report()                          # doctest: +SKIP
  """
  return launch(prepare(config, nodes, **options))


def study(name: str, runs: str = "runs") -> Study:
  """Return the handle of a study that was submitted before.

  Args:
    name: the name of the study, or the path of its folder.
    runs: the directory of all runs.

  Raises:
    ConfigError: the study does not exist.
  """
  folder = folders.find_study(name, runs)
  if folder is None:
    known = folders.all_studies(runs)
    hint = nearest(name, known) if known else f"there is none in {runs}/"
    raise ConfigError(f"{name}: no such study, {hint}")
  return Study(folder[0], tuple(map(Job, folder[1])))


class Study(NamedTuple):
  """A submitted scaling study, identified by its folder.

  Attributes:
    folder: the folder of the study.
    jobs: the runs of the study.
  """

  folder: Path
  jobs: tuple[Job, ...]

  @property
  def name(self) -> str:
    """Name of the study; `jobs.study(name)` returns this handle again."""
    return self.folder.name

  def status(self) -> StatusTable:
    """Return the status of each run."""
    return statuses([job.folder for job in self.jobs])

  def wait(self, timeout_s: float | None = None, every_s: float = 2.0) -> StatusTable:
    """Wait until all runs have ended; see `Job.wait`."""
    return job_handle.wait(self.jobs, timeout_s, every_s)

  def cancel(self) -> None:
    """Cancel all runs; see `Job.cancel`."""
    for job in self.jobs:
      job.cancel()

  def report(self) -> Report:
    """Return the table and picture of the results, and write them into the folder.

    Raises:
      ConfigError: no run has started.
    """
    return report(self.name, [job.folder for job in self.jobs], self.folder)
