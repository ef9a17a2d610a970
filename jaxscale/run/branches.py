"""Branches: copies of a state that train at other batch sizes, and are then thrown away.

The run itself does not change, so a run that is stopped among them repeats them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.experiment.derive import check_phases
from jaxscale.experiment.microbatches import over_devices
from jaxscale.experiment.phases import Phase, examples_at, phase_index
from jaxscale.training.types import Batch, TrainState


class Branches(NamedTuple):
  """Point of a run from which branches start; all processes call its methods.

  Attributes:
    experiment: the experiment at the phase that has just ended.
    state: the state after the last step of that phase, which branches do not change.
    train_batches: a function of an experiment that returns its next batches.
    poll: called before every step, in all processes; an exception from it ends a branch.
  """

  experiment: build.Experiment
  state: TrainState
  train_batches: Callable[[build.Experiment], Iterator[Batch]]
  poll: Callable[[], None] = lambda: None

  def at_size(self, batch_size: int, accumulate_steps: int) -> build.Experiment | None:
    """Return the experiment at a batch size; None if the size does not fit the devices.

    Args:
      batch_size: examples per step.
      accumulate_steps: micro-batches per step, on the devices that the run started with.
    """
    config, derived = self.experiment.config, self.experiment.derived
    step, sizes = int(self.state.step), (batch_size, accumulate_steps)
    phase = derived.phases[phase_index(derived.phases, step)]
    shape = Phase(step, phase.stop, examples_at(derived.phases, step), *sizes, phase.image_size)
    start_blocks = max(derived.start_devices * derived.row_blocks // derived.num_devices, 1)
    try:
      check_phases(config, [shape], derived.num_train, start_blocks)
      (tried,) = over_devices(config, [shape], derived.row_blocks, start_blocks)
      return build.at_phase(self.experiment, tried)
    except ConfigError:  # For example, bn_span may not divide this batch size.
      return None

  def losses(self, tried: build.Experiment, steps: int) -> np.ndarray:
    """Return the training losses of a branch, float64 [steps].

    Args:
      tried: the experiment at the batch size of the branch, from `at_size`.
      steps: the number of steps.
    """
    train_step, losses = tried.compile_train_step(), []
    copy = jax.tree.map(jnp.copy, self.state)
    copy = build.enter_phase(self.experiment.config, self.experiment.phase, tried.phase, copy)
    for batch in itertools.islice(self.train_batches(tried), steps):
      self.poll()
      copy, values = train_step(copy, batch)
      losses.append(values["loss"])
      # Wait for the step before: the batches of steps that have not begun would take memory.
      jax.block_until_ready(losses[-2:][0])
    return np.array([x.item() for x in losses], np.float64)

  def side_by_side(self, tried: Sequence[build.Experiment], steps: int) -> np.ndarray:
    """Return the losses of branches on the same examples, float64 [branches, steps].

    Args:
      tried: the experiments of the branches; every batch size divides the largest.
      steps: the number of steps of the largest. A column has the mean loss of each branch
        over the examples of one such step.
    """
    times = [max(t.phase.batch_size for t in tried) // t.phase.batch_size for t in tried]
    losses = [self.losses(t, n * steps) for t, n in zip(tried, times, strict=True)]
    return np.stack([x.reshape(steps, -1).mean(1) for x in losses])


class Comparison(NamedTuple):
  """Comparison of two branches over the second half of their examples.

  Attributes:
    loss: the mean loss at the current batch size.
    larger_loss: the mean loss at the larger batch size.
    difference: the second minus the first.
    error: the standard error of the difference, from its scatter over steps.
  """

  loss: float
  larger_loss: float
  difference: float
  error: float


def compare_branches(losses: np.ndarray) -> Comparison:
  """Compare the losses of two branches on the same examples.

  The first half of the examples is left out, because a branch needs some steps to show the
  effect of its batch size. Losses on the same examples share most of their noise, which
  cancels in the difference.

  Args:
    losses: [2, steps], the mean losses at the current and at the larger batch size, of the
      same examples in each column.

  Example:
    >>> compare_branches(np.array([[9, 9, 2.0, 1.0], [9, 9, 2.2, 1.0]]))
    Comparison(loss=1.5, larger_loss=1.6, difference=0.1, error=0.1)
  """
  small, large = losses[:, losses.shape[1] // 2 :]
  off = large - small
  values = small.mean(), large.mean(), off.mean(), off.std(ddof=1) / np.sqrt(len(off))
  return Comparison(*(round(float(x), 12) for x in values))
