"""Device efficiency of a run: model FLOPs utilization (MFU), HFU and memory.

    MFU = model FLOPs of an example * examples/s / (devices * peak FLOP/s of one)

as arXiv:2204.02311, appendix B, defines it; `training.flops` counts the model's FLOPs.
HFU, hardware FLOPs utilization, uses the FLOPs of the compiled step instead
(`hlo.program_flops`). HFU counts recomputed activations (remat) and leaves out the
gradient with respect to the input. The peak is the vendor's figure for dense bfloat16,
whatever dtype the run uses. CPUs have no such figure, so their runs report no MFU.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale.experiment import build
from jaxscale.hlo import memory_of, program_flops
from jaxscale.metrics.chips import peak_flops


def find_peak() -> float | None:
  """Return the published FLOP/s of this process's devices; None for CPUs and unknown chips."""
  return peak_flops(jax.local_devices()[0].device_kind)


class Efficiency:
  """Device efficiency of a run, one record per window between logged steps."""

  def __init__(self):
    """Start without any window."""
    self.program: Future[Program | None] = Future()  # the step of the current phase
    self._windows: list[dict[str, float]] = []
    self._peak = find_peak()

  def measured(self, experiment: build.Experiment, rate: float) -> dict[str, float]:
    """Return the efficiency of a window, by names in `metrics.jsonl` without "perf/".

    The first call of a phase traces the model.

    Args:
      experiment: the experiment at the current phase.
      rate: the examples per second over all devices.
    """
    per_device = rate * experiment.example_flops / experiment.mesh.size
    values = {"tflops_per_device": per_device / 1e12} | _memory()
    if per_device and (peak := self._peak):
      values["mfu"] = per_device / peak
      if program := self._known_program():
        values["hfu"] = rate / experiment.phase.batch_size * program.flops / peak
    self._windows.append(values)
    return values

  def summary(self) -> dict[str, Any]:
    """Return the medians for summary.json, without the first window, which has the start."""
    windows = self._windows[1:] or self._windows
    result: dict[str, Any] = {}
    for name in ("mfu", "hfu"):
      if values := [window[name] for window in windows if name in window]:
        result[name] = round(statistics.median(values), 4)
    if "mfu" in result and self._peak:
      result["peak_tflops_per_device"] = round(self._peak / 1e12, 4)
      result["peak_source"] = f"published: {jax.local_devices()[0].device_kind}, bfloat16"
    if windows and "peak_memory_gb" in windows[-1]:
      result["peak_memory_gb"] = round(windows[-1]["peak_memory_gb"], 3)
    if program := self._known_program():
      result["program_memory_gb"] = round(program.memory / 1e9, 3)
    return result

  def _known_program(self) -> Program | None:
    return self.program.result() if self.program.done() else None


class Program(NamedTuple):
  """Cost of a compiled train step.

  Attributes:
    flops: the FLOPs per device and step.
    memory: the bytes of memory that a device needs.
  """

  flops: float
  memory: int


def read_program(train_step: Any) -> Program | None:
  """Read the cost of a compiled train step, which takes seconds for a large one.

  Args:
    train_step: the result of `Experiment.compile_train_step`.

  Returns:
    The cost, or None if the text of this backend's program cannot be parsed.
  """
  # The text may come from any compiler, and a parsing error must not end a run.
  with contextlib.suppress(Exception):
    return Program(program_flops(train_step.as_text()), memory_of(train_step).total)
  return None


def _memory() -> dict[str, float]:
  """Return the memory of this process's fullest device in GB; empty if unknown."""
  stats = [s for d in jax.local_devices() if (s := d.memory_stats())] or [_resident()]
  names = {"memory_gb": "bytes_in_use", "peak_memory_gb": "peak_bytes_in_use"}
  known = {name: key for name, key in names.items() if all(key in s for s in stats)}
  return {name: max(s[key] for s in stats) / 1e9 for name, key in known.items()}


def _resident() -> dict[str, float]:
  """Return this process's memory, divided equally between its simulated devices."""
  with contextlib.suppress(OSError):  # Only Linux has /proc.
    names = {"VmRSS": "bytes_in_use", "VmHWM": "peak_bytes_in_use"}
    sizes = re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text())
    share = 1024 / jax.local_device_count()
    return {names[k]: share * int(size) for k, size in sizes if k in names}
  return {}
