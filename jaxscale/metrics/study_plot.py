"""`study.png`: how far the batch can go, from the study.json of a batch study.

Steps to the target against the batch size, with the line of ideal scaling and the
fitted curve; examples, time and generalisation gap beside it. A run that missed
the target is drawn where it ended, as an open triangle that points on; one that
diverged as a cross.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_RUN, _FIT, _IDEAL = "#c8553d", "#8aa6c8", "#999999"


def plot_study(study: Mapping[str, Any], path: str | Path) -> Path:
  """Draw a study into a PNG file.

  Args:
    study: as in study.json: "runs", each with "status", "batch_size", "steps",
      "target_step", "target_examples", "target_seconds" and "gap"; "sizes", each
      with "batch_size" and "target_step"; "fit" or None, with "s_min" (steps),
      "b_crit" and "b_crit_range" (examples; no upper end: None); "title".
    path: of the picture.

  Returns:
    The path.
  """
  # 1 s to import, and nothing else needs it.
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  runs = study["runs"]
  figure, axes = plt.subplots(2, 2, figsize=(10, 7.2), layout="constrained")
  panels = (
    ("Steps to target", "target_step", 1, True),
    ("Examples to target", "target_examples", 1, True),
    ("Seconds to target", "target_seconds", 1, True),
    ("Generalisation gap, training - held out (points)", "gap", 100, False),
  )
  for axis, (title, name, scale, log) in zip(axes.flat, panels, strict=True):
    _points(axis, runs, name, scale)
    _style(axis, title, runs, log)
  _curves(axes[0, 0], axes[0, 1], study)
  handles, labels = axes[0, 0].get_legend_handles_labels()
  once = dict(zip(labels, handles, strict=True))
  axes[0, 0].legend(once.values(), once.keys(), frameon=False, fontsize=9)
  figure.suptitle(study["title"], x=0.01, ha="left", fontsize=12)
  figure.savefig(path, dpi=120)
  plt.close(figure)
  return Path(path)


def _points(axis, runs, name: str, scale: float) -> None:
  """A mark a run: what it measured, or where it ended without the target."""
  ended = {
    "target_step": lambda run: run["steps"],
    "target_examples": lambda run: run["steps"] * run["batch_size"],
  }
  for run in runs:
    at, value = run["batch_size"], run[name]
    if value is not None:
      filled = run["status"] == "reached"
      face = _RUN if filled else "none"
      label = "reached" if filled else None
      axis.plot(at, scale * value, "o", color=_RUN, mfc=face, ms=6, label=label)
    elif name in ended and run["status"] == "missed":
      y = ended[name](run)
      axis.plot(at, y, "^", color=_RUN, mfc="none", ms=8, label="not reached by then")
    elif name in ended and run["status"] == "diverged":
      axis.plot(at, ended[name](run), "x", color="black", ms=8, label="diverged then")


def _curves(steps_axis, examples_axis, study: Mapping[str, Any]) -> None:
  """Ideal scaling from the smallest size that reached, and the fit."""
  reached = [s for s in study["sizes"] if s["target_step"] is not None]
  if not reached:
    return
  sizes = sorted(run["batch_size"] for run in study["runs"])
  low, high = sizes[0] / 1.2, sizes[-1] * 1.2
  grid = [low * (high / low) ** (i / 100) for i in range(101)]
  first = min(reached, key=lambda s: s["batch_size"])
  examples = first["target_step"] * first["batch_size"]
  dashed = {"color": _IDEAL, "ls": "--", "lw": 1}
  steps_axis.plot(grid, [examples / b for b in grid], label="ideal scaling", **dashed)
  examples_axis.plot(grid, [examples] * len(grid), **dashed)
  if (fit := study.get("fit")) is None:
    return
  curve = [fit["s_min"] * (1 + fit["b_crit"] / b) for b in grid]
  low_end, high_end = fit["b_crit_range"]
  at_least = high_end is None  # without one of the sizes, the curve does not bend
  label = (
    f"fit, B_crit at least {low_end:,.0f}" if at_least
    else f"fit, B_crit = {fit['b_crit']:,.0f}"
  )  # fmt: skip
  steps_axis.plot(grid, curve, color=_FIT, label=label)
  examples_axis.plot(
    grid, [s * b for s, b in zip(curve, grid, strict=True)], color=_FIT
  )
  if low < fit["b_crit"] < high:
    for axis in (steps_axis, examples_axis):
      axis.axvline(fit["b_crit"], color=_FIT, lw=0.8, ls=":")


def _style(axis, title: str, runs, log: bool) -> None:
  sizes = sorted({run["batch_size"] for run in runs})
  axis.set_title(title, loc="left", fontsize=11)
  axis.set_xlabel("batch size (examples)")
  axis.set_xscale("log")
  axis.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
  axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
  axis.set_xticks([], minor=True)
  if log:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(_plain)
    axis.yaxis.set_minor_formatter(_plain)
  else:
    axis.axhline(0, color=_IDEAL, lw=0.8)
  axis.grid(alpha=0.25)
  axis.spines[["top", "right"]].set_visible(False)


def _plain(value: float, position: int | None = None) -> str:
  """A tick as a number, where it is 1, 2 or 5 times a power of ten."""
  del position
  return f"{value:,.12g}" if f"{value:e}"[0] in "125" else ""
