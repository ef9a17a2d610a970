"""Report of one run: outcome, last and best metrics, speed, time and problems."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale.jobs.measured import SUMMARY, NotBegunError, finite, locate, resumed_text, windows
from jaxscale.jobs.spec import ASKED_CODES
from jaxscale.metrics import read_json, read_json_lines, read_metrics, text
from jaxscale.metrics.scoring import best_of, signed
from jaxscale.run import provenance
from jaxscale.run.settings import DECISIONS

_CURVE, _BLOCKS = 24, "▁▂▃▄▅▆▇█"
_PROBLEMS = ("skipped_steps", "rolled_back", "damaged_examples")


def describe(path: Path) -> str:
  """Describe how a run did, in lines of at most 80 columns where names are short.

  Args:
    path: the folder of a run of `jaxscale.jobs`, or a workdir of `jaxscale.train`.

  Raises:
    NotBegunError: the run has not logged a step yet.
    ConfigError: the path is a sweep, or not a run.
  """
  run = locate(path)
  if not (lines := read_metrics(run.workdir / "metrics.jsonl")):
    raise NotBegunError(f"{run.name}: has not logged a step yet, so there is nothing to report")
  summary = read_json(run.workdir / "summary.json", SUMMARY)
  step = max(line["step"] for line in lines)
  state = f"at step {step:,}, no summary.json yet"
  if summary:
    done = "{outcome}, {step:,} of {total_steps:,} steps on {devices}".format(**summary)
    state = resumed_text(step, summary) or done
  values, rates = finite(summary), windows(lines)
  notes = [f"speed: {statistics.median(rates):,.0f} examples/s (median)"] if rates else []
  notes += [f"time: {run.goodput}"] * (run.goodput is not None)
  notes += _batch_sizes(run.workdir, lines)
  problems = [f"{n.replace('_', ' ')}: {values[n]:,g}" for n in _PROBLEMS if values.get(n)]
  ends = [x for x in run.events if x["event"] == "end" and x["code"]]
  # Do not list a preemption as a problem if its job starts again.
  again = (x for x in ends if x["next"] == "requeue" or x is not run.events[-1])
  asked = [x for x in again if x["code"] in ASKED_CODES]
  notes += [f"stops: {len(asked)} on request, requeued or resumed"] * bool(asked)
  ended = "job {job} ended with exit code {code} ({next})"
  problems += [ended.format(**x) for x in ends if x not in asked]
  has_target = {"target_accuracy", "target_loss"} & values.keys()
  problems += ["the target was not reached"] * bool(has_target and "target_step" not in values)
  notes.append(f"problems: {'; '.join(problems) or 'none on record'}")
  origin = provenance.last_start(run.workdir, run.nodes[1])
  notes += [f"start: {origin}"] * bool(origin)
  notes += [f"picture: {picture}" for picture in sorted(run.workdir.glob("*.png"))]
  wrapped = [textwrap.fill(note, 80, subsequent_indent="  ") for note in notes]
  table = text.table(*metric_table(lines, _best_metric(run.workdir, summary)), left=(0, 3))
  return "\n".join([f"{run.name}: {state}", "", table, "", *wrapped])


def _batch_sizes(workdir: Path, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
  """Yield each change of the batch size, and the last decision, which may be to keep it."""
  shape = {"step": int, "batch_size": int, "why": str}
  decided = {x["step"]: x for x in read_json_lines(workdir / DECISIONS, None, shape)}
  sizes = {x["step"] - 1: x["growth/batch_size"] for x in lines if "growth/batch_size" in finite(x)}
  sizes |= {step: decided[step]["batch_size"] for step in [*decided][-1:]}
  for step, size in sorted(sizes.items()):
    why = f": {decided[step]['why']}" if step in decided else ""
    yield f"batch size: {size:,g} after step {step:,}{why}"


def _best_metric(workdir: Path, summary: Mapping[str, Any]) -> str | None:
  """Return the metric that decides which evaluation is best, from `metrics.signed`."""
  if isinstance(name := summary.get("best_metric"), str):
    return name
  shape = {"config": {"checkpoint": {"best_metric": str}}}
  described = read_json(workdir / "config.json", shape)
  return signed(described["config"]["checkpoint"]["best_metric"]) if described else None


def metric_table(
  lines: Sequence[Mapping[str, Any]], best_metric: str | None = None
) -> tuple[list[str], list[list[str]]]:
  """Return titles and rows: the last and the best value of each metric, and its curve.

  Args:
    lines: the lines of metrics.jsonl.
    best_metric: the metric that decides which evaluation is best, as in `metrics.score`.
  """
  _, best = best_of(((finite(x, "eval/"), x["step"]) for x in lines), best_metric)
  rows = []
  for key in dict.fromkeys(n for x in lines for n in x if n == "train/loss" or n[:5] == "eval/"):
    if points := {x["step"]: x[key] for x in lines if key in finite(x)}:
      form = ".2%" if key == "eval/accuracy" else ".5g"
      cells = [text.cell(points.get(step), form) for step in (max(points), best)]
      name = key.replace("eval/", "validation ").replace("train/", "training ")
      rows.append([name, *cells, curve([points[step] for step in sorted(points)])])
  last = f"last (step {max(line['step'] for line in lines):,})"
  return ["", last, f"best (step {text.cell(best, ',')})", "curve"], rows


def curve(values: Sequence[float]) -> str:
  """Draw values as a line of blocks, and of many values the last of each stretch.

  Example:
    >>> curve([3.0, 2.0, 1.5, 1.0])
    '█▅▃▁'
  """
  count = min(len(values), _CURVE)
  shown = [values[(i + 1) * len(values) // count - 1] for i in range(count)]
  low, height = min(shown), max(shown) - min(shown)
  return "".join(_BLOCKS[round(7 * (v - low) / height) if height else 3] for v in shown)
