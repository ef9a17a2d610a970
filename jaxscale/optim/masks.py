"""Which leaves decay and get a trust ratio."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.optim.tree_paths import path_name

# params -> a bool per leaf, or its name or pattern as of `including`. Defaults are
# names: `optax.inject_hyperparams` would call a function as a schedule.
MaskFn = Callable[[Any], Any]
Mask = str | MaskFn


def kernels(params: Any) -> Any:
  """True for leaves of two dims or more: not biases, not BatchNorm's.

  The rule of the MLPerf reference for its LARS (`bias` and
  `batch_normalization` are skipped) and of Goyal et al. (arXiv:1706.02677, §5.3).

  Example:
    >>> kernels({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
    {'b': False, 'w': True}
  """
  return jax.tree.map(lambda x: x.ndim > 1, params)


def timm_kernels(params: Any) -> Any:
  """`kernels` without tables of positions: what timm decays.

  timm excludes vectors and what a ViT's `no_weight_decay` lists: `pos_embed`, and
  tokens, which are vectors here (timm 1.0.31, optim/_param_groups.py).

  Example:
    >>> timm_kernels({"embed": {"position": jnp.ones((5, 4))}, "w": jnp.ones((2, 3))})
    {'embed': {'position': False}, 'w': True}
  """

  def decays(path: Any, x: Any):
    return x.ndim > 1 and not path_name(path).endswith("embed/position")

  return jax.tree.map_with_path(decays, params)


def matching(pattern: str) -> MaskFn:
  r"""A mask that is True where a regular expression finds the leaf's path.

  Args:
    pattern: searched in the path, "/" between names, e.g. r"head/kernel$".

  Example:
    >>> matching("^a/")({"a": {"w": 1}, "b": {"w": 1}})
    {'a': {'w': True}, 'b': {'w': False}}
  """

  def fits(path: Any, _):
    return bool(re.search(pattern, path_name(path)))

  return lambda params: jax.tree.map_with_path(fits, params)


# By the names that `include` of an optimizer's settings has for them.
NAMED: dict[str, MaskFn | None] = {"kernels": kernels, "timm": timm_kernels, "all": None}


def including(include: str) -> MaskFn | None:
  """The mask of a name in `NAMED`, or of a regular expression of paths; None: all."""
  return NAMED[include] if include in NAMED else matching(include)
