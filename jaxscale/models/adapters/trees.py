"""Parameters and state of a library's model as nested dicts with the model's paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxscale.errors import ConfigError

PARAMS, STATISTICS, STATE = "params", "batch_stats", "state"


class Leaves:
  """Arrays of a model by group and path.

  Groups are `PARAMS`, `STATISTICS` (floats that are averaged over devices) and `STATE`
  (the rest). Typed keys are stored as their data, because a checkpoint holds numbers.

  Args:
    arrays: the path of each array, with "/" between names, and its shape and dtype.
    groups: the group of each array.

  Raises:
    ConfigError: a path is also the beginning of another.
  """

  def __init__(self, arrays: Sequence[tuple[str, Any]], groups: Sequence[str]):
    paths = [path for path, _ in arrays]
    self.places = [f"{group}/{path}" for group, path in zip(groups, paths, strict=True)]
    self.keys: dict[str, Any] = {}  # implementations of typed keys by place
    for place, (path, x) in zip(self.places, arrays, strict=True):
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        jax.eval_shape(lambda key, at=place: self.keys.update({at: jax.random.key_impl(key)}), x)
      if any(other.startswith(f"{path}/") for other in paths) or paths.count(path) > 1:
        raise ConfigError(f"the model has two arrays at {path!r}; rename one of them")

  def pack(self, arrays: Sequence[jax.Array]) -> tuple[Any, Any]:
    """Return (params, model_state) of the arrays."""
    flat = {}
    for place, x in zip(self.places, arrays, strict=True):
      x = jax.random.key_data(x) if place in self.keys else x
      flat[place] = jnp.asarray(x, x.dtype)  # no weak type, which a checkpoint would lose
    trees: dict[str, Any] = {PARAMS: {}} | unflatten_dict(flat, sep="/")
    return trees.pop(PARAMS), trees

  def unpack(self, params: Any, model_state: Any) -> list[jax.Array]:
    """Return the arrays of (params, model_state)."""
    flat: dict[str, Any] = flatten_dict({PARAMS: params, **model_state}, sep="/")
    for place, impl in self.keys.items():
      flat[place] = jax.random.wrap_key_data(flat[place], impl=impl)
    return [flat[place] for place in self.places]


def group_of(x: Any, *, is_param: bool, is_statistic: bool) -> str:
  """Return the group of an array; only floats can have gradients and be averaged."""
  if not jnp.issubdtype(x.dtype, jnp.inexact) or not (is_param or is_statistic):
    return STATE
  return STATISTICS if is_statistic else PARAMS
