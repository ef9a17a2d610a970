"""Six optimizers at small and large batches: the tables and the picture of docs/large_batch.md.

    python benchmarks/large_batch.py [--jobs 2] [--only images-sgd,text-muon] [--table]

Trains the runs of configs/large_batch.py (after `make fashion_mnist`). Every optimizer at every
batch size has `TRIALS` learning rates, with `TUNING_SEED`, and is then trained with the best of
them and the seeds of `SEEDS`, of which the tuning seed is one. The trials begin at the best rate
of the batch size before, or at that of `FIRST`, and go on from the best one in factors of 2,
upwards first; if the best one is inside, the next is between it and its better neighbour. SGD
also runs with the best rate of its smallest batch scaled linearly. AdamW at its smallest batch
also runs with batches that grow, at the rate of the constant batch. Copies of the state that train
to decide this count neither as steps nor as examples of the run; they are a column of their own.

Each run is one line of benchmarks/results/large_batch_runs.jsonl and is not repeated, so the
command can be stopped and started again. `--jobs` processes run at the same time, each on a core
of its own; they take one optimizer on one task after the other. `--table` trains nothing: it
prints the tables, and writes benchmarks/results/large_batch.json from the runs that are there.

Values are means over the seeds with their sample standard deviation: the validation accuracy of
images, and the bits per byte of text. A run that diverged has none, nor one that ends with the
same class for all images. "Steps to the target" count to the first evaluation that reaches the
config's target, of the runs that do.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import keep_run, report, runs_done

from jaxscale import data
from jaxscale.cluster import cpu_settings
from jaxscale.config import ByBranch, Config, Growing
from jaxscale.config.loading import load_config
from jaxscale.errors import EXIT_DONE, one_line_errors
from jaxscale.run.adaptive_batch import read_chosen

CONFIG = "configs/large_batch.py"
NAME = "large_batch"
SIZES = {"images": (256, 1536, 4096, 8192, 16384), "text": (16, 128, 512)}
LABELS = {"sgd": "SGD", "linear": "SGD, linear scaling", "lars": "LARS", "lamb": "LAMB"}
LABELS |= {"adamw": "AdamW", "muon": "Muon", "soap": "SOAP"}
FIRST = {
  "images": dict(sgd=0.1, lars=0.1, lamb=0.02, adamw=0.004, muon=0.008, soap=0.004),
  "text": dict(sgd=0.5, lars=0.4, lamb=0.02, adamw=0.004, muon=0.008, soap=0.008),
}  # near the best of three in a tenth of a run, of images, and a quarter, of text
GROWTH = {"schedule": "by the schedule", "noise": "by the noise scale", "branches": "by branches"}
CHANCE = {"images": 0.1, "text": None}  # one class for all images
TRIALS, TUNING_SEED, SEEDS = 4, 0, (0, 1, 2)


class Run(NamedTuple):
  """A run: what identifies it.

  Attributes:
    task: "images" or "text".
    kind: an optimizer, "linear" (SGD), or a rule of `GROWTH` (AdamW).
    batch_size: examples per step, at the start.
    lr: the peak learning rate.
    seed: the seed.
  """

  task: str
  kind: str
  batch_size: int
  lr: float
  seed: int


def read() -> dict[Run, dict[str, Any]]:
  """Return the results of the runs that are done."""
  return {Run(*(row[field] for field in Run._fields)): row for row in runs_done(NAME)}


def train(run: Run) -> dict[str, Any]:
  """Train a run and keep its result."""
  from jaxscale.run.fit import fit
  from jaxscale.training.loop import NonFiniteError

  task, kind, size, lr, seed = run
  optimizer = "adamw" if kind in GROWTH else "sgd" if kind == "linear" else kind
  name = f"{task}-{optimizer}-{size}" + f"-{kind}" * (kind in GROWTH)
  config = load_config(f"{CONFIG}:{name}", {"optimizer.lr": repr(lr), "seed": str(seed)})
  row: dict[str, Any] = run._asdict() | {"value": None, "steps": None, "target_step": None}
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    try:
      _, summary = fit(config, Path(folder, "run"))
      row |= in_branches(config, Path(folder, "run"))
      value = summary["accuracy"] if task == "images" else summary["loss"] / math.log(2)
      row |= {"value": value, "steps": summary["step"], "target_step": summary.get("target_step")}
    except NonFiniteError as e:
      row["diverged_at"] = e.step
  row |= {"seconds": round(time.monotonic() - start, 1), "date": f"{datetime.date.today()}"}
  keep_run(NAME, row)
  return row


def in_branches(config: Config, workdir: Path) -> dict[str, int]:
  """Return the steps and examples of the copies that `ByBranch` has trained, at both sizes."""
  if not (isinstance(config.phases, Growing) and isinstance(config.phases.when, ByBranch)):
    return {}
  factor, steps = config.phases.factor, config.phases.when.steps
  most = config.phases.max_batch_size or math.inf
  sizes = [size for size in read_chosen(workdir)[:-1] if size * factor <= most]
  return {
    "branch_steps": len(sizes) * steps * (1 + factor),
    "branch_examples": sum(2 * steps * factor * size for size in sizes),
  }


def score(task: str, row: dict[str, Any]) -> float:
  """Return what is better if it is lower."""
  if row["value"] is None:
    return math.inf
  return -row["value"] if task == "images" else row["value"]


def next_rate(first: float, scores: dict[float, float]) -> float:
  """Return the rate to try next, given the scores of those that were tried.

  Example:
    >>> next_rate(1.0, {}), next_rate(1.0, {1.0: 0.5}), next_rate(1.0, {1.0: 0.5, 2.0: 0.6})
    (1.0, 2.0, 0.5)
    >>> next_rate(1.0, {0.5: 0.7, 1.0: 0.5, 2.0: 0.6})
    1.41
  """
  if not scores:
    return first
  rates = sorted(scores)
  best = rates.index(min(rates, key=lambda rate: scores[rate]))
  if best == len(rates) - 1:
    return 2 * rates[best]
  if best == 0:
    return rates[0] / 2
  near = min(rates[best - 1], rates[best + 1], key=lambda rate: scores[rate])
  return float(f"{math.sqrt(near * rates[best]):.3g}")


def trials(done: dict[Run, Any], task: str, kind: str, size: int, first: float) -> dict[float, Any]:
  """Return the results of the trials that are done, by rate."""
  found: dict[float, Any] = {}
  while len(found) < TRIALS:
    lr = next_rate(first, {rate: score(task, row) for rate, row in found.items()})
    run = Run(task, kind, size, lr, TUNING_SEED)
    if run not in done:
      break
    found[lr] = done[run]
  return found


def cells(
  done: dict[Run, Any], task: str, kind: str
) -> Iterator[tuple[str, int, float, dict[float, Any]]]:
  """Yield the kind, batch size, rate and trials of an optimizer's rows.

  Rows that follow from another one, of "linear" and of `GROWTH`, have no trials of their own. The
  last row may have fewer than `TRIALS`, and then the rate is that of the next trial.
  """
  smallest, first = SIZES[task][0], FIRST[task][kind]
  for size in SIZES[task]:
    found = trials(done, task, kind, size, first)
    scores = {rate: score(task, row) for rate, row in found.items()}
    if len(found) < TRIALS:
      yield kind, size, next_rate(first, scores), found
      return
    first = min(scores, key=lambda rate: scores[rate])
    yield kind, size, first, found
    if size == smallest:
      base = first
      yield from ((rule, size, first, {}) for rule in GROWTH if kind == "adamw")
    elif kind == "sgd":
      yield "linear", size, base * size / smallest, {}


def missing(done: dict[Run, Any], task: str, kind: str) -> Run | None:
  """Return the next run of an optimizer and of the rows that follow from it; None: all are done."""
  for each, size, lr, found in cells(done, task, kind):
    in_tuning = each == kind and len(found) < TRIALS
    for seed in (TUNING_SEED,) if in_tuning else SEEDS:
      if (run := Run(task, each, size, lr, seed)) not in done:
        return run
  return None


def work(keys: SimpleQueue[str], core: int) -> None:
  """Train what is missing of one optimizer on one task after the other, in processes on a core."""
  with contextlib.suppress(Empty):
    while True:
      command = [sys.executable, __file__, f"--core={core}", f"--only={keys.get_nowait()}"]
      subprocess.run(command, check=True)


def train_missing(keys: list[str], core: int) -> None:
  """Train in this process, on one core."""
  os.sched_setaffinity(0, {core})
  cpu_settings.keep_memory()
  data.tfds_images = functools.cache(data.tfds_images)  # decoded once
  for key in keys:
    task, kind = key.split("-")
    while run := missing(read(), task, kind):
      row = train(run)
      print(f"{run}: {row['value']}, {row['seconds']} s", file=sys.stderr, flush=True)


def summary(done: dict[Run, Any], task: str, kind: str, size: int, lr: float) -> dict[str, Any]:
  """Return the row of a table: all seeds of an optimizer, or of a rule, at a batch size."""
  runs = [done[run] for seed in SEEDS if (run := Run(task, kind, size, lr, seed)) in done]
  values = [None if row["value"] == CHANCE[task] else row["value"] for row in runs]
  finite = [value for value in values if value is not None]
  reached = [row["target_step"] for row in runs if row["target_step"]]
  counts = {
    field: round(statistics.fmean(each))
    for field in ("steps", "branch_steps", "branch_examples")
    if (each := [row[field] for row in runs if row.get(field)])
  }
  return {
    "task": task,
    "kind": kind,
    "batch_size": size,
    "lr": lr,
    "values": values,
    "mean": statistics.fmean(finite) if finite else None,
    "spread": statistics.stdev(finite) if len(finite) > 1 else None,
    "target_steps": reached,
    "steps": None,
    **counts,
  }


def rows(done: dict[Run, Any]) -> list[dict[str, Any]]:
  """Return the rows of all tables, without those that are still tuned."""
  made = []
  for task, optimizers in FIRST.items():
    for optimizer in optimizers:
      for kind, size, lr, found in cells(done, task, optimizer):
        if kind == optimizer and len(found) < TRIALS:
          continue
        row = summary(done, task, kind, size, lr)
        if found:
          row["trials"] = {f"{rate:g}": each["value"] for rate, each in sorted(found.items())}
        made.append(row)
  return made


def shown(row: dict[str, Any]) -> str:
  """Format the mean and deviation of a row."""
  times, digits = (100, 2) if row["task"] == "images" else (1, 3)
  diverged = row["values"].count(None)
  parts = [f"{diverged} of {len(row['values'])} diverged"] if diverged else []
  if row["mean"] is not None and not diverged:
    parts = [f"{times * row['mean']:.{digits}f}"]
    parts += [f"± {times * row['spread']:.{digits}f}"] if row["spread"] is not None else []
  return " ".join(parts)


def to_target(row: dict[str, Any]) -> str:
  """Format the steps to the target, and how many runs reach it if not all do."""
  if not row["target_steps"]:
    return "–" if row["values"] else ""
  share = f" ({len(row['target_steps'])} of {len(row['values'])})"
  partly = len(row["target_steps"]) < len(row["values"])
  return f"{statistics.fmean(row['target_steps']):,.0f}{share * partly}"


def branches(row: dict[str, Any], constant: dict[str, Any]) -> str:
  """Format the mean steps and examples in branches; these as a share of the constant run's."""
  if "branch_steps" not in row:
    return ""
  share = row["branch_examples"] / (constant["steps"] * constant["batch_size"])
  return f"{row['branch_steps']:,}, {share:.0%} of the examples"


