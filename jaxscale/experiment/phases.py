"""A run in phases: batch and images may change size, the schedule continues.

A phase is a stretch of steps of one shape. Epochs say where it begins; steps
and examples follow. Schedules count in steps of the reference batch size, so
their shape over the epochs is the same however the batch changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Phase(NamedTuple):
  """A stretch of steps of one shape.

  Attributes:
    start: steps before it.
    stop: steps done at its end.
    examples: examples seen before it.
    batch_size: examples per step.
    accumulate_steps: micro-batches per step.
    image_size: of its training images; None: the data's own.
    ordinal: its place among the phases asked for; some have room for no step.
  """

  start: int
  stop: int
  examples: int
  batch_size: int
  accumulate_steps: int
  image_size: int | None
  ordinal: int = 0


def plan(
  starts: Sequence[float],
  batch_sizes: Sequence[int],
  accumulate_steps: Sequence[int],
  image_sizes: Sequence[int | None],
  *,
  num_train: int,
  total_epochs: float | None = None,
  total_steps: int | None = None,
  in_steps: bool = False,
) -> tuple[Phase, ...]:
  """The phases of a run; one that has no room for a step is left out.

  Args:
    starts: epochs before each, rising from 0.
    batch_sizes: of each.
    accumulate_steps: of each.
    image_sizes: of each.
    num_train: training examples.
    total_epochs: of the run.
    total_steps: of the run, if it is not counted in epochs.
    in_steps: `starts` has steps.

  Example:
    >>> [(s.start, s.stop) for s in plan(
    ...   (0, 1), (10, 20), (1, 1), (None, None), total_epochs=3, num_train=100)]
    [(0, 10), (10, 20)]
  """
  phases: list[Phase] = []
  start, examples = 0, 0
  parts = zip(batch_sizes, accumulate_steps, image_sizes, strict=True)
  for ordinal, (batch_size, micros, image_size) in enumerate(parts):
    ends = [(total_steps, True) if total_epochs is None else (total_epochs, False)]
    ends += [(end, in_steps) for end in starts[ordinal + 1 : ordinal + 2]]
    room = [
      end - start if is_steps else math.ceil((end * num_train - examples) / batch_size)
      for end, is_steps in ends
      if end is not None
    ]
    if (steps := int(max(min(room), 0))) > 0:
      shape = batch_size, micros, image_size, ordinal
      phases.append(Phase(start, start + steps, examples, *shape))
    start, examples = start + steps, examples + steps * batch_size
  if not phases:  # a run has a step, however short it is
    phases.append(Phase(0, 1, 0, batch_sizes[0], accumulate_steps[0], image_sizes[0]))
  return tuple(phases)


def phase_index(phases: Sequence[Phase], step: int) -> int:
  """Which phase the step after `step` steps is in; the last one at the end."""
  inside = (i for i, phase in enumerate(phases) if step < phase.stop)
  return next(inside, len(phases) - 1)


def examples_at(phases: Sequence[Phase], step: int) -> int:
  """Examples seen after `step` steps."""
  phase = phases[phase_index(phases, step)]
  return phase.examples + (step - phase.start) * phase.batch_size


def step_at(phases: Sequence[Phase], examples: int) -> int:
  """The first step after which so many examples have been seen.

  Example:
    >>> one, two = Phase(0, 10, 0, 10, 1, None), Phase(10, 20, 100, 20, 1, None)
    >>> step_at((one, two), 130)
    12
  """
  ends = (s.examples + (s.stop - s.start) * s.batch_size for s in phases)
  inside = (s for s, end in zip(phases, ends, strict=True) if examples <= end)
  phase = next(inside, phases[-1])
  return phase.start + math.ceil((examples - phase.examples) / phase.batch_size)


def every(
  phases: Sequence[Phase], phase: Phase, steps: Callable[[Phase], int]
) -> Callable[[int], bool]:
  """Step -> whether something regular follows it, for the steps of one phase.

  An interval that a phase has begun continues in the next, as a share of it: phases
  shorter than an interval do not put it off. The run's last step is always one.

  Args:
    phases: of the run.
    phase: the one that is running.
    steps: phase -> steps of an interval in it.
  """
  before = [s for s in phases if s.stop <= phase.start]
  begun = sum((s.stop - s.start) / steps(s) for s in before) % 1
  interval = steps(phase)

  def intervals(step: int) -> int:
    return math.floor(begun + (step - phase.start) / interval + 1e-9)

  def due(step: int) -> bool:
    return step == phases[-1].stop or intervals(step) > intervals(step - 1)

  return due


def scale_velocity(opt_state: Any, factor: float) -> Any:
  """Multiply every velocity in an optax state.

  SGD's velocity settles at gradient / (1 - momentum): where the momentum
  changes, (1 - old) / (1 - new) carries it over, and nothing jumps.
  """

  def scale(path: Any, x: Any):
    # Fields of NamedTuples of ours or of optax; names of parameters are keys.
    fields = {getattr(key, "name", None) for key in path}
    return x * jnp.asarray(factor, x.dtype) if fields & {"velocity", "trace"} else x

  return jax.tree.map_with_path(scale, opt_state)
