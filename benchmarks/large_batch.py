"""SGD, LARS and LAMB on Fashion-MNIST at large batch: the table of docs/large_batch.md.

    python benchmarks/large_batch.py [SEEDS]            (after `make fashion_mnist`)

Trains every name of configs/fashion_mnist_large_batch.py with seeds 0, 1, ...
(default 3) for the same epochs, in runs/large_batch/; runs that are done are
not repeated. Prints a table in Markdown and one JSON line. Accuracies are means
over the seeds with their sample standard deviation; the gap is accuracy on the
training examples less that on the held-out ones, in points, a mean over the seeds. The
noise scale, in examples, is that at the end of the run: the harmonic mean over the
seeds (an infinite one counts), and the lowest and highest end of their 95 % intervals.
A run that diverged counts as 10 %, what guessing gives.
"""

from __future__ import annotations

import os
import statistics
import sys
from math import inf

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import seeds
from common import report

from jaxscale.config.loading import load_config
from jaxscale.errors import EXIT_DONE, one_line_errors
from jaxscale.jobs.batch_study import mean_noise_scale

CONFIG = "configs/fashion_mnist_large_batch.py"
NAMES = (
  "sgd-256",
  "sgd-8192",
  "sgd_tuned-8192",
  "lars-8192",
  "lamb-8192",
  "sgd-16384",
  "sgd_tuned-16384",
  "lars-16384",
  "lamb-16384",
)
LABELS = {
  "sgd": "SGD, linear scaling",
  "sgd_tuned": "SGD, tuned rate",
  "lars": "LARS",
  "lamb": "LAMB",
}
BASELINE = "256"


def summarise(name: str, outcomes: list[seeds.Outcome]) -> dict:
  """Return one row of the table."""
  kind, batch = name.split("-")
  done = [o for o in outcomes if o.accuracy is not None]
  mean = statistics.fmean
  return {
    "name": name,
    "optimizer": "SGD" if batch == BASELINE else LABELS[kind],
    "batch_size": int(batch),
    "peak_lr": outcomes[0].peak_lr,
    "steps": done[0].steps if done else None,
    **seeds.accuracy(outcomes),
    "gap": round(mean([o.gap for o in done]), 5) if done else None,
    "noise_scale": seeds.finite(mean_noise_scale([o._asdict() for o in done])),
    "noise_scale_low": min((o.noise_scale_low or 0.0 for o in done), default=None),
    "noise_scale_high": seeds.finite(max((o.noise_scale_high or inf for o in done), default=None)),
  }


def markdown(rows: list[dict]) -> str:
  """Return the rows as the Markdown table of docs/large_batch.md."""
  lines = [
    "| batch | optimizer | peak rate | steps | held-out accuracy "
    "| gap (points) | noise scale (examples) |",
    "|---|---|---|---|---|---|---|",
  ]
  for row in rows:
    accuracy = seeds.percent(row)
    if row["diverged"]:
      diverged = f"{row['diverged']} of {len(row['accuracies'])} diverged"
      accuracy = f"{accuracy} ({diverged})" if row["steps"] else diverged
    gap = "" if row["gap"] is None else f"{100 * row['gap']:.2f}"
    names = ("noise_scale", "noise_scale_low", "noise_scale_high")
    digits = (seeds.two_digits(row[name]) for name in names)
    noise = "{} ({} to {})".format(*digits) if row["steps"] else ""
    steps = "" if row["steps"] is None else f"{row['steps']:,}"
    lines.append(
      f"| {row['batch_size']:,} | {row['optimizer']} | {row['peak_lr']:.4g} | "
      f"{steps} | {accuracy} | {gap} | {noise} |"
    )
  return "\n".join(lines)


@one_line_errors
def main() -> int:
  outcomes = seeds.train(CONFIG, NAMES, "runs/large_batch")
  rows = [summarise(name, each) for name, each in outcomes.items()]
  epochs = load_config(f"{CONFIG}:{NAMES[0]}").epochs
  print(markdown(rows))
  report("large_batch", seeds=len(rows[0]["accuracies"]), epochs=epochs, rows=rows)
  return EXIT_DONE


if __name__ == "__main__":
  sys.exit(main())
