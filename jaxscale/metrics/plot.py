"""`metrics.png`: loss, accuracy, learning rate and speed against the step.

Of a language model perplexity takes the place of accuracy.

Alone: `python -m jaxscale.metrics.plot WORKDIR`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jaxscale.metrics.reading import read_json_lines

_PANELS = (  # title, unit of the y axis, series: (metric, label), log scale
  (
    "Loss",
    "nats",
    (("train/loss", "training"), ("eval/loss", "held out")),
    True,
  ),
  (
    "Accuracy",
    "%",
    (("train/accuracy", "training"), ("eval/accuracy", "held out")),
    False,
  ),
  ("Learning rate", "", (("train/learning_rate", ""),), False),
  ("Speed", "examples/s", (("perf/examples_per_s", ""),), False),
)
_PERPLEXITY = (
  "Perplexity",
  "",
  (("train/perplexity", "training"), ("eval/perplexity", "held out")),
  True,
)


def plot_metrics(workdir: str | Path) -> Path | None:
  """Draw `workdir/metrics.jsonl` into `workdir/metrics.png`.

  Returns:
    The path of the picture, or None if nothing was logged yet.
  """
  # 1 s to import, and nothing else needs it.
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt
  from matplotlib.ticker import LogFormatter

  workdir = Path(workdir)
  lines = read_json_lines(workdir / "metrics.jsonl")
  if not lines:
    return None
  panels = list(_PANELS)
  if any("eval/perplexity" in line or "train/perplexity" in line for line in lines):
    panels[1] = _PERPLEXITY
  figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
  for axis, (title, unit, series, log) in zip(axes.flat, panels, strict=True):
    for colour, (name, label) in zip(("#8aa6c8", "#c8553d"), series, strict=False):
      points = [(line["step"], line[name]) for line in lines if name in line]
      if not points:
        continue
      steps, values = zip(*points, strict=True)
      if unit == "%":
        values = [100 * v for v in values]
      marker = "o" if name.startswith("eval/") else None
      axis.plot(steps, values, color=colour, marker=marker, ms=4, label=label)
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel("step")
    axis.set_ylabel(unit)
    if log:
      axis.set_yscale("log")
      for place in ("major", "minor"):  # 1.4, not 1.4 x 10^0
        getattr(axis.yaxis, f"set_{place}_formatter")(LogFormatter())
    else:
      axis.set_ylim(bottom=None if unit == "%" else 0)
    if unit == "%":
      axis.set_ylim(top=100.5)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
      axis.legend(frameon=False)
  figure.suptitle(workdir.name, x=0.01, ha="left", fontsize=12)
  path = workdir / "metrics.png"
  figure.savefig(path, dpi=120)
  plt.close(figure)
  return path


if __name__ == "__main__":
  drawn = plot_metrics(sys.argv[1]) if len(sys.argv) == 2 else None
  print(drawn or "usage: python -m jaxscale.metrics.plot WORKDIR (with metrics)")
  sys.exit(0 if drawn else 2)
