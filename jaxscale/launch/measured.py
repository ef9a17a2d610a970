"""What one run of a scaling study left behind, read back from its files.

Throughput is the median over windows, the stretches between two logged steps. The
first after a start is warm-up, and one of fewer than half as many steps as the others
(the end of a run) scatters too much; both are left out. Of a run that was started
again, the last start counts: the ones before may have had other devices.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import ConfigError
from jaxscale.launch import folder as folders
from jaxscale.launch import spec
from jaxscale.metrics import read_json_lines

_RATE, _REPORT = "perf/examples_per_s", "perf/exposed_share"


class NotBegunError(ConfigError):
  """A run that has written nothing yet."""


class Measured(NamedTuple):
  """One run; None is what is not on record, and `missing` says why.

  Attributes:
    name: of the run.
    config: as it was resolved, by name.
    num_train: training examples.
    versions: of packages.
    nodes: that the last start had.
    hosts: their names, as Slurm lists them.
    processes: of the last start.
    devices: of the last start.
    kind: of its devices, as "cpu" or "NVIDIA H100".
    batch: examples a step, over all devices.
    rates: examples a second, by window.
    exposed: share of a step that waits for the exchange.
    compute_s: seconds of a step without its exchange.
    exposed_s: seconds that the exchange adds.
    spread: from the fastest to the slowest process, as a share of their median.
    loss: held out, at the end.
    accuracy: likewise.
    perplexity: likewise, of a language model.
    missing: what is not on record, and why.
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
  missing: tuple[str, ...]
  perplexity: float | None = None

  @property
  def rate(self) -> float | None:
    """Median examples a second."""
    return statistics.median(self.rates) if self.rates else None

  @property
  def quartiles(self) -> tuple[float, float] | None:
    """First and third quartile of the windows; of fewer than 3 there are none."""
    if len(self.rates) < 3:
      return None
    low, _, high = statistics.quantiles(self.rates, n=4, method="inclusive")
    return low, high


def read(path: Path) -> Measured:
  """What a run left.

  Args:
    path: folder of a run of `jaxscale.launch`, or workdir of `jaxscale.train`.

  Raises:
    NotBegunError: it has not begun.
    ConfigError: it is neither, or a sweep.
  """
  diary, workdir = [], path
  if (path / "run.json").exists():
    run = folders.read_run(path)
    if run.trials:
      raise ConfigError(
        f"{path.name}: is a sweep; give runs, or workdirs as {path}/trials/0"
      )
    workdir = spec.workdir(run, 0)
    diary = folders.read_lines(spec.events_file(run, 0))
  config_file = workdir / "config.json"
  try:
    described = json.loads(config_file.read_text())
    derived = described["derived"]
  except FileNotFoundError:
    if workdir != path:
      raise NotBegunError(
        f"{path.name}: has written nothing yet; see `status {path.name}`"
      ) from None
    raise ConfigError(f"{path}: no run.json or config.json in it, give a run") from None
  except (OSError, ValueError, KeyError) as e:
    raise ConfigError(f"{config_file}: unreadable ({e})") from None
  starts = [e for e in diary if e.get("event") == "start"]
  lines = _since_last_start(read_json_lines(workdir / "metrics.jsonl"), starts)
  summary = _summary(workdir)
  report: Mapping[str, Any] = next((x for x in lines if _REPORT in x), {})
  rates = windows(lines)
  done, processes = summary.get("outcome") == "done", described["processes"]
  return Measured(
    name=path.name,
    config=described["config"],
    num_train=derived["num_train"],
    versions=described["versions"] | {"python": described["python"]},
    nodes=starts[-1]["nodes"] if starts else None,
    hosts=starts[-1].get("hosts", "") if starts else "",
    processes=processes,
    devices=derived["num_devices"],
    kind=summary.get("devices", "").partition(" x ")[2],
    batch=_batch(path.name, described),
    rates=rates,
    exposed=report.get(_REPORT),
    compute_s=report.get("perf/compute_s"),
    exposed_s=report.get("perf/exposed_s"),
    spread=report.get("perf/spread") if processes > 1 else None,
    loss=summary.get("loss") if done else None,
    accuracy=summary.get("accuracy") if done else None,
    missing=_missing(
      bool(starts),
      lines,
      summary,
      derived["total_steps"],
      rates,
      described["config"]["log"]["step_report"],
    ),
    perplexity=summary.get("perplexity") if done else None,
  )


def _since_last_start(
  lines: Sequence[dict[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
  """Lines of the last start, which the diary or else a step report marks."""
  reports = [line["time"] for line in lines if _REPORT in line]
  begins = max([*reports, *(float(s["time"]) for s in starts)], default=0.0)
  # The diary has whole seconds; nothing is logged in the first one of a process.
  return [line for line in lines if line["time"] >= begins - (begins not in reports)]


def windows(lines: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
  """Examples a second of the windows that count, of one start.

  Args:
    lines: of metrics.jsonl, in their order.

  Example:
    >>> windows([{"step": s, "perf/examples_per_s": 10.0 * s} for s in (5, 10, 15, 17)])
    (100.0, 150.0)
  """
  found = [(line["step"], line[_RATE]) for line in lines if _RATE in line]
  steps = [b - a for (a, _), (b, _) in itertools.pairwise(found)]
  if not steps:
    return ()
  whole = statistics.median_high(steps)
  counted = zip(steps, found[1:], strict=True)
  return tuple(rate for n, (_, rate) in counted if 2 * n >= whole)


def _summary(workdir: Path) -> dict[str, Any]:
  try:
    return json.loads((workdir / "summary.json").read_text())
  except (OSError, ValueError):
    return {}


def _batch(name: str, described: Mapping[str, Any]) -> int:
  """The batch size, which must be one, or there is no throughput to speak of."""
  shapes = {(s["batch_size"], s["image_size"]) for s in described["derived"]["phases"]}
  if len(shapes) > 1 or described["config"]["phases"]["class"] == "AdaptiveBatch":
    raise ConfigError(
      f"{name}: batch or images change size on the way, which have no one throughput; "
      "compare runs with --config.phases=Phases"
    )
  return shapes.pop()[0]


def _missing(
  has_diary: bool,
  lines: Sequence[Mapping[str, Any]],
  summary: Mapping[str, Any],
  total: int,
  rates: Sequence[float],
  is_asked: bool,
) -> tuple[str, ...]:
  """What is not there, and why, a line each; `is_asked`: for a step report."""
  found = []
  last = max((line["step"] for line in lines), default=0)
  every = f"log.every_steps={max(total // 20, 1)}"
  if not rates:
    found.append(f"throughput: no window after the warm-up; {every} logs more often")
  elif len(rates) < 3:
    found.append(
      f"quartiles: of {len(rates)} windows there are none; {every} logs more often"
    )
  if not any(_REPORT in line for line in lines):
    remedy = "not measured yet" if is_asked else "set log.step_report=True"
    found.append(f"exposed and spread: no step report, {remedy}")
  if summary.get("outcome") != "done":
    found.append(f"loss and accuracy: not done, at step {last:,} of {total:,}")
  if not has_diary:
    found.append("nodes: only runs of jaxscale.launch write them down")
  return tuple(found)
