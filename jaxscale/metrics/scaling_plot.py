"""Picture of a scaling study: measured and planned values.

Measured values are drawn in the colour `plot.POINTS`, as marks with quartiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxscale.metrics.plot import CURVES, IDEAL, POINTS, figure, log_scale, titled
from jaxscale.metrics.text import plural

_PLANNED = "#3d8b6f"
_SIZES = ("#8aa6c8", "#c8553d", "#5b9f8f", "#8a6fb0", "#e0a458", "#666666")
_Values = Mapping[str, Any]  # of a study, or of one of its rows


def plot_scaling(study: _Values, path: str | Path) -> Path:
  """Draw a scaling study: speed-up, efficiency, the parts of a step, and the loss.

  Args:
    study: a dict with "title" and "rows"; "base", the number of devices of the smallest
      size; "law", a curve of (devices, speed-up); and its label "law_label". Each row has
      "devices" and "global_batch". The other keys of a row are None if unknown:
      "examples_per_s" with its quartiles "examples_per_s_q1" and "examples_per_s_q3",
      "speed_up", "planned_efficiency", "compute_s" and "exposed_s" (seconds of a step),
      "spread" (a share), and "evaluations" as (epochs, loss).
    path: the path of the picture.

  Returns:
    The path of the picture.
  """
  with figure(path, 2, 2, (12.8, 8.6), study["title"]) as axes:
    for axis, draw in zip(axes.flat, (_speed_up, _efficiency, _step_parts, _loss), strict=True):
      draw(axis, study)
  return Path(path)


def _speed_up(axis: Any, study: _Values) -> None:
  titled(axis, "Speed-up (and examples/s)", "devices", "against the smallest size")
  rows = _over_devices(axis, study, lambda up, devices: up)
  for row in rows:
    at = row["devices"], row["speed_up"]
    _annotate(axis, f"{row['examples_per_s']:,.0f}", at, (7, -12), color=POINTS)
  if rows:
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def _efficiency(axis: Any, study: _Values) -> None:
  titled(axis, "Efficiency", "devices", "% of the ideal")
  base = study["base"]
  if _over_devices(axis, study, lambda up, devices: 100 * up * base / devices):
    axis.set_ylim(0, max(axis.get_ylim()[1], 108))


def _over_devices(axis: Any, study: _Values, scale: Callable[[float, int], float]) -> list[_Values]:
  """Draw the ideal, the law, the plan and the measured sizes; return their rows.

  Args:
    axis: the axes to draw on.
    study: the study, as for `plot_scaling`.
    scale: a function of (speed-up, devices) that returns the height.
  """
  rows, base = [row for row in study["rows"] if row["speed_up"]], study["base"]
  if not rows:
    _empty(axis, "no throughput on record")
    return rows
  axis.margins(y=0.12)
  axis.set_xscale("log", base=2)
  devices = sorted({row["devices"] for row in study["rows"]})
  axis.set_xlim(devices[0] / 1.25, devices[-1] * 1.4)
  axis.set_xticks(devices, [f"{size:,}" for size in devices])
  axis.set_xticks([], minor=True)
  ideal, law = [(n, n / base) for n in (base, devices[-1])], study["law"]
  planned = {row["devices"]: row["planned_efficiency"] for row in rows}
  plan = [(n, share * n / base) for n, share in planned.items() if share is not None]
  for points, label, style in (
    (ideal, "ideal", {"color": IDEAL, "ls": "--"}),
    (law, study["law_label"], {"color": CURVES}),
    (plan, "planned", {"color": _PLANNED, "ls": "-.", "marker": "s", "ms": 4}),
  ):
    if points:
      heights = [scale(up, n) for n, up in points]
      axis.plot([n for n, _ in points], heights, label=label, **style)
  style = {"fmt": "o", "color": POINTS, "ms": 6, "zorder": 4, "capsize": 3, "lw": 1.2}
  heights = [scale(row["speed_up"], row["devices"]) for row in rows]
  errors = []
  for row, height in zip(rows, heights, strict=True):
    rate = row["examples_per_s"]
    low, high = (row[f"examples_per_s_{q}"] or rate for q in ("q1", "q3"))
    # Rounding may put a median slightly outside of its quartiles.
    errors.append((height * max(1 - low / rate, 0), height * max(high / rate - 1, 0)))
  sizes = [row["devices"] for row in rows]
  label = "measured: median and quartiles"
  axis.errorbar(sizes, heights, yerr=[*zip(*errors, strict=True)], label=label, **style)
  return rows


def _step_parts(axis: Any, study: _Values) -> None:
  """Draw bars of the exchange's share of a step, and marks of the spread of processes."""
  titled(axis, "What a step waits for (step report)", "devices, and ms per step", "% of a step")
  axis.grid(False, axis="x")
  known = [row for row in study["rows"] if None not in (row["compute_s"], row["exposed_s"])]
  if not known:
    _empty(axis, "no step report on record")
    return
  steps = [row["compute_s"] + row["exposed_s"] for row in known]
  shares = [100 * r["exposed_s"] / s for r, s in zip(known, steps, strict=True)]
  axis.bar(range(len(known)), shares, 0.45, color=CURVES, label="exposed exchange")
  for i, share in enumerate(shares):
    _annotate(axis, f"{share:.2g}", (i, share), (0, 2), color="#5b7aa3", ha="center")
  spread = [(i + 0.3, 100 * r["spread"]) for i, r in enumerate(known) if r["spread"]]
  if spread:
    label = "fastest to slowest process, each alone"
    axis.plot(*zip(*spread, strict=True), "D", color=POINTS, mfc="white", label=label)
  sizes = [f"{row['devices']:,}" for row in known]
  ticks = [f"{n}\n{1e3 * s:.3g}" for n, s in zip(sizes, steps, strict=True)]
  axis.set_xticks(range(len(known)), ticks)
  axis.set_xlim(-0.6, max(len(known) - 0.4, 1.6))
  axis.set_ylim(0, 1.45 * max([1, *shares, *(y for _, y in spread)]))
  axis.legend(frameon=False, fontsize=8, loc="upper left")


def _loss(axis: Any, study: _Values) -> None:
  """Draw the validation loss by epochs; at equal epochs, all sizes have seen as much data."""
  titled(axis, "Validation loss at equal epochs", "epochs", "nats")
  known = [row for row in study["rows"] if row["evaluations"]]
  if not known:
    _empty(axis, "no evaluation on record")
    return
  for i, row in enumerate(known):
    epochs, losses = zip(*row["evaluations"], strict=True)
    # Later lines are on top, so they are thinner: equal ones remain visible below.
    width = 1.2 + 1.6 * (len(known) - 1 - i)
    style = {"color": _SIZES[i % len(_SIZES)], "lw": width, "ms": 2.5 + width}
    label = f"{plural(row['devices'], 'device')}, batch {row['global_batch']:,}"
    axis.plot(epochs, losses, "o-", label=label, **style)
  every = [loss for row in known for _, loss in row["evaluations"]]
  if min(every) > 0 and max(every) > 4 * min(every):
    log_scale(axis)
  axis.legend(frameon=False, fontsize=8, loc="upper right")


def _annotate(axis: Any, text: str, at: Any, offset: Any, **style: Any) -> None:
  axis.annotate(text, at, xytext=offset, **{"textcoords": "offset points", "fontsize": 8} | style)


def _empty(axis: Any, text: str) -> None:
  axis.set(xticks=[], yticks=[])
  axis.text(0.5, 0.5, text, color=IDEAL, ha="center", va="center", transform=axis.transAxes)
