"""How well a run uses its devices: model FLOPs against their peak, and their memory.

    MFU = model FLOPs of an example * examples/s / (devices * peak FLOP/s of one)

as arXiv:2204.02311, appendix B, defines it; `training.flops` counts the model's. The
peak is the maker's for dense bfloat16, whatever dtype the run has; on CPUs, for which
there is none, that of NumPy's float32 matrix product, measured when the run starts.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.experiment import build
from jaxscale.metrics.chips import peak_flops

_SIZE, _ROUNDS = 768, 4  # of the products that measure a peak; the first one warms up


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
  x, seconds = np.ones((_SIZE, _SIZE), np.float32), []
  out = np.empty_like(x)
  for _ in range(_ROUNDS):
    began = time.perf_counter()
    np.matmul(x, x, out=out)
    seconds.append(time.perf_counter() - began)
  return 2 * _SIZE**3 / min(seconds) / jax.local_device_count()


class Efficiency:
  """Of a run, window by window."""

  def __init__(self, peak: Peak | None):
    """Nothing is measured so far; without a peak there is never an MFU."""
    self.peak = peak
    self._found: list[float] = []

  def full_rate(self, experiment: build.Experiment) -> float | None:
    """Examples/s of all devices at their peak; None where that is not known.

    The first call of a phase traces the model.
    """
    if self.peak is None or not experiment.example_flops:
      return None
    return experiment.mesh.size * self.peak.flops / experiment.example_flops

  def measured(self, experiment: build.Experiment, rate: float) -> dict[str, float]:
    """By the names of `metrics.jsonl`, without their "perf/".

    Args:
      experiment: at the phase that trains.
      rate: examples/s of all devices.
    """
    per_device = rate * experiment.example_flops / experiment.mesh.size
    values = {"tflops_per_device": per_device / 1e12} | _memory()
    if full := self.full_rate(experiment):
      values["mfu"] = rate / full
      self._found.append(rate / full)
    return values

  def summary(self) -> dict[str, Any]:
    """For summary.json: the median but for the first window, which has the start."""
    if not self._found or self.peak is None:
      return {}
    median = statistics.median(self._found[1:] or self._found)
    return {
      "mfu": round(median, 4),
      "peak_tflops_per_device": round(self.peak.flops / 1e12, 4),
      "peak_source": self.peak.source,
    }


def _memory() -> dict[str, float]:
  """Of the fullest device of this process; nothing where the platform does not say."""
  stats = [s for d in jax.local_devices() if (s := d.memory_stats())]
  names = {"bytes_in_use": "memory_gb", "peak_bytes_in_use": "peak_memory_gb"}
  return {
    name: max(s[key] for s in stats) / 1e9
    for key, name in names.items()
    if stats and all(key in s for s in stats)
  }
