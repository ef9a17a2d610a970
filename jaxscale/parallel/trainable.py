"""Trainable part of the parameters, for fine-tuning with frozen parameters.

A tree of the trainable part has None in place of frozen leaves. It is an ordinary pytree with
fewer leaves, so that gradients, exchange, optimizer state and averages of frozen leaves do not
exist, in any layout.
"""

from __future__ import annotations

import re
from typing import Any

import jax

from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.specs import Layout


def trainable_part(params: Any, pattern: str | None) -> Any:
  """Return a tree like the parameters with None in place of frozen leaves.

  Args:
    params: a tree with the structure of the parameters.
    pattern: a regular expression that is searched in the path of a leaf and selects the
      trainable ones; None selects all.

  Example:
    >>> trainable_part({"embed": 1, "head": {"kernel": 2}}, "^head/")
    {'embed': None, 'head': {'kernel': 2}}
  """
  if pattern is None:
    return params

  def kept(path: Any, leaf: Any) -> Any:
    return leaf if re.search(pattern, path_name(path)) else None

  return jax.tree.map_with_path(kept, params)


def merge(part: Any, params: Any) -> Any:
  """Return the parameters with the leaves of their trainable part replaced.

  Example:
    >>> merge({"embed": None, "head": 3}, {"embed": 1, "head": 2})
    {'embed': 1, 'head': 3}
  """

  def newest(new: Any, old: Any) -> Any:
    return old if new is None else new

  return jax.tree.map(newest, part, params, is_leaf=lambda x: x is None)


def trainable_layout(layout: Layout, pattern: str | None) -> Layout:
  """Return the layout of the trainable part: of gradients and optimizer state.

  Args:
    layout: the layout of all parameters.
    pattern: as for `trainable_part`.
  """
  if pattern is None or layout.shapes is None:
    return layout
  names = "param_specs", "opt_specs", "gathers", "shapes"
  return layout._replace(**{n: trainable_part(getattr(layout, n), pattern) for n in names})
