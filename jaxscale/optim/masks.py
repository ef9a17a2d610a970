"""Masks that select the leaves with weight decay and trust ratios."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.optim.tree_paths import path_name

# A mask is a function params -> bool per leaf, or a name or pattern of `including`.
# Defaults are names, because `optax.inject_hyperparams` would call a function as a schedule.
MaskFn = Callable[[Any], Any]
Mask = str | MaskFn


# Names of vectors, which Equinox and Haiku keep with further dims of 1, e.g. (64, 1, 1).
VECTORS = {"bias", "b", "scale", "offset"}


def kernels(params: Any) -> Any:
  """Mask of the leaves with two dims or more, which excludes biases and BatchNorm.

  This is the rule of the MLPerf reference for LARS (which skips `bias` and
  `batch_normalization`) and of Goyal et al. (arXiv:1706.02677, §5.3). A leaf named bias, b,
  scale or offset needs two dims longer than 1.

  Example:
    >>> kernels({"w": jnp.ones((2, 1)), "b": jnp.ones((3, 1, 1))})
    {'b': False, 'w': True}
  """

  def is_kernel(path: Any, x: Any):
    is_vector = path_name(path).split("/")[-1] in VECTORS
    return sum(n > is_vector for n in x.shape) > 1

  return jax.tree.map_with_path(is_kernel, params)


def timm_kernels(params: Any) -> Any:
  """Mask of the leaves with weight decay in timm: `kernels` except position embeddings.

  timm excludes vectors and the parameters in a ViT's `no_weight_decay`: `pos_embed` and
  the tokens, which are vectors in jaxscale (timm 1.0.31, optim/_param_groups.py).

  Example:
    >>> timm_kernels({"embed": {"position": jnp.ones((5, 4))}, "w": jnp.ones((2, 3))})
    {'embed': {'position': False}, 'w': True}
  """

  def decays(path: Any, is_kernel: bool):
    return is_kernel and not path_name(path).endswith("embed/position")

  return jax.tree.map_with_path(decays, kernels(params))


def matching(pattern: str) -> MaskFn:
  r"""Return a mask of the leaves whose path matches a regular expression.

  Args:
    pattern: a regular expression that is searched in the path, whose names are joined by
      "/", e.g. r"head/kernel$".

  Example:
    >>> matching("^a/")({"a": {"w": 1}, "b": {"w": 1}})
    {'a': {'w': True}, 'b': {'w': False}}
  """

  def fits(path: Any, _):
    return bool(re.search(pattern, path_name(path)))

  return lambda params: jax.tree.map_with_path(fits, params)


# Masks by the names that `include` in an optimizer's settings accepts.
NAMED: dict[str, MaskFn | None] = {"kernels": kernels, "timm": timm_kernels, "all": None}


def including(include: str) -> MaskFn | None:
  """Return the mask for a name in `NAMED` or a regular expression; None means all leaves."""
  return NAMED[include] if include in NAMED else matching(include)
