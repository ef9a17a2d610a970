"""A plan for people: a page of text and a picture."""

from __future__ import annotations

from pathlib import Path

from jaxscale.files import output_path
from jaxscale.metrics.plot import CURVES, IDEAL, POINTS, figure
from jaxscale.metrics.text import duration, plural, short_time, table
from jaxscale.planning import plan as plans
from jaxscale.planning.fits import line
from jaxscale.planning.job import Job
from jaxscale.planning.machine import CORNERS, Rates, hosts
from jaxscale.planning.plan import Plan
from jaxscale.planning.step_plan import Step
from jaxscale.planning.topologies import compiler, gib

_WITHOUT_BFLOAT16 = ("p100", "v100")  # of the generations before Ampere


def text(plan: Plan) -> str:
  """The page that `jaxscale plan` prints.

  Example:
    >>> print(text(make_plan(config, "h100-256")))               # doctest: +SKIP
  """
  parts = [_head(plan), _memory(plan), _sent(plan), _step(plan)]
  parts += [_scaling(plan), _run(plan), _constants(plan)]
  return "\n\n".join(parts)


def _head(plan: Plan) -> str:
  step, chips = plan.step, plan.rates
  how = calibrated(chips)
  sizes = plan.fit.mesh.shape.items()
  grid = " x ".join(f"{axis} {n}" for axis, n in sizes if n > 1) or "one device"
  several = " (some simulated, the rows of each the same)"
  what = f"{step.devices} x {chips.title} in {plural(step.nodes, _place(plan))}"
  compiled = ", ".join(plan.compiled)
  note = several if len(plan.chips.devices) < step.devices else ""
  by = compiler(plan.chips.chip.platform)
  lines = [
    f"plan {how}",
    f"{what}, as {grid}; batch {step.batch_size:,}, {step.rows:,} per device",
    f"compiled for {compiled}{note} by {by} in {plan.seconds:.0f} s",
  ]
  if plan.chips.kind in _WITHOUT_BFLOAT16 and plan.config.dtype == "bfloat16":
    lines += ["it has no bfloat16: rates and bytes are those of float16"]
  if not plan.fit.is_good:
    lines += ["it does not fit: times are those of chips that had the memory"]
  return "\n".join(lines)


def calibrated(rates: Rates) -> str:
  """Where the rates are from; the end of the first line."""
  if rates.machine.chip not in ("", rates.chip):
    return f"not calibrated: the site's file has measured {rates.machine.chip}"
  if rates.is_calibrated:
    return "from what the site's file says was measured there"
  return "not calibrated: rates are published or assumed, nothing was measured here"


def _memory(plan: Plan) -> str:
  memory = plan.fit.memory
  most = "the state and the batch"
  if memory and memory.temporaries > memory.arguments:
    most = "temporaries: activations, and what is gathered"
  return f"memory of a device: {line(plan.fit, plan.chips)}\n  most of it: {most}"


def _sent(plan: Plan) -> str:
  rows = [
    (r["collective"], r["axes"], f"{r['times']:,}", f"{r['bytes'] / 1e6:,.1f}")
    for r in plans.sent(plan)
  ]
  if not rows:
    return "communication: none"
  return "a device sends in a step\n" + _indented(
    table(("collective", "axes", "times", "MB"), rows, left=(0, 1))
  )


def _step(plan: Plan) -> str:
  step = plan.step
  rows = [
    (name, short_time(s), f"{s / step.seconds['expected']:.0%}")
    for name, s in sorted(step.parts.items(), key=lambda p: -p[1])
    if s > 0
  ]
  hidden = sum(step.sent.values()) - sum(
    s for name, s in step.parts.items() if name.startswith("exposed")
  )
  slow, mean, fast = (short_time(step.seconds[c]) for c in CORNERS)
  lines = [f"a step takes {mean} ({fast} to {slow})"]
  lines += [_indented(table(("part", "time", "share"), rows, left=(0,)))]
  if hidden > 1e-6:
    lines += [f"  and {short_time(hidden)} of communication during compute"]
  loading = hosts(step.devices, plan.rates.at("expected"))
  need = step.batch_size / loading / step.seconds["expected"]
  lines += [
    f"  {_count(step.rate)} examples/s, {_count(step.rate / step.devices)} a device; "
    f"MFU {plan.mfu:.1%}; {step.efficiency:.1%} of a device alone",
    f"  a host has to load {_count(need)} examples/s",
    f"  {plans.bottleneck(plan)[1]}",
  ]
  return "\n".join(lines)


def _count(number: float) -> str:
  return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _place(plan: Plan) -> str:
  return "slice" if plan.chips.chip.platform == "tpu" else "node"


def _scaling(plan: Plan) -> str:
  weak = {s.devices: s for s in plan.weak}
  strong = {s.devices: s for s in plan.strong}
  if not weak:
    return "scaling: the mesh fits no other number of devices"
  base = next((s for s in plan.strong if s.fits), None)
  rows = [_size(n, strong.get(n), weak.get(n), base) for n in sorted({*weak, *strong})]
  head = (
    "devices",
    f"{_place(plan)}s",
    "rows",
    "step",
    "examples/s",
    "efficiency",
    "weak examples/s",
    "weak efficiency",
  )
  title = f"the same batch of {plan.step.batch_size:,} on more devices, and the same "
  lines = [f"{title}{plan.step.rows:,} rows per device", _indented(table(head, rows))]
  if plan.knee:
    lines += [
      f"  strong scaling ends at {plan.knee:,} devices: twice as many give less "
      "than 1.4 times the rate"
    ]
  elif plan.strong:
    lines += [f"  strong scaling does not end up to {plan.strong[-1].devices:,} devices"]
  if plan.skipped:
    sizes = ", ".join(f"{n:,}" for n in plan.skipped)
    lines += [f"  the batch, the mesh or the chips do not come in {sizes} devices"]
  return "\n".join(lines)


