"""Growing batch: ask the config's rule whether the batch grows after this step."""

from __future__ import annotations

import numpy as np

from jaxscale import cluster
from jaxscale.config import Growing
from jaxscale.experiment import build
from jaxscale.experiment.derive import growth_rule, next_size
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
  larger, rule = next_size(config, size, derived.num_train), _rule(experiment)
  assert larger is not None and rule.decide is not None  # Else nothing is to be decided.
  sizes = [branches.at_size(n, settings.accumulate_steps(n, config)) for n in (size, larger)]
  if None in sizes:
    why = f"{larger:,} does not fit the devices and BatchNorm spans"
    logger.info(f"step {step}  batch size stays {size:,}: {why}")
    return size, {}

  def branch(steps: int) -> np.ndarray:
    factor = settings.factor
    counts = zip(sizes, (steps * factor, steps), strict=True)
    small, large = (branches.losses(tried, n) for tried, n in counts if tried is not None)
    return np.stack([small.reshape(-1, factor).mean(1), large])

  point = (step, examples_at(derived.phases, step), size, larger, _noise(state), branch)
  with user_errors(settings.when, " (decide)"):
    grows, why, values = rule.decide(build.cfg.GrowthPoint(*point))
  grows, why, values = cluster.from_leader((bool(grows), str(why), dict(values)))
  text = f"grows from {size:,} to {larger:,}" if grows else f"stays {size:,}"
  logger.info(f"step {step}  batch size {text}: {why}")
  return (larger if grows else size), values


def _rule(experiment: build.Experiment) -> build.cfg.GrowthRule:
  derived = experiment.derived
  return growth_rule(experiment.config, derived.num_train, derived.warmup_steps)


def _noise(state: TrainState) -> tuple[float, float, float] | None:
  """Return the noise scale and its interval, which are infinite where unknown."""
  if not state.noise:
    return None
  scale, low, high = (
    x if x is not None else float("inf") for x in noise_scale.read(state.noise).values()
  )
  return (scale, low, high) if state.noise.weight > 0 else (scale, 0.0, high)


def reason(experiment: build.Experiment) -> str:
  """Return why the batch of a planned phase has grown, for the log; "" if it is measured."""
  config = experiment.config
  if not isinstance(config.phases, Growing) or not experiment.phase.start:
    return ""
  rule = _rule(experiment)
  return "" if rule.decide else rule.why
