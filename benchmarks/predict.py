"""Predictions of 100,000 images on two processes: exactness, and speed beside evaluation's.

    .venv/bin/python benchmarks/predict.py

A CNN is trained for 60 steps on synthetic images, of which 100,000 are for validation. Two
processes of one device each then evaluate it and predict all images into a .parquet file, in
turns. `is_exact` compares the accuracy in the file with that of `evaluate`, as fractions of
whole numbers; `ids_once` that the file has each example once and in order. Speeds are images a
second of both processes together, from the first batch to the last, compilation included;
`ratio` is the median over turns of predict / evaluate.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from common import free_address, report

IMAGES, TURNS, PROCESSES = 100_000, 3, 2
SETTINGS = f"""
  data=Synthetic data.num_examples={10 * IMAGES} data.image_size=16 model=CNN model.features=(8,16)
  model.dense=16 epochs=None steps=60 schedule.warmup_epochs=0 batch_size=256 log.plot=False
"""


def command(name: str, *words: str | Path) -> list[str]:
  return [sys.executable, "-m", "jaxscale", name, *map(str, words)]


def together(*words: str | Path) -> float:
  """Run a command as two processes; return the speed that it prints."""
  env = os.environ | {"JAX_PLATFORMS": "cpu", "JAXSCALE_COORDINATOR": free_address()}
  env |= {"JAXSCALE_NUM_PROCESSES": str(PROCESSES)}
  pipe, processes = subprocess.PIPE, []
  for rank in range(PROCESSES):
    own = env | {"JAXSCALE_PROCESS_ID": str(rank)}
    processes.append(subprocess.Popen(command(*map(str, words)), env=own, stdout=pipe, text=True))
  out = [process.communicate()[0] for process in processes]
  assert not any(process.returncode for process in processes), out
  found = re.search(r"done: .*\(([\d,]+) examples/s\)", out[0])
  assert found is not None, out
  return float(found[1].replace(",", ""))


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    run, table, result = (Path(folder, name) for name in ("run", "out.parquet", "result.json"))
    settings = [f"--config.{setting}" for setting in SETTINGS.split()]
    subprocess.run(command("train", "--config", "digits", "--workdir", run, *settings), check=True)
    speeds: dict[str, list[float]] = {"evaluate": [], "predict": []}
    for _ in range(TURNS):
      speeds["evaluate"].append(together("evaluate", run, "--to", result))
      speeds["predict"].append(together("predict", run, "--to", table))
    columns = pq.read_table(table, columns=["id", "label", "target"]).to_pydict()
    right = int(np.equal(columns["label"], columns["target"]).sum())
    accuracy = json.loads(result.read_text())["evaluation"]["accuracy"]
    pairs = zip(speeds["predict"], speeds["evaluate"], strict=True)
    report(
      "predict",
      is_exact=right / IMAGES == accuracy,
      ids_once=columns["id"] == list(range(IMAGES)),
      right=right,
      images=IMAGES,
      processes=PROCESSES,
      ratio=round(statistics.median(a / b for a, b in pairs), 3),
      predict_images_per_s=speeds["predict"],
      evaluate_images_per_s=speeds["evaluate"],
      file_megabytes=round(table.stat().st_size / 1e6, 1),
    )


if __name__ == "__main__":
  main()
