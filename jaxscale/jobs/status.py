"""Status of runs, from their executor and from their folders.

Slurm forgets a job some minutes after its end, and knows neither step nor loss. The folder
has both, and its events have the exit code. This module does not import JAX.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import EXIT_DONE, EXIT_PREEMPTED, ConfigError, printable
from jaxscale.jobs import folder as folders
from jaxscale.jobs import prediction
from jaxscale.jobs.executors import EXECUTORS
from jaxscale.jobs.spec import JobSpec, QueueEntry
from jaxscale.metrics import read_json, read_metrics, text
from jaxscale.run.goodput import Goodput

# Final states of squeue(1), and two of jaxscale. LOST: the run was started, and neither the
# executor nor the events know of an end. UNREADABLE: the folder has no valid run.json.
ENDED = """
BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LOST NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED
TIMEOUT UNREADABLE
""".split()
_TAIL = 1 << 16  # bytes to read from the end of the metrics: hundreds of lines
_RATE_OVER = 10  # logged lines
_TITLES = "run,job,state,nodes,step,loss,examples/s,accuracy,time left,to go,goodput,restarts,"
_HEAD = _TITLES.split(",")
_LOGGED = {"loss": "train/loss", "rate": "perf/examples_per_s"}
_LOGGED |= {"accuracy": "eval/accuracy", "perplexity": "eval/perplexity"}
_LEAST_MISSED = ("restarts", "job", "nodes", "accuracy", "goodput", "time left")
_WORDS = ("run", "job", "state", "")  # these columns are aligned to the left


class RunStatus(NamedTuple):
  """The present status of a run or of a trial; unknown values are None.

  Attributes:
    run: the name of the run; NAME/3 for trial 3.
    job: the number of the job.
    state: the state in Slurm's terms, or LOST or UNREADABLE.
    code: the exit code of the last end.
    nodes: the number of nodes that it has or requests.
    step: the last recorded step.
    total: the number of steps of the whole run.
    loss: the loss of the last logged training step.
    rate: the examples per second.
    accuracy: the accuracy of the last evaluation.
    perplexity: the perplexity of the last evaluation, for a language model.
    time_left: the time until the time limit, in Slurm's format.
    to_go: the seconds until training is done, at the present speed.
    restarts: the number of restarts.
    note: the reason why it waits, the settings of a trial, and its step time against its
      plan.
    goodput: the shares of its time.
  """

  run: str
  job: str
  state: str
  code: int | None = None
  nodes: int = 0
  step: int | None = None
  total: int | None = None
  loss: float | None = None
  rate: float | None = None
  accuracy: float | None = None
  perplexity: float | None = None
  time_left: str = ""
  to_go: float | None = None
  restarts: int = 0
  note: str = ""
  goodput: Goodput | None = None

  @property
  def ended(self) -> bool:
    """True in a final state."""
    return self.state in ENDED


class ShownAsTable(list[Any]):
  """A list that a terminal and a notebook show as a table."""

  empty = ""

  def columns(self) -> Any:
    """Return titles, rows of cells, and the indices of left-aligned columns."""

  def __repr__(self) -> str:
    return text.table(*self.columns()) if self else self.empty

  def _repr_html_(self) -> str:
    return text.html_table(*self.columns()) if self else self.empty


class StatusTable(ShownAsTable):
  """A list of `RunStatus`."""

  empty = "no runs"

  def columns(self) -> tuple[Sequence[str], list[Sequence[str]], Sequence[int]]:
    """See `ShownAsTable`."""
    left = [i for i, name in enumerate(_HEAD) if name in _WORDS]
    return _HEAD, [_cells(status) for status in self], left

  def shown(self, width: int | None = None) -> str:
    """Return the table as text.

    Args:
      width: the columns of the terminal; None means no limit. In a narrow terminal, empty and
        less important columns are left out, and notes are truncated.
    """
    if width is None or not self:
      return repr(self)
    head, rows, _ = self.columns()
    columns = list(zip(head, *rows, strict=True))
    if _width(columns) > width:
      columns = [c for c in columns if c[0] in _WORDS or {*c[1:]} - {"-", "0", ""}]
    for name in _LEAST_MISSED:
      if _width(columns) > width:
        columns = [c for c in columns if c[0] != name]
    head, *rows = zip(*columns, strict=True)
    left = [i for i, name in enumerate(head) if name in _WORDS]
    lines = text.table(head, rows, left).splitlines()
    return "\n".join(x if len(x) <= width else f"{x[: width - 1]}…" for x in lines)


def _width(columns: Sequence[Sequence[str]]) -> int:
  """Return the width of a table without its notes."""
  return sum(2 + max(map(len, column)) for column in columns if column[0]) - 2


def statuses(folders_of_runs: Sequence[Path]) -> StatusTable:
  """Return the status of each run or trial; each executor is called once.

  Raises:
    ConfigError: Slurm does not answer.
  """
  specs, table = [], StatusTable()
  for path in folders_of_runs:
    try:
      specs.append(folders.read_spec(path))
    except ConfigError as e:  # one damaged folder must not hide the other runs
      table.append(RunStatus(path.name, "", "UNREADABLE", note=str(e)))
  queue: dict[str, QueueEntry] = {}
  for name, executor in EXECUTORS.items():
    runs = {folders.last_job(s.folder): s for s in specs if s.executor == name}
    queue |= executor.queue(runs)
  for spec in specs:
    for task in spec.tasks:
      job = folders.last_job(spec.folder, task)
      table.append(status(spec, task, job, queue.get(spec.task_id(job, task))))
  return table


def status(spec: JobSpec, task: int, job: str, queued: QueueEntry | None) -> RunStatus:
  """Return the status of one run or trial.

  Args:
    spec: the run.
    task: the index of the trial.
    job: the number of its last job.
    queued: the state from the executor; None if the executor does not know the job.
  """
  last = folders.last_event(spec, job, task)
  workdir = spec.workdir(task)
  lines = read_metrics(workdir / "metrics.jsonl", _TAIL)
  latest = {name: value for line in lines for name, value in line.items()}
  described = read_json(workdir / "config.json", {"derived": {"total_steps": int}})
  total = described["derived"]["total_steps"] if described else None
  state = queued.state if queued else _state(spec, last)
  queued = queued or QueueEntry(state)
  trial = spec.trials[task] if spec.trials else {}
  notes = [f"{name}={value}" for name, value in trial.items()]
  if state == "PENDING" and queued.reason != "None":
    notes.insert(0, f"({queued.reason})")
  if described and (compared := prediction.comparison(workdir)):
    notes.append(compared.note())
  is_running = state == "RUNNING"
  return RunStatus(
    run=f"{spec.name}/{task}" if spec.trials else spec.name,
    job=spec.task_id(job, task),
    state=state,
    code=last["code"] if last.get("event") == "end" else None,
    nodes=queued.nodes or last.get("nodes") or spec.nodes,
    step=max((line["step"] for line in lines), default=None),
    total=total,
    **{name: latest.get(key) for name, key in _LOGGED.items()},
    time_left=queued.time_left if is_running else "",
    to_go=seconds_to_go(lines, total) if is_running else None,
    restarts=max(queued.restarts, last.get("restarts", 0)),
    note=" ".join(notes),
    goodput=folders.read_goodput(spec, task),
  )


def _state(spec: JobSpec, last: Mapping[str, Any]) -> str:
  """Return the state, from its events, of a run that its executor has forgotten."""
  ended = last.get("event") == "end" and last["next"] != "requeue"
  if ended and last["code"] == EXIT_DONE:
    return "COMPLETED"
  if os.path.exists(Path(spec.folder, "cancelled")):
    return "CANCELLED"
  if not ended:
    return "LOST"
  return "PREEMPTED" if last["code"] == EXIT_PREEMPTED else "FAILED"


def seconds_to_go(rows: Sequence[Mapping[str, Any]], total: int | None) -> float | None:
  """Estimate the seconds to the last step from recent lines, including evaluations.

  Example:
    >>> rows = [{"step": 10, "train/loss": 1.0, "time": 0.0},
    ...         {"step": 30, "train/loss": 0.9, "time": 4.0}]
    >>> seconds_to_go(rows, 100)
    14.0
  """
  logged = [row for row in rows if "train/loss" in row][-_RATE_OVER:]
  if total is None or not logged:
    return None
  steps, seconds = (logged[-1][name] - logged[0][name] for name in ("step", "time"))
  if steps <= 0 or seconds < 0:  # one line, or a restart from an earlier step
    return None
  return (total - logged[-1]["step"]) * seconds / steps


def _cells(s: RunStatus) -> list[str]:
  state = f"{s.state} {s.code}" if s.state == "FAILED" and s.code else s.state
  total = text.cell(s.total, ",").replace(text.NOTHING, "?")
  middle = [
    s.step is not None and f"{s.step:,}/{total}",
    text.cell(s.loss, ".4f"),
    text.cell(s.rate, ",.0f"),
    quality(s.accuracy, s.perplexity),
    s.time_left,
    s.to_go is not None and text.duration(s.to_go),
    s.goodput is not None and text.cell(s.goodput.share, ".0%"),
  ]
  known = ["-" if cell in (False, "", text.NOTHING) else cell for cell in middle]
  return [*map(printable, [s.run, s.job, state, str(s.nodes), *known, str(s.restarts), s.note])]


def quality(accuracy: float | None, perplexity: float | None) -> str:
  """Return a model's accuracy or perplexity as a cell; "" if unknown.

  Example:
    >>> quality(0.9, None), quality(0.5, 3.4567), quality(None, None)
    ('90.00%', 'ppl 3.457', '')
  """
  if perplexity is not None:
    return f"ppl {perplexity:.3f}"
  return "" if accuracy is None else f"{accuracy:.2%}"
