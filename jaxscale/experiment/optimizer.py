"""Learning rate and optimizer of a phase.

The train step logs `schedule(state.step)` (training/step.py). The optimizer evaluates the same
schedule at its own count of steps, which skipped steps also advance (`nan_guard.count_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax import Schedule

from jaxscale import config as cfg
from jaxscale import optim
from jaxscale.experiment.derive import Derived, build_schedule, schedule_steps
from jaxscale.experiment.own_classes import build, guarded_parts
from jaxscale.experiment.phases import Phase

Rule = Literal["none", "linear", "sqrt", "neutral"]  # scaling of lr and momentum


def make_schedule(config: cfg.Config, derived: Derived) -> Schedule:
  """Return the schedule: step of Config.batch_size examples -> learning rate.

  The peak is `Derived.peak_lr`, the optimizer's lr scaled to the batch size.
  """
  per_epoch = derived.num_train / config.batch_size
  total = schedule_steps(config, derived.phases, derived.num_train)
  total = max(math.ceil(total), 1)
  context = cfg.ScheduleContext(total, derived.warmup_steps, per_epoch)
  return build_schedule(config, derived.peak_lr, context)


def phase_rate(config: cfg.Config, phase: Phase) -> tuple[float, float | None]:
  """Return the factor of the learning rate and the momentum (or None) of a phase."""
  settings = config.phases
  rule = "neutral" if isinstance(settings, cfg.AdaptiveBatch) else settings.follow
  momentum = getattr(config.optimizer, "momentum", None)
  factor, new = follow_batch_size(rule, phase.batch_size, config.batch_size, momentum or 0.0)
  return factor, None if momentum is None else new


def phase_schedule(config: cfg.Config, derived: Derived, phase: Phase) -> Schedule:
  """Return the schedule of a phase: step of the run -> learning rate."""
  schedule = make_schedule(config, derived)
  if isinstance(config.phases, cfg.Phases) and derived.phases == (phase,):
    return schedule
  return within_phase(schedule, phase, config.batch_size, phase_rate(config, phase)[0])


def within_phase(
  schedule: optax.Schedule, phase: Phase, batch_size: int, factor: float
) -> optax.Schedule:
  """Return a schedule inside a phase, as a function of the run's step.

  Args:
    schedule: schedule in steps of `batch_size` examples.
    phase: the phase.
    batch_size: the reference batch size.
    factor: factor of the learning rate at the phase's batch size.
  """
  before = phase.examples / batch_size
  ratio = phase.batch_size / batch_size

  def of_step(step: Any) -> jax.Array:
    inside = jnp.asarray(step - phase.start, jnp.float32)
    return factor * jnp.asarray(schedule(before + ratio * inside), jnp.float32)

  return of_step


def follow_batch_size(
  rule: Rule, batch_size: int, reference: int, momentum: float
) -> tuple[float, float]:
  """Return the factor of the learning rate, and the momentum, for a new batch size.

  "neutral" corresponds to CNTK's learning rate per sample and momentum as time constant
  (SGD.h: momentum = exp(-B / tc), learning rate per sample lr / (B (1 - momentum))). Both
  stay constant, so that every example moves the parameters as far as before, spread over
  the same number of examples.

  Args:
    rule: the scaling rule.
    batch_size: the new batch size.
    reference: the batch size of the original learning rate and momentum.
    momentum: the original momentum.

  Example:
    >>> follow_batch_size("linear", 512, 256, 0.9)
    (2.0, 0.9)
  """
  ratio = batch_size / reference
  if rule == "neutral":
    new = momentum**ratio
    return ratio * (1 - new) / (1 - momentum), new
  return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule], momentum


def make_optimizer(
  config: cfg.Config,
  schedule: Schedule,
  warmup_steps: int = 0,
  momentum: float | None = None,
  factors: Mapping[str, optim.LeafFactors] | None = None,
) -> optax.GradientTransformation:
  """Build the optimizer, with clipping by the global norm and layer-wise lr decay.

  Args:
    config: the config of the run.
    schedule: the learning rate as a function of the step.
    warmup_steps: the number of warm-up steps.
    momentum: the momentum that replaces the setting; None keeps it.
    factors: the factors of the parametrization by path; None means none.
  """
  masks = ("^layers/", "^(embed|head)/") if config.model.is_stack else ()
  context = cfg.OptimizerContext(momentum, warmup_steps, *map(optim.matching, masks))

  def is_optax(made: Any) -> bool:
    return hasattr(made, "init") and hasattr(made, "update")

  expected = "an optax transformation"
  optimizer = build(config.optimizer, schedule, context, kind=is_optax, expected=expected)
  if isinstance(optimizer, optax.GradientTransformation):  # not with extra arguments
    optimizer = guarded_parts(config.optimizer, " ({})", optimizer)
  chain = [optim.with_factors(optimizer, factors)] if factors else [optimizer]
  if config.clip_norm is not None:
    chain.insert(0, optax.clip_by_global_norm(config.clip_norm))
  if config.layer_decay is not None:
    chain.append(optim.layerwise_rate_decay(config.layer_decay, config.layer_order))
  if factors:
    chain.insert(0, optim.scale_by_path({path: f.multiplier for path, f in factors.items()}))
  return optax.chain(*chain)