def _size(
  devices: int, strong: Step | None, weak: Step | None, base: Step | None
) -> tuple[str, ...]:
  """Cells of one number of devices."""
  cells = ["", "", "", ""]
  nodes = 0
  if strong:
    nodes, up = strong.nodes, "too large"
    if strong.fits and base:
      up = f"{strong.rate / base.rate * base.devices / devices:.0%}"
    took = short_time(strong.seconds["expected"])
    cells = [f"{strong.rows:,}", took, f"{_count(strong.rate)}", up]
  more = ["", ""]
  if weak:
    nodes, more = weak.nodes, [f"{_count(weak.rate)}", f"{weak.efficiency:.1%}"]
  return (f"{devices:,}", f"{nodes:,}", *cells, *more)


def _run(plan: Plan) -> str:
  if plan.job is None or plan.run is None:
    took = duration(1000 * plan.step.seconds["expected"])
    return f"the run: its text is not here; 1,000 steps take {took}"
  run, job = plan.run, plan.job
  lines = [
    f"the run: {run.steps:,} steps, {run.evaluations:,} evaluations, {run.saves:,} "
    f"checkpoints of {gib(run.state_bytes)}: {_hours(job)}",
    f"  training {duration(job.train['expected'])}, evaluation "
    f"{duration(job.evaluate['expected'])}, checkpoints {duration(job.save)}, start "
    f"{duration(job.start['expected'])}",
    f"  ask for {duration(3600 * job.limit)}; {job.chip_hours:,.1f} chip-hours",
  ]
  if plan.rates.machine.mtbf_hours:
    lines += [f"  {job.restarts:.2g} restarts cost {duration(job.lost)}"]
  if job.interval:
    lines += [f"  checkpoints every {job.interval / 60:.3g} minutes lose least"]
  if job.kwh is not None:
    lines += [f"  {job.kwh:,.1f} kWh"]
  if job.price is not None:
    lines += [f"  price {job.price:,.2f}"]
  return "\n".join(lines)


def _hours(job: Job) -> str:
  slow, mean, fast = (duration(3600 * job.hours[c]) for c in CORNERS)
  return f"{mean} ({fast} to {slow})"


def _constants(plan: Plan) -> str:
  kinds: dict[str, list[str]] = {}
  for name, constant in sorted(plan.rates.constants.items()):
    kinds.setdefault(constant.kind, []).append(name)
  if "site" in kinds:
    kinds["the site's file"] = kinds.pop("site")
  lines = [f"  {kind}: {', '.join(names)}" for kind, names in kinds.items()]
  return "\n".join(["constants, whose values and sources --json has", *lines])


def _indented(lines: str) -> str:
  return "\n".join(f"  {x}" for x in lines.splitlines())


def draw(plan: Plan, path: str | Path) -> None:
  """The picture: what a step is made of, and how its rate grows with devices.

  Args:
    plan: of `make_plan`.
    path: of a picture, whose suffix is its format.
  """
  title = f"{plan.step.batch_size:,} examples per step on {plan.rates.title}"
  with figure(output_path(path), 1, 2, (12, 4.2), title) as axes:
    _draw_parts(axes[0, 0], plan)
    _draw_rates(axes[0, 1], plan)


def _draw_parts(axis, plan: Plan) -> None:
  """What shares of a step go to what, for each number of devices that it fits."""
  steps = [s for s in plan.strong if s.fits] or [plan.step]
  names = dict.fromkeys(n for s in steps for n, took in s.parts.items() if took > 0)
  places, bottom = range(len(steps)), [0.0] * len(steps)
  for name in names:
    shares = [100 * s.parts.get(name, 0.0) / s.seconds["expected"] for s in steps]
    axis.bar(places, shares, bottom=bottom, label=name, width=0.75)
    bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
  for place, step in zip(places, steps, strict=True):
    axis.text(place, 101, short_time(step.seconds["expected"]), ha="center", fontsize=8)
  axis.set_xticks(list(places), [f"{s.devices:,}" for s in steps])
  axis.set_title("What a step is made of\n", loc="left", fontsize=11)
  axis.set(xlabel="devices, the same batch", ylabel="% of the step", ylim=(0, 108))
  axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _draw_rates(axis, plan: Plan) -> None:
  """Examples a second of one device: level where scaling is perfect."""
  strong, weak = (plan.strong, POINTS, "batch"), (plan.weak, CURVES, "rows per device")
  for all_steps, color, label in (strong, weak):
    if steps := [s for s in all_steps if s.fits]:
      devices = [s.devices for s in steps]
      low, mean, high = ([s.batch_size / s.seconds[c] / s.devices for s in steps] for c in CORNERS)
      axis.plot(devices, mean, "o-", color=color, label=f"the same {label}")
      axis.fill_between(devices, low, high, color=color, alpha=0.15, lw=0)
  if plan.knee:
    axis.axvline(plan.knee, color=IDEAL, lw=1, ls=":")
  axis.set_xscale("log", base=2)
  sizes = [s.devices for s in plan.weak or plan.strong or (plan.step,)]
  axis.set_xticks(sizes, [f"{n:,}" for n in sizes], fontsize=8)
  axis.set_ylim(bottom=0)
  title = "Examples per second and device, and their range\n"
  axis.set_title(title, loc="left", fontsize=11)
  axis.set(xlabel="devices")
  axis.legend(fontsize=8, frameon=False, loc="lower left")
