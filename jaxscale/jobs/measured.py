"""Read one run of a scaling study from its files.

Throughput is the median over windows, the intervals between two logged steps. The first
window after a start is warm-up, and one of fewer than half as many steps as the others
(the end of a run) varies too much; both are left out. If a run was restarted, the last
start counts: earlier ones may have had other devices.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.files import mismatch, require_json
from jaxscale.jobs import folder as folders
from jaxscale.metrics import read_json, read_json_lines, read_metrics
from jaxscale.planning import stored
from jaxscale.run import provenance
from jaxscale.run.goodput import FILE, Goodput, goodput, read_activities

CHANGES = "batch or image size changes during the run, so it has no single throughput"
_PHASE = {"batch_size": int, "image_size": (int, None)}
_RECORD = dict(
  config=dict(phases={"class": str}, log=dict(step_report=bool)),
  derived=dict(phases=[_PHASE], num_train=int, num_devices=int, total_steps=int),
  processes=int,
  versions={str: str},
  python=str,
)
# Contents of a summary.json that reports need.
SUMMARY = {"outcome": str, "step": int, "total_steps": int, "devices": str}
_REMEDY = "compare other runs"
_Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl
_RATE, _REPORT = "perf/examples_per_s", "perf/exposed_share"


class NotBegunError(ConfigError):
  """The run has no results yet."""


class Located(NamedTuple):
  """Files of a run.

  Attributes:
    name: the name of the run.
    workdir: the workdir of the run.
    events: the starts and ends of the run's jobs; empty without `jaxscale.jobs`.
    goodput: the time of the run by category; None if it is not recorded.
  """

  name: str
  workdir: Path
  events: Sequence[Mapping[str, Any]]
  goodput: Goodput | None

  @property
  def nodes(self) -> tuple[int | None, str]:
    """The number and the names of its last nodes; (None, "") without a job."""
    last = next((x for x in reversed(self.events) if x["event"] != "end"), {})
    return last.get("nodes"), str(last.get("hosts", ""))


class MeasuredRun(NamedTuple):
  """Measurements of one run; None if not recorded, and `missing` has the reasons.

  Attributes:
    name: the name of the run.
    config: the resolved config, as in config.json.
    num_train: the number of training examples.
    versions: the versions of packages.
    processes: the number of processes of the last start.
    devices: the number of devices of the last start.
    kind: the kind of the devices, such as "cpu" or "NVIDIA H100"; "" if not recorded.
    batch: the examples per step over all devices.
    rates: the examples per second, by window.
    step_report: the numbers of the step report, by their names in metrics.jsonl without
      "perf/"; empty without a step report.
    summary: the numbers of summary.json once training is done, such as loss, accuracy and
      perplexity; empty before that.
    nodes: the number of nodes of the last start.
    hosts: the names of those nodes, as Slurm lists them.
    goodput: the time of the run by category.
    evaluations: the (epochs, validation loss) of each evaluation.
    origin: the commit, host and command of the last start.
    planned: the run's counterpart in its plan; None without a plan.
    missing: the values that are not recorded, with the reasons.
  """

  name: str
  config: dict[str, Any]
  num_train: int
  versions: dict[str, str]
  processes: int
  devices: int
  kind: str
  batch: int
  rates: tuple[float, ...]
  step_report: Mapping[str, float]
  summary: Mapping[str, float]
  nodes: int | None = None
  hosts: str = ""
  goodput: Goodput | None = None
  evaluations: tuple[tuple[float, float], ...] = ()
  origin: str = ""
  planned: stored.Match | None = None
  missing: tuple[str, ...] = ()

  @property
  def rate(self) -> float | None:
    """Median examples per second."""
    return statistics.median(self.rates) if self.rates else None

  @property
  def quartiles(self) -> tuple[float, float] | None:
    """The first and third quartile of the windows; None for fewer than 3."""
    if len(self.rates) < 3:
      return None
    low, _, high = statistics.quantiles(self.rates, n=4, method="inclusive")
    return low, high


def locate(path: Path) -> Located:
  """Find the workdir of a run, and the record of its jobs.

  Args:
    path: the folder of a run of `jaxscale.jobs`, or a workdir of `jaxscale.train`.

  Raises:
    NotBegunError: the run has not started yet.
    ConfigError: the path is a sweep, or not a run.
  """
  if not (path / "run.json").exists():
    if not (path / "config.json").exists():
      raise ConfigError(f"{path}: has no run.json or config.json; give the folder of a run")
    return Located(path.name, path, (), goodput(read_activities(path)))
  spec, name = folders.read_spec(path), path.name
  if spec.trials:
    raise ConfigError(f"{name}: is a sweep; give runs, or workdirs as {path}/trials/0")
  if not (spec.workdir(0) / "config.json").exists():
    raise NotBegunError(f"{name}: has not started yet; see `jaxscale status {name}`")
  events, spent = folders.read_events(spec, 0), folders.read_goodput(spec, 0)
  return Located(name, spec.workdir(0), events, spent)


def read(path: Path) -> MeasuredRun:
  """Read the measurements of a run.

  Args:
    path: the path of the run, as for `locate`.

  Raises:
    NotBegunError: the run has not logged a step yet.
    ConfigError: `locate` fails, or the batch size changes during the run.
  """
  name, workdir, _, spent = located = locate(path)
  record = require_json(workdir / "config.json", _RECORD, _REMEDY)
  config, derived, processes, versions, python = (record[key] for key in _RECORD)
  if not derived["phases"]:
    raise ConfigError(f"{workdir}/config.json: derived.phases is empty; {_REMEDY}")
  shapes = {(phase["batch_size"], phase["image_size"]) for phase in derived["phases"]}
  if len(shapes) > 1 or config["phases"]["class"] != "Phases":
    raise ConfigError(f"{name}: the {CHANGES}; compare runs with --config.phases=Phases")
  if not (lines := read_metrics(workdir / "metrics.jsonl")):
    raise NotBegunError(f"{name}: has not logged a step yet, so there is nothing to report")
  (batch, _), num_train = shapes.pop(), derived["num_train"]
  starts = read_json_lines(workdir / provenance.FILE, None, {"time": float})
  since = starts[-1]["time"] if starts else 0.0
  current = [line for line in lines if line["time"] >= since]
  reports = [finite(line, "perf/") for line in current if _REPORT in line]
  summary = read_json(workdir / "summary.json", {"outcome": str})
  size = dict(batch=batch, processes=processes, devices=derived["num_devices"])
  about: dict[str, Any] = dict(config=config, num_train=num_train, goodput=spent)
  about["nodes"], about["hosts"] = located.nodes
  about |= dict(kind=str(record.get("device_kind") or ""), versions=versions | {"python": python})
  run = MeasuredRun(
    name=name,
    **about,
    **size,
    rates=windows(current),
    step_report=reports[0] if reports else {},
    summary=finite(summary) if summary.get("outcome") == "done" else {},
    evaluations=_evaluations(lines, batch, num_train),
    origin=provenance.last_start(workdir, about["hosts"]),
    planned=_planned(workdir / stored.FILE, record, batch),
  )
  newest = max(line["step"] for line in lines)
  return run._replace(missing=tuple(_missing(run, newest, derived["total_steps"])))


def resumed_text(step: int, summary: Mapping[str, Any]) -> str:
  """Describe a run that trains again after the step of its summary; "" if it does not.

  The summary of an interrupted run stays in the workdir while the run resumes.
  """
  text = f"at step {step:,} of {summary['total_steps']:,}, resumed at {summary['step']:,}"
  return text if step > summary["step"] else ""


def finite(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
  """Return the finite numbers among values, by name without the prefix."""
  return {
    name.removeprefix(prefix): x
    for name, x in values.items()
    if mismatch(x, float) is None and math.isfinite(x)
  }


def _planned(path: Path, record: Mapping[str, Any], batch: int) -> stored.Match | None:
  """Match a run with the plan at a path; None if there is no file."""
  if not os.path.lexists(path):
    return None
  try:
    plan = stored.read_plan(path)
  except ConfigError as e:
    return stored.Match(reason=str(e).removeprefix(f"{path.parent}/{stored.FILE}: "))
  derived, kind = record["derived"], str(record.get("device_kind") or "")
  size = dict(devices=derived["num_devices"], batch_size=batch, steps=derived["total_steps"])
  return stored.match(plan, record["config"], **size, kind=kind)


def windows(lines: _Lines) -> tuple[float, ...]:
  """Return the examples per second of the windows that count, for one start.

  Args:
    lines: the lines of metrics.jsonl, in order.

  Example:
    >>> windows([{"step": s, "perf/examples_per_s": 10.0 * s} for s in (5, 10, 15, 17)])
    (100.0, 150.0)
  """
  logged = [line for line in lines if _RATE in line]
  steps = [b["step"] - a["step"] for a, b in itertools.pairwise(logged)]
  whole = statistics.median_high(steps or [0])
  counted = zip(steps, logged[1:], strict=True)
  return tuple(line[_RATE] for n, line in counted if 2 * n >= whole)


def _evaluations(lines: _Lines, batch: int, num_train: int) -> tuple[tuple[float, float], ...]:
  """Return (epochs, validation loss) over all starts; a repeated step replaces the earlier one."""
  losses = {x["step"]: x["eval/loss"] for x in lines if "eval/loss" in finite(x)}
  epochs = batch / max(num_train, 1)
  return tuple((step * epochs, loss) for step, loss in sorted(losses.items()))


def _missing(run: MeasuredRun, step: int, total: int) -> Iterator[str]:
  """Yield the values that are not recorded, with the reasons, one line each."""
  now, enough = run.config["log"].get("every_steps"), max(total // 20, 1)
  is_enough = isinstance(now, int) and now <= enough
  remedy = ", so far" if is_enough else f"; log.every_steps={enough} logs more often"
  if not run.rates:
    yield f"throughput: no window after the warm-up{remedy}"
  elif not run.quartiles:
    yield f"quartiles: only {len(run.rates)} windows{remedy}"
  if not run.step_report:
    remedy = "not measured yet" if run.config["log"]["step_report"] else "set log.step_report=True"
    yield f"exposed and spread: no step report, {remedy}"
  if not run.summary:
    yield f"loss and accuracy: not done, at step {step:,} of {total:,}"
  if run.goodput is None:
    yield f"goodput: no {FILE} in the workdir"
