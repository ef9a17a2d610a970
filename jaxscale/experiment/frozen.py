"""Frozen parameters of an experiment: their pattern, checks of it, and a note on them."""

from __future__ import annotations

import re
from typing import Any

import jax
import optax

from jaxscale import config as cfg
from jaxscale import optim
from jaxscale.collectives import payload_bytes
from jaxscale.errors import ConfigError, invalid
from jaxscale.metrics.text import byte_size
from jaxscale.models import lora
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.trainable import trainable_part


def trainable(config: cfg.Config) -> str | None:
  """Return the pattern of the trained parameters; None means all."""
  if not isinstance(config.adapter, cfg.LoRA):
    return config.trainable
  return lora.LEAVES if config.trainable is None else f"{config.trainable}|{lora.LEAVES}"


def check_paths(config: cfg.Config, params: Any) -> None:
  """Raise if a pattern matches no parameter, which would silently change the method.

  Args:
    config: the config, with patterns of several settings.
    params: the parameters, or their shapes.

  Raises:
    ConfigError: a pattern matches no parameter, or only frozen ones.
  """
  order, include = config.layer_order, getattr(config.optimizer, "include", "all")
  fields = [("Config.layer_order", pattern) for pattern in order]
  of_optimizer = f"{type(config.optimizer).__name__}.include"
  if include not in optim.NAMED:
    fields.insert(0, (of_optimizer, include))
  if config.trainable is not None:
    fields.insert(0, ("Config.trainable", config.trainable))
  if isinstance(rule := config.parametrization, cfg.MuP):
    names = (n for n in ("outputs", "branch_ends") if getattr(rule, n, None) is not None)
    fields += [(f"{type(rule).__name__}.{n}", getattr(rule, n)) for n in names]
  paths, trained = _paths(params), _paths(trainable_part(params, trainable(config)))
  for field, pattern in fields:
    if not any(re.search(pattern, path) for path in paths):
      # Paths from the start, the middle and the end are enough as examples.
      some = sorted({0, 1, len(paths) // 2, len(paths) - 1} & set(range(len(paths))))
      fix = f"paths are, e.g., {', '.join(paths[i] for i in some)}"
      raise invalid(field, repr(pattern), "matches no parameter", fix)
    if field == of_optimizer and not any(re.search(pattern, path) for path in trained):
      fix = f"trained are, e.g., {', '.join(trained[:3])}"
      raise invalid(field, repr(pattern), "matches only frozen parameters", fix)
  for path in trained if order else ():
    fits = [repr(pattern) for pattern in order if re.search(pattern, path)]
    if len(fits) != 1:
      found = f"{path} matches {' and '.join(fits) or 'none'} of them"
      raise ConfigError(f"Config.layer_order={order}: {found}; it must match exactly one")


def frozen_note(
  config: cfg.Config, params: Any, tx: optax.GradientTransformation
) -> tuple[str, ...]:
  """Return a line on the frozen parameters and what they save, or () if all are trained."""
  trained = trainable_part(params, trainable(config))
  parts, every = jax.tree.leaves(trained), jax.tree.leaves(params)
  if len(parts) == len(every):
    return ()
  count, total = (sum(x.size for x in leaves) for leaves in (parts, every))
  frozen_bytes = payload_bytes(params) - (trained_bytes := payload_bytes(trained))
  # Optimizers keep as many bytes for each trained parameter as they would for a frozen one.
  state = payload_bytes(jax.eval_shape(tx.init, trained)) * frozen_bytes // trained_bytes
  what = f"trained: {count:,} of {total:,} parameters ({len(parts)} of {len(every)} arrays)"
  saved = f"saving as much of gradients and exchange, and {byte_size(state)} of optimizer state"
  return (f"{what}; frozen: {byte_size(frozen_bytes)}, {saved}",)


def _paths(params: Any) -> list[str]:
  return [path_name(path) for path, _ in jax.tree.leaves_with_path(params)]
