"""Smaller rates for lower layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxscale.optim.tree_paths import path_name


def layerwise_rate_decay(decay: float, order: Sequence[str]) -> optax.GradientTransformation:
  """Multiply each layer's update by decay^(its depth below the top).

  Discriminative fine-tuning of ULMFiT (arXiv:1801.06146, §3.2, decay 1/2.6), in
  the form of BEiT (arXiv:2106.08254): the head moves by the whole rate, the layer
  below it by decay times that, and so on. Chain it after the optimizer, whose trust
  ratios and moments would undo it.

  Args:
    decay: in (0, 1]; 0.65 to 0.9 is usual.
    order: from the input to the top: regular expressions, one per depth, searched
      in the leaf's path, "/" between names.

  Raises:
    ValueError: `decay` is out of range; or, in `init`, a leaf fits
      none of the expressions or several.

  Example:
    >>> tx = optax.chain(
    ...   adamw(1e-3), layerwise_rate_decay(0.75, ["^stem", "^block_0", "^head"]))
  """
  if not 0 < decay <= 1:
    raise ValueError(f"decay={decay}: need 0 < decay <= 1")
  patterns = [re.compile(pattern) for pattern in order]

  def factor(path: Any) -> float:
    name = path_name(path)
    hits = [i for i, pattern in enumerate(patterns) if pattern.search(name)]
    if len(hits) != 1:
      fits = [order[i] for i in hits] or "none"
      raise ValueError(f"order: {name} fits {fits} of {list(order)}, need exactly one")
    return decay ** (len(patterns) - 1 - hits[0])

  def init(params: Any):
    jax.tree.map_with_path(lambda path, _: factor(path), params)
    return optax.EmptyState()

  def update(updates: Any, state: Any, params: Any = None):
    scaled = jax.tree.map_with_path(lambda path, u: factor(path) * u, updates)
    return scaled, state

  return optax.GradientTransformation(init, update)
