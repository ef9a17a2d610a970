"""From a Config to the learning rate and the optimizer of a phase."""

from __future__ import annotations

import math

import optax
from optax import Schedule

from jaxscale import config as cfg
from jaxscale import optim
from jaxscale.experiment.derive import Derived, schedule_steps
from jaxscale.experiment.own_classes import build, guarded, guarded_parts
from jaxscale.experiment.phases import Phase, follow_batch_size, within_phase


def make_schedule(config: cfg.Config, derived: Derived) -> Schedule:
  """Step, of Config.batch_size examples -> learning rate."""
  per_epoch = derived.num_train / config.batch_size
  total = schedule_steps(config, derived.phases, derived.num_train)
  total = max(math.ceil(total), 1)
  context = cfg.ScheduleContext(total, derived.warmup_steps, per_epoch)
  wanted = "a function of the step"
  schedule = build(config.schedule, derived.peak_lr, context, kind=callable, wanted=wanted)
  return guarded(config.schedule, ", its schedule", schedule)


def phase_rate(config: cfg.Config, phase: Phase) -> tuple[float, float | None]:
  """(factor of the learning rate, momentum or None) in a phase."""
  settings = config.phases
  rule = "neutral" if isinstance(settings, cfg.AdaptiveBatch) else settings.follow
  momentum = getattr(config.optimizer, "momentum", None)
  sizes = phase.batch_size, config.batch_size
  factor, new = follow_batch_size(rule, *sizes, momentum or 0.0)
  return factor, None if momentum is None else new


def phase_schedule(config: cfg.Config, derived: Derived, phase: Phase) -> Schedule:
  """Step of the run -> learning rate, inside a phase."""
  schedule = make_schedule(config, derived)
  if len(derived.phases) == 1:
    return schedule
  return within_phase(schedule, phase, config.batch_size, phase_rate(config, phase)[0])


def make_optimizer(
  config: cfg.Config, schedule: Schedule, warmup_steps: int = 0, momentum: float | None = None
) -> optax.GradientTransformation:
  """Clip by the global norm, optimize, and let lower layers move less."""
  stacked = embeddings = None
  if config.model.is_stack:
    stacked = optim.matching("^layers/")
    embeddings = optim.matching("^(embed|head)/")
  context = cfg.OptimizerContext(momentum, warmup_steps, stacked, embeddings)
  optimizer = build(
    config.optimizer,
    schedule,
    context,
    kind=lambda x: hasattr(x, "init") and hasattr(x, "update"),
    wanted="an optax transformation",
  )
  if isinstance(optimizer, optax.GradientTransformation):  # keeps what takes more arguments
    optimizer = guarded_parts(config.optimizer, ", its {}", optimizer)
  chain = [optimizer]
  if config.clip_norm is not None:
    chain.insert(0, optax.clip_by_global_norm(config.clip_norm))
  if config.layer_decay is not None:
    chain.append(optim.layerwise_rate_decay(config.layer_decay, config.layer_order))
  return optax.chain(*chain)
