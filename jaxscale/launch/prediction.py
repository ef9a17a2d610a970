"""A run against its plan, part by part.

What is measured of a step's parts is what a run has on record anyway: its rate, the
share of the time that it waits for input, and, with `log.step_report`, the step without
its exchange. What is left is the host's, with all that nothing else accounts for. The
step report leaves in "compute" what is sent within the model (along `fsdp`, `model` and
`stage`) and waiting for the slowest device; both are planned with it here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from jaxscale.errors import ConfigError, printable
from jaxscale.launch.corrections import Correction, corrections, paste
from jaxscale.launch.measured import MeasuredRun, NotBegunError, read
from jaxscale.metrics import text
from jaxscale.planning.machine import CORNERS
from jaxscale.planning.stored import FILE, PlannedStep, not_compared

# Axes that the exchange of gradients sends along; others are the model's.
_EXCHANGE = {"replica", "data", "bn", "all"}
_EXPOSED = "exposed "
# What is within a twentieth of the range's ends is in it: of a site that has given all
# constants the range is a point, and rates of one config differ by as much.
_TOLERANCE = 1.05
_COLORS = {
  "compute": "#2f6f9f", _EXPOSED: "#c8553d", "input": "#e0a458", "host": "#8c939b",
}  # fmt: skip


class Part(NamedTuple):
  """A number that was planned and measured; None is what is not known.

  Attributes:
    name: what it is.
    planned: as expected.
    measured: of the run.
    low: the fast end of the plan's range; None: it has none.
    high: the slow end.
    kind: "time", "long" (of a run), "bytes" or "share".
    of_step: whether the step's seconds are a sum of such parts.
  """

  name: str
  planned: float | None
  measured: float | None
  low: float | None = None
  high: float | None = None
  kind: str = "time"
  of_step: bool = False

  @property
  def excess(self) -> float:
    """By how much it is above what was planned; 0 where that is not known."""
    is_known = self.measured is not None and self.planned is not None
    return self.measured - self.planned if is_known else 0.0  # pyright: ignore


class Comparison(NamedTuple):
  """A run against its plan.

  Attributes:
    run: its name.
    plan: what was planned, in a line.
    why: nothing is compared; "" where it is.
    parts: numbers, the step first.
    outcome: in a sentence, whether the step is as planned, and if not where.
    is_slower: the step is slower than the slowest that was planned.
    corrections: of the machine's constants.
    notes: what a reader must know, a line each.
    seconds: of the whole run as planned, fast, expected and slow; (): not planned.
  """

  run: str
  plan: str
  why: str
  parts: tuple[Part, ...] = ()
  outcome: str = ""
  is_slower: bool = False
  corrections: tuple[Correction, ...] = ()
  notes: tuple[str, ...] = ()
  seconds: tuple[float, ...] = ()

  def __str__(self) -> str:
    if self.why:
      return f"{self.run}: {not_compared(self.why)}"
    lines = [f"{self.run} against its plan: {self.plan}", _table(self.parts)]
    lines += [self.outcome, *self.notes]
    if offered := paste(self.run, self.corrections):
      lines += ["", "for the table [machine] of the site's file:", offered]
    if rest := [f"  {c.name}: {c.why}" for c in self.corrections if c.value is None]:
      lines += ["", "not determined by this run:", *rest]
    return "\n".join(lines)


def compare(run: MeasuredRun) -> Comparison | None:
  """A run against its plan; None: it has none.

  Example:
    >>> print(compare(read(Path("runs/digits"))))              # doctest: +SKIP
  """
  found = run.planned
  if found is None:
    return None
  if found.step is None or found.plan is None:
    return Comparison(run.name, "", found.why)
  step_s = _step_s(run)
  if step_s is None:
    return Comparison(run.name, "", "the run has no rate after its warm-up yet")
  parts = [*_step(run, found.step, step_s), *_memory(run, found.step)]
  parts += [*_utilization(run, found.step), *_whole(run)]
  how = "calibrated" if found.plan.calibrated else "not calibrated"
  step = found.step
  where = text.plural(step.devices, "device")
  plan = f"{found.plan.chips}, {how}; batch {step.batch_size:,} on {where}"
  outcome, is_slower = check_step(step, parts)
  notes = []
  if not found.is_whole and found.plan.job and run.is_done:
    notes.append("hours are not compared: the plan's run is another one")
  if run.compute_s is None:
    notes.append("log.step_report=True measures compute and exchange apart")
  offered = corrections(run, found, step_s)
  hours = found.plan.job["hours"] if found.plan.job and found.is_whole else {}
  seconds = tuple(3600 * hours[c] for c in reversed(CORNERS)) if hours else ()
  return Comparison(
    run.name, plan, "", tuple(parts), outcome, is_slower, offered, tuple(notes), seconds
  )


def comparison(path: Path, plan: Path | None = None) -> Comparison | None:
  """`compare` of what is in a folder; None where it has no plan, or no record yet.

  Args:
    path: folder of a run, or workdir.
    plan: a plan's file; None: plan.json of the workdir.
  """
  try:
    return compare(read(path, plan))
  except NotBegunError:
    return None
  except ConfigError as e:
    if plan is None and not has_plan(path):
      return None
    return Comparison(path.name, "", str(e).removeprefix(f"{path.name}: "))


def has_plan(path: Path) -> bool:
  """Whether there is a plan in a workdir, or in that of a run's folder."""
  return any(os.path.lexists(path / place / FILE) for place in (".", "train"))


