"""The compiled step's program as text, in the workdir."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxscale.experiment import build
from jaxscale.files import replace_text
from jaxscale.training.step import TrainStep

FOLDER = "hlo"  # in the workdir


def dump_hlo(
  workdir: Path,
  experiment: build.Experiment,
  train_step: TrainStep,
  say: Callable[[str], None],
) -> None:
  """Write what JAX gave to XLA (StableHLO), and what XLA made of it.

  `hlo/phase_0.stablehlo.txt` and `hlo/phase_0.optimized.txt`, of the phase of batch
  size that `experiment` is at. `hlo` reads the second one.

  Args:
    workdir: of the run.
    experiment: lowered once more, which costs the time to trace it.
    train_step: its compiled step.
    say: called with the line of an error; the run continues.
  """
  folder, name = workdir / FOLDER, f"phase_{experiment.phase.ordinal}"
  compiled: Any = train_step
  try:
    folder.mkdir(exist_ok=True)
    stable = experiment.lower_train_step().as_text()
    replace_text(folder / f"{name}.stablehlo.txt", stable)
    replace_text(folder / f"{name}.optimized.txt", compiled.as_text())
  except OSError as e:
    say(f"log.dump_hlo: {e.filename or folder}: {e.strerror}; the program is not there")
