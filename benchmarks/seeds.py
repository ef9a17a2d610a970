"""Training of a config's variants with several seeds, shared by the accuracy tables."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from jaxscale import data
from jaxscale.config import Config
from jaxscale.config.loading import load_config
from jaxscale.run.fit import fit
from jaxscale.run.workdir import experiment_in
from jaxscale.training import loop

CHANCE = 0.1  # a run that diverged counts as guessing among ten classes


class Outcome(NamedTuple):
  """Result of a run.

  Attributes:
    peak_lr: learning rate after the warm-up.
    steps: steps that were done; where it diverged, the step of the NaN or Inf.
    accuracy: validation accuracy after the last step; None: the run diverged.
    gap: accuracy on the training examples, without augmentation, less that.
    noise_scale: gradient-noise scale in examples; None: infinite, or not measured.
    noise_scale_low: lower end of its interval; None: not measured.
    noise_scale_high: upper end of its interval; None: infinite, or not measured.
  """

  peak_lr: float
  steps: int
  accuracy: float | None = None
  gap: float = 0.0
  noise_scale: float | None = None
  noise_scale_low: float | None = None
  noise_scale_high: float | None = None


def run(config: Config, workdir: Path) -> Outcome:
  """Train or resume a run; a complete one is only evaluated."""
  experiment = experiment_in(workdir, config)
  peak_lr = experiment.derived.peak_lr
  try:
    state, summary = fit(config, workdir)
  except loop.NonFiniteError as e:
    return Outcome(peak_lr, e.step)
  dataset, size = experiment.train_data, experiment.derived.eval_batch_size
  batches = data.to_device(data.eval_batches(dataset, size), experiment.mesh)
  values = loop.evaluate(experiment.eval_step, *state.evaluated(), batches)
  names = ("noise_scale", "noise_scale_low", "noise_scale_high")
  scale = {name: summary.get(name) for name in names}
  accuracy = summary["accuracy"]
  return Outcome(peak_lr, summary["step"], accuracy, values["accuracy"] - accuracy, **scale)


def train(config: str, names: Sequence[str], folder: str) -> dict[str, list[Outcome]]:
  """Return the results of every name with seeds 0, 1, ... (3 seeds without an argument).

  A seed is trained for all names before the next one starts, so that an interrupted
  study still compares them. Complete runs in `folder` are not repeated.
  """
  seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
  outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
  for seed in seeds:
    for name in names:
      made = load_config(f"{config}:{name}", {"seed": str(seed)})
      outcomes[name].append(run(made, Path(folder, f"{name}-{seed}")))
  return outcomes


def accuracy(outcomes: Sequence[Outcome]) -> dict:
  """Return the columns of a row with the accuracy of all seeds."""
  each = [CHANCE if o.accuracy is None else o.accuracy for o in outcomes]
  return {
    "accuracy": round(statistics.fmean(each), 5),
    "spread": round(statistics.stdev(each), 5) if len(each) > 1 else None,
    "accuracies": each,
    "diverged": sum(o.accuracy is None for o in outcomes),
  }


def finite(value: float | None) -> float | None:
  """Return a number, with None for infinity, which JSON lacks."""
  return None if value is None or math.isinf(value) else value


def two_digits(value: float | None) -> str:
  """Format a number with two digits; None is infinite."""
  return "∞" if value is None else f"{float(f'{value:.2g}'):,.0f}"


def difference(row: dict, base: dict) -> str:
  """Return the difference of two rows in points, its standard error, and a note.

  "Within noise" means that equal means differ as much in 1 of 20 cases (Welch's test).
  """
  points = 100 * (row["accuracy"] - base["accuracy"])
  if None in (row["spread"], base["spread"]):
    return f"{points:+.2f}, one seed"
  parts = (r["spread"] ** 2 / len(r["accuracies"]) for r in (row, base))
  error = 100 * math.sqrt(sum(parts))
  test: Any = stats.ttest_ind(row["accuracies"], base["accuracies"], equal_var=False)
  return f"{points:+.2f} ± {error:.2f}" + ", within noise" * bool(test.pvalue > 0.05)


def percent(row: dict) -> str:
  """Format the accuracy of a row with its sample standard deviation, for a table."""
  spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
  return f"{100 * row['accuracy']:.2f}{spread} %"
