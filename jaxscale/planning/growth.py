"""Plan what a growing batch saves: steps and time, on each number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxscale.config import Growing
from jaxscale.config.phase_settings import measuring
from jaxscale.experiment.derive import derive, next_size
from jaxscale.planning.machine import Corner
from jaxscale.planning.step_plan import Step


class Saving(NamedTuple):
  """Steps and time of a growing batch on some devices, beside the constant batch of its start.

  Attributes:
    devices: the number of devices.
    nodes: the number of nodes.
    steps: the number of steps at each batch size.
    constant_steps: the number of steps at the constant batch size.
    seconds: the seconds of all steps, by corner.
    constant_seconds: the expected seconds of all steps at the constant batch size.
  """

  devices: int
  nodes: int
  steps: dict[int, int]
  constant_steps: int
  seconds: dict[Corner, float]
  constant_seconds: float


def steps_by_size(experiment: Any) -> dict[int, int]:
  """Return the steps at each batch size; {} if the batch is constant.

  A rule that measures during the run is planned as if the batch grew at every decision.
  """
  config, derived = experiment.config, experiment.derived
  if measuring(config.phases) and isinstance(config.phases, Growing):
    chosen, size = [], config.batch_size
    while size is not None:
      chosen.append(size)
      size = next_size(config, size, derived.num_train)
    derived = derive(config, derived.num_train, derived.num_eval, derived.num_devices, chosen)
  steps: dict[int, int] = {}
  for phase in derived.phases:
    steps[phase.batch_size] = steps.get(phase.batch_size, 0) + phase.stop - phase.start
  return steps if len(steps) > 1 else {}


def savings(
  experiment: Any, steps: Sequence[Step], step_on: Callable[[int, int], Step]
) -> tuple[Saving, ...]:
  """Return what the growing batch of an experiment saves; () if its batch is constant.

  Args:
    experiment: the `build.Experiment`.
    steps: the planned steps at its first batch size.
    step_on: a function of devices and rows per device that plans a step.
  """
  by_size, saved = steps_by_size(experiment), []
  for step in steps if by_size else ():
    sized = {b: step_on(step.devices, step.rows * b // step.batch_size) for b in by_size}
    took = {c: sum(n * sized[b].seconds[c] for b, n in by_size.items()) for c in step.seconds}
    constant = math.ceil(sum(b * n for b, n in by_size.items()) / step.batch_size)
    whole = constant * step.seconds["expected"]
    saved.append(Saving(step.devices, step.nodes, by_size, constant, took, whole))
  return tuple(saved)
