"""Micro-batches of a run that resumes on another number of devices.

Batch and order of examples are the run's, whatever it runs on. What is left to
choose is how many micro-batches a device works through: on fewer devices so many
that none holds more examples at a time than when the run began, which had memory
for just that. Where they are as many as then, each micro-batch has the very rows
that a device had: row i of the batch is in micro-batch i // rows, counted over
devices and then over a device's micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from jaxscale.errors import ConfigError
from jaxscale.experiment.phases import Phase
from jaxscale.metrics.text import listed, plural

# (a phase as asked for, devices, micro-batches) -> whether a step keeps its meaning
Keeps = Callable[[Phase, int, int], bool]


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
  phases: Sequence[Phase], num_devices: int, start_devices: int, keeps: Keeps
) -> tuple[Phase, ...]:
  """The phases with the micro-batches that a step has on so many devices.

  Args:
    phases: as asked for; their batches divide over `start_devices`.
    num_devices: there are now.
    start_devices: there were when the run began.
    keeps: whether a step keeps its meaning.

  Raises:
    ConfigError: a batch cannot be divided; it says over how many devices it can.

  Example:
    >>> phase = Phase(0, 10, 0, 64, 1, None)
    >>> [s.accumulate_steps for s in over_devices(
    ...   [phase], 2, 8, lambda phase, devices, micros: True)]
    [4]
  """

  def here(phase: Phase, devices: int) -> int | None:
    size, asked = phase.batch_size, phase.accumulate_steps
    return micro_batches(
      size, asked, devices, start_devices, lambda n: keeps(phase, devices, n)
    )

  found = [here(phase, num_devices) for phase in phases]
  if None not in found:
    made = zip(phases, found, strict=True)
    return tuple(s._replace(accumulate_steps=n) for s, n in made if n is not None)
  phase = phases[found.index(None)]
  most = max(num_devices, start_devices)
  do = [n for n in range(1, most + 1) if all(here(s, n) is not None for s in phases)]
  wrong = "does not divide over"
  if phase.batch_size % (num_devices * phase.accumulate_steps) == 0:
    wrong = "with BatchNorm's statistics and noise scale kept, cannot be divided over"
  elif num_devices > start_devices and phase.accumulate_steps > 1:
    wrong = f"in {phase.accumulate_steps} micro-batches, {wrong}"
  raise ConfigError(
    f"batch_size={phase.batch_size}: {wrong} {plural(num_devices, 'device')}, and a "
    f"run resumes with the batch that it began with, on {start_devices}; give it "
    f"{_nearest(do, num_devices)} devices, or another --workdir"
  )


def summary(
  asked: Sequence[Phase],
  phases: Sequence[Phase],
  num_devices: int,
  start_devices: int,
) -> str:
  """One line for the log of a run on another number of devices.

  Args:
    asked: the phases as the config has them.
    phases: those of `over_devices`.
    num_devices: there are now.
    start_devices: there were when the run began.

  Example:
    >>> phase = Phase(0, 10, 0, 1024, 1, None)
    >>> print(summary([phase], [phase._replace(accumulate_steps=2)], 8, 16))
    ... # doctest: +NORMALIZE_WHITESPACE
    8 devices, 16 at the start: 2 micro-batches per step instead of 1, so that a device
    still holds 64 examples at a time; the global batch and the order of examples stay
  """
  before = [s.batch_size // (start_devices * s.accumulate_steps) for s in asked]
  rows = [s.batch_size // (num_devices * s.accumulate_steps) for s in phases]
  then, now = ([s.accumulate_steps for s in each] for each in (asked, phases))
  micros = f"{_each(now)} micro-batch{'es' * (_each(now) != '1')} per step"
  micros += ", as then" if then == now else f" instead of {_each(then)}"
  if rows == before:
    held = f"so that a device still holds {_each(rows)} examples at a time"
  else:
    held = f"a device holds {_each(rows)} examples at a time, {_each(before)} then"
  return (
    f"{plural(num_devices, 'device')}, {start_devices} at the start: {micros}, {held}; "
    "the global batch and the order of examples stay"
  )


def _each(values: Sequence[int]) -> str:
  """One value for all phases, or one for each."""
  return listed(f"{v:,}" for v in (values if len(set(values)) > 1 else values[:1]))


def _nearest(numbers: Iterable[int], near: int) -> str:
  """The six numbers that are nearest by ratio, in order."""
  nearest = sorted(numbers, key=lambda n: max(n / near, near / n))[:6]
  return listed(sorted(nearest), "or")


def _divisors(number: int) -> list[int]:
  """Divisors of a number, rising."""
  low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
  return sorted({*low, *(number // n for n in low)})
