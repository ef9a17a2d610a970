"""Batch sizes that a run chooses itself: by the rule of a growing batch, or by CNTK's trials.

The rules of `AdaptiveBatch` are those of CNTK's SGD.cpp (AdaptiveMinibatchSizing and
SearchForBestMinibatchSize), with one difference: CNTK accepted a trial whose loss was NaN,
and jaxscale rejects it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp

from jaxscale import cluster
from jaxscale.config import AdaptiveBatch, Growing, GrowthPoint
from jaxscale.errors import ConfigError
from jaxscale.experiment.derive import next_size
from jaxscale.experiment.optimizer import make_schedule
from jaxscale.experiment.own_classes import user_errors
from jaxscale.experiment.phases import examples_at
from jaxscale.files import require_json
from jaxscale.metrics.log import logger
from jaxscale.run.branches import Branches
from jaxscale.training import noise_scale

FILE = "batch_sizes.json"  # in the workdir: the batch sizes chosen so far


def candidates(
  previous: int, initial: int, *, maximum: int, multiple: int, rate_change: float = 1.0
) -> list[int]:
  """Return the batch sizes to try, rising by sqrt(2), without repeats.

  The sizes range from max(initial / rate_change, previous / 2) to min(maximum, 2 previous),
  each rounded to a multiple of `multiple`.

  Args:
    previous: the current batch size.
    initial: the batch size of the first epoch.
    maximum: the largest batch size allowed.
    multiple: the divisor of every size.
    rate_change: the current learning rate divided by the initial one.

  Example:
    >>> candidates(512, 256, maximum=4096, multiple=64)
    [256, 384, 512, 704, 1024]
  """
  top = min(maximum, 2 * previous)
  size = float(min(max(initial / max(rate_change, 1e-9), previous / 2), top))
  sizes: list[int] = []
  while size <= top * (1 + 1e-9):  # In floating point, sqrt(2) squared exceeds 2.
    rounded = max(round(size / multiple), 1) * multiple
    if rounded <= top and rounded not in sizes:
      sizes.append(rounded)
    size *= math.sqrt(2)
  return sizes or [previous]


def search(
  sizes: Sequence[int], trial: Callable[[int], float], margin: float, previous: int
) -> int:
  """Return the last size before the first trial whose loss exceeds the margin.

  Args:
    sizes: the candidates, rising.
    trial: a function of the size that returns the mean training loss of a trial; all
      trials start from the same state.
    margin: the allowed increase, as a share of the first trial's loss.
    previous: the result if the loss of the first trial is NaN or Inf.
  """
  best, most = previous, None
  for size in sizes:
    loss = trial(size)
    most = loss + margin * abs(loss) if most is None else most
    if not (math.isfinite(loss) and loss <= most):
      break
    best = size
  return best


def choose(branches: Branches) -> tuple[int, str, dict[str, float]]:
  """Return the batch size of the next steps, why, and the numbers that the choice is based on.

  All processes call it at the start of a phase. A choice is logged in one line, a trial too.

  Raises:
    ConfigError: an error in a rule of the user.
  """
  if isinstance(branches.experiment.config.phases, Growing):
    return _grow(branches)
  return _choose_by_trials(branches), "by trials", {}


def _grow(branches: Branches) -> tuple[int, str, dict[str, float]]:
  experiment, state = branches.experiment, branches.state
  config, derived, step = experiment.config, experiment.derived, int(state.step)
  settings, size = config.phases, experiment.phase.batch_size
  assert isinstance(settings, Growing)
  larger, decide = next_size(config, size, derived.num_train), settings.when.decide
  assert larger is not None and decide is not None  # Else nothing is to be decided.
  tried = [branches.at_size(n, settings.micro_batches(n, config)) for n in (size, larger)]
  fitting = [each for each in tried if each is not None]
  branch = functools.partial(branches.side_by_side, fitting)
  noise = tuple(noise_scale.read(state.noise).values())
  point = step, examples_at(derived.phases, step), size, larger, noise, branch
  grows, why, values = False, f"{larger:,} does not fit the devices and BatchNorm spans", {}
  if len(fitting) == 2:
    with user_errors(settings.when, ".decide"):
      grows, why, values = decide(GrowthPoint(*point))
      values = {str(name): float(x) for name, x in values.items()}
  grows, why, values = cluster.from_leader((bool(grows), str(why), values))
  text = f"grows from {size:,} to {larger:,}" if grows else f"stays {size:,}"
  logger.info(f"step {step}  batch size {text}: {why}")
  return (larger if grows else size), why, values


def _choose_by_trials(branches: Branches) -> int:
  """Choose a batch size as CNTK does."""
  experiment, step = branches.experiment, int(branches.state.step)
  config, derived, settings = experiment.config, experiment.derived, experiment.config.phases
  assert isinstance(settings, AdaptiveBatch)
  here, start = derived.num_devices, derived.start_devices
  asked, previous = config.accumulate_steps, experiment.phase.batch_size
  # A run that resumes on a different number of devices must try the same sizes.
  unit = math.lcm(settings.multiple, start * asked, here * (asked if here > start else 1))

  def trial(size: int) -> float:
    loss = float(branches.losses(tries[size], settings.trial_steps).mean())
    logger.info(f"step {step}  trial with batch size {size:,}: loss {loss:.4f}")
    return loss

  done = examples_at(derived.phases, step) / config.batch_size
  rate = jnp.asarray(make_schedule(config, derived)(done)).item()
  # A lower learning rate makes larger batches worth a trial.
  change = rate / derived.peak_lr if done >= derived.warmup_steps else 1.0
  most = min(settings.max_batch_size, derived.num_train)
  sizes = candidates(previous, config.batch_size, maximum=most, multiple=unit, rate_change=change)
  tries = {size: x for size in sizes if (x := branches.at_size(size, asked)) is not None}
  if not set(tries) - {previous}:
    return previous
  return search(list(tries), trial, settings.margin, previous)


def read_chosen(workdir: Path) -> tuple[int, ...]:
  """Return the batch sizes that this run has chosen so far, one per phase.

  Raises:
    ConfigError: the record is damaged.
  """
  path, remedy = workdir / FILE, "restore the file from a copy, or use another --workdir"
  chosen = require_json(path, [int], remedy) if path.exists() else []
  if min(chosen, default=1) < 1:
    raise ConfigError(f"{path}: {min(chosen)} is not a batch size; {remedy}")
  return tuple(chosen)