def tables(found: list[dict[str, Any]]) -> str:
  """Return the tables of docs/large_batch.md in Markdown."""
  by_cell = {(row["task"], row["kind"], row["batch_size"]): row for row in found}
  lines = []
  for task, sizes in SIZES.items():
    for title, text in (("result", shown), ("steps to the target", to_target)):
      lines += ["", f"| {task}: {title} | {' | '.join(f'{size:,}' for size in sizes)} |"]
      lines += ["|---" * (1 + len(sizes)) + "|"]
      for kind, label in LABELS.items():
        each = [by_cell.get((task, kind, size)) for size in sizes]
        lines.append(f"| {label} | {' | '.join(text(row) if row else '' for row in each)} |")
    constant = by_cell.get((task, "adamw", sizes[0]))
    lines += [
      "",
      f"| {task}: AdamW from {sizes[0]} | steps | fewer | and in branches | result |",
      "|---|---|---|---|---|",
    ]
    for kind, label in (("adamw", "constant"), *GROWTH.items()):
      row = by_cell.get((task, kind, sizes[0]))
      if row and row["steps"] and constant:
        fewer = f"{1 - row['steps'] / constant['steps']:.0%}" if row != constant else ""
        lines.append(
          f"| {label} | {row['steps']:,} | {fewer} | {branches(row, constant)} | {shown(row)} |"
        )
  return "\n".join(lines)


@one_line_errors
def main() -> int:
  keys = [f"{task}-{kind}" for task in SIZES for kind in FIRST[task]]
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
  parser.add_argument("--only", default=",".join(keys), help="TASK-OPTIMIZER by commas")
  parser.add_argument("--table", action="store_true", help="report what is there, train nothing")
  parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  keys = args.only.split(",")
  if args.core is not None:
    train_missing(keys, args.core)
    return EXIT_DONE
  if not args.table:
    queue: SimpleQueue[str] = SimpleQueue()
    for key in keys:
      queue.put(key)
    with ThreadPoolExecutor(args.jobs) as pool:
      list(pool.map(work, [queue] * args.jobs, sorted(os.sched_getaffinity(0))[: args.jobs]))
  done = read()
  found = rows(done)
  print(tables(found))
  report(NAME, show=False, trials=TRIALS, tuning_seed=TUNING_SEED, rows=found)
  return EXIT_DONE


if __name__ == "__main__":
  sys.exit(main())
