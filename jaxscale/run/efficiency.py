"""How well a run uses its devices: model FLOPs against their peak, and their memory.

    MFU = model FLOPs of an example * examples/s / (devices * peak FLOP/s of one)

as arXiv:2204.02311, appendix B, defines it; `training.flops` counts the model's. HFU,
hardware FLOPs utilization, is the same of the FLOPs that the compiled step has
(`hlo.program_flops`): more where it computes again (remat), less by the
gradient of the input, which nobody needs. The peak is the maker's for dense bfloat16,
whatever dtype the run has; on CPUs, for which there is none, that of NumPy's float32
matrix product, measured when it is first needed, which is not before the first step,
and again where steps exceed it: then other work had the processor.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.experiment import build
from jaxscale.hlo import memory_of, program_flops
from jaxscale.metrics.chips import peak_flops

_SIZE, _ROUNDS = 768, 8  # of the products that measure a peak; the first one warms up


class Peak(NamedTuple):
  """FLOP/s that a device could do.

  Attributes:
    flops: a second.
    source: where the number is from.
  """

  flops: float
  source: str


def find_peak() -> Peak | None:
  """Of a device of this process; on CPUs it is measured, in some 30 ms."""
  device = jax.local_devices()[0]
  if device.platform == "cpu":
    return Peak(_measured_peak(), "measured: NumPy's float32 matrix product")
  flops = peak_flops(device.device_kind)
  if flops is None:
    return None
  return Peak(flops, f"published: {device.device_kind}, bfloat16")


def _measured_peak() -> float:
  """The fastest of a few products; simulated devices share the processor."""
  here = [x for x in jax.live_arrays() if not x.is_deleted()]
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # donated meanwhile
    jax.block_until_ready(here)  # steps in flight would share it too
  x, seconds = np.ones((_SIZE, _SIZE), np.float32), []
  out = np.empty_like(x)
  for _ in range(_ROUNDS):
    began = time.perf_counter()
    np.matmul(x, x, out=out)
    seconds.append(time.perf_counter() - began)
  return 2 * _SIZE**3 / min(seconds) / jax.local_device_count()


class Efficiency:
  """Of a run, window by window."""

  def __init__(self):
    """Nothing is measured so far; without a peak there is never an MFU."""
    self.program: Future[Program | None] = Future()  # of the phase that trains
    self._windows: list[dict[str, float]] = []
    self._peak: Peak | None = None

  def measured(self, experiment: build.Experiment, rate: float) -> dict[str, float]:
    """By the names of `metrics.jsonl`, without their "perf/".

    The first call of a phase traces the model.

    Args:
      experiment: at the phase that trains.
      rate: examples/s of all devices.
    """
    per_device = rate * experiment.example_flops / experiment.mesh.size
    values = {"tflops_per_device": per_device / 1e12} | _memory()
    if per_device and (peak := self._peak_above(per_device)):
      values["mfu"] = per_device / peak.flops
      if program := self._known_program():
        steps = rate / experiment.phase.batch_size
        values["hfu"] = steps * program.flops / peak.flops
    self._windows.append(values)
    return values

  def summary(self) -> dict[str, Any]:
    """For summary.json: medians but for the first window, which has the start."""
    windows = self._windows[1:] or self._windows
    found: dict[str, Any] = {}
    for name in ("mfu", "hfu"):
      if values := [window[name] for window in windows if name in window]:
        found[name] = round(statistics.median(values), 4)
    if "mfu" in found and self._peak:
      found["peak_tflops_per_device"] = round(self._peak.flops / 1e12, 4)
      found["peak_source"] = self._peak.source
    if windows and "peak_memory_gb" in windows[-1]:
      found["peak_memory_gb"] = round(windows[-1]["peak_memory_gb"], 3)
    if program := self._known_program():
      found["program_memory_gb"] = round(program.memory / 1e9, 3)
    return found

  def _peak_above(self, reached: float) -> Peak | None:
    """The peak; a measured one is no lower than what the run has reached."""
    self._peak = self._peak or find_peak()
    is_measured = self._peak and self._peak.source.startswith("measured")
    if is_measured and self._peak and reached > self._peak.flops:
      own = Peak(reached, "measured: the run's fastest steps")
      self._peak = max(own, find_peak() or own, key=lambda peak: peak.flops)
    return self._peak

  def _known_program(self) -> Program | None:
    return self.program.result() if self.program.done() else None


class Program(NamedTuple):
  """What a compiled step says of itself.

  Attributes:
    flops: of a device in a step.
    memory: bytes that a device must have.
  """

  flops: float
  memory: int


def read_program(train_step: Any) -> Program | None:
  """What a train step takes; takes seconds for a large one.

  Args:
    train_step: of `Experiment.compile_train_step`.

  Returns:
    None where this backend's programs say nothing that is known here.
  """
  with contextlib.suppress(Exception):  # a text of any compiler: no run ends for it
    return Program(program_flops(train_step.as_text()), memory_of(train_step).total)
  return None


def _memory() -> dict[str, float]:
  """Of the fullest device of this process, GB; nothing where no one says."""
  found = [s for d in jax.local_devices() if (s := d.memory_stats())] or _resident()
  names = {"bytes_in_use": "memory_gb", "peak_bytes_in_use": "peak_memory_gb"}
  known = {key for key in names if found and all(key in s for s in found)}
  return {names[key]: max(s[key] for s in found) / 1e9 for key in names if key in known}


def _resident() -> list[dict[str, float]]:
  """Memory of the process, of which every simulated device has its share."""
  with contextlib.suppress(OSError):  # Linux alone has it
    status = Path("/proc/self/status").read_text()
    names = {"VmRSS": "bytes_in_use", "VmHWM": "peak_bytes_in_use"}
    sizes = re.findall(r"(\w+):\s+(\d+) kB", status)
    share = 1024 / jax.local_device_count()
    return [{names[k]: share * int(size) for k, size in sizes if k in names}]
  return []
