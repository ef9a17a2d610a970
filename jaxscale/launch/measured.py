"""What one run of a scaling study left behind, read from its files.

Throughput is the median over windows, the intervals between two logged steps. The first
window after a start is warm-up, and one of fewer than half as many steps as the others
(the end of a run) varies too much; both are left out. If a run was restarted, the last
start counts: earlier ones may have had other devices.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.files import mismatch, require_json
from jaxscale.launch import folder as folders
from jaxscale.metrics import read_json, read_metrics
from jaxscale.planning.stored import Match, of_workdir
from jaxscale.run.goodput import FILE, Activity, Goodput, goodput, read_activities
from jaxscale.run.provenance import last_start

CHANGES = "batch or image size changes during the run, which has no single throughput"
_PHASE = {"batch_size": int, "image_size": (int, None)}
_RECORD = {
  "config": {"phases": {"class": str}, "log": {"step_report": bool}},
  "derived": {
    "phases": [_PHASE], "num_train": int, "num_devices": int, "total_steps": int
  },
  "processes": int,
  "versions": {str: str},
  "python": str,
}  # fmt: skip
_REMEDY = "compare other runs"
_RATE, _REPORT = "perf/examples_per_s", "perf/exposed_share"


class NotBegunError(ConfigError):
  """A run that has written nothing yet."""


class MeasuredRun(NamedTuple):
  """One run; None is what is not on record, and `missing` says why.

  Attributes:
    name: name of the run.
    config: the resolved config, as in config.json.
    num_train: training examples.
    versions: versions of packages.
    nodes: nodes of the last start.
    hosts: their names, as Slurm lists them.
    processes: processes of the last start.
    devices: devices of the last start.
    kind: the kind of device, as "cpu" or "NVIDIA H100".
    batch: examples per step, over all devices.
    rates: examples per second, by window.
    exposed: share of a step that waits for the exchange.
    compute_s: seconds of a step without its exchange.
    exposed_s: seconds that the exchange adds.
    spread: from the fastest to the slowest process, as a share of their median.
    loss: validation loss at the end.
    accuracy: validation accuracy at the end.
    missing: what is not on record, and why.
    origin: commit, host and command of the last start.
    perplexity: validation perplexity at the end, of a language model.
    goodput: where its time went.
    medians: of the windows that count, by the names of metrics.jsonl.
    exposed_noise_s: how far half of the step report's rounds are from its median.
    evaluations: (epochs, validation loss) of each.
    program_bytes: that the compiled step takes of a device.
    peak_bytes: that the fullest device had in use; None on CPUs.
    start_s: from the first process's start to its first steps, compilation included.
    is_done: whether it was trained to its end.
    planned: its plan; None: it has none.
  """

  name: str
  config: dict[str, Any]
  num_train: int
  versions: dict[str, str]
  nodes: int | None
  hosts: str
  processes: int
  devices: int
  kind: str
  batch: int
  rates: tuple[float, ...]
  exposed: float | None
  compute_s: float | None
  exposed_s: float | None
  spread: float | None
  loss: float | None
  accuracy: float | None
  missing: tuple[str, ...] = ()
  origin: str = ""
  perplexity: float | None = None
  goodput: Goodput | None = None
  medians: Mapping[str, float] = MappingProxyType({})
  exposed_noise_s: float | None = None
  evaluations: tuple[tuple[float, float], ...] = ()
  program_bytes: float | None = None
  peak_bytes: float | None = None
  start_s: float | None = None
  is_done: bool = False
  planned: Match | None = None

  @property
  def rate(self) -> float | None:
    """Median examples per second."""
    return statistics.median(self.rates) if self.rates else None

  @property
  def quartiles(self) -> tuple[float, float] | None:
    """First and third quartile of the windows; None for fewer than 3."""
    if len(self.rates) < 3:
      return None
    low, _, high = statistics.quantiles(self.rates, n=4, method="inclusive")
    return low, high


def read(path: Path, plan: Path | None = None) -> MeasuredRun:
  """Read what a run left.

  Args:
    path: folder of a run of `jaxscale.launch`, or workdir of `jaxscale.train`.
    plan: a plan's file; None: plan.json of its workdir, if it has one.

  Raises:
    NotBegunError: it has not begun.
    ConfigError: it is neither, or a sweep.
  """
  workdir, starts, found_goodput = _files_of(path)
  record = require_json(workdir / "config.json", _RECORD, _REMEDY)
  config, derived, processes, versions, python = (record[name] for name in _RECORD)
  if not derived["phases"]:
    raise ConfigError(f"{workdir}/config.json: derived.phases is empty; {_REMEDY}")
  shapes = {(phase["batch_size"], phase["image_size"]) for phase in derived["phases"]}
  if len(shapes) > 1 or config["phases"]["class"] == "AdaptiveBatch":
    advice = "compare runs with --config.phases=Phases"
    raise ConfigError(f"{path.name}: the {CHANGES}; {advice}")
  # Lines of the last start, which an event or else a step report marks. Events have
  # whole seconds; nothing is logged in the first second of a process.
  lines = read_metrics(workdir / "metrics.jsonl")
  if not lines:
    raise NotBegunError(f"{path.name}: has trained no step, there is nothing to report")
  newest = max(line["step"] for line in lines)
  reports = [line["time"] for line in lines if _REPORT in line]
  times = [s.get("time") for s in starts]
  begins = max([*reports, *(t for t in times if isinstance(t, int))], default=0)
  lines = [x for x in lines if x["time"] >= begins - (begins not in reports)]
  found_report = next((x for x in lines if _REPORT in x), {})
  report = {name: x for name, x in found_report.items() if math.isfinite(x)}
  summary = read_json(workdir / "summary.json", {"outcome": str, "devices": str})
  scores = summary if summary.get("outcome") == "done" else {}
  names = "loss", "accuracy", "perplexity"
  found = {name: scores.get(name) for name in names}
  final: dict[str, Any] = {
    name: None if mismatch(x, float) else x for name, x in found.items()
  }
  measured = MeasuredRun(
    name=path.name,
    config=config,
    num_train=derived["num_train"],
    versions=versions | {"python": python},
    nodes=starts[-1]["nodes"] if starts else None,
    hosts=str(starts[-1].get("hosts", "")) if starts else "",
    processes=processes,
    devices=derived["num_devices"],
    kind=summary.get("devices", "").partition(" x ")[2] or _kind(record),
    batch=shapes.pop()[0],
    rates=windows(lines),
    medians=_medians(lines),
    exposed=report.get(_REPORT),
    compute_s=report.get("perf/compute_s"),
    exposed_s=report.get("perf/exposed_s"),
    spread=report.get("perf/spread") if processes > 1 else None,
    origin=last_start(workdir),
    goodput=found_goodput,
    exposed_noise_s=report.get("perf/exposed_noise_s"),
    evaluations=_evaluations(workdir, derived["num_train"], record),
    start_s=_start_s(read_activities(workdir)),
    is_done=bool(scores),
    planned=of_workdir(workdir, record, plan),
    **_memory(summary),
    **final,
  )
  missing = _missing(measured, newest, derived["total_steps"], bool(scores))
  return measured._replace(missing=tuple(missing))


def _kind(record: Mapping[str, Any]) -> str:
  """Of the devices, of a run that is not done."""
  kind = record.get("device_kind")
  return kind if isinstance(kind, str) else ""


def _files_of(path: Path) -> tuple[Path, list[dict[str, Any]], Goodput | None]:
  """The workdir of a run, its starts if `jaxscale.launch` made it, and its goodput."""
  if not (path / "run.json").exists():
    if not (path / "config.json").exists():
      raise ConfigError(f"{path}: no run.json or config.json in it, give a run")
    return path, [], goodput(read_activities(path))
  spec = folders.read_spec(path)
  name = path.name
  if spec.trials:
    raise ConfigError(f"{name}: is a sweep; give runs, or workdirs as {path}/trials/0")
  if not (spec.workdir(0) / "config.json").exists():
    raise NotBegunError(f"{name}: has written nothing yet; see `status {name}`")
  events = folders.read_events(spec, 0)
  starts = [e for e in events if e["event"] == "start"]
  return spec.workdir(0), starts, folders.read_goodput(spec, 0)


def windows(lines: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
  """Examples per second of the windows that count, of one start.

  Args:
    lines: of metrics.jsonl, in their order.

  Example:
    >>> windows([{"step": s, "perf/examples_per_s": 10.0 * s} for s in (5, 10, 15, 17)])
    (100.0, 150.0)
  """
  return tuple(line[_RATE] for line in _counted(lines))


def _counted(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  """The lines at the ends of windows that count."""
  found = [line for line in lines if _RATE in line]
  steps = [b["step"] - a["step"] for a, b in itertools.pairwise(found)]
  whole = statistics.median_high(steps or [0])
  counted = zip(steps, found[1:], strict=True)
  return [line for n, line in counted if 2 * n >= whole]


def _medians(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Of what each window has, of those that count."""
  found: dict[str, list[float]] = {}
  for line in _counted(lines):
    for name in ("perf/input_wait", "perf/tflops_per_device"):
      if math.isfinite(line.get(name, math.nan)):
        found.setdefault(name, []).append(line[name])
  return {name: statistics.median(values) for name, values in found.items()}


