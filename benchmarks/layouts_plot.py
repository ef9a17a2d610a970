"""docs/layouts.png: losses under several layouts, and how far apart they are.

python benchmarks/layouts_plot.py                  (from results/layouts.json)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Widest first, so that the curves below show at the sides of those above.
_LOOKS = (
  {"color": "#ccd6e2", "lw": 9},
  {"color": "#e0826d", "lw": 5},
  {"color": "#2f6690", "lw": 2.2},
  {"color": "#f2c14e", "lw": 1, "ls": (0, (2, 2))},
)
_BELOW = {"lw": 1.5, "ls": "-"}
_CONTROL = {"color": "#c4c4c4", "lw": 5}
_FLOAT32 = 2**-24  # half a unit in the last place: what one rounding may do
_WINDOW = 10  # steps that a difference is the mean over


def draw(studies: Sequence[Mapping[str, Any]], path: Path) -> None:
  """Draw a column per study: losses above, differences from the first layout below.

  Args:
    studies: each with "title" and "rows"; a row has "label", "devices" and
      "train_loss", one number per step. Rows on fewer devices than the first show what
      another order of additions does, and only below.
    path: the PNG file.
  """
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(
    2, len(studies), figsize=(10, 7), sharex="col", squeeze=False, layout="constrained"
  )
  for below in axes[1, 1:]:  # losses are of different kinds, differences are not
    below.sharey(axes[1, 0])
  for (above, below), study in zip(axes.T, studies, strict=True):
    first, *others = study["rows"]
    alike = [row for row in others if row["devices"] == first["devices"]]
    controls = [row for row in others if row["devices"] != first["devices"]]
    for row, look in zip([first, *alike], _LOOKS, strict=False):
      _line(above, row["train_loss"], row["label"], look)
    for row in controls:
      _line(below, _apart(row, first), row["label"], _CONTROL)
    for row, look in zip(alike, _LOOKS[1:], strict=False):
      _line(below, _apart(row, first), row["label"], look | _BELOW)
    above.set_title(study["title"], loc="left", fontsize=12)
    below.set_title(
      f"difference to {first['label']}, mean of {_WINDOW} steps", loc="left", fontsize=10
    )
    below.set_xlabel("step")
    below.set_yscale("log")
    below.axhline(_FLOAT32, color="black", lw=0.8, ls=":")
    below.annotate(
      "a rounding of float32",
      (1, _FLOAT32),
      xycoords=("axes fraction", "data"),
      xytext=(0, 3),
      textcoords="offset points",
      ha="right",
      fontsize=8,
    )
    for axis in (above, below):
      axis.grid(alpha=0.25)
      axis.spines[["top", "right"]].set_visible(False)
      axis.legend(frameon=False, fontsize=9)
  axes[0, 0].set_ylabel("training loss (nats)")
  axes[1, 0].set_ylabel("relative difference of the loss")
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _line(axis: Any, ys: Sequence[float], label: str, look: Mapping[str, Any]) -> None:
  axis.plot(range(1, len(ys) + 1), ys, label=label, **look)


def _apart(row: Mapping[str, Any], first: Mapping[str, Any]) -> list[float]:
  """Return relative differences of the losses, as means over the steps up to each."""
  pairs = zip(row["train_loss"], first["train_loss"], strict=True)
  each = [abs(a - b) / b for a, b in pairs]
  windows = (each[max(0, i - _WINDOW) : i] for i in range(1, len(each) + 1))
  return [max(sum(w) / len(w), _FLOAT32 / 2) for w in windows]


if __name__ == "__main__":
  kept = Path(__file__).parent / "results" / "layouts.json"
  draw(json.loads(kept.read_text())["studies"], Path("docs/layouts.png"))
