"""Picture of a run: its metrics by step."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale.cluster.environment import is_installed
from jaxscale.errors import invalid
from jaxscale.files import read_json, replacing
from jaxscale.metrics.reading import read_metrics

POINTS, CURVES, IDEAL = "#c8553d", "#8aa6c8", "#999999"
_MOST_FURTHER = 6  # panels for metrics other than loss and accuracy
_FEW = 10  # A curve of fewer points has a marker at each.
_Rows = Sequence[Mapping[str, Any]]


@contextlib.contextmanager
def figure(
  path: str | Path, rows: int, columns: int, size: tuple[float, float], title: str = ""
) -> Iterator[Any]:
  """Yield axes [rows, columns] to draw on; save the picture at the end.

  Args:
    path: the path of the picture; its suffix sets the format.
    rows: the number of rows of axes.
    columns: the number of columns of axes.
    size: the width and height in inches, at 120 dots per inch.
    title: the title above the axes.
  """
  _import_matplotlib()
  from matplotlib.figure import Figure  # Unlike pyplot, it opens no windows.

  drawn = Figure(figsize=size, layout="constrained")
  axes = drawn.subplots(rows, columns, squeeze=False)
  for axis in axes.flat:
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
  drawn.suptitle(title, x=0.01, ha="left", fontsize=12)
  yield axes
  with replacing(Path(path)) as file:  # Does not write through a link at this path.
    drawn.savefig(file, dpi=120, format=Path(path).suffix[1:] or None)


def check_matplotlib(field: str, value: Any) -> None:
  """Refuse a setting that asks for pictures if matplotlib is missing.

  Raises:
    ConfigError: it is not installed.
  """
  if not is_installed("matplotlib"):
    fix = "install it (pip install matplotlib), or omit this"
    raise invalid(field, value, "needs the package matplotlib", fix)


def _import_matplotlib() -> None:
  """Import matplotlib, also if MPLBACKEND has an unknown backend."""
  if "matplotlib" in sys.modules:
    return
  chosen = os.environ.pop("MPLBACKEND", None)
  import matplotlib  # Takes 1 s.

  if chosen is not None:
    os.environ["MPLBACKEND"] = chosen
    with contextlib.suppress(ValueError):
      matplotlib.rcParams["backend"] = chosen


def titled(axis: Any, title: str, x_label: str, y_label: str = "") -> None:
  """Set the title and the axis labels of a plot."""
  axis.set_title(title, loc="left", fontsize=11)
  axis.set(xlabel=x_label, ylabel=y_label)


# Axes of a run's picture: title, unit of the y axis, and the label of each metric.
_Panel = tuple[str, str, dict[str, str]]


def _panels(lines: _Rows, training: str) -> list[_Panel]:
  """Return the panels to draw, depending on what was logged.

  Args:
    lines: the lines of metrics.jsonl.
    training: the label of the training loss.
  """
  evaluated = [n[5:] for line in lines for n in line if n.startswith("eval/")]
  others = [name for name in evaluated if name != "loss"] or ["accuracy"]
  known = [name for name in ("perplexity", "accuracy") if name in others]
  name = [*known, *others][0]
  shown = ("perplexity", "accuracy", "bits_per_byte", "loss", name)
  further = [x for x in dict.fromkeys(evaluated) if x not in shown][:_MOST_FURTHER]
  both = {f"train/{name}": "training", f"eval/{name}": "validation"}
  shares = {"perf/mfu": "model FLOPs utilization", "perf/input_wait": "input wait"}
  memory = {"perf/memory_gb": "in use", "perf/peak_memory_gb": "peak"}
  losses = {"train/loss": training, "eval/loss": "validation"}
  used = [line["perf/mfu"] for line in lines if "perf/mfu" in line]
  mfu = f" (MFU {statistics.median(used):.1%})" if used else ""
  return [
    ("Loss", "nats" if known else "", losses),
    (_title(name), "%" if name == "accuracy" else "", both),
    ("Learning rate", "", {"train/learning_rate": ""}),
    ("Speed", "examples/s", {"perf/examples_per_s": ""}),
    (f"Use of a device{mfu}", "%", shares),
    ("Memory of a device", "GB", memory),
    *((_title(x), "", {f"train/{x}": "training", f"eval/{x}": "validation"}) for x in further),
  ]


def _title(name: str) -> str:
  return name.replace("_", " ").capitalize()


def log_scale(axis: Any) -> None:
  """Scale the y axis by logarithm, with labels like 0.6 and 2,000, not 6e-01 and 2x10^3."""
  from matplotlib import ticker

  class Formatter(ticker.LogFormatter):
    def __call__(self, x, pos=None):
      return f"{x:,.12g}" if super().__call__(x, pos) else ""

  axis.set_yscale("log")
  axis.yaxis.set_major_formatter(Formatter())
  axis.yaxis.set_minor_formatter(Formatter())


def _training_label(workdir: Path) -> str:
  """Return the label of the training loss, which label smoothing makes larger."""
  described = read_json(workdir / "config.json", {"config": {"loss": {"label_smoothing": float}}})
  smoothing = described["config"]["loss"]["label_smoothing"] if described else 0
  return f"training (label smoothing {smoothing:g})" if smoothing else "training"


def plot_metrics(workdir: str | Path) -> Path | None:
  """Draw the metrics in `workdir/metrics.jsonl` by step, as `workdir/metrics.png`.

  The panels are loss, accuracy (or perplexity, or another metric), learning rate, speed,
  device use (MFU and the share of time waiting for input), memory, and up to six further
  validation metrics.

  Args:
    workdir: the workdir of a run.

  Returns:
    The path of the picture, or None if nothing was logged yet.
  """
  workdir = Path(workdir)
  lines = read_metrics(workdir / "metrics.jsonl")
  if not lines:
    return None
  path = workdir / "metrics.png"
  panels = _panels(lines, _training_label(workdir))
  rows = -(-len(panels) // 3)
  with figure(path, rows, 3, (13.5, 3.2 * rows), workdir.name) as axes:
    for axis, panel in itertools.zip_longest(axes.flat, panels):
      _draw_panel(axis, panel, lines) if panel else axis.set_visible(False)
  return path


def _draw_panel(axis: Any, panel: _Panel, lines: _Rows) -> None:
  title, unit, series = panel
  titled(axis, title, "step", unit)
  for (name, label), color in zip(series.items(), (CURVES, POINTS), strict=False):
    points = [(line["step"], line[name]) for line in lines if name in line]
    if points:
      steps, values = zip(*points, strict=True)
      values = [100 * v for v in values] if unit == "%" else values
      # A line through few points is short, and a line through one point is invisible.
      marker = "o" if name.startswith("eval/") or len(points) < _FEW else None
      axis.plot(steps, values, color=color, marker=marker, ms=4, label=label)
  if {"train/loss", "train/perplexity"} & series.keys():
    log_scale(axis)
  elif "eval/accuracy" in series:
    axis.set_ylim(top=100.5)
  else:
    axis.set_ylim(bottom=0)
  if len(series) > 1 and axis.lines:
    axis.legend(frameon=False)