def _step_s(run: MeasuredRun) -> float | None:
  """Seconds of a step, the median over windows."""
  is_rate = run.rate is not None and math.isfinite(run.rate) and run.rate > 0
  return run.batch / run.rate if is_rate else None  # pyright: ignore


def _step(run: MeasuredRun, step: PlannedStep, step_s: float) -> Iterator[Part]:
  """The step, and what it is made of."""
  slow, mean, fast = (step.seconds[c] for c in CORNERS)
  yield Part("step", mean, step_s, fast, slow)
  exposed = {n: s for n, s in step.parts.items() if n.startswith(_EXPOSED)}
  sent = {n: s for n, s in exposed.items() if {*_axes(n)} <= _EXCHANGE}
  others = ("input", "host")
  compute = sum(s for n, s in step.parts.items() if n not in sent and n not in others)
  wait = run.medians.get("perf/input_wait")
  waits = None if wait is None else wait * step_s
  host = step.parts.get("host", 0.0)
  if run.compute_s is None or run.exposed_s is None:
    rest = None if waits is None else step_s - waits
    planned = compute + sum(sent.values()) + host
    yield Part("compute, exchange, host", planned, rest, of_step=True)
    yield Part("input", step.parts.get("input", 0.0), waits, of_step=True)
    return
  yield Part("compute", compute, run.compute_s, of_step=True)
  if step.devices > 1:
    yield from _exchange(sent, run.exposed_s)
  yield Part("input", step.parts.get("input", 0.0), waits, of_step=True)
  left = step_s - run.compute_s - run.exposed_s - (waits or 0.0)
  yield Part("host, and the rest", host, left, of_step=True)


def _axes(name: str) -> list[str]:
  return name.removeprefix(_EXPOSED).split("+")


def _exchange(sent: Mapping[str, float], measured: float) -> Iterator[Part]:
  """Exposed communication of gradients, by axes where one alone has any."""
  if len(sent) < 2:
    name = next(iter(sent), f"{_EXPOSED}exchange")
    yield Part(name, sum(sent.values()), measured, of_step=True)
    return
  yield Part(f"{_EXPOSED}exchange", sum(sent.values()), measured, of_step=True)
  for name, seconds in sent.items():
    yield Part(f"    {name.removeprefix(_EXPOSED)}", seconds, None)


