"""Pictures of an evaluation: confusion matrix and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxscale.metrics.plot import CURVES, POINTS, figure, titled

_NUMBERED, _NAMED = 20, 120  # the most classes with counts in their cells, with names


def plot_confusion(path: Path, matrix: np.ndarray, class_names: Sequence[str] = ()) -> None:
  """Draw a confusion matrix; colors are shares of the examples of a class.

  Args:
    path: the path of the picture.
    matrix: the counts [true classes, predicted classes].
    class_names: the names of the classes; () uses their numbers.
  """
  count, total = len(matrix), max(matrix.sum(), 1e-300)
  names = [str(x)[:20] for x in (class_names if len(class_names) == count else range(count))]
  shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1e-300)
  size = float(np.clip(2.5 + 0.45 * min(count, _NUMBERED) + 0.09 * count, 4.5, 14))
  title = f"{np.trace(matrix) / total:.2%} of {total:,.0f} on the diagonal"
  with figure(path, 1, 1, (size + 0.8, size), title) as axes:
    from matplotlib.colors import PowerNorm

    axis, norm = axes[0, 0], PowerNorm(0.5, 0, 1)  # A root, so that rare errors show.
    image = axis.imshow(shares, cmap="Blues", norm=norm, interpolation="nearest")
    titled(axis, "Confusion matrix", "predicted class", "true class")
    axis.grid(visible=False)
    if count <= _NAMED:
      size = np.clip(600 / count, 4, 9)
      axis.set_xticks(range(count), names, rotation=90, fontsize=size)
      axis.set_yticks(range(count), names, fontsize=size)
    for i, j in np.argwhere(matrix) if count <= _NUMBERED else ():
      color = "white" if shares[i, j] > 0.4 else "black"
      axis.text(j, i, f"{matrix[i, j]:,.4g}", ha="center", va="center", color=color, fontsize=8)
    axis.figure.colorbar(image, ax=axis, shrink=0.8, label="share of the true class")


def plot_calibration(path: Path, bins: np.ndarray, class_names: Sequence[str] = ()) -> None:
  """Draw a reliability diagram: the accuracy by the probability of the predicted class.

  Args:
    path: the path of the picture.
    bins: the share of the examples, the mean probability and the accuracy, [bins, 3].
    class_names: unused.
  """
  share, sure, hits = bins.T
  error, is_used = (share * abs(hits - sure)).sum(), share > 0
  with figure(path, 2, 1, (6, 7), f"calibration error {error:.2%}") as axes:
    (upper,), (lower,) = axes
    for axis, heights, label in ((upper, hits, "accuracy"), (lower, share, "share of examples")):
      left = np.arange(len(bins)) / len(bins)
      axis.bar(left, heights, 1 / len(bins), align="edge", color=CURVES, edgecolor="white")
      titled(axis, "", "probability of the predicted class", label)
      axis.set_xlim(0, 1)
    upper.plot([0, 1], [0, 1], color="black", lw=1, ls="--", label="perfect calibration")
    upper.plot(sure[is_used], hits[is_used], "o", color=POINTS, label="mean of a bin")
    upper.legend(frameon=False, loc="upper left")
