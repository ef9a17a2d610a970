"""What a plan says of a scaling study: its steps on the study's sizes, and a curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxscale.launch.measured import MeasuredRun
from jaxscale.planning.stored import FILE, PlannedStep, StoredPlan


class Point(NamedTuple):
  """Speed-up on so many devices, relative to the smallest size of a study."""

  devices: int
  expected: float
  slow: float
  fast: float


class PlannedScaling(NamedTuple):
  """A study's plan.

  Attributes:
    plan: of one of its runs.
    curve: speed-ups that it has; () where it has none of the smallest size.
    base: devices that they are relative to.
    notes: why there is none, or not of all runs; a line each.
  """

  plan: StoredPlan | None = None
  curve: tuple[Point, ...] = ()
  base: int = 0
  notes: tuple[str, ...] = ()

  def speed_up(self, devices: int) -> float | None:
    """As expected on so many devices; None: not planned."""
    found = (p.expected for p in self.curve if p.devices == devices)
    return next(found, None)

  def efficiency(self, devices: int) -> float | None:
    """The speed-up divided by that of the devices."""
    up = self.speed_up(devices)
    return None if up is None else up * self.base / devices


def plan_of(runs: Sequence[MeasuredRun], base: int | None) -> PlannedScaling:
  """The plan that the runs of a study have.

  Args:
    runs: of the study, sorted by devices.
    base: devices that its speed-ups are relative to; None: no run has a throughput.
  """
  notes = [
    f"{run.name}: {FILE}: {run.planned.why}; not compared"
    for run in runs
    if run.planned and run.planned.step is None
  ]
  plans = [r.planned.plan for r in runs if r.planned and r.planned.step]
  if not plans or plans[0] is None:
    return PlannedScaling(notes=tuple(notes))
  plan, batches = plans[0], {r.batch for r in runs}
  if len(batches) == 1:
    steps = [s for s in (plan.step, *plan.strong) if s.batch_size in batches]
  else:
    rows = {r.batch / r.devices for r in runs}
    steps = [s for s in (plan.step, *plan.weak) if s.rows in rows]
  curve = _curve(steps, base)
  if base and not curve:
    notes.append(f"{FILE}: it has no {base:,} devices, no curve is drawn")
  return PlannedScaling(plan, curve, base or 0, tuple(notes))


def _curve(steps: Sequence[PlannedStep], base: int | None) -> tuple[Point, ...]:
  by_devices = {s.devices: s for s in steps}
  first = by_devices.get(base or 0)
  if first is None:
    return ()
  points = []
  for devices in sorted(by_devices):
    step = by_devices[devices]
    if devices >= first.devices:
      ups = {c: step.rate(c) / first.rate(c) for c in step.seconds}
      points.append(Point(devices, ups["expected"], ups["low"], ups["high"]))
  return tuple(points)


def exposed_share(step: PlannedStep) -> float:
  """Of a step, what is planned as communication that nothing hides."""
  exposed = (s for name, s in step.parts.items() if name.startswith("exposed"))
  return sum(exposed) / step.seconds["expected"]
