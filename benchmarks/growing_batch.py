"""Steps that a growing batch saves at equal validation loss: the table of docs/large_batch.md.

    nice python benchmarks/growing_batch.py [SEEDS] [TASK ...]     (after `make fashion_mnist`)

Tasks are "text" (the text of the package) and "fashion" (Fashion-MNIST); both by default. The
constant batch is tuned over the rates of RATES with seed 0, at the batch size of the task and
at twice that; the growing batches take the best rate of the first, untuned. All runs see the
same number of examples. Runs that are done in runs/growing_batch/ are not repeated, so the
command can be stopped and started again. SEEDS is 1 by default; the published table has 3.
Use `taskset -c 0` for one core.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import report

from jaxscale import config as cfg
from jaxscale.errors import EXIT_DONE, one_line_errors
from jaxscale.files import read_json
from jaxscale.run.fit import fit

FOLDER = Path("runs/growing_batch")
RATES = {"text": (2e-3, 4e-3, 8e-3), "fashion": (2e-3, 4e-3, 8e-3)}
MOST = 16  # times the batch size at the start


def task(name: str) -> cfg.Config:
  """Return the config of a task with a constant batch."""
  quiet: Any = {"log": cfg.Log(every_steps=100, tensorboard=False, plot=False)}
  quiet |= {"checkpoint": cfg.Checkpoint(every_epochs=1, keep_last=1)}
  if name == "text":  # 2 layers: about 0.1 M parameters
    return cfg.Config(
      model=cfg.Transformer(num_layers=2, width=64, num_heads=4, hidden=192),
      data=cfg.Text(sequence_length=64),
      optimizer=cfg.AdamW(lr=1.0, b2=0.95, weight_decay=0.1),
      schedule=cfg.Cosine(warmup_epochs=0.1),
      batch_size=16,
      epochs=1,
      clip_norm=1.0,
      evaluation=cfg.Evaluation(every_epochs=1),
      **quiet,
    )
  return cfg.Config(  # 0.24 M multiply-adds per image
    model=cfg.CNN(features=(6, 16), dense=32),
    data=cfg.TFDS(name="fashion_mnist", cache=True),
    optimizer=cfg.AdamW(lr=1.0, weight_decay=0.01),
    schedule=cfg.Cosine(warmup_epochs=0.3),
    batch_size=64,
    epochs=3,
    evaluation=cfg.Evaluation(every_epochs=3),
    **quiet,
  )


def rules(base: cfg.Config) -> dict[str, dict[str, Any]]:
  """Return the settings of the growing batches by name."""
  most = MOST * base.batch_size
  epochs = base.epochs or 1

  def growing(**more: Any) -> dict[str, Any]:
    return {"phases": cfg.Growing(max_batch_size=most, **more)}

  noise = growing(when=cfg.ByNoiseScale(every_epochs=epochs / 10))
  return {
    "schedule": growing(),
    "branch": growing(when=cfg.ByBranch(every_epochs=epochs / 10, steps=16)),
    "noise scale": noise | {"noise_scale": True, "accumulate_steps": 2},
  }


def run(name: str, config: cfg.Config, seed: int) -> dict[str, Any]:
  """Train a run, or read the result of one that is done."""
  workdir = FOLDER / f"{name.replace(' ', '_')}-{seed}"
  done = {"outcome": str, "step": int, "loss": float, "accuracy": float}
  summary = read_json(workdir / "summary.json", done)
  if summary.get("outcome") != "done":
    summary = fit(dataclasses.replace(config, seed=seed), workdir).summary
  found = {n: summary[n] for n in ("loss", "accuracy", "step")}
  print(f"{name} seed {seed}: {found}", file=sys.stderr, flush=True)
  return found


def at(config: cfg.Config, times: int, rate: float) -> cfg.Config:
  """Return a task at a multiple of its batch size, and at a learning rate."""
  optimizer = dataclasses.replace(config.optimizer, lr=rate)
  return dataclasses.replace(config, batch_size=times * config.batch_size, optimizer=optimizer)


def tuned(name: str, times: int) -> float:
  """Return the best rate of a constant batch by the validation loss of seed 0."""
  base, losses = task(name), {}
  for rate in RATES[name]:
    losses[rate] = run(f"{name}-x{times}-{rate:g}", at(base, times, rate), 0)["loss"]
  best = min(losses, key=lambda rate: losses[rate])
  print(f"{name} x{times}: {losses}, best {best:g}", file=sys.stderr, flush=True)
  return best


def rows(name: str, seeds: int) -> list[dict[str, Any]]:
  """Return the rows of a task."""
  base, rate = task(name), tuned(name, 1)
  arms: dict[str, Any] = {"constant": (f"{name}-x1-{rate:g}", at(base, 1, rate))}
  for rule, settings in rules(base).items():
    arms[rule] = f"{name}-{rule}-{rate:g}", dataclasses.replace(at(base, 1, rate), **settings)
  double = tuned(name, 2)
  arms["constant x 2"] = f"{name}-x2-{double:g}", at(base, 2, double)
  table = []
  for arm, (label, config) in arms.items():
    found = [run(label, config, seed) for seed in range(seeds)]
    row: dict[str, Any] = {"task": name, "batch": arm, "lr": config.optimizer.lr}
    for key in ("loss", "accuracy", "step"):
      values = [x[key] for x in found]
      row |= {key: statistics.fmean(values), f"{key}s": values}
      row[f"{key}_sd"] = statistics.stdev(values) if seeds > 1 else None
    row["saved"] = 1 - row["step"] / (table[0]["step"] if table else row["step"])
    table.append(row)
  return table


@one_line_errors
def main() -> int:
  words = sys.argv[1:]
  seeds = int(words.pop(0)) if words and words[0].isdigit() else 1
  table = [row for name in words or ("text", "fashion") for row in rows(name, seeds)]
  print("| task | batch | lr | steps | saved | validation loss | accuracy |")
  print("|---|---|---|---|---|---|---|")
  for row in table:
    spread = "" if row["loss_sd"] is None else f" ± {row['loss_sd']:.4f}"
    print(
      f"| {row['task']} | {row['batch']} | {row['lr']:g} | {row['step']:,.0f} | "
      f"{row['saved']:.0%} | {row['loss']:.4f}{spread} | {row['accuracy']:.2%} |"
    )
  report("growing_batch", seeds=seeds, rows=table)
  return EXIT_DONE


if __name__ == "__main__":
  sys.exit(main())
