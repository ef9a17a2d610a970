"""Time to accuracy by MLPerf's protocol: N seeds, drop best and worst, mean.

    jaxscale time-to-accuracy --config FILE --seeds 5

Each run trains to the config's `target_accuracy` and leaves a `:::MLLOG` log,
`result_0.txt` and so on, as MLPerf's own checkers read them.

The rules (mlcommons/training_policies, training_rules.adoc): ResNet is run five
times, the fastest and the slowest are dropped, the mean of the rest counts; a run
that misses counts as the slowest, so one may miss and a second makes the result
void. Reference convergence points: epochs that the reference needs.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale import metrics
from jaxscale.config import Config
from jaxscale.metrics.text import entries_table
from jaxscale.studies import trials
from jaxscale.studies.trials import Outcome, Trial


class Reference(NamedTuple):
  """A reference convergence point of MLPerf's ResNet-50, to 75.9 %.

  Attributes:
    epochs: mean over the reference's runs, best and worst dropped.
    min_epochs: a submission's mean below it is too good to be the same training:
      the t-test of the rules, at 5 %.
  """

  epochs: float
  min_epochs: float


# By batch size: what mlperf-logging 4.1.68 computes from its
# rcp_checker/training_4.0.0/rcps_resnet.json.
REFERENCES = {
  1632: Reference(35.0, 33.802),
  3264: Reference(35.154, 34.310),
  4096: Reference(39.875, 38.634),
  8192: Reference(41.875, 40.634),
  13056: Reference(45.5, 44.677),
  32768: Reference(56.0, 55.445),
  49152: Reference(68.0, 67.215),
  58880: Reference(80.0, 78.969),
  65536: Reference(84.5, 83.356),
  67840: Reference(85.846, 85.183),
}
REFERENCE_TARGET = 0.759


def olympic_mean(values: Sequence[float | None]) -> float | None:
  """Mean without the smallest and the largest; None (missed) counts as the largest.

  Args:
    values: at least three.

  Returns:
    None if a missed run is left among those that count.

  Example:
    >>> olympic_mean([5, 1, 2, 3, None])
    3.3333333333333335
  """
  if (count := len(values)) < 3:
    raise ValueError(f"{count} values: best and worst are dropped, give 3 or more")
  kept = sorted(math.inf if v is None else v for v in values)[1:-1]
  mean = statistics.fmean(kept)
  return None if math.isinf(mean) else mean


def reference(config: Config) -> Reference | None:
  """The reference convergence point that a config can be compared with.

  Between two batch sizes of the table it is interpolated, as the rules have it.

  Args:
    config: MLPerf's if it is ResNet-50 on ImageNet by LARS to 75.9 %.
  """
  is_reference = (
    getattr(config.model, "depth", None) == 50
    and getattr(config.data, "name", None) == "imagenet2012"
    and type(config.optimizer).__name__ == "LARS"
    and config.target_accuracy is not None
    and math.isclose(config.target_accuracy, REFERENCE_TARGET)
  )
  size = config.batch_size
  if not is_reference or not min(REFERENCES) <= size <= max(REFERENCES):
    return None
  columns = zip(*REFERENCES.values(), strict=True)
  return Reference(*(float(np.interp(size, [*REFERENCES], y)) for y in columns))


def make_trials(config: Config, workdir: Path, seeds: int) -> list[Trial]:
  """One trial per seed.

  Raises:
    ConfigError: the config has no target.
  """
  log = dataclasses.replace(config.log, mllog=True)
  return trials.make(config, workdir, seeds, log=log)


def summarise(
  config: Config, outcomes: Sequence[Outcome], title: str
) -> dict[str, Any]:
  """The result as JSON."""
  steps, epochs, seconds = (
    olympic_mean([getattr(o, f"target_{unit}") for o in outcomes])
    for unit in ("step", "epochs", "seconds")
  )
  if any(o.target_seconds is None for o in outcomes if o.target_step is not None):
    seconds = None
  point = reference(config)
  return {
    "title": title,
    "target_accuracy": config.target_accuracy,
    "batch_size": config.batch_size,
    "runs": [o.as_dict() for o in outcomes],
    "reached": sum(o.status == "reached" for o in outcomes),
    "valid": steps is not None,
    "steps": steps,
    "epochs": epochs,
    "seconds": seconds,
    "reference": None if point is None else point._asdict(),
    "faster_than_reference": epochs < point.min_epochs if point and epochs else None,
  }


_COLUMNS = {
  "seed": ("seed", ""), "outcome": ("status", ""), "steps": ("target_step", ","),
  "epochs": ("target_epochs", ".2f"), "seconds": ("target_seconds", ".1f"),
  "held-out": ("accuracy", ".2%"),
}  # fmt: skip


def table(result: dict[str, Any]) -> str:
  """The result for a terminal: one line per run, then the result."""
  count, reached = len(result["runs"]), result["reached"]
  title = f"{result['title']}: to {result['target_accuracy']:.2%} at batch "
  title += f"{result['batch_size']:,}, {reached} of {count} reached"
  lines = [title, entries_table(result["runs"], _COLUMNS)]
  if not result["valid"]:
    return "\n".join([*lines, f"no result: {count - reached} runs missed, one may"])
  seconds = "time unknown, a run was interrupted"
  if result["seconds"] is not None:
    seconds = f"{result['seconds']:.1f} s"
  steps, epochs = f"{result['steps']:,.1f} steps", f"{result['epochs']:.2f} epochs"
  lines.append(f"without best and worst: {steps}, {epochs}, {seconds}")
  if point := result["reference"]:
    text = "this is not faster than its runs scatter"
    if result["faster_than_reference"]:
      text = f"fewer than {point['min_epochs']:.1f} would not pass as the same training"
    lines.append(f"MLPerf's reference needs {point['epochs']:.1f} epochs; {text}")
  return "\n".join(lines)


def collect_logs(made: Sequence[Trial], workdir: Path) -> list[Path]:
  """Each run's `:::MLLOG` lines as `result_<i>.txt`; made from its record if need be.

  A run that diverged before its first evaluation has nothing to say.
  """
  paths = []
  for i, trial in enumerate(made):
    log = trial.workdir / "mllog.txt"
    if log.exists() or metrics.log_from_record(trial.workdir):
      paths.append(workdir / f"result_{i}.txt")
      shutil.copyfile(log, paths[-1])
  return paths


def study(title: str, config: Config, workdir: Path, *, seeds: int = 5) -> trials.Page:
  """Train each seed; returns what process 0 writes and prints at the end.

  Args:
    title: of the table.
    config: see `make_trials`.
    workdir: of the study.
    seeds: runs, at least three.
  """
  made = make_trials(config, workdir, seeds)
  result = summarise(config, trials.run_trials(made), title)

  def page() -> str:
    metrics.write_json(workdir / "time_to_accuracy.json", result)
    count = len(collect_logs(made, workdir))
    logs = f"{count} logs in MLPerf's format: result_<i>.txt"
    return f"{table(result)}\nsee {workdir}; {logs}"

  return page