def _evaluations(
  workdir: Path, num_train: int, record: Mapping[str, Any]
) -> tuple[tuple[float, float], ...]:
  """(epochs, validation loss), of all starts; of steps done twice, what came last."""
  batch = record["derived"]["phases"][0]["batch_size"]
  found = {
    line["step"]: line["eval/loss"]
    for line in read_metrics(workdir / "metrics.jsonl")
    if math.isfinite(line.get("eval/loss", math.nan))
  }
  if num_train < 1:
    return ()
  return tuple((step * batch / num_train, loss) for step, loss in sorted(found.items()))


def _start_s(activities: Sequence[Activity]) -> float | None:
  """Of the first process, until it has done a step; None: that is not on record."""
  first = min(activities, key=lambda a: a.start, default=None)
  for found in sorted(activities, key=lambda a: a.time):
    if first and found.start == first.start and found.seconds.get("step"):
      names = "starting", "compiling", "preparing"
      return sum(found.seconds.get(name, 0.0) for name in names)
  return None


def _memory(summary: Mapping[str, Any]) -> dict[str, float | None]:
  """Bytes of a device, as far as the summary has them."""
  program, peak = (summary.get(f"{n}_memory_gb") for n in ("program", "peak"))
  if "cpu" in summary.get("devices", "cpu"):
    peak = None  # of the process
  known = {"program_bytes": program, "peak_bytes": peak}
  return {
    name: None if mismatch(gb, float) else 1e9 * gb  # pyright: ignore
    for name, gb in known.items()
  }


def _missing(run: MeasuredRun, step: int, total: int, is_done: bool) -> Iterator[str]:
  """What is not on record, and why, one line each."""
  now, enough = run.config["log"].get("every_steps"), max(total // 20, 1)
  is_enough = isinstance(now, int) and now <= enough
  remedy = ", so far" if is_enough else f"; log.every_steps={enough} logs more often"
  if not run.rates:
    yield f"throughput: no window after the warm-up{remedy}"
  elif not run.quartiles:
    yield f"quartiles: only {len(run.rates)} windows{remedy}"
  if run.exposed is None:
    is_asked = run.config["log"]["step_report"]
    remedy = "not measured yet" if is_asked else "set log.step_report=True"
    yield f"exposed and spread: no step report, {remedy}"
  if not is_done:
    yield f"loss and accuracy: not done, at step {step:,} of {total:,}"
  if run.goodput is None:
    yield f"goodput: no {FILE} in the workdir"
  if run.nodes is None:
    yield "nodes: only runs of jaxscale.launch record them"
