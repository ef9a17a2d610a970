"""Strong and weak scaling: one config at several sizes, a run each.

A study has a folder beside those of its runs, with what it is (scaling.json) and what
came of it (scaling.csv, scaling.png). On this machine its runs go one after another,
or they would measure each other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config import AdaptiveBatch, Config
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.launch import folder as folders
from jaxscale.launch import handle, sweeps
from jaxscale.launch import status as states
from jaxscale.launch.handle import Job, Prepared, Rows
from jaxscale.launch.report import Report, report
from jaxscale.metrics import write_json

BATCHES = ("fixed", "grows")


class PreparedStudy(NamedTuple):
  """A study that is checked and not made yet.

  Attributes:
    folder: that it will have.
    batch: "fixed" or "grows".
    runs: from the first size on, in the order that was asked for.
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
  **options: Any,
) -> PreparedStudy:
  """Check all that can be checked here; makes nothing. See `scaling`."""
  if batch not in BATCHES:
    raise ConfigError(f"--batch={batch}: {nearest(batch, BATCHES)}")
  given = ",".join(map(str, nodes))
  if not nodes or len({*nodes}) < len(nodes) or min(nodes) < 1:
    raise ConfigError(f"--nodes={given}: give several sizes, e.g. 1,2,4,8")
  path = config if isinstance(config, str) else "notebook.py"
  folder = folders.new_folder(runs, name, path)
  # What a step waits for is part of the report.
  settings = {"log.step_report": True, **(overrides or {})}
  texts = {k: sweeps.as_text(v) for k, v in settings.items()}
  asked = handle.loader(config)(texts)
  phases, smallest = asked.phases, asked.batch_size
  if isinstance(phases, AdaptiveBatch) or phases.batch_sizes or phases.image_sizes:
    raise ConfigError(
      f"{path}: batch or images change size on the way, which have no one throughput; "
      "give --config.phases=Phases"
    )
  prepared = []
  for size in nodes:
    changed = dict(texts)
    if batch == "grows":
      changed["batch_size"] = str(smallest * size // nodes[0])
    prepared.append(
      handle.prepare(
        config, nodes=size, name=f"{folder.name}-{size}n", overrides=changed,
        runs=runs, **options,
      )
    )  # fmt: skip
  return PreparedStudy(folder, batch, tuple(prepared))


def launch(prepared: PreparedStudy) -> Study:
  """Make the study's folder, and submit its runs.

  Raises:
    ConfigError: as `handle.launch`; what was submitted before is cancelled.
  """
  folder, jobs = prepared.folder, []
  try:
    for run in prepared.runs:
      jobs.append(handle.launch(run, after=jobs[-1] if jobs else None))
    folder.mkdir()
    line = {
      "batch": prepared.batch,
      "runs": [job.name for job in jobs],
      "made_by": prepared.runs[0].run.made_by,
      "time": round(time.time(), 3),
    }
    write_json(folder / "scaling.json", line)
  except (ConfigError, OSError) as e:
    for job in jobs:
      job.cancel()
    if isinstance(e, ConfigError):
      raise
    raise ConfigError(f"{folder}: {e.strerror}; give another --runs") from None
  return Study(folder, tuple(jobs))


def scaling(config: str | Config, nodes: Sequence[int], **options: Any) -> Study:
  """Submit the same config at several sizes.

  Args:
    config: as for `submit`.
    nodes: the sizes; the batch is that of the first.
    options: `batch`, "fixed" (strong scaling, the default) or "grows" with the nodes
      (weak); `name` of the study, whose runs are NAME-1n, NAME-2n, …; and those of
      `submit`.

  Raises:
    ConfigError: as for `submit`, or a config whose batch changes on the way.

  Example:
    >>> study = scaling("configs/digits.py", [1, 2, 4])       # doctest: +SKIP
    >>> study.wait(), study.report()                          # doctest: +SKIP
  """
  return launch(prepare(config, nodes, **options))


def study(name: str, runs: str = "runs") -> Study:
  """The handle of a study that was submitted before.

  Args:
    name: of the study, or the path of its folder.
    runs: the directory of all runs.

  Raises:
    ConfigError: there is no such study.
  """
  found = folders.find_study(name, runs)
  if found is None:
    known = [p.parent.name for p in Path(runs).glob("*/scaling.json")]
    hint = nearest(name, known) if known else f"there is none in {runs}/"
    raise ConfigError(f"{name}: no such study, {hint}")
  return Study(found[0], tuple(map(Job, found[1])))


class Study(NamedTuple):
  """A scaling study that was submitted, known by its folder.

  Attributes:
    folder: of the study.
    jobs: its runs.
  """

  folder: Path
  jobs: tuple[Job, ...]

  @property
  def name(self) -> str:
    """Of the study; `launch.study(name)` gives this handle again."""
    return self.folder.name

  def status(self) -> Rows:
    """A row a run."""
    return Rows(states.rows([job.folder for job in self.jobs]))

  def wait(self, timeout_s: float | None = None, every_s: float = 2.0) -> Rows:
    """Wait until all runs have ended, as `Job.wait`."""
    return handle.wait(self.status, self.name, timeout_s, every_s)

  def cancel(self) -> None:
    """End all runs, as `Job.cancel`."""
    for job in self.jobs:
      job.cancel()

  def report(self) -> Report:
    """Table and picture of what is on record by now, also as files in the folder.

    Raises:
      ConfigError: a run has not begun.
    """
    paths = [job.folder for job in self.jobs]
    files = (self.folder / f"scaling.{kind}" for kind in ("csv", "png"))
    return report(self.name, paths, *files)
