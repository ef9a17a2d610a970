"""Accuracy with each exchange: the first table of docs/exchange.md.

    python benchmarks/exchange_accuracy.py [SEEDS]      (after `make fashion_mnist`)

Trains names of configs/fashion_mnist_exchange.py on 8 simulated devices with
seeds 0, 1, ... (default 3), in runs/exchange/; runs that are done are not
repeated. Prints a table in Markdown and one JSON line. Accuracies are means over the
seeds with their sample standard deviation, differences to "plain" in points with their
standard error. Bytes are those that a device sends in a step, read from the compiled
program; of local updates the bytes of a synchronization are divided by the steps
between two.
"""

from __future__ import annotations

import dataclasses
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import seeds
from common import report

from jaxscale import hlo
from jaxscale.config import Config
from jaxscale.config.loading import load_config
from jaxscale.errors import EXIT_DONE, one_line_errors
from jaxscale.experiment import build

CONFIG = "configs/fashion_mnist_exchange.py"
LABELS = {
  "plain": "plain (psum)",
  "bf16": "bfloat16",
  "int8": "int8, blocks of 256",
  "one_bit": "1-bit, error feedback",
  "top_k": "top-k 1 %, error feedback",
  "power_sgd": "PowerSGD, rank 4",
  "delayed": "one step late",
  "block_momentum": "BMUF, every 14 steps",
}


def sent_bytes(config: Config) -> float:
  """Return the bytes that a device sends in a step after the epochs without compression."""
  if hasattr(config.exchange, "plain_epochs"):
    exchange = dataclasses.replace(config.exchange, plain_epochs=0.0)
    config = dataclasses.replace(config, exchange=exchange)
  experiment = build.experiment(config)
  every = experiment.sync.method.every if experiment.sync else 1
  table = hlo.collectives(experiment.lower_train_step().compile(), experiment.mesh)
  return sum(row.times * row.wire_bytes / (every if row.conditional else 1) for row in table)


def markdown(rows: list[dict]) -> str:
  """Return the rows as the Markdown table of docs/exchange.md."""
  lines = [
    "| exchange | bytes sent per device and step | of plain | held-out accuracy "
    "| to plain (points) |",
    "|---|---|---|---|---|",
  ]
  plain = rows[0]
  for row in rows:
    lines.append(
      f"| {LABELS[row['name']]} | {row['bytes']:,} | "
      f"{row['bytes'] / plain['bytes']:.1%} | {seeds.percent(row)} | "
      + ("" if row is plain else seeds.difference(row, plain))
      + " |"
    )
  return "\n".join(lines)


@one_line_errors
def main() -> int:
  outcomes = seeds.train(CONFIG, list(LABELS), "runs/exchange")
  configs = {name: load_config(f"{CONFIG}:{name}") for name in LABELS}
  rows = [
    {"name": name, "bytes": round(sent_bytes(configs[name]))} | seeds.accuracy(each)
    for name, each in outcomes.items()
  ]
  print(markdown(rows))
  report(
    "exchange_accuracy", seeds=len(rows[0]["accuracies"]), epochs=configs["plain"].epochs, rows=rows
  )
  return EXIT_DONE


if __name__ == "__main__":
  sys.exit(main())
