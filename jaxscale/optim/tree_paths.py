"""Names of a tree's leaves, as used in masks, metrics, checkpoints and messages."""

from __future__ import annotations

from typing import Any

import jax


def path_name(path: tuple[Any, ...]) -> str:
  """Return the name of a leaf, e.g. params/Dense_0/kernel.

  Args:
    path: the leaf's path from functions such as `jax.tree.map_with_path`.
  """
  return jax.tree_util.keystr(path, simple=True, separator="/")
