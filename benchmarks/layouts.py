"""One training under several layouts: a table and a picture of docs/parallelism.md.

    python benchmarks/layouts.py                       (after `make fashion_mnist`)

Trains configs/text.py and configs/vit_fashion_mnist.py for some 200 steps on 8
simulated devices, by the command that a user types, once a layout, in float32, in
runs/layouts/; runs that are done are not repeated. Plain data parallelism on 4 devices
is the reference: what another order of additions alone does. Keeps the curves in
benchmarks/results/layouts.json, draws docs/layouts.png and prints a table.

A difference is that of a layout to the first one, in the training loss of each step
and, at the end, in the parameters: norm of the difference by the norm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from common import report
from layouts_plot import draw

from jaxscale.checkpoint import checkpoint_files
from jaxscale.checkpoint import directory as checkpoint_dir
from jaxscale.errors import EXIT_DONE, one_line_errors
from jaxscale.metrics.reading import read_json_lines

FOLDER = Path("runs/layouts")


class Run(NamedTuple):
  """A training run: its name, its number of devices and a note."""

  label: str
  settings: tuple[str, ...]
  devices: int = 8


class Study(NamedTuple):
  """A config, the settings of all its runs, and the runs; the first one is the reference."""

  name: str
  title: str
  config: str
  settings: tuple[str, ...]
  runs: tuple[Run, ...]


REPLICATED = Run("replicated, data 8", ())
FOUR = Run("replicated, data 4 (4 devices)", (), devices=4)
FSDP = "layout.shard=fsdp"
STUDIES = (
  Study(
    "text",
    "Language model of bytes",
    "configs/text.py",
    ("epochs=0.4",),
    (
      REPLICATED,
      Run("FSDP 2 x model 4", ("mesh.data=1", "mesh.fsdp=2", "mesh.model=4", FSDP)),
      Run("data 4 x stage 2, 1F1B", ("mesh.stage=2", "layout.schedule=1f1b", "accumulate_steps=4")),
      Run("data 2 x ring attention 4", ("mesh.model=4", "layout.model=ring")),
      FOUR,
    ),
  ),
  Study(
    "vit",
    "ViT on Fashion-MNIST",
    "configs/vit_fashion_mnist.py",
    ("epochs=0.45", "batch_size=128", "schedule.warmup_epochs=0.1"),
    (
      REPLICATED,
      Run("FSDP 8", ("mesh.data=1", "mesh.fsdp=8", FSDP)),
      Run("data 2 x FSDP 2 x model 2", ("mesh.data=2", "mesh.fsdp=2", "mesh.model=2", FSDP)),
      FOUR,
    ),
  ),
)


def workdir(study: Study, run: Run) -> Path:
  return FOLDER / "-".join([study.name, *re.findall(r"\w+", run.label.lower())])


def train(study: Study, run: Run) -> None:
  """Run the command line, unless the run is complete already."""
  summary = workdir(study, run) / "summary.json"
  if summary.exists() and json.loads(summary.read_text())["outcome"] == "done":
    return
  every = ("log.every_steps=1", "log.tensorboard=False", "evaluation.every_epochs=99")
  command = [
    *(sys.executable, "-m", "jaxscale.train", "--config", study.config),
    *("--workdir", str(workdir(study, run))),
    *(f"--config.{setting}" for setting in (*study.settings, *run.settings, *every)),
  ]
  print(" ".join(["python", *command[1:]]), flush=True)
  env = os.environ | {"JAX_NUM_CPU_DEVICES": str(run.devices)}
  subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)


def parameters(directory: Path) -> dict[str, np.ndarray]:
  """Return the whole parameters of the newest checkpoint, however they were split."""
  folder = (directory / "checkpoints").absolute()
  saved = folder / str(checkpoint_dir.steps(folder)[-1])
  read = checkpoint_files.leaf_reader(saved)
  names = checkpoint_files.read_manifest(saved)["leaves"]
  return {name: read(name) for name in names if name.startswith("params/")}


def distance(ours: dict[str, np.ndarray], first: dict[str, np.ndarray]) -> float:
  """Return the norm of the difference of all parameters, divided by the norm of the first."""
  assert ours.keys() == first.keys()
  square = sum(np.sum((ours[k].astype(np.float64) - first[k]) ** 2) for k in first)
  norm = sum(np.sum(first[k].astype(np.float64) ** 2) for k in first)
  return float(np.sqrt(square / norm))


def curves(study: Study) -> dict:
  """Return the recorded losses of a study's runs, compared with the first run."""
  first, rows = study.runs[0], []
  params = parameters(workdir(study, first))
  for run in study.runs:
    lines = read_json_lines(workdir(study, run) / "metrics.jsonl")
    loss = {x["step"]: x["train/loss"] for x in lines if "train/loss" in x}
    summary = json.loads((workdir(study, run) / "summary.json").read_text())
    assert list(loss) == list(range(1, summary["step"] + 1)), run.label
    moved = distance(parameters(workdir(study, run)), params)
    rows.append(
      {"label": run.label, "settings": run.settings, "devices": run.devices}
      | {k: summary[k] for k in ("loss", "accuracy", "bits_per_byte") if k in summary}
      | {"parameters": float(f"{moved:.3g}"), "train_loss": list(loss.values())}
    )
  return {"title": study.title, "config": study.config, "settings": study.settings, "rows": rows}


def differences(row: dict, first: dict) -> list[float]:
  """Return the relative differences of the training losses from the first run, by step."""
  pairs = zip(row["train_loss"], first["train_loss"], strict=True)
  return [abs(a - b) / b for a, b in pairs]


def markdown(studies: list[dict]) -> str:
  """Return the Markdown table of docs/parallelism.md."""
  lines = [
    "| model | layout | held-out | loss: first 10 steps | first 100 | all | parameters, end |",
    "|---|---|---|---|---|---|---|",
  ]
  for study in studies:
    for row in study["rows"]:
      held_out = (
        f"{row['bits_per_byte']:.4f} bits/byte"
        if "bits_per_byte" in row
        else f"{row['accuracy']:.2%}"
      )
      far = differences(row, study["rows"][0])
      cells = [f"{max(far[:n]):.0e}" for n in (10, 100, len(far))]
      cells = [*cells, f"{row['parameters']:.0e}"] if any(far) else ["", "", "", ""]
      cells = [study["title"], row["label"], held_out, *cells]
      lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


@one_line_errors
def main() -> int:
  for study in STUDIES:
    for run in study.runs:
      train(study, run)
  studies = [curves(study) for study in STUDIES]
  report("layouts", studies=studies)
  draw(studies, Path("docs/layouts.png"))
  print(markdown(studies))
  return EXIT_DONE


if __name__ == "__main__":
  sys.exit(main())
