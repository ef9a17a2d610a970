"""What each exchange does to the accuracy: the first table of docs/exchange.md.

    python benchmarks/exchange_accuracy.py [SEEDS]      (after `make fashion_mnist`)

Trains names of configs/fashion_mnist_exchange.py on 8 simulated devices with
seeds 0, 1, ... (3 unless said), in runs/exchange/; runs that are done are not
repeated. Prints a table in Markdown and one JSON line. Accuracies are means over the
seeds with their sample standard deviation, differences to "plain" in points. Bytes
are those that a device sends in a step, read from the compiled program; of local
updates the bytes of a meeting are divided by the steps between two.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

from common import report

from jaxscale import build
from jaxscale.config import Config
from jaxscale.exits import EXIT_DONE, one_line_errors
from jaxscale.overrides import load_config
from jaxscale.scaling import hlo
from jaxscale.trials import Outcome, Trial, run_trials

CONFIG = "configs/fashion_mnist_exchange.py"
LABELS = {
  "plain": "plain (psum)", "bf16": "bfloat16", "int8": "int8, blocks of 256",
  "one_bit": "1-bit, error feedback", "top_k": "top-k 1 %, error feedback",
  "power_sgd": "PowerSGD, rank 4", "delayed": "one step late",
  "block_momentum": "BMUF, every 14 steps",
}  # fmt: skip
CHANCE = 0.1


def sent_bytes(config: Config) -> float:
  """Bytes that a device sends in a step once the plain epochs are over."""
  if hasattr(config.exchange, "plain_epochs"):
    exchange = dataclasses.replace(config.exchange, plain_epochs=0.0)
    config = dataclasses.replace(config, exchange=exchange)
  experiment = build.experiment(config)
  every = experiment.agreement.method.every if experiment.agreement else 1
  table = hlo.collectives(experiment.lower_train_step().compile(), experiment.mesh)
  return sum(
    row.times * row.wire_bytes / (every if row.conditional else 1) for row in table
  )


def summarise(name: str, outcomes: list[Outcome], num_bytes: float) -> dict:
  """One row of the table."""
  accuracies = [CHANCE if o.accuracy is None else o.accuracy for o in outcomes]
  return {
    "name": name,
    "bytes": round(num_bytes),
    "accuracy": round(statistics.fmean(accuracies), 5),
    "spread": round(statistics.stdev(accuracies), 5) if len(accuracies) > 1 else None,
    "accuracies": accuracies,
    "diverged": sum(o.status == "diverged" for o in outcomes),
  }


def markdown(rows: list[dict]) -> str:
  """The rows as docs/exchange.md shows them."""
  lines = [
    "| exchange | bytes a device sends a step | of plain | held-out accuracy "
    "| to plain (points) |",
    "|---|---|---|---|---|",
  ]
  plain = rows[0]
  for row in rows:
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
    difference = 100 * (row["accuracy"] - plain["accuracy"])
    lines.append(
      f"| {LABELS[row['name']]} | {row['bytes']:,} | "
      f"{row['bytes'] / plain['bytes']:.1%} | {100 * row['accuracy']:.2f}{spread} % | "
      + ("" if row is plain else f"{difference:+.2f}")
      + " |"
    )
  return "\n".join(lines)


@one_line_errors
def main() -> int:
  seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
  trials = [
    Trial(
      load_config(f"{CONFIG}:{name}", {"seed": str(seed)}),
      Path(f"runs/exchange/{name}-{seed}"),
    )
    for seed in range(seeds)
    for name in LABELS
  ]
  outcomes = run_trials(trials)
  rows = [
    summarise(name, outcomes[i :: len(LABELS)], sent_bytes(trials[i].config))
    for i, name in enumerate(LABELS)
  ]
  print(markdown(rows))
  report("exchange_accuracy", seeds=seeds, epochs=trials[0].config.epochs, rows=rows)
  return EXIT_DONE


if __name__ == "__main__":
  sys.exit(main())
