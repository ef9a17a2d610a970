"""`scaling.png`: speed-up, efficiency and the parts of a step against the devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_RUN, _FIT, _IDEAL = "#c8553d", "#8aa6c8", "#999999"


def plot_scaling(study: Mapping[str, Any], path: str | Path) -> Path:
  """Draw a scaling study into a PNG file.

  Args:
    study: "title"; "rows", each with "devices", and with None for what is not known
      "examples_per_s", "speed_up", its quartiles "low" and "high",
      "efficiency", "compute_s" and "exposed_s" (seconds of a step), and "spread" (a
      share); "base", the devices of the smallest size; "law", (devices, speed-up) of
      a curve, and its "law_label".
    path: of the picture.

  Returns:
    The path.
  """
  # 1 s to import, and nothing else needs it.
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  rows = study["rows"]
  devices = sorted({row["devices"] for row in rows})
  figure, axes = plt.subplots(1, 3, figsize=(12, 4.4), layout="constrained")
  _speed_up(axes[0], study, devices)
  _efficiency(axes[1], study, devices)
  _step(axes[2], rows)
  for axis in axes:
    axis.set_xlabel("devices, and ms a step" if axis is axes[2] else "devices")
    axis.grid(alpha=0.25, axis="y" if axis is axes[2] else "both")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=9
  )
  figure.suptitle(study["title"], x=0.01, ha="left", fontsize=12)
  figure.savefig(path, dpi=150)
  plt.close(figure)
  return Path(path)


def _speed_up(axis, study: Mapping[str, Any], devices: Sequence[int]) -> None:
  base, rows = study["base"], [r for r in study["rows"] if r["speed_up"]]
  axis.set_title("Speed-up (and examples/s)", loc="left", fontsize=11)
  axis.set_ylabel("against the smallest size")
  _log2(axis, devices)
  if not rows:
    _empty(axis, "no throughput on record")
    return
  ends = [base, devices[-1]]
  ideal = [1, devices[-1] / base]
  axis.plot(ends, ideal, color=_IDEAL, ls="--", lw=1, label="ideal")
  if study["law"]:
    axis.plot(*zip(*study["law"], strict=True), color=_FIT, label=study["law_label"])
  label = "measured: median and quartiles" if _bars(rows) else "measured"
  _points(axis, rows, "speed_up", ("low", "high"), label)
  for row in rows:
    axis.annotate(
      _short(row["examples_per_s"]), (row["devices"], row["speed_up"]), xytext=(7, -12),
      textcoords="offset points", fontsize=8, color=_RUN,
    )  # fmt: skip
  axis.set_yscale("log", base=2)
  values = [v for r in rows for v in (r["speed_up"], r["low"], r["high"]) if v]
  low = math.floor(min(0, math.log2(min(values))))
  high = math.ceil(math.log2(max(*ideal, *values)))
  ticks = [2.0**i for i in range(low, high + 1)]
  axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
  axis.set_ylim(min(*values, 1) / 1.25, max(*values, *ideal) * 1.15)


def _efficiency(axis, study: Mapping[str, Any], devices: Sequence[int]) -> None:
  base, rows = study["base"], [r for r in study["rows"] if r["efficiency"]]
  axis.set_title("Efficiency", loc="left", fontsize=11)
  axis.set_ylabel("% of the ideal")
  _log2(axis, devices)
  if not rows:
    _empty(axis, "no throughput on record")
    return
  axis.axhline(100, color=_IDEAL, ls="--", lw=1)
  if study["law"]:
    curve = [(n, 100 * s * base / n) for n, s in study["law"]]
    axis.plot(*zip(*curve, strict=True), color=_FIT)
  scaled = []
  for row in rows:
    factor = 100 * base / row["devices"]
    ends = {k: row[k] and factor * row[k] for k in ("low", "high")}
    scaled.append({**row, **ends, "efficiency": 100 * row["efficiency"]})
  _points(axis, scaled, "efficiency", ("low", "high"), None)
  top = max(max(r["efficiency"], r["high"] or 0) for r in scaled)
  axis.set_ylim(0, max(top, 100) * 1.08)


def _step(axis, rows: Sequence[Mapping[str, Any]]) -> None:
  """Bars: what of a step its exchange adds; marks: how far processes are apart."""
  axis.set_title("What a step waits for (step report)", loc="left", fontsize=11)
  axis.set_ylabel("% of a step")
  known = [row for row in rows if row["compute_s"] is not None]
  if not known:
    axis.set_xticks([])
    _empty(axis, "no step report on record")
    return
  steps = [row["compute_s"] + row["exposed_s"] for row in known]
  shares = [100 * r["exposed_s"] / s for r, s in zip(known, steps, strict=True)]
  axis.bar(
    [i - 0.1 for i in range(len(known))],
    shares,
    0.45,
    color=_FIT,
    label="exposed exchange",
  )
  for i, share in enumerate(shares):
    axis.annotate(
      f"{share:.2g}" if share else "0", (i - 0.1, share), xytext=(0, 2), ha="center",
      textcoords="offset points", fontsize=8, color="#5b7aa3",
    )  # fmt: skip
  spread = [(i + 0.26, 100 * r["spread"]) for i, r in enumerate(known) if r["spread"]]
  if spread:
    label = "fastest to slowest process, each alone"
    xs, ys = zip(*spread, strict=True)
    axis.plot(xs, ys, "D", color=_RUN, mfc="white", ms=6, label=label)
  ticks = (
    f"{r['devices']:,}\n{1e3 * s:.3g}" for r, s in zip(known, steps, strict=True)
  )
  axis.set_xticks(range(len(known)), list(ticks))
  axis.set_xlim(-0.6, max(len(known) - 0.4, 1.6))
  axis.set_ylim(0, 1.35 * max([1, *shares, *(y for _, y in spread)]))
  axis.legend(frameon=False, fontsize=9, loc="upper left")


def _points(axis, rows, name: str, ends: tuple[str, str], label: str | None) -> None:
  """A mark a run, with its quartiles where they are known."""
  xs, ys = [r["devices"] for r in rows], [r[name] for r in rows]
  if _bars(rows):
    low, high = ([r[end] if r[end] else r[name] for r in rows] for end in ends)
    # A median lies between its quartiles; rounding may put it a hair outside.
    below = [max(y - a, 0) for y, a in zip(ys, low, strict=True)]
    above = [max(b - y, 0) for y, b in zip(ys, high, strict=True)]
    axis.errorbar(
      xs, ys, yerr=(below, above), fmt="o", color=_RUN, ms=6, capsize=3, lw=1.2,
      label=label,
    )  # fmt: skip
  else:
    axis.plot(xs, ys, "o", color=_RUN, ms=6, label=label)


def _bars(rows: Sequence[Mapping[str, Any]]) -> bool:
  return any(row["low"] for row in rows)


def _log2(axis, devices: Sequence[int]) -> None:
  axis.set_xscale("log", base=2)
  axis.set_xticks(devices, [f"{n:,}" for n in devices])
  axis.set_xticks([], minor=True)
  axis.set_xlim(devices[0] / 1.25, devices[-1] * 1.4)


def _empty(axis, text: str) -> None:
  axis.set_yticks([])
  axis.text(
    0.5, 0.5, text, ha="center", va="center", color=_IDEAL, transform=axis.transAxes
  )


def _short(value: float) -> str:
  """Three digits and a unit.

  Example:
    >>> _short(25173.2), _short(748.2), _short(3.2e6)
    ('25.2k', '748', '3.2M')
  """
  for unit, size in (("M", 1e6), ("k", 1e3)):
    if value >= size:
      return f"{value / size:.3g}{unit}"
  return f"{value:.3g}"
