"""Comparison of a run with its plan: planned values, measured values and their ratio.

With `log.step_report` the compute and the exchange of a step are measured separately. In
the report and in the plan, compute includes communication within the model (along `fsdp`,
`model` and `stage`) and the wait for the slowest device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxscale.errors import ConfigError, printable
from jaxscale.jobs.measured import MeasuredRun, NotBegunError, read
from jaxscale.metrics import text
from jaxscale.planning.stored import FILE, not_compared

# Axes of the gradient exchange; along the others the model communicates.
_EXCHANGE = {"replica", "data", "bn", "all"}
_HEAD = ("", "planned", "measured", "ratio")


class Row(NamedTuple):
  """Planned and measured value of a quantity."""

  name: str
  planned: float
  measured: float
  form: Callable[[float], str]

  @property
  def ratio(self) -> float | None:
    """Measured divided by planned; None if nothing was planned."""
    return self.measured / self.planned if self.planned > 0 else None


class Comparison(NamedTuple):
  """The comparison of a run with its plan.

  Attributes:
    run: the name of the run.
    reason: the reason why there is no comparison; "" if there is one.
    plan: the plan, in a few words.
    rows: the quantities, with the step time first.
  """

  run: str
  reason: str = ""
  plan: str = ""
  rows: tuple[Row, ...] = ()

  def __str__(self) -> str:
    if self.reason:
      return f"{printable(self.run)}: {not_compared(self.reason)}"
    heading = printable(f"{self.run} against its plan: {self.plan}")
    cells = [
      [r.name, r.form(r.planned), r.form(r.measured), text.cell(r.ratio, ",.2f")] for r in self.rows
    ]
    return f"{heading}\n{text.table(_HEAD, cells)}"

  def note(self) -> str:
    """Return the measured and the planned step time, for `jaxscale status`."""
    if self.reason:
      return not_compared(self.reason)
    step = self.rows[0]
    times = text.short_time(step.measured), text.short_time(step.planned)
    return f"step {times[0]}, planned {times[1]} ({text.cell(step.ratio, '.2f')} x)"


def compare(run: MeasuredRun) -> Comparison | None:
  """Compare a run with its plan; return None if it has no plan."""
  if run.planned is None:
    return None
  step, reason, chips, _ = run.planned
  if step is None:
    return Comparison(run.name, reason)
  if not (run.rate and run.rate > 0):
    return Comparison(run.name, "the run has no step time after its warm-up yet")
  low, high = (text.short_time(step.seconds[c]) for c in ("high", "low"))
  devices = text.plural(step.devices, "device")
  about = f"{chips}, batch {step.batch_size:,} on {devices}; a step in {low} to {high}"
  return Comparison(run.name, "", about, tuple(_rows(run)))


def _rows(run: MeasuredRun) -> Iterator[Row]:
  assert run.planned and run.planned.step and run.rate
  step, hours, report = run.planned.step, run.planned.hours, run.step_report
  yield Row("step", step.seconds["expected"], run.batch / run.rate, text.short_time)
  if {"compute_s", "exposed_s"} <= report.keys():
    exchange = compute = 0.0
    for name, seconds in step.parts.items():
      kind, _, axes = name.partition(" ")
      if kind == "exposed" and {*axes.split("+")} <= _EXCHANGE:
        exchange += seconds
      elif name not in ("input", "host"):
        compute += seconds
    yield Row("  compute", compute, report["compute_s"], text.short_time)
    if step.devices > 1:
      yield Row("  exposed exchange", exchange, report["exposed_s"], text.short_time)
  if (size := run.summary.get("program_memory_gb")) is not None:
    yield Row("memory of a device", step.memory, 1e9 * size, text.byte_size)
  if hours and run.summary and run.goodput:
    spent = run.goodput.wall_s - run.goodput.seconds["queue"]
    yield Row("whole run", 3600 * hours["expected"], spent, text.duration)


def comparison(path: Path) -> Comparison | None:
  """Compare a run in a folder; return None if it has no plan or no step yet.

  Args:
    path: the folder of a run, or a workdir.
  """
  if not any(os.path.lexists(path / folder / FILE) for folder in (".", "train")):
    return None
  try:
    return compare(read(path))
  except NotBegunError:
    return None
  except ConfigError as e:
    return Comparison(path.name, str(e).removeprefix(f"{path.name}: "))
