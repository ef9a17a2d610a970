"""Phases of a run, between which batch size and image size may change.

All steps of a phase have the same shapes. The start of a phase is given in epochs or
steps. Schedules count steps of the reference batch size, so that their shape over the
epochs does not depend on changes of the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Phase(NamedTuple):
  """Sequence of steps with the same shapes.

  Attributes:
    start: number of steps before the phase.
    stop: number of steps done at its end.
    examples: number of examples seen before the phase.
    batch_size: examples per step.
    accumulate_steps: micro-batches per step.
    image_size: size of the training images; None means the size in the data.
    ordinal: index among the phases in the settings, of which those without a step are
      left out.
    is_decided: False for a phase before which the run decides on its batch size.
  """

  start: int
  stop: int
  examples: int
  batch_size: int
  accumulate_steps: int
  image_size: int | None
  ordinal: int = 0
  is_decided: bool = True


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
  """Return the phases of a run; phases without a step are left out.

  Args:
    starts: epochs before each phase, ascending from 0.
    batch_sizes: batch size of each phase.
    accumulate_steps: micro-batches per step of each phase.
    image_sizes: image size of each phase, or None.
    num_train: number of training examples.
    total_epochs: epochs of the run; None means that `total_steps` is given.
    total_steps: steps of the run, if its length is given in steps.
    in_steps: `starts` is given in steps.

  Example:
    >>> [(s.start, s.stop) for s in plan(
    ...   (0, 1), (10, 20), (1, 1), (None, None), total_epochs=3, num_train=100)]
    [(0, 10), (10, 20)]
  """
  phases: list[Phase] = []
  start, examples = 0, 0
  parts = zip(batch_sizes, accumulate_steps, image_sizes, strict=True)
  for ordinal, (batch_size, num_microbatches, image_size) in enumerate(parts):
    ends = [(total_steps, True) if total_epochs is None else (total_epochs, False)]
    ends += [(end, in_steps) for end in starts[ordinal + 1 : ordinal + 2]]
    room = [
      end - start if is_steps else math.ceil((end * num_train - examples) / batch_size)
      for end, is_steps in ends
      if end is not None
    ]
    if (steps := int(max(min(room), 0))) > 0:
      shape = batch_size, num_microbatches, image_size, ordinal
      phases.append(Phase(start, start + steps, examples, *shape))
    start, examples = start + steps, examples + steps * batch_size
  if not phases:  # a run has at least one step
    phases.append(Phase(0, 1, 0, batch_sizes[0], accumulate_steps[0], image_sizes[0]))
  return tuple(phases)


def phase_index(phases: Sequence[Phase], step: int) -> int:
  """Return the index of the phase after `step` steps; at the end, of the last phase."""
  return next((i for i, phase in enumerate(phases) if step < phase.stop), len(phases) - 1)


def examples_at(phases: Sequence[Phase], step: int) -> int:
  """Return the number of examples seen after `step` steps."""
  phase = phases[phase_index(phases, step)]
  return phase.examples + (step - phase.start) * phase.batch_size


def step_at(phases: Sequence[Phase], examples: int) -> int:
  """Return the first step after which at least `examples` examples have been seen.

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
  """Return a function step -> whether a periodic action is due after it.

  An interval continues from one phase to the next, as a fraction, so that phases shorter
  than an interval do not delay the action. It is always due after the last step of the
  run.

  Args:
    phases: the phases of the run.
    phase: the current phase.
    steps: phase -> interval in steps during it.
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
  """Multiply every velocity in an optax state by a factor.

  SGD's velocity settles at gradient / (1 - momentum). If the momentum changes, the factor
  (1 - old) / (1 - new) avoids a jump.
  """

  def scale(path: Any, x: Any):
    # Velocities are fields of NamedTuples; names of parameters are dict keys.
    fields = {getattr(key, "name", None) for key in path}
    return x * jnp.asarray(factor, x.dtype) if fields & {"velocity", "trace"} else x

  return jax.tree.map_with_path(scale, opt_state)
