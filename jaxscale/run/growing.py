"""Growing batch: ask the config's rule whether the batch grows after this step."""

from __future__ import annotations

import functools

import jax

from jaxscale import cluster
from jaxscale.config import Growing, GrowthPoint
from jaxscale.experiment.derive import next_size
from jaxscale.experiment.own_classes import user_errors
from jaxscale.experiment.phases import examples_at
from jaxscale.metrics.log import logger
from jaxscale.run.branches import Branches
from jaxscale.training import noise_scale
from jaxscale.training.types import TrainState


def choose(branches: Branches) -> tuple[int, dict[str, float]]:
  """Return the batch size of the next steps, and the numbers that the rule has compared.

  All processes call it. The decision is logged in one line.

  Raises:
    ConfigError: an error in a rule of the user.
  """
  experiment, state = branches.experiment, branches.state
  config, derived, step = experiment.config, experiment.derived, int(state.step)
  settings, size = config.phases, experiment.phase.batch_size
  assert isinstance(settings, Growing)
  larger, decide = next_size(config, size, derived.num_train), settings.when.decide
  assert larger is not None and decide is not None  # Else nothing is to be decided.
  tried = [branches.at_size(n, settings.accumulate_steps(n, config)) for n in (size, larger)]
  fitting = [each for each in tried if each is not None]
  branch = functools.partial(branches.side_by_side, fitting)
  point = step, examples_at(derived.phases, step), size, larger, _noise(state), branch
  grows, why, values = False, f"{larger:,} does not fit the devices and BatchNorm spans", {}
  if len(fitting) == 2:
    with user_errors(settings.when, ".decide"):
      grows, why, values = decide(GrowthPoint(*point))
  grows, why, values = cluster.from_leader((bool(grows), str(why), dict(values)))
  text = f"grows from {size:,} to {larger:,}" if grows else f"stays {size:,}"
  logger.info(f"step {step}  batch size {text}: {why}")
  return (larger if grows else size), values


def _noise(state: TrainState) -> tuple[float, float, float] | None:
  """Return the noise scale and its interval, which are infinite where unknown."""
  if not state.noise:
    return None
  values = jax.device_get(noise_scale.metrics(state.noise))
  names = ("noise_scale", "noise_scale_low", "noise_scale_high")
  scale, low, high = (float(values[name]) for name in names)
  return scale, low, high
