"""Which leaves decay and get a trust ratio."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.tree_paths import path_name

Mask = Callable[[Any], Any]  # params -> a bool per leaf


def kernels(params: Any) -> Any:
  """True for leaves of two dims or more: not biases, not BatchNorm's.

  The rule of the MLPerf reference for its LARS (`bias` and
  `batch_normalization` are skipped) and of Goyal et al. (arXiv:1706.02677, §5.3).

  Example:
    >>> kernels({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
    {'b': False, 'w': True}
  """
  return jax.tree.map(lambda x: x.ndim > 1, params)


def matching(pattern: str) -> Mask:
  r"""A mask that is True where a regular expression finds the leaf's path.

  Args:
    pattern: searched in the path, "/" between names, e.g. r"head/kernel$".

  Example:
    >>> matching("^a/")({"a": {"w": 1}, "b": {"w": 1}})
    {'a': {'w': True}, 'b': {'w': False}}
  """

  def fits(path, _):
    return bool(re.search(pattern, path_name(path)))

  return lambda params: jax.tree.map_with_path(fits, params)
