"""A text file for the textfile collector of Prometheus' node_exporter.

Format: Prometheus, exposition formats, text format 0.0.4. Names follow its naming
practices: a prefix, base units as the suffix, no dimension in a name. The collector
reads `*.prom` and takes no timestamps (prometheus/node_exporter#769).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from pathlib import Path

from jaxscale.files import replace_text
from jaxscale.metrics.tracking import Tracker

# Ends of our names, in Prometheus' base units: (its end, factor).
_UNITS = {
  "_per_s": ("_per_second", 1.0),
  "_s": ("_seconds", 1.0),
  "_gb": ("_bytes", 1e9),
  "tflops_per_device": ("flops_per_device", 1e12),
}
_OF_PARAMETERS = ("trust_ratio",)  # what follows the slash is a label


def prometheus_file(directory: Path, run: str) -> Tracker:
  """A tracker that keeps `directory/jaxscale_RUN.prom` at the newest values.

  The file is replaced as a whole, and is gone when the run has ended.

  Args:
    directory: of the collector.
    run: in the file's name, and the label of every value.
  """
  path, newest = directory / f"jaxscale_{run}.prom", {}

  def log(step: int, time: float, values: dict[str, float]) -> None:
    newest.update(values)
    replace_text(path, exposition(newest, step, time, run))

  def finish(outcome: str) -> None:
    del outcome
    with contextlib.suppress(FileNotFoundError):
      path.unlink()

  return Tracker(log, finish)


def exposition(values: Mapping[str, float], step: int, time: float, run: str) -> str:
  """Values as gauges in Prometheus' text format.

  The step is a value of its own: as a label it would begin a new time series with
  every line.

  Args:
    values: by name, as in metrics.jsonl.
    step: of the newest.
    time: of the newest, in seconds since the epoch.
    run: the label `run` of each.

  Example:
    >>> print(exposition({"perf/step_s": 0.5}, 7, 1e9, "digits-1"), end="")
    # HELP jaxscale_step Steps of training that are done.
    # TYPE jaxscale_step gauge
    jaxscale_step{run="digits-1"} 7
    # HELP jaxscale_last_log_timestamp_seconds When the newest values were logged.
    # TYPE jaxscale_last_log_timestamp_seconds gauge
    jaxscale_last_log_timestamp_seconds{run="digits-1"} 1000000000.0
    # HELP jaxscale_perf_step_seconds perf/step_s of jaxscale.
    # TYPE jaxscale_perf_step_seconds gauge
    jaxscale_perf_step_seconds{run="digits-1"} 0.5
  """
  label = f'run="{_escaped(run)}"'
  families = {
    "jaxscale_step": ("Steps of training that are done.", {label: step}),
    "jaxscale_last_log_timestamp_seconds": (
      "When the newest values were logged.", {label: time}
    ),
  }  # fmt: skip
  for name, value in values.items():
    prefix, _, rest = name.partition("/")
    labels, about = label, name
    if prefix in _OF_PARAMETERS:
      labels, about = f'{label},parameter="{_escaped(rest)}"', prefix
    metric, factor = _metric(about)
    help_ = f"{about} of jaxscale.".replace("\\", "\\\\").replace("\n", "\\n")
    # Two of our names may become one there, of which a file has only one value.
    families.setdefault(metric, (help_, {}))[1][labels] = factor * value
  lines = []
  for metric, (help_, samples) in families.items():
    lines += [f"# HELP {metric} {help_}", f"# TYPE {metric} gauge"]
    lines += [f"{metric}{{{labels}}} {_number(x)}" for labels, x in samples.items()]
  return "\n".join(lines) + "\n"


def _metric(name: str) -> tuple[str, float]:
  """The metric for a name of ours, and what its values are multiplied by."""
  factor = 1.0
  for end, (theirs, scale) in _UNITS.items():
    if name.endswith(end):
      name, factor = name.removesuffix(end) + theirs, scale
      break
  return "jaxscale_" + re.sub(r"\W", "_", name, flags=re.ASCII), factor


def _escaped(label: str) -> str:
  return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(x: float) -> str:
  if math.isfinite(x):
    return repr(x)
  return "NaN" if math.isnan(x) else "+Inf" if x > 0 else "-Inf"