def _memory(run: MeasuredRun, step: PlannedStep) -> Iterator[Part]:
  if run.program_bytes is not None:
    yield Part("memory of a device", step.memory, run.program_bytes, kind="bytes")
  if run.peak_bytes is not None:
    yield Part("  in use at most", step.memory, run.peak_bytes, kind="bytes")


def _utilization(run: MeasuredRun, step: PlannedStep) -> Iterator[Part]:
  """MFU, both of the plan's peak."""
  reached = run.medians.get("perf/tflops_per_device")
  plan = run.planned.plan if run.planned else None
  peak = plan.constants.get("peak_bfloat16") if plan else None
  if plan is None or not peak or reached is None:
    return
  share = step.rate() / step.devices / (plan.step.rate() / plan.step.devices)
  yield Part(
    "MFU, of the plan's peak", share * plan.mfu, 1e12 * reached / peak, kind="share"
  )


def _whole(run: MeasuredRun) -> Iterator[Part]:
  """Hours, of a run that is done and was planned as it is."""
  found, spent = run.planned, run.goodput
  if not (found and found.is_whole and found.plan and run.is_done and spent):
    return
  job, seconds = found.plan.job or {}, spent.seconds
  hours, train, evaluate, start = (
    job[n] for n in ("hours", "train", "evaluate", "start")
  )
  slow, mean, fast = (3600 * hours[c] for c in CORNERS)
  yield Part("whole run", mean, spent.wall_s - seconds["queue"], fast, slow, "long")
  rows = (
    ("training, and input", train, ("training", "input")),
    ("evaluation", evaluate, ("evaluation",)),
    ("saving", dict.fromkeys(CORNERS, job["save"]), ("saving",)),
    ("start-up and compiling", start, ("start-up", "compile")),
    ("lost, down and other", dict.fromkeys(CORNERS, job["lost"]),
     ("lost", "down", "other")),
  )  # fmt: skip
  for name, planned, categories in rows:
    measured = sum(seconds[c] for c in categories)
    low, high = planned["high"], planned["low"]
    ends = (low, high) if low != high else (None, None)
    yield Part(f"  {name}", planned["expected"], measured, *ends, "long")


def check_step(step: PlannedStep, parts: Sequence[Part]) -> tuple[str, bool]:
  """Whether a step is as planned, and if not in which part; whether it is slower.

  Args:
    step: that was planned.
    parts: of `compare`, the step first.
  """
  took = parts[0].measured or 0.0
  slow, mean, fast = (step.seconds[c] for c in CORNERS)
  off = f"{took / mean - 1:+.0%}"
  if fast / _TOLERANCE <= took <= slow * _TOLERANCE:
    return f"the step is as planned, within the range ({off})", False
  is_slower = took > slow
  known = [p for p in parts if p.of_step and p.measured is not None]
  sign = 1 if is_slower else -1
  most = max(known, key=lambda p: sign * p.excess, default=None)
  where = ""
  if most is not None and sign * most.excess > 0:
    where = f", most of it in {most.name.strip()}: {_cell(most, most.measured)} for "
    where += f"{_cell(most, most.planned)}"
  word = "slower" if is_slower else "faster"
  return f"the step is {word} than planned, beyond the range ({off}){where}", is_slower


def _cell(part: Part, value: float | None) -> str:
  if value is None:
    return ""
  if part.kind == "bytes":
    return text.byte_size(value)
  if part.kind == "share":
    return f"{value:.1%}"
  if part.kind == "long" and value >= 60:
    return text.duration(value)
  sign = "-" if value < 0 else ""
  return sign + text.short_time(abs(value)) if abs(value) >= 5e-7 else "0"


def _cells(part: Part, indent: bool = True) -> list[str]:
  """A row of the table."""
  ends = ""
  if part.low is not None and part.high is not None:
    ends = f"{_cell(part, part.low)} to {_cell(part, part.high)}"
  off = ""
  if part.planned and part.measured is not None:
    ratio = part.measured / part.planned
    off = f"{ratio - 1:+.0%}" if ratio < 10 else f"{ratio:,.0f} times"
  name = "  " * (indent and part.of_step) + part.name
  measured = _cell(part, part.measured) or text.NOTHING
  return [name, _cell(part, part.planned), measured, off, ends]


