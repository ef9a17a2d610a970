"""Parametrization of an experiment: the base model, factors by path, and initial values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale import config as cfg
from jaxscale import models, optim
from jaxscale.errors import invalid
from jaxscale.experiment.own_classes import build
from jaxscale.optim.layers import matrix_labels
from jaxscale.optim.tree_paths import path_name

Factors = Mapping[str, optim.LeafFactors]


def base_config(config: cfg.Config) -> cfg.Config:
  """Return the config with the base model of its parametrization, and Standard.

  Raises:
    ConfigError: the model does not have these fields or refuses their values.
  """
  model: Any = dataclasses.replace(config.model, **getattr(config.parametrization, "base", {}))
  return dataclasses.replace(config, model=model, parametrization=cfg.Standard())


def leaf_factors(config: cfg.Config, model: Any, base: Any) -> Factors:
  """Return the factors of each parameter by path.

  Args:
    config: the config of the model.
    model: the model, `ModelFns` or `Stack`.
    base: the base model.

  Raises:
    ConfigError: there is no rule for the optimizer, the adapter or the shapes.
  """
  name, optimizer = type(config.parametrization).__name__, type(config.optimizer).__name__
  if (rule := config.optimizer.update_rule) not in ("adam", "sgd", "muon"):
    fix = "use AdamW, Muon or SGD, or set `update_rule` in an optimizer of your own"
    raise invalid("Config.parametrization", name, f"has no rule for {optimizer}", fix)
  if not isinstance(config.adapter, cfg.NoAdapter):
    problem = f"has no rule for {type(config.adapter).__name__}"
    raise invalid("Config.parametrization", name, problem, "use NoAdapter or Standard")
  own, small = _params(model), _params(base)
  if different := own.keys() ^ small.keys():
    problem = f"gives a model with other parameters, e.g. {min(different)}"
    raise invalid(f"{name}.base", ..., problem, "change sizes only")
  by_muon = _by_muon(config, model) if rule == "muon" else {}
  is_stack, leaves = isinstance(model, models.Stack), {}
  for path, x in own.items():
    inside = is_stack and path.startswith("layers/")
    shapes = x.shape[inside:], small[path].shape[inside:]
    leaves[path] = optim.Leaf(*shapes, inside, by_muon.get(path, ""))
  more: dict[str, Any] = {"out_first": getattr(model, "out_first", False)}
  if is_stack:
    scale = math.sqrt(_head_width(base_config(config).model) / _head_width(config.model))
    more |= dict(depth=model.num_layers / base.num_layers, is_tied=model.tied, query_scale=scale)
  context = cfg.ParametrizationContext(leaves, rule, **more)
  expected = "a dict from paths in context.leaves to optim.LeafFactors"
  factors = build(config.parametrization, context, kind=Mapping, expected=expected)
  for path, each in factors.items():
    if path not in own or not isinstance(each, optim.LeafFactors):
      raise invalid(f"{name}.build", ..., f"maps {path!r} to {each!r}", f"return {expected}")
  return factors


def _params(model: Any) -> dict[str, jax.ShapeDtypeStruct]:
  params = _split(models.init_shapes(model.init))[0]
  return {path_name(path): x for path, x in jax.tree.leaves_with_path(params)}


def _split(result: Any) -> tuple[Any, Any]:
  """Return parameters and model state of the `init` of `ModelFns` or `Stack`."""
  return result if isinstance(result, tuple) else (result, None)


def _head_width(model: Any) -> int:
  """Return the width of an attention head of a built-in stack; 1 if it is another model."""
  if not isinstance(model, cfg.Transformer | cfg.ViT):
    return 1
  return getattr(model, "head_width", None) or model.width // model.num_heads


def _by_muon(config: cfg.Config, model: Any) -> dict[str, str]:
  """Return `adjust` by the paths of the parameters that Muon updates, as `optim.muon` does."""
  masks = ("^layers/", "^(embed|head)/") if isinstance(model, models.Stack) else (None, None)
  labels = matrix_labels("muon", getattr(config.optimizer, "include", None), *masks)[0]
  leaves = jax.tree.leaves_with_path(labels(_split(models.init_shapes(model.init))[0]))
  adjust = getattr(config.optimizer, "adjust", "original")
  return {path_name(path): adjust for path, label in leaves if label == "muon"}


def with_init(model: Any, base: Any, factors: Factors) -> Any:
  """Return a model whose parameters begin with the root mean squares of the factors.

  A parameter's root mean square is that of the base model's at the same key, times the factor,
  whatever the model's own rule for its sizes is. Parameters without a factor, and zeros, stay.

  Args:
    model: the model, `ModelFns` or `Stack`.
    base: the base model.
    factors: the factors by path.
  """
  own, small = _params(model), _params(base)
  known = {path for path, x in own.items() if x.shape == small[path].shape}

  def init(key: jax.Array) -> Any:
    params, state = _split(result := model.init(key))
    bases = dict(jax.tree.leaves_with_path(_split(base.init(key))[0]))

    def scaled(path: Any, x: jax.Array) -> jax.Array:
      if (factor := factors.get(name := path_name(path))) is None:
        return x
      scale = factor.stored()[0]
      if name not in known:
        now, then = (jnp.sqrt(jnp.mean(jnp.square(leaf))) for leaf in (x, bases[path]))
        scale = jnp.where(now > 0, scale * then / jnp.where(now > 0, now, 1), 1).astype(x.dtype)
      return scale * x

    new = jax.tree.map_with_path(scaled, params)
    return (new, state) if isinstance(result, tuple) else new

  return model._replace(init=init)
