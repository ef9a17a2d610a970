"""Pictures: a run against its steps, and a batch-size study."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.files import read_json, replacing
from jaxscale.metrics.reading import read_metrics

POINTS, CURVES, IDEAL = "#c8553d", "#8aa6c8", "#999999"
_Rows = Sequence[Mapping[str, Any]]


@contextlib.contextmanager
def figure(
  path: str | Path, rows: int, columns: int, size: tuple[float, float], title: str = ""
) -> Iterator[Any]:
  """Axes [rows, columns] to draw on; saved at the end, in the suffix's format.

  Args:
    path: of the picture.
    rows: of axes.
    columns: likewise.
    size: width and height in inches of 120 dots.
    title: above the axes.
  """
  _import_matplotlib()
  from matplotlib.figure import Figure  # no pyplot: that opens windows

  drawn = Figure(figsize=size, layout="constrained")
  axes = drawn.subplots(rows, columns, squeeze=False)
  for axis in axes.flat:
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
  drawn.suptitle(title, x=0.01, ha="left", fontsize=12)
  yield axes
  with replacing(Path(path)) as file:  # through no link that somebody has put there
    drawn.savefig(file, dpi=120, format=Path(path).suffix[1:] or None)


def _import_matplotlib() -> None:
  """Import it, also where MPLBACKEND names none of its backends."""
  if "matplotlib" in sys.modules:
    return
  chosen = os.environ.pop("MPLBACKEND", None)
  import matplotlib  # 1 s, and nothing else needs it

  if chosen is not None:
    os.environ["MPLBACKEND"] = chosen
    with contextlib.suppress(ValueError):
      matplotlib.rcParams["backend"] = chosen


def titled(axis: Any, title: str, x_label: str, y_label: str = "") -> None:
  """Write a title above axes, and their labels."""
  axis.set_title(title, loc="left", fontsize=11)
  axis.set(xlabel=x_label, ylabel=y_label)


class _Panel(NamedTuple):
  """Axes of a run's picture.

  Attributes:
    title: above it.
    unit: of the y axis.
    series: metric -> its label.
  """

  title: str
  unit: str
  series: dict[str, str]


def _panels(lines: _Rows, training: str) -> list[_Panel]:
  """What is drawn of a run, by what was logged.

  Args:
    lines: of metrics.jsonl.
    training: the label of the training loss.
  """
  evaluated = [n[5:] for line in lines for n in line if n.startswith("eval/")]
  others = [name for name in evaluated if name != "loss"] or ["accuracy"]
  known = [name for name in ("perplexity", "accuracy") if name in others]
  name = [*known, *others][0]
  unit = "%" if name == "accuracy" else ""
  both = {f"train/{name}": "training", f"eval/{name}": "held-out"}
  losses = {"train/loss": training, "eval/loss": "held-out"}
  shares = {"perf/mfu": "model FLOPs utilization", "perf/input_wait": "input wait"}
  memory = {"perf/memory_gb": "in use", "perf/peak_memory_gb": "peak"}
  return [
    _Panel("Loss", "nats" if known else "", losses),
    _Panel(name.replace("_", " ").capitalize(), unit, both),
    _Panel("Learning rate", "", {"train/learning_rate": ""}),
    _Panel("Speed", "examples/s", {"perf/examples_per_s": ""}),
    _Panel(f"Use of a device{_mfu(lines)}", "%", shares),
    _Panel("Memory of a device", "GB", memory),
  ]


def _log_formatter() -> Any:
  """0.6 and 2,000, not 6e-01 and 2x10^3; which ticks have a label stays."""
  from matplotlib import ticker

  class Formatter(ticker.LogFormatter):
    def __call__(self, x, pos=None):
      return f"{x:,.12g}" if super().__call__(x, pos) else ""

  return Formatter()


def _mfu(lines: Sequence[Mapping[str, Any]]) -> str:
  """The median model FLOPs utilization, as words."""
  found = [line["perf/mfu"] for line in lines if "perf/mfu" in line]
  return f" (MFU {statistics.median(found):.1%})" if found else ""


def _training_label(workdir: Path) -> str:
  """Of the training loss, which label smoothing lifts above the held-out one."""
  shape = {"config": {"loss": {"label_smoothing": float}}}
  described = read_json(workdir / "config.json", shape)
  smoothing = described["config"]["loss"]["label_smoothing"] if described else 0
  return f"training (label smoothing {smoothing:g})" if smoothing else "training"


def plot_metrics(workdir: str | Path, path: str | Path | None = None) -> Path | None:
  """Draw `workdir/metrics.jsonl` against the step.

  Loss, accuracy (or perplexity, or another metric), learning rate, speed, the shares of
  a device's FLOPs and of the time that waits for input, and memory.

  Args:
    workdir: of a run.
    path: of the picture, in its suffix's format; None: `workdir/metrics.png`.

  Returns:
    The path of the picture, or None if nothing was logged yet.
  """
  workdir = Path(workdir)
  lines = read_metrics(workdir / "metrics.jsonl")
  if not lines:
    return None
  path = Path(path or workdir / "metrics.png")
  with figure(path, 2, 3, (13.5, 6.4), workdir.name) as axes:
    for axis, panel in zip(
      axes.flat, _panels(lines, _training_label(workdir)), strict=True
    ):
      _draw_panel(axis, panel, lines)
  return path


def _draw_panel(axis: Any, panel: _Panel, lines: _Rows) -> None:
  titled(axis, panel.title, "step", panel.unit)
  for (name, label), color in zip(panel.series.items(), (CURVES, POINTS), strict=False):
    points = [(line["step"], line[name]) for line in lines if name in line]
    if points:
      steps, values = zip(*points, strict=True)
      values = [100 * v for v in values] if panel.unit == "%" else values
      marker = "o" if name.startswith("eval/") else None
      axis.plot(steps, values, color=color, marker=marker, ms=4, label=label)
  if any(name in panel.series for name in ("train/loss", "train/perplexity")):
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(_log_formatter())
    axis.yaxis.set_minor_formatter(_log_formatter())
  elif panel.unit == "%" and "eval/accuracy" in panel.series:
    axis.set_ylim(top=100.5)
  else:
    axis.set_ylim(bottom=0)
  if len(panel.series) > 1 and axis.lines:
    axis.legend(frameon=False)


def plot_study(study: Mapping[str, Any], path: str | Path) -> Path:
  """Draw a batch-size study: steps, examples and seconds to the target, and the gap.

  With the line of ideal scaling and the fitted curve. A run that missed the target is
  drawn where it ended, as an open triangle; one that diverged as a cross.

  Args:
    study: as in study.json: "runs", each with "status", "batch_size", "steps",
      "target_step", "target_examples", "target_seconds" and "gap"; "sizes", each
      with "batch_size" and "target_step"; "fit" or None, with "s_min" (steps),
      "b_crit" and "b_crit_range" (examples; no upper end: None); "title".
    path: of the picture.

  Returns:
    The path.
  """
  runs, path = study["runs"], Path(path)
  sizes = sorted({run["batch_size"] for run in runs})
  panels = {
    "target_step": "Steps to target",
    "target_examples": "Examples to target",
    "target_seconds": "Seconds to target",
    "gap": "Generalization gap, training - held-out (points)",
  }
  with figure(path, 2, 2, (10, 7.2), study["title"]) as axes:
    for axis, (name, title) in zip(axes.flat, panels.items(), strict=True):
      titled(axis, title, "batch size (examples)")
      _study_points(axis, runs, name)
      axis.set_xscale("log")
      size_ticks(axis, sizes, 1 / 1.3, 1.3)
      if name == "gap":
        axis.axhline(0, color=IDEAL, lw=0.8)
      else:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(_round_tick)
        axis.yaxis.set_minor_formatter(_round_tick)
    _study_curves(axes[0, 0], axes[0, 1], study)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes[0, 0].legend(once.values(), once.keys(), frameon=False, fontsize=9)
  return path


def _round_tick(value: float, _: Any) -> str:
  """A tick as a number, where it is 1, 2 or 5 times a power of ten."""
  return f"{value:,.12g}" if f"{value:e}"[0] in "125" else ""


def size_ticks(axis: Any, sizes: Sequence[int], below: float, above: float) -> None:
  """Ticks at these sizes alone, and room below the first and above the last one."""
  axis.set_xlim(sizes[0] * below, sizes[-1] * above)
  axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
  axis.set_xticks([], minor=True)


def _study_points(axis: Any, runs: _Rows, name: str) -> None:
  """One mark per run: what it measured, or where it ended without the target."""
  for run in runs:
    at, value, status = run["batch_size"], run[name], run["status"]
    style: dict[str, Any] = {"color": POINTS, "mfc": "none"}
    if value is not None:
      if status == "reached":
        style |= {"mfc": POINTS, "label": "reached"}
      axis.plot(at, value * (100 if name == "gap" else 1), "o", ms=6, **style)
    elif name in ("target_step", "target_examples"):
      ended = run["steps"] * (1 if name == "target_step" else at)
      if status == "missed":
        axis.plot(at, ended, "^", ms=8, label="not reached by then", **style)
      elif status == "diverged":
        axis.plot(at, ended, "x", color="black", ms=8, label="diverged then")


def _study_curves(steps_axis: Any, examples_axis: Any, study: Mapping[str, Any]):
  """Ideal scaling from the smallest size that reached the target, and the fit."""
  reached = [s for s in study["sizes"] if s["target_step"] is not None]
  if not reached:
    return
  sizes = [run["batch_size"] for run in study["runs"]]
  low, high = min(sizes) / 1.2, max(sizes) * 1.2
  grid = [low * (high / low) ** (i / 100) for i in range(101)]
  first = min(reached, key=lambda s: s["batch_size"])
  examples = first["target_step"] * first["batch_size"]
  ideal = [examples / b for b in grid]
  curves = [(ideal, "ideal scaling", {"color": IDEAL, "ls": "--"})]
  if (fit := study.get("fit")) is not None:
    at_least, high_end = fit["b_crit_range"]
    label = f"fit, B_crit = {fit['b_crit']:,.0f}"
    if high_end is None:  # without one of the sizes, the curve does not bend
      label = f"fit, B_crit at least {at_least:,.0f}"
    steps = [fit["s_min"] * (1 + fit["b_crit"] / b) for b in grid]
    curves.append((steps, label, {"color": CURVES}))
    if low < fit["b_crit"] < high:
      for axis in (steps_axis, examples_axis):
        axis.axvline(fit["b_crit"], color=CURVES, lw=0.8, ls=":")
  for steps, label, style in curves:
    steps_axis.plot(grid, steps, label=label, **style)
    examples_axis.plot(grid, [s * b for s, b in zip(steps, grid, strict=True)], **style)