def status_line(found: Comparison, to_go: float | None, spent: float | None) -> str:
  """How a run does against its plan, in one line for `jaxscale status`.

  Args:
    found: of `compare`.
    to_go: seconds until training is done; None: not known, or it is.
    spent: seconds of the run so far, without the queue; None: not known.
  """
  if found.why:
    return printable(not_compared(found.why))
  step = found.parts[0]
  line = f"{_cell(step, step.measured)} per step, planned {_cell(step, step.planned)} "
  line += f"({_cell(step, step.low)} to {_cell(step, step.high)})"
  word = found.outcome.removeprefix("the step is ")
  if found.is_slower:
    line = f"SLOWER THAN PLANNED{word.removeprefix('slower than planned')}; {line}"
  else:
    line = f"{word}; {line}"
  took = math.nan if to_go is None or spent is None else spent + to_go
  if found.seconds and math.isfinite(took):
    low, mean, high = (text.duration(s) for s in found.seconds)
    line += f"; {text.duration(took)} in all expected, {mean} planned ({low} to {high})"
  return line


_HEAD = ("", "planned", "measured", "off by", "planned range")


def _table(parts: Sequence[Part]) -> str:
  return text.table(_HEAD, [_cells(part) for part in parts])


def html(found: Comparison) -> str:
  """A section of a page: the table, two bars, and the corrected constants."""
  if found.why:
    return f"<p>{escape(not_compared(found.why))}</p>"
  rows = [[c.replace("  ", "\u2003") for c in _cells(part)] for part in found.parts]
  lines = [f"<p>{escape(found.plan)}. {escape(_sentence(found.outcome))}</p>"]
  lines += [_bars(found.parts), text.html_table(_HEAD, rows)]
  lines += [f"<p>{escape(_sentence(note))}</p>" for note in found.notes]
  if offered := paste(found.run, found.corrections):
    lines.append("<p>Corrected constants, for the table [machine] of the site's file:"
                 f"</p><pre>{escape(offered)}</pre>")  # fmt: skip
  rest = [f"{c.name}: {c.why}" for c in found.corrections if c.value is None]
  if rest:
    items = "".join(f"<li>{escape(line)}</li>" for line in rest)
    lines.append(f"<p>Not determined by this run:</p><ul>{items}</ul>")
  return "".join(lines)


def _sentence(line: str) -> str:
  return f"{line[:1].upper()}{line[1:]}."


def _bars(parts: Sequence[Part]) -> str:
  """The step as planned and as measured, one above the other, to the same scale."""
  known = [p for p in parts if p.of_step and p.measured is not None]
  if not known:
    return ""
  sides = {
    "planned": [(p, max(p.planned or 0.0, 0.0)) for p in known],
    "measured": [(p, max(p.measured or 0.0, 0.0)) for p in known],
  }
  most = max(sum(s for _, s in side) for side in sides.values()) or 1.0
  bars = []
  for name, side in sides.items():
    pieces = "".join(
      f"<div style='background:{_color(p)};width:{100 * s / most:.3f}%' "
      f"title='{escape(p.name)} {_cell(p, s)}'></div>"
      for p, s in side
    )
    total = text.short_time(sum(s for _, s in side))
    bars.append(f"<p class='keys'>{name}, {total}</p><div class='bar'>{pieces}</div>")
  keys = "".join(
    f"<span><i class='key' style='background:{_color(p)}'></i>{escape(p.name)}</span>"
    for p in known
  )
  return f"{''.join(bars)}<p class='keys'>{keys}</p>"


def _color(part: Part) -> str:
  return next(c for n, c in [*_COLORS.items(), ("", "#8c939b")] if n in part.name)
