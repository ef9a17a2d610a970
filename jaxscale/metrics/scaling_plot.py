"""The picture of a scaling study: what was measured, the plan, and published results.

What was measured is drawn in the colour of `plot.POINTS`, as marks with quartiles; a
plan as a curve with its range; what others published in grey, as a mark and a dotted
line from the size that it is relative to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale.metrics.plot import CURVES, IDEAL, POINTS, figure, size_ticks, titled
from jaxscale.metrics.text import plural

PLANNED, PUBLISHED = "#3d8b6f", "#9a9a9a"
_SIZES = ("#8aa6c8", "#c8553d", "#5b9f8f", "#8a6fb0", "#e0a458", "#666666")
_Rows = Sequence[Mapping[str, Any]]


def plot_scaling(
  study: Mapping[str, Any], path: str | Path, panels: Sequence[str] = ()
) -> Path:
  """Draw a scaling study: speed-up, efficiency, the parts of a step, and the loss.

  Args:
    study: "title"; "rows", each with "devices", and with None for what is not known
      "examples_per_s", "speed_up", its quartiles "low" and "high", "efficiency",
      "compute_s" and "exposed_s" (seconds of a step), "planned_exposed" and "spread"
      (shares), and "evaluations", (epochs, loss); "base", the devices of the smallest
      size; "law", (devices, speed-up) of a curve, and its "law_label"; "plan",
      (devices, speed-up as expected, slowest, fastest); "published", each with "label",
      "times" (devices by those it is relative to) and "efficiency".
    path: of the picture.
    panels: names in `PANELS`; (): all, and the title above them.

  Returns:
    The path.
  """
  path, names = Path(path), list(panels or PANELS)
  rows = -(-len(names) // 2)
  columns = min(len(names), 2)
  title = "" if panels else study["title"]
  with figure(path, rows, columns, (6.4 * columns, 4.3 * rows), title) as axes:
    for axis, name in zip(axes.flat, names, strict=True):
      PANELS[name](axis, study)
  return path


def _known(study: Mapping[str, Any]) -> _Rows:
  return [row for row in study["rows"] if row["speed_up"]]


def _speed_up(axis: Any, study: Mapping[str, Any]) -> None:
  titled(axis, "Speed-up (and examples/s)", "devices", "against the smallest size")
  axis.set_xscale("log", base=2)
  devices = sorted({row["devices"] for row in study["rows"]})
  size_ticks(axis, devices, 1 / 1.25, 1.4)
  if not (rows := _known(study)):
    _empty(axis, "no throughput on record")
    return
  ideal = devices[-1] / study["base"]
  axis.plot([study["base"], devices[-1]], [1, ideal], color=IDEAL, ls="--",
            label="ideal")  # fmt: skip
  if study["law"]:
    axis.plot(*zip(*study["law"], strict=True), color=CURVES, label=study["law_label"])
  plan = [point for point in study["plan"] if point[0] <= devices[-1]]
  _plan_curve(axis, plan, lambda n, s: s)
  _with_quartiles(axis, rows, [1] * len(rows), "measured")
  for row in rows:
    rate, at = row["examples_per_s"], (row["devices"], row["speed_up"])
    power = next((p for p in (2, 1) if rate >= 1e3**p), 0)
    text = f"{rate / 1e3**power:.3g}{['', 'k', 'M'][power]}"
    _annotate(axis, text, at, (7, -12), color=POINTS)
  axis.set_yscale("log", base=2)
  values = [v for r in rows for v in (r["speed_up"], r["low"], r["high"]) if v]
  values += [s for _, s, *_ in plan]
  low = math.floor(min(0, math.log2(min(values))))
  ticks = [2.0**i for i in range(low, math.ceil(math.log2(max(ideal, *values))) + 1)]
  axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
  axis.set_ylim(min(*values, 1) / 1.25, max(*values, ideal) * 1.15)
  axis.legend(frameon=False, fontsize=8, loc="upper left")


def _plan_curve(
  axis: Any, plan: Sequence[Sequence[float]], scale: Callable[[float, float], float]
) -> None:
  """The plan as a curve, and its range."""
  if not plan:
    return
  devices = [n for n, *_ in plan]
  mean, slow, fast = (
    [scale(n, s) for n, s in zip(devices, column, strict=True)]
    for column in list(zip(*plan, strict=True))[1:]
  )
  axis.fill_between(devices, slow, fast, color=PLANNED, alpha=0.12, lw=0)
  style = {"color": PLANNED, "ls": "-.", "marker": "s", "ms": 4, "mfc": "white"}
  axis.plot(devices, mean, label="planned, and its range", **style)


def _efficiency(axis: Any, study: Mapping[str, Any]) -> None:
  """By times the smallest size: that is what published results have in common."""
  titled(axis, "Efficiency", "devices, as times the smallest size", "% of the ideal")
  axis.set_xscale("log", base=2)
  if not (rows := _known(study)):
    axis.set_xticks([])
    _empty(axis, "no throughput on record")
    return
  base = study["base"]
  _published(axis, study["published"])
  axis.axhline(100, color=IDEAL, ls="--", lw=1)
  if study["law"]:
    curve = [(n / base, 100 * s * base / n) for n, s in study["law"]]
    axis.plot(*zip(*curve, strict=True), color=CURVES)
  most = max([row["devices"] / base for row in study["rows"]])
  most = max([most, *(x["times"] for x in study["published"])])
  plan = [(n / base, *s) for n, *s in study["plan"] if n / base <= most]
  _plan_curve(axis, plan, lambda n, s: 100 * s / n)
  scaled = [{**row, "devices": row["devices"] / base} for row in rows]
  _with_quartiles(axis, scaled, [100 / row["devices"] for row in scaled], None)
  ticks = [2**i for i in range(math.ceil(math.log2(most)) + 1)]
  size_ticks(axis, ticks or [1], 1 / 1.2, 1.3)
  axis.set_ylim(0, max(axis.get_ylim()[1], 108))


def _published(axis: Any, every: _Rows) -> None:
  """A letter at each mark, and what it stands for where the panel is empty."""
  lines = []
  for letter, found in zip("abcdefghij", every, strict=False):
    times, efficiency = found["times"], 100 * found["efficiency"]
    axis.plot([1, times], [100, efficiency], color=PUBLISHED, lw=0.8, ls=":", zorder=1)
    axis.plot(times, efficiency, "D", color=PUBLISHED, mfc="white", ms=4, zorder=2)
    place = {"color": "#777777", "ha": "center", "va": "top"}
    _annotate(axis, letter, (times, efficiency), (0, -4), **place)
    lines.append(f"{letter}  {found['label']}")
  if lines:
    style = {"fontsize": 7, "color": "#777777", "transform": axis.transAxes}
    text = "\n".join(["published by others, not measured here:", *lines])
    style |= {"ha": "right", "va": "bottom", "multialignment": "left"}
    axis.text(0.98, 0.03, text, linespacing=1.35, **style)


def _with_quartiles(
  axis: Any, rows: _Rows, scales: Sequence[float], label: str | None
) -> None:
  """One mark per size: its scaled speed-up, with the quartiles where known."""
  devices = [row["devices"] for row in rows]
  low, mid, high = (
    [s * (row[k] or row["speed_up"]) for row, s in zip(rows, scales, strict=True)]
    for k in ("low", "speed_up", "high")
  )
  style = {"fmt": "o", "color": POINTS, "ms": 6, "zorder": 4}
  if any(row["low"] for row in rows):
    # A median is between its quartiles; rounding may put it a hair outside.
    below = [max(y - a, 0) for y, a in zip(mid, low, strict=True)]
    above = [max(b - y, 0) for y, b in zip(mid, high, strict=True)]
    style |= {"yerr": (below, above), "capsize": 3, "lw": 1.2}
    label = label and f"{label}: median and quartiles"
  axis.errorbar(devices, mid, label=label, **style)


def _step_parts(axis: Any, study: Mapping[str, Any]) -> None:
  """Bars: what of a step its exchange adds; marks: how far processes are apart."""
  titled(axis, "What a step waits for (step report)", "devices, and ms per step")
  axis.set_ylabel("% of a step")
  axis.grid(False, axis="x")
  known = [row for row in study["rows"] if row["compute_s"] is not None]
  if not known:
    axis.set_xticks([])
    _empty(axis, "no step report on record")
    return
  steps = [row["compute_s"] + row["exposed_s"] for row in known]
  shares = [100 * r["exposed_s"] / s for r, s in zip(known, steps, strict=True)]
  places = [i - 0.1 for i in range(len(known))]
  axis.bar(places, shares, 0.45, color=CURVES, label="exposed exchange")
  for place, share in zip(places, shares, strict=True):
    text = f"{share:.2g}" if share else "0"
    _annotate(axis, text, (place, share), (0, 2), color="#5b7aa3", ha="center")
  spread = [(i + 0.26, 100 * r["spread"]) for i, r in enumerate(known) if r["spread"]]
  planned = [
    (i - 0.1, 100 * r["planned_exposed"])
    for i, r in enumerate(known)
    if r["planned_exposed"] is not None and r["devices"] > 1
  ]
  for points, mark, color, label in (
    (planned, "s", PLANNED, "exposed exchange, planned"),
    (spread, "D", POINTS, "fastest to slowest process, each alone"),
  ):
    if points:
      xs, ys = zip(*points, strict=True)
      axis.plot(xs, ys, mark, color=color, mfc="white", ms=6, label=label)
  sizes = [f"{row['devices']:,}" for row in known]
  ticks = [f"{n}\n{1e3 * s:.3g}" for n, s in zip(sizes, steps, strict=True)]
  axis.set_xticks(range(len(known)), ticks)
  axis.set_xlim(-0.6, max(len(known) - 0.4, 1.6))
  highest = max([1, *shares, *(y for _, y in [*spread, *planned])])
  axis.set_ylim(0, 1.45 * highest)
  axis.legend(frameon=False, fontsize=8, loc="upper left")


def _loss(axis: Any, study: Mapping[str, Any]) -> None:
  """Validation loss by epochs: at equal epochs, all sizes have seen as much."""
  titled(axis, "Validation loss at equal epochs", "epochs", "nats")
  known = [row for row in study["rows"] if row["evaluations"]]
  if not known:
    axis.set_xticks([])
    _empty(axis, "no evaluation on record")
    return
  for i, row in enumerate(known):
    epochs, losses = zip(*row["evaluations"], strict=True)
    # Those that are drawn later, on top, are thinner: equal ones show below.
    width = 1.2 + 1.6 * (len(known) - 1 - i)
    style = {"color": _SIZES[i % len(_SIZES)], "lw": width, "ms": 2.5 + width}
    label = f"{plural(row['devices'], 'device')}, batch {row['global_batch']:,}"
    axis.plot(epochs, losses, "o-", label=label, **style)
  every = [loss for row in known for _, loss in row["evaluations"]]
  if min(every) > 0 and max(every) > 4 * min(every):
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.12g}")
    axis.yaxis.set_minor_formatter(
      lambda y, _: f"{y:,.12g}" if f"{y:e}"[0] in "25" else ""
    )
  axis.legend(frameon=False, fontsize=8, loc="upper right")


def _annotate(axis: Any, text: str, at: Any, offset: Any, **style: Any) -> None:
  options = {"textcoords": "offset points", "fontsize": 8} | style
  axis.annotate(text, at, xytext=offset, **options)


def _empty(axis: Any, text: str) -> None:
  axis.set_yticks([])
  place = {"ha": "center", "va": "center", "transform": axis.transAxes}
  axis.text(0.5, 0.5, text, color=IDEAL, **place)


PANELS: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
  "speed-up": _speed_up, "efficiency": _efficiency, "step": _step_parts, "loss": _loss,
}  # fmt: skip
