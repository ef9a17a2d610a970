"""The report of one run: outcome, best and last metrics, speed, time and problems."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale.jobs.measured import Located, NotBegunError, finite, locate, windows
from jaxscale.metrics import read_json, read_metrics, text
from jaxscale.metrics.scoring import score
from jaxscale.run import provenance

_WIDTH, _CURVE, _BLOCKS = 80, 24, "▁▂▃▄▅▆▇█"
_PROBLEMS = {"skipped_steps": "skipped step", "rolled_back": "roll back"}
_PROBLEMS |= {"damaged_examples": "damaged example"}
_SHAPE = {"outcome": str, "step": int, "total_steps": int, "devices": str, "seconds": float}


def describe(path: Path) -> str:
  """Describe how a run did, in lines of at most 80 columns where names are short.

  Args:
    path: folder of a run of `jaxscale.jobs`, or workdir of `jaxscale.train`.

  Raises:
    NotBegunError: the run has trained no step yet.
    ConfigError: the path is a sweep, or not a run.
  """
  run = locate(path)
  lines = read_metrics(run.workdir / "metrics.jsonl")
  if not lines:
    raise NotBegunError(f"{run.name}: has trained no step, there is nothing to report")
  summary = read_json(run.workdir / "summary.json", _SHAPE)
  state = f"at step {max(line['step'] for line in lines):,}, no summary.json yet"
  if summary:
    steps = f"{summary['step']:,} of {summary['total_steps']:,} steps"
    took = text.duration(summary["seconds"])
    state = f"{summary['outcome']}, {steps} on {summary['devices']}, {took} in the last start"
  report = [f"{run.name}: {state}", "", text.table(*metric_table(lines), left=(0, 3)), ""]
  notes = [*_notes(run, lines, summary)]
  return "\n".join([*report, *(textwrap.fill(n, _WIDTH, subsequent_indent="  ") for n in notes)])


def metric_table(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
  """Return titles and rows: each metric of the last and the best evaluation, and its curve.

  Accuracy decides which evaluation is best, or else the loss, as in `metrics.score`.

  Args:
    lines: lines of metrics.jsonl.
  """
  evaluations = [(line["step"], finite(line, "eval/")) for line in lines if "eval/loss" in line]
  ranked = [(rank, step) for step, x in evaluations if (rank := score(x)) is not None]
  best = max(ranked)[1] if ranked else None
  rows = []
  for key in dict.fromkeys(n for x in lines for n in x if n == "train/loss" or n[:5] == "eval/"):
    points = {x["step"]: x[key] for x in lines if key in finite(x)}
    if points:
      form = ".2%" if key == "eval/accuracy" else ".5g"
      cells = (text.cell(points.get(step), form) for step in (max(points), best))
      name = key.replace("eval/", "validation ").replace("train/", "training ")
      rows.append([name, *cells, curve([points[step] for step in sorted(points)])])
  title = "best" if best is None else f"best (step {best:,})"
  return ["", f"last (step {max(line['step'] for line in lines):,})", title, "curve"], rows


def curve(values: Sequence[float]) -> str:
  """Draw values as a line of blocks, the last of each stretch where there are many.

  Example:
    >>> curve([3.0, 2.0, 1.5, 1.0])
    '█▅▃▁'
  """
  count = min(len(values), _CURVE)
  shown = [values[(i + 1) * len(values) // count - 1] for i in range(count)]
  low, height = min(shown), max(shown) - min(shown)
  return "".join(_BLOCKS[round(7 * (v - low) / height) if height else 3] for v in shown)


def _notes(
  run: Located, lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> Iterator[str]:
  """Yield speed, time, problems and origin, one note each."""
  if rates := windows(lines):
    count = text.plural(len(rates), "window")
    yield f"speed: {statistics.median(rates):,.0f} examples/s (median of {count})"
  if run.goodput:
    yield f"time: {run.goodput}"
  values = finite(summary)
  problems = [
    text.plural(int(n), noun) for key, noun in _PROBLEMS.items() if (n := values.get(key))
  ]
  ends = [x for x in run.events if x["event"] == "end" and x["code"]]
  problems += [f"job {x['job']} ended with exit code {x['code']} ({x['next']})" for x in ends]
  if {"target_accuracy", "target_loss"} & values.keys() and "target_step" not in values:
    problems.append("the target was not reached")
  yield f"problems: {'; '.join(problems) or 'none on record'}"
  yield from filter(None, [provenance.last_start(run.workdir)])
  if (picture := run.workdir / "metrics.png").exists():
    yield f"picture: {picture}"
