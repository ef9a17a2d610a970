"""Micro-batches of a run that resumes on another number of devices.

Batch and order of examples are the run's, whatever it runs on. What is left to
choose is how many micro-batches a device works through: on fewer devices so many
that none holds more examples at a time than when the run began, which had memory
for just that. Where they are as many as then, each micro-batch has the very rows
that a device had: row i of the batch is in micro-batch i // rows, counted over
devices and then over a device's micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxscale import config as cfg
from jaxscale.errors import ConfigError
from jaxscale.experiment.phases import Phase
from jaxscale.mesh import batch_norm_span, mesh_shape
from jaxscale.metrics.text import listed, plural


def micro_batches(
  batch_size: int,
  asked: int,
  num_devices: int,
  start_devices: int,
  keeps: Callable[[int], bool] = lambda micros: True,
) -> int | None:
  """How many micro-batches a step has; None: the batch cannot be divided.

  On as many devices as at the start, or more, those asked for. On fewer, the
  smallest number, of at least as many, that lets no device hold more examples at a
  time than at the start; if `keeps` allows none such, the largest that it allows.

  Args:
    batch_size: examples per step.
    asked: the setting.
    num_devices: there are now.
    start_devices: there were when the run began.
    keeps: micro-batches -> whether a step keeps its meaning.

  Example:
    >>> micro_batches(1024, 1, num_devices=8, start_devices=16)
    2
    >>> micro_batches(96, 1, num_devices=3, start_devices=8)  # 8 rows each, 12 then
    4
  """
  rows, rest = divmod(batch_size, num_devices)
  if rest:
    return None
  fitting = [n for n in _divisors(rows) if n >= asked and keeps(n)]
  if num_devices >= start_devices:
    return asked if asked in fitting else None
  most = batch_size // (start_devices * asked)
  small = [n for n in fitting if rows // n <= most]
  return small[0] if small else max(fitting, default=None)


def over_devices(
  config: cfg.Config, phases: Sequence[Phase], num_blocks: int, start_blocks: int
) -> tuple[Phase, ...]:
  """The phases, as asked for, with the micro-batches that a step has here.

  Args:
    config: says what is to stay as it was.
    phases: whose batches divide over `start_blocks`.
    num_blocks: parts that devices split the rows in now.
    start_blocks: when the run began.

  Raises:
    ConfigError: a batch cannot be divided; it says over how many devices it can.
  """
  if num_blocks == start_blocks:
    return tuple(phases)
  span = bn_span_of(config) or "device"

  def keeps(phase: Phase, devices: int, micros: int) -> bool:
    if config.noise_scale and devices * micros == 1:
      return False
    if span == "global":  # its statistics are over a micro-batch of all devices
      return micros == phase.accumulate_steps
    rows = phase.batch_size // (devices * micros)
    try:
      grid = dataclasses.asdict(config.mesh) | {"stage": 1, "model": 1}
      shape = mesh_shape(devices, **grid)
      batch_norm_span(span, rows, replica=shape.replica, data=shape.data * shape.fsdp)
    except ConfigError:
      return False
    return True

  def here(phase: Phase, devices: int) -> int | None:
    sizes = phase.batch_size, phase.accumulate_steps, devices, start_blocks
    return micro_batches(*sizes, lambda n: keeps(phase, devices, n))

  found = [here(phase, num_blocks) for phase in phases]
  if None not in found:
    made = zip(phases, found, strict=True)
    return tuple(s._replace(accumulate_steps=n) for s, n in made if n is not None)
  phase = phases[found.index(None)]
  most = max(num_blocks, start_blocks)
  do = [n for n in range(1, most + 1) if all(here(s, n) is not None for s in phases)]
  wrong = "does not divide over"
  if phase.batch_size % (num_blocks * phase.accumulate_steps) == 0:
    wrong = "with BatchNorm's statistics and noise scale kept, cannot be divided over"
  elif num_blocks > start_blocks and phase.accumulate_steps > 1:
    wrong = f"in {phase.accumulate_steps} micro-batches, {wrong}"
  raise ConfigError(
    f"batch_size={phase.batch_size}: {wrong} {plural(num_blocks, 'device')}, and a "
    f"run resumes with the batch that it began with, on {start_blocks}; give it "
    f"{_nearest(do, num_blocks)} devices, or another --workdir"
  )


def bn_span_of(config: cfg.Config) -> Any:
  """Return the model's `bn_span`; None: the model has no BatchNorm."""
  return config.model.bn_span if config.model.batch_norm else None


def _nearest(numbers: Iterable[int], near: int) -> str:
  """The six numbers that are nearest by ratio, in order."""
  nearest = sorted(numbers, key=lambda n: max(n / near, near / n))[:6]
  return listed(sorted(nearest), "or")


def _divisors(number: int) -> list[int]:
  """Divisors of a number, rising."""
  low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
  return sorted({*low, *(number // n for n in low)})
