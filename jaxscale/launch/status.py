"""Where runs are: what Slurm says, and what they wrote into their folders.

Slurm forgets a job some minutes after its end, and knows neither step nor loss; the
folder has both, and the diary says how it ended. Nothing here asks JAX.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.launch import folder as folders
from jaxscale.launch import local, slurm, spec
from jaxscale.launch.slurm import Queued
from jaxscale.launch.spec import Run
from jaxscale.launch.table import as_html, as_text, result
from jaxscale.metrics import duration

# States of squeue(1) after which nothing more happens, and our own LOST: it was
# started and neither Slurm nor the diary knows of an end.
ENDED = (
  "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LOST", "NODE_FAIL",
  "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
_TAIL = 1 << 16  # bytes of the metrics that are read: hundreds of lines
_RATE_OVER = 10  # logged lines


class Row(NamedTuple):
  """One run, or one trial of a sweep, as of now.

  Attributes:
    run: its name; NAME/3 for trial 3.
    job: its number.
    state: in Slurm's words, and LOST.
    code: exit code of the last end, None before.
    nodes: that it has, or asked for.
    step: the last one on record.
    total: steps of the whole run.
    loss: of the last logged training step.
    rate: examples a second.
    accuracy: of the last evaluation.
    perplexity: likewise, of a language model.
    time_left: until the limit, as Slurm writes it.
    to_go: seconds until training is done, if it goes on as it does.
    restarts: how often it was started again.
    note: why it waits; what a trial varies.
  """

  run: str
  job: str
  state: str
  code: int | None
  nodes: int
  step: int | None
  total: int | None
  loss: float | None
  rate: float | None
  accuracy: float | None
  time_left: str
  to_go: float | None
  restarts: int
  note: str
  perplexity: float | None = None

  @property
  def ended(self) -> bool:
    """Whether nothing more will happen by itself."""
    return self.state in ENDED


def rows(paths: Sequence[Path]) -> list[Row]:
  """The state of runs, a row a run or trial; Slurm is asked once.

  Args:
    paths: their folders.

  Raises:
    ConfigError: a folder is none of a run, or Slurm does not answer.
  """
  runs = [(path, folders.read_run(path)) for path in paths]
  wants_slurm = any(run.executor == "slurm" for _, run in runs)
  queue = slurm.queue() if wants_slurm and slurm.is_here() else {}
  found = []
  for path, run in runs:
    job = folders.last_job(path) or ""
    is_alive = run.executor == "local" and local.is_alive(path)
    for task in run.tasks:
      number = f"{job}_{task}" if run.trials else job
      found.append(row(run, task, number, queue.get(number), is_alive))
  return found


def row(run: Run, task: int, job: str, queued: Queued | None, is_alive: bool) -> Row:
  """The state of a run or trial.

  Args:
    run: what was asked for.
    task: index of the trial.
    job: its number.
    queued: what Slurm says of it, if it knows it.
    is_alive: whether the supervisor of a local run is.
  """
  diary = folders.read_lines(spec.events_file(run, task))
  last = diary[-1] if diary else {}
  workdir = spec.workdir(run, task)
  lines = tail(workdir / "metrics.jsonl")
  step = max((line["step"] for line in lines), default=None)
  total = total_steps(workdir)
  note = " ".join(f"{k}={v}" for k, v in run.trials[task].items()) if run.trials else ""
  state = queued.state if queued else _state(run, last, job, is_alive)
  waits = queued is not None and state == "PENDING" and queued.reason != "None"
  return Row(
    run=f"{run.name}/{task}" if run.trials else run.name,
    job=job,
    state=state,
    code=last["code"] if last.get("event") == "end" else None,
    nodes=(queued.nodes if queued else 0) or last.get("nodes") or run.nodes,
    step=step,
    total=total,
    loss=_latest(lines, "train/loss"),
    rate=_latest(lines, "perf/examples_per_s"),
    accuracy=_latest(lines, "eval/accuracy"),
    time_left=queued.time_left if queued and state == "RUNNING" else "",
    to_go=seconds_to_go(lines, total) if state == "RUNNING" else None,
    restarts=max(queued.restarts if queued else 0, last.get("restarts", 0)),
    note=" ".join(
      filter(None, (f"({queued.reason})" if queued and waits else "", note))
    ),
    perplexity=_latest(lines, "eval/perplexity"),
  )


def _state(run: Run, last: Mapping[str, Any], job: str, is_alive: bool) -> str:
  """The state of what Slurm has forgotten, or never knew."""
  is_this = last.get("job") in (job, job.rpartition("_")[0])  # not one before
  cancelled = Path(run.folder, "cancelled").exists()
  if is_alive and not (is_this and last["event"] == "end" and last["next"] == "stop"):
    return "RUNNING" if is_this else "PENDING"
  if not is_this or last["event"] != "end" or last["next"] == "requeue":
    return "CANCELLED" if cancelled else "LOST"
  if last["code"] == 0:
    return "COMPLETED"
  if cancelled:
    return "CANCELLED"
  return "PREEMPTED" if last["code"] == 85 else "FAILED"


def tail(path: Path, size: int = _TAIL) -> list[dict[str, Any]]:
  """The last lines of a file of JSON lines, without those that are cut."""
  try:
    with path.open("rb") as file:
      end = file.seek(0, 2)
      file.seek(max(end - size, 0))
      text = file.read().decode(errors="replace")
  except OSError:
    return []
  lines = []
  for line in text.splitlines():
    try:
      value = json.loads(line)
    except json.JSONDecodeError:
      continue
    if isinstance(value, dict) and "step" in value:
      lines.append(value)
  return lines


def _latest(lines: Sequence[Mapping[str, Any]], name: str) -> Any:
  return next((line[name] for line in reversed(lines) if name in line), None)


def total_steps(workdir: Path) -> int | None:
  """Steps of the whole run, where it has said so."""
  try:
    return json.loads((workdir / "config.json").read_text())["derived"]["total_steps"]
  except (OSError, ValueError, KeyError):
    return None


def seconds_to_go(
  lines: Sequence[Mapping[str, Any]], total: int | None
) -> float | None:
  """Until the last step, at the pace of the last lines (evaluations included).

  Example:
    >>> lines = [{"step": 10, "train/loss": 1.0, "time": 0.0},
    ...          {"step": 30, "train/loss": 0.9, "time": 4.0}]
    >>> seconds_to_go(lines, 100)
    14.0
  """
  logged = [line for line in lines if "train/loss" in line][-_RATE_OVER:]
  if total is None or len(logged) < 2:
    return None
  steps = logged[-1]["step"] - logged[0]["step"]
  seconds = logged[-1]["time"] - logged[0]["time"]
  if steps <= 0 or seconds < 0:  # it went back, after a restart
    return None
  return (total - logged[-1]["step"]) * seconds / steps


_HEAD = ("run", "job", "state", "nodes", "step", "loss", "examples/s", "accuracy",
         "time left", "to go", "restarts", "")  # fmt: skip
_LEFT = (0, 1, 2, 11)  # columns of words


def table(found: Sequence[Row]) -> str:
  """Rows for a person.

  Example:
    >>> print(table([]))
    no runs
  """
  if not found:
    return "no runs"
  return as_text(_HEAD, [_cells(row) for row in found], _LEFT)


def html(found: Sequence[Row]) -> str:
  """Rows for a notebook."""
  return as_html(_HEAD, [_cells(row) for row in found], _LEFT)


def _cells(r: Row) -> tuple[str, ...]:
  failed = r.state == "FAILED" and r.code
  return (
    r.run,
    r.job,
    f"{r.state} {r.code}" if failed else r.state,
    str(r.nodes),
    "-"
    if r.step is None
    else f"{r.step:,}/{'?' if r.total is None else f'{r.total:,}'}",
    "-" if r.loss is None else f"{r.loss:.4f}",
    "-" if r.rate is None else f"{r.rate:,.0f}",
    result(r.accuracy, r.perplexity) or "-",
    r.time_left or "-",
    "-" if r.to_go is None else duration(r.to_go),
    str(r.restarts),
    r.note,
  )
