"""CNTK's adaptive minibatch: trials choose the batch size during the run.

The rules are those of CNTK's SGD.cpp (AdaptiveMinibatchSizing and
SearchForBestMinibatchSize), but for one: it took a trial whose loss was NaN,
here such a trial is rejected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxscale.config import AdaptiveBatch
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.experiment.microbatches import over_devices
from jaxscale.experiment.optimizer import make_schedule
from jaxscale.experiment.phases import examples_at, phase_index
from jaxscale.files import require_json
from jaxscale.metrics.log import logger
from jaxscale.training.types import Batch, TrainState

FILE = "batch_sizes.json"  # in the workdir: those that an adaptive run has chosen


def candidates(
  previous: int, initial: int, *, maximum: int, multiple: int, rate_change: float = 1.0
) -> list[int]:
  """Batch sizes to try, rising by sqrt(2), without repeats.

  From max(initial / rate_change, previous / 2) to min(maximum, 2 previous),
  each rounded to a multiple of `multiple`.

  Args:
    previous: the batch size now.
    initial: that of the first epoch.
    maximum: no candidate is larger.
    multiple: what sizes are rounded to.
    rate_change: the learning rate now as a share of the initial one.

  Example:
    >>> candidates(512, 256, maximum=4096, multiple=64)
    [256, 384, 512, 704, 1024]
  """
  top = min(maximum, 2 * previous)
  size = float(min(max(initial / max(rate_change, 1e-9), previous / 2), top))
  sizes: list[int] = []
  while size <= top * (1 + 1e-9):  # sqrt(2) squared is a little more than 2
    rounded = max(round(size / multiple), 1) * multiple
    if rounded <= top and rounded not in sizes:
      sizes.append(rounded)
    size *= math.sqrt(2)
  return sizes or [previous]


def search(
  sizes: Sequence[int], trial: Callable[[int], float], margin: float, previous: int
) -> int:
  """The largest size in turn whose loss is within the margin of the first's.

  Args:
    sizes: candidates, rising.
    trial: size -> mean training loss of a trial from the same state.
    margin: as a share of the first trial's loss.
    previous: the result if even the loss of the first trial is NaN or Inf.
  """
  best, most = previous, None
  for size in sizes:
    loss = trial(size)
    most = loss + margin * abs(loss) if most is None else most
    if not (math.isfinite(loss) and loss <= most):
      break
    best = size
  return best


def choose(
  experiment: build.Experiment,
  state: TrainState,
  train_batches: Callable[[build.Experiment], Iterator[Batch]],
  poll: Callable[[], None] = lambda: None,
) -> int:
  """Try candidates from this state, at the start of a phase.

  Args:
    experiment: at the phase that has just ended.
    state: after its last step; untouched.
    train_batches: (experiment at a batch size) -> its batches from here on.
    poll: called before every step of a trial, in all processes; what it raises
      ends the trials, which then have chosen nothing.
  """
  config, derived = experiment.config, experiment.derived
  settings = config.phases
  assert isinstance(settings, AdaptiveBatch)
  step = int(state.step)
  phase = derived.phases[phase_index(derived.phases, step)]
  here, start = derived.num_devices, derived.start_devices
  asked, previous = config.accumulate_steps, experiment.phase.batch_size
  # A run that resumes on other devices tries the sizes that it would have tried.
  micros = asked if here > start else 1
  unit = math.lcm(settings.multiple, start * asked, here * micros)

  def at_size(size: int) -> build.Experiment | None:
    wanted = phase._replace(batch_size=size, accumulate_steps=asked)
    try:
      (tried,) = over_devices(config, [wanted], here, start)
      return build.at_phase(experiment, tried)
    except ConfigError:  # bn_span, say, does not fit it
      return None

  def trial(size: int) -> float:
    tried = tries[size]
    train_step, losses = tried.compile_train_step(), []
    copy = jax.tree.map(jnp.copy, state)
    copy = build.enter_phase(config, experiment.phase, tried.phase, copy)
    for batch in itertools.islice(train_batches(tried), settings.trial_steps):
      poll()
      copy, values = train_step(copy, batch)
      losses.append(values["loss"])
    loss = sum(x.item() for x in losses) / len(losses)
    logger.info(f"step {step}  trial at batch {size:,}: loss {loss:.4f}")
    return loss

  done = examples_at(derived.phases, step) / config.batch_size
  rate = jnp.asarray(make_schedule(config, derived)(done)).item()
  # As the rate decays, larger batches are worth a trial.
  change = rate / derived.peak_lr if done >= derived.warmup_steps else 1.0
  most = min(settings.max_batch_size, derived.num_train)
  sizes = candidates(previous, config.batch_size, maximum=most, multiple=unit, rate_change=change)
  tries = {size: tried for size in sizes if (tried := at_size(size)) is not None}
  if not set(tries) - {previous}:
    return previous
  return search(list(tries), trial, settings.margin, previous)


def read_chosen(workdir: Path) -> tuple[int, ...]:
  """The batch sizes that this run has chosen so far, one per phase.

  Raises:
    ConfigError: the record of them is damaged.
  """
  path, remedy = workdir / FILE, "put it back from a copy, or use another --workdir"
  chosen = require_json(path, [int], remedy) if path.exists() else []
  if min(chosen, default=1) < 1:
    raise ConfigError(f"{path}: {min(chosen)} is no batch size; {remedy}")
  return tuple(chosen)
