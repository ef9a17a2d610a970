"""The record of a run: `metrics.jsonl`, and TensorBoard's event files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
  """Replace a JSON file as a whole: a reader sees the old one or the new one."""
  scratch = path.with_name(path.name + ".tmp")
  scratch.write_text(json.dumps(value, indent=2) + "\n")
  os.replace(scratch, path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
  """The lines of a `metrics.jsonl`; one that a kill cut short is left out."""
  lines = []
  if path.exists():
    for line in path.read_text().splitlines():
      try:
        lines.append(json.loads(line))
      except json.JSONDecodeError:
        continue
  return lines


class MetricWriter:
  """Appends metrics to `workdir/metrics.jsonl` and to event files."""

  def __init__(self, workdir: Path, *, start: int = 0, tensorboard: bool = True):
    """Go on with the record after step `start`, dropping what came later.

    A run that was killed may have logged steps beyond its last checkpoint;
    they will be done, and logged, again.

    Args:
      workdir: where the files are.
      start: the step that the run goes on from.
      tensorboard: also write event files, into `workdir/tensorboard`.
    """
    path = workdir / "metrics.jsonl"
    kept = [line for line in read_metrics(path) if line["step"] <= start]
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(scratch, path)
    self._file = path.open("a")
    self._tensorboard_dir = workdir / "tensorboard" if tensorboard else None
    self._start = start
    self._events: Any = None

  def write(self, step: int, metrics: dict[str, float]) -> None:
    """One line: the step, the metrics, and seconds since the epoch."""
    line = {"step": step, **metrics, "time": round(time.time(), 3)}
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()
    if self._tensorboard_dir is None:
      return
    if self._events is None:
      # Here and not at the top: it takes 0.25 s, and the first step comes first.
      from tensorboardX import SummaryWriter

      # purge_step tells TensorBoard to forget what a killed run logged later.
      purge = self._start + 1 if self._start else None
      self._events = SummaryWriter(str(self._tensorboard_dir), purge_step=purge)
    for name, value in metrics.items():
      self._events.add_scalar(name, value, step)

  def close(self) -> None:
    """Flush and close the files."""
    self._file.close()
    if self._events is not None:
      self._events.close()
