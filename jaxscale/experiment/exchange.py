"""Gradient exchange and synchronization of an experiment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxscale import config as cfg
from jaxscale.errors import ConfigError, invalid
from jaxscale.exchange import Exchange, plain
from jaxscale.exchange.local_updates import LocalUpdate
from jaxscale.exchange.wrappers import delayed, warm_start
from jaxscale.experiment.derive import Derived
from jaxscale.experiment.model import bn_span
from jaxscale.experiment.own_classes import build, guarded_parts
from jaxscale.experiment.phases import Phase, step_at


def make_exchange(
  config: cfg.Config, derived: Derived, sizes: dict[str, int], params: Callable[[], Any], mesh: Mesh
) -> tuple[Exchange, list[str]]:
  """Build the gradient exchange, and return it with notes for the user.

  Args:
    config: the config, with the settings of the exchange.
    derived: derived numbers, for the steps of `plain_epochs`.
    sizes: sizes of the axes to average over.
    params: function that returns a device's parameters, or their shapes.
    mesh: the mesh of the axes.

  Raises:
    ConfigError: the exchange does not fit the devices.
  """
  axes, chosen, notes = tuple(sizes), config.exchange, []
  if not axes:  # gradients are summed in the backward pass
    return plain(axes), []
  name = type(chosen).__name__
  try:
    context = cfg.ExchangeContext(sizes, params, mesh, config.seed, notes.append)
    exchange = build(chosen, context, kind=Exchange, expected="an exchange.Exchange")
  except ConfigError as e:
    if f"{name}." in str(e):  # errors of a user's class already have its name
      raise
    raise ConfigError(f"{name}.{e}") from None
  exchange = guarded_parts(chosen, " ({})", exchange)
  if chosen.plain_epochs:
    examples = math.ceil(chosen.plain_epochs * derived.num_train)
    # A delayed exchange sends zeros in its first step.
    steps = step_at(derived.phases, examples) + chosen.delayed
    exchange = warm_start(exchange, axes, steps=steps)
  return delayed(exchange) if chosen.delayed else exchange, notes


class Synchronization(NamedTuple):
  """Method and workers of local updates, for `make_local_train_step`."""

  method: LocalUpdate
  workers: tuple[str, ...] | None


def make_sync(
  config: cfg.Config, derived: Derived, phase: Phase, mesh: Mesh
) -> tuple[Synchronization | None, list[str]]:
  """Return the synchronization of workers in a phase, or None, and notes for the user.

  Raises:
    ConfigError: workers would share BatchNorm statistics, or there are too few examples
      for block momentum.
  """
  if not config.is_local_sgd:
    return None, []
  sync, notes = config.sync, []
  alone = None if sync.workers == "device" else ("replica",)
  span = bn_span(config, derived, phase).axis_name or ()
  if span and (alone is None or set(span) & {*alone}):
    field = f"{type(config.model).__name__}.bn_span"
    problem = "would share BatchNorm statistics between workers that train alone"
    raise invalid(field, config.model.bn_span, problem, "use 'device' or a smaller number")
  num_workers = mesh.size if alone is None else mesh.shape["replica"]
  rows = phase.batch_size // num_workers
  context = cfg.SyncContext(num_workers, rows, derived.num_train, notes.append)
  kinds, expected = (LocalUpdate, type(None)), "an exchange.local_updates.LocalUpdate, or None"
  method = build(sync, context, kind=kinds, expected=expected)
  return (None if method is None else Synchronization(method, alone)), notes
