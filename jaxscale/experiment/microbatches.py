"""Micro-batches of a run that resumes on a different number of devices.

The batch size and the order of examples do not depend on the devices. On fewer devices, a
step has so many micro-batches that no device holds more examples at a time than at the
start of the run, when they fit into memory. If the micro-batch size stays the same, each
micro-batch has the rows that a device had before: row i of the batch is in micro-batch
i // rows, counted over devices and then over a device's micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxscale import config as cfg
from jaxscale.errors import ConfigError, invalid
from jaxscale.experiment.phases import Phase
from jaxscale.mesh import batch_norm_span, mesh_shape
from jaxscale.metrics.text import listed, plural


def micro_batches(
  batch_size: int,
  asked: int,
  num_devices: int,
  start_devices: int,
  keeps: Callable[[int], bool] = lambda num_microbatches: True,
) -> int | None:
  """Return the number of micro-batches per step; None if the batch is not divisible.

  With at least as many devices as at the start, the result is `asked`. With fewer devices, it
  is the smallest number, at least `asked`, with which no device holds more examples at a
  time than at the start. If `keeps` allows no such number, the largest allowed one is used.

  Args:
    batch_size: examples per step.
    asked: number of micro-batches in the settings.
    num_devices: current number of devices.
    start_devices: number of devices when the run started.
    keeps: number of micro-batches -> whether the results of a step stay the same.

  Example:
    >>> micro_batches(1024, 1, num_devices=8, start_devices=16)
    2
    >>> micro_batches(96, 1, num_devices=3, start_devices=8)  # 8 rows at a time, at the start 12
    4
  """
  rows, rest = divmod(batch_size, num_devices)
  if rest:
    return None
  fitting = [n for n in _divisors(rows) if n >= asked and keeps(n)]
  if num_devices >= start_devices:
    return asked if asked in fitting else None
  small = [n for n in fitting if rows // n <= batch_size // (start_devices * asked)]
  return small[0] if small else max(fitting, default=None)


def over_devices(
  config: cfg.Config, phases: Sequence[Phase], num_blocks: int, start_blocks: int
) -> tuple[Phase, ...]:
  """Return the phases with the number of micro-batches for the current devices.

  Args:
    config: the config, for the BatchNorm span and the noise scale, which must not change.
    phases: phases whose batches are divisible by `start_blocks`.
    num_blocks: number of parts into which devices now split the rows.
    start_blocks: number of parts when the run started.

  Raises:
    ConfigError: a batch cannot be divided; the error lists possible numbers of devices.
  """
  if num_blocks == start_blocks:
    return tuple(phases)
  span = bn_span_of(config) or "device"

  def keeps(phase: Phase, devices: int, num_microbatches: int) -> bool:
    if config.noise_scale and devices * num_microbatches == 1:
      return False
    if span == "global":  # statistics cover a micro-batch of all devices
      return num_microbatches == phase.accumulate_steps
    rows = phase.batch_size // (devices * num_microbatches)
    try:
      shape = mesh_shape(devices, **dataclasses.asdict(config.mesh) | {"stage": 1, "model": 1})
      batch_norm_span(span, rows, replica=shape.replica, data=shape.data * shape.fsdp)
    except ConfigError:
      return False
    return True

  def here(phase: Phase, devices: int) -> int | None:
    sizes = phase.batch_size, phase.accumulate_steps, devices, start_blocks
    return micro_batches(*sizes, lambda n: keeps(phase, devices, n))

  counts = [here(phase, num_blocks) for phase in phases]
  if None not in counts:
    pairs = zip(phases, counts, strict=True)
    return tuple(s._replace(accumulate_steps=n) for s, n in pairs if n is not None)
  phase = phases[counts.index(None)]
  most = max(num_blocks, start_blocks)
  do = [n for n in range(1, most + 1) if all(here(s, n) is not None for s in phases)]
  wrong = "cannot be divided over"
  if phase.batch_size % (num_blocks * phase.accumulate_steps) == 0:
    wrong = "with the same BatchNorm statistics and noise scale cannot be divided over"
  elif num_blocks > start_blocks and phase.accumulate_steps > 1:
    wrong = f"in {phase.accumulate_steps} micro-batches {wrong}"
  problem = f"{wrong} {plural(num_blocks, 'device')}, and a resumed run keeps the batch size "
  problem += f"with which it started, on {start_blocks}"
  fix = f"use {_nearest(do, num_blocks)} devices, or a different --workdir"
  raise invalid("batch_size", phase.batch_size, problem, fix)


def bn_span_of(config: cfg.Config) -> Any:
  """Return the model's `bn_span`; None if the model has no BatchNorm."""
  return config.model.bn_span if config.model.batch_norm else None


def _nearest(numbers: Iterable[int], near: int) -> str:
  """Format the six numbers that are nearest by ratio, in ascending order."""
  nearest = sorted(numbers, key=lambda n: max(n / near, near / n))[:6]
  return listed(sorted(nearest), "or")


def _divisors(number: int) -> list[int]:
  """Return the divisors of a number in ascending order."""
  low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
  return sorted({*low, *(number // n for n in low)})
