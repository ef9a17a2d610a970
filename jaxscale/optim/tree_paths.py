"""What a leaf of a tree is called: in masks, metrics, checkpoints and messages."""

from __future__ import annotations

from typing import Any

import jax


def path_name(path: tuple[Any, ...]) -> str:
  """The name of a leaf, e.g. params/Dense_0/kernel.

  Args:
    path: as JAX's `tree_map_with_path` and its kin give it.
  """
  return jax.tree_util.keystr(path, simple=True, separator="/")
