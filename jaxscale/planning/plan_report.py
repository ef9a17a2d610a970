"""Show a plan as a page of text and a picture."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

from jaxscale.config.phase_settings import measuring
from jaxscale.files import output_path
from jaxscale.metrics.plot import CURVES, IDEAL, POINTS, figure, titled
from jaxscale.metrics.text import duration, grouped, plural, short_time, table
from jaxscale.planning import plan as plans
from jaxscale.planning.fits import line
from jaxscale.planning.machine import CORNERS, Rates, hosts
from jaxscale.planning.plan import Plan
from jaxscale.planning.step_plan import Step
from jaxscale.planning.topologies import TARGETS, compiler, gib

_WITHOUT_BFLOAT16 = ("p100", "v100")  # before NVIDIA's Ampere generation


def text(plan: Plan) -> str:
  """Return the page that `jaxscale plan` prints.

  Example:
    >>> print(text(make_plan(config, "h100-256")))               # doctest: +SKIP
  """
  parts = _head, _memory, _sent, _step, _scaling, _growth, _run, _constants
  return "\n\n".join(text for part in parts if (text := part(plan)))


def _head(plan: Plan) -> str:
  step, sizes = plan.step, plan.fit.mesh.shape.items()
  grid = " x ".join(f"{axis} {n}" for axis, n in sizes if n > 1) or "one device"
  note = " (some simulated, the rows of each the same)" * (len(plan.chips.devices) < step.devices)
  by = f"by {compiler(plan.chips.chip.platform)} in {plan.seconds:.0f} s"
  lines = [
    f"plan {calibrated(plan.rates)}",
    f"{step.devices} x {plan.rates.title} in {plural(step.nodes, _node(plan))}, as {grid}; "
    f"batch {step.batch_size:,}, {step.rows:,} per device",
    f"compiled for {', '.join(plan.compiled)}{note} {by}",
  ]
  if plan.chips.kind in _WITHOUT_BFLOAT16 and plan.config.dtype == "bfloat16":
    lines.append("the chip has no bfloat16: rates and bytes are those of float16")
  if plan.chips.chip.platform == "cuda" and plan.chips.kind not in TARGETS:
    lines.append("the program is that of an H100, as XLA cannot compile for this GPU without one")
  lines += plan.fit.experiment.dealt_out
  if not plan.fit.is_good:
    lines.append("the step does not fit: times assume chips with enough memory")
  return "\n".join(lines)


def calibrated(rates: Rates) -> str:
  """Describe the source of the rates; the end of the first line."""
  if rates.machine.chip not in ("", rates.chip):
    return f"not calibrated: the site's file has measurements of {rates.machine.chip}"
  if rates.is_calibrated:
    return "calibrated by the measurements in the site's file"
  return "not calibrated: rates are published or assumed, not measured"


def _memory(plan: Plan) -> str:
  memory = plan.fit.memory
  most = "the state and the batch"
  if memory and memory.temporaries > memory.arguments:
    most = "temporaries: activations and gathered parameters"
  frozen = [f"\n  {x}" for x in plan.fit.experiment.notes if x.startswith("trained: ")]
  return f"memory of a device: {line(plan.fit, plan.chips)}\n  most of it: {most}{''.join(frozen)}"


def _sent(plan: Plan) -> str:
  rows = [
    (r["collective"], r["axes"], f"{r['times']:,}", f"{r['bytes'] / 1e6:,.1f}")
    for r in plans.sent(plan)
  ]
  if not rows:
    return "communication: none"
  shown = table(("collective", "axes", "times", "MB"), rows, left=(0, 1))
  advice = plans.hybrid_advice(plan)
  return f"each device sends per step\n{indent(shown, '  ')}" + f"\n  {advice}" * bool(advice)


def _step(plan: Plan) -> str:
  step, whole = plan.step, plan.step.seconds["expected"]
  parts = sorted(step.parts.items(), key=lambda part: -part[1])
  rows = [(name, short_time(s), f"{s / whole:.0%}") for name, s in parts if s > 0]
  exposed = sum(s for name, s in parts if name.startswith("exposed"))
  hidden = sum(step.sent.values()) - exposed
  slow, mean, fast = (short_time(step.seconds[c]) for c in CORNERS)
  lines = [f"a step takes {mean} ({fast} to {slow})"]
  lines.append(indent(table(("part", "time", "share"), rows), "  "))
  if hidden > 1e-6:
    lines.append(f"  and {short_time(hidden)} of communication during compute")
  need = step.rate / hosts(step.devices, plan.rates.at("expected"))
  rates = f"{_count(step.rate)} examples/s, {_count(step.rate / step.devices)} a device"
  lines.append(f"  {rates}; MFU {plan.mfu:.1%}; {step.efficiency:.1%} of a device alone")
  lines += [f"  each host must load {_count(need)} examples/s", f"  {plans.bottleneck(plan)[1]}"]
  return "\n".join(lines)


def _count(number: float) -> str:
  return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _node(plan: Plan) -> str:
  return "slice" if plan.chips.chip.platform == "tpu" else "node"


def _scaling(plan: Plan) -> str:
  weak, strong = ({s.devices: s for s in steps} for steps in (plan.weak, plan.strong))
  if not weak:
    return "scaling: the mesh fits no other number of devices"
  base = next((s for s in plan.strong if s.fits), None)
  rows = [_size(strong.get(n), weak.get(n), base) for n in sorted({*weak, *strong})]
  head = f"devices,{_node(plan)}s,rows,step,examples/s,efficiency,weak examples/s,weak efficiency"
  title = f"the same batch of {plan.step.batch_size:,} on more devices, and the same "
  lines = [f"{title}{plan.step.rows:,} rows per device", indent(table(head.split(","), rows), "  ")]
  if plan.knee:
    line = f"  strong scaling ends at {plan.knee:,} devices: twice as many give less "
    lines.append(f"{line}than 1.4 times the rate")
  elif plan.strong:
    lines.append(f"  strong scaling continues to {plan.strong[-1].devices:,} devices or more")
  if plan.skipped:
    sizes = ", ".join(f"{n:,}" for n in plan.skipped)
    lines.append(f"  not possible with this batch, mesh and chips: {sizes} devices")
  return "\n".join(lines)


def _size(strong: Step | None, weak: Step | None, base: Step | None) -> tuple[str, ...]:
  """Return the cells for one number of devices, which fits at least one kind of scaling."""
  cells, more = [""] * 4, ["", ""]
  if strong:
    up = "too large"
    if strong.fits and base:
      up = f"{strong.rate / base.rate * base.devices / strong.devices:.0%}"
    cells = [f"{strong.rows:,}", short_time(strong.seconds["expected"]), _count(strong.rate), up]
  if weak:
    more = [_count(weak.rate), f"{weak.efficiency:.1%}"]
  step = weak or strong
  assert step is not None
  return (f"{step.devices:,}", f"{step.nodes:,}", *cells, *more)


def _growth(plan: Plan) -> str:
  """Return what a growing batch saves, or nothing for a constant one."""
  if not plan.growth:
    return ""
  first, rows = plan.growth[0], []
  for s in sorted(plan.growth):
    times = duration(s.constant_seconds), duration(s.seconds["expected"])
    saved = f"{1 - s.seconds['expected'] / s.constant_seconds:.0%}"
    rows.append((f"{s.devices:,}", f"{s.nodes:,}", *times, saved))
  sizes = ", ".join(f"{n:,} at {size:,}" for size, n in first.steps.items())
  total, constant = sum(first.steps.values()), first.constant_steps
  measured = measuring(plan.config.phases)
  line = f"the growing batch takes {total:,} steps ({sizes}), "
  line += f"{1 - total / constant:.0%} fewer than the {constant:,} at {next(iter(first.steps)):,}"
  line += f"\n  if {measured} lets it grow whenever it decides" * bool(measured)
  head = f"devices,{_node(plan)}s,constant batch,growing batch,saved"
  return f"{line}\n{indent(table(head.split(','), rows), '  ')}"


def _run(plan: Plan) -> str:
  if plan.job is None or plan.run is None:
    took = duration(1000 * plan.step.seconds["expected"])
    return f"the run: unknown length, because plan reads no text; 1,000 steps take {took}"
  run, job, machine = plan.run, plan.job, plan.rates.machine
  slow, mean, fast = (duration(3600 * job.hours[c]) for c in CORNERS)
  parts = f"training {duration(job.train['expected'])}, "
  parts += f"evaluation {duration(job.evaluate['expected'])}, "
  parts += f"checkpoints {duration(job.save)}, start {duration(job.start['expected'])}"
  lines = [
    f"the run: {plural(run.steps, 'step')}, {plural(run.evaluations, 'evaluation')}, "
    f"{plural(run.saves, 'checkpoint')} of {gib(run.state_bytes)}: {mean} ({fast} to {slow})",
    f"  {parts}",
    f"  request {duration(3600 * job.limit)}; {job.chip_hours:,.1f} chip-hours",
  ]
  if machine.mtbf_hours:
    lines.append(f"  {job.restarts:.2g} restarts cost {duration(job.lost)}")
  if job.interval:
    lines.append(f"  checkpoints every {job.interval / 60:.3g} minutes lose the least time")
  if job.kwh is not None:
    lines.append(f"  {job.kwh:,.1f} kWh")
  if job.price is not None:
    lines.append(f"  price {job.price:,.2f}")
  return "\n".join(lines)


def _constants(plan: Plan) -> str:
  kinds = grouped((constant.kind, n) for n, constant in sorted(plan.rates.constants.items()))
  if "site" in kinds:
    kinds["the site's file"] = kinds.pop("site")
  lines = [f"\n  {kind}: {', '.join(names)}" for kind, names in kinds.items()]
  return f"constants (values and sources: --json){''.join(lines)}"


def draw(plan: Plan, path: str | Path) -> None:
  """Draw the parts of a step, and the growth of its rate with devices.

  Args:
    plan: the plan, from `make_plan`.
    path: the path of the picture, whose suffix sets the format.
  """
  title = f"{plan.step.batch_size:,} examples per step on {plan.rates.title}"
  with figure(output_path(path), 1, 2, (12, 4.2), title) as axes:
    _draw_parts(axes[0, 0], plan)
    _draw_rates(axes[0, 1], plan)


def _draw_parts(axis, plan: Plan) -> None:
  """Draw the share of each part of a step, by number of devices."""
  steps = [s for s in plan.strong if s.fits] or [plan.step]
  names = dict.fromkeys(n for s in steps for n, took in s.parts.items() if took > 0)
  positions, bottom = range(len(steps)), [0.0] * len(steps)
  for name in names:
    shares = [100 * s.parts.get(name, 0.0) / s.seconds["expected"] for s in steps]
    axis.bar(positions, shares, bottom=bottom, label=name, width=0.75)
    bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
  for position, step in zip(positions, steps, strict=True):
    axis.text(position, 101, short_time(step.seconds["expected"]), ha="center", fontsize=7)
  axis.set_xticks(list(positions), [f"{s.devices:,}" for s in steps])
  titled(axis, "What a step is made of\n", "devices, the same batch", "% of the step")
  axis.set_ylim(0, 108)
  axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _draw_rates(axis, plan: Plan) -> None:
  """Draw the examples per second of one device, which are constant for perfect scaling."""
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
  axis.yaxis.set_major_formatter("{x:,.12g}")
  titled(axis, "Examples per second and device, and their range\n", "devices")
  axis.set_ylim(0)
  axis.legend(fontsize=8, frameon=False)
