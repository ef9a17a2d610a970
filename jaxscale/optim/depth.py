"""Layer-wise learning rate decay: smaller learning rates for lower layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxscale.optim.tree_paths import path_name


def layerwise_rate_decay(decay: float, order: Sequence[str]) -> optax.GradientTransformation:
  """Multiply each layer's update by decay^(its depth below the top).

  This is the discriminative fine-tuning of ULMFiT (arXiv:1801.06146, §3.2, decay 1/2.6)
  in the form of BEiT (arXiv:2106.08254): the head uses the full learning rate, the layer
  below it decay times that, and so on. Chain it after the optimizer, because trust ratios
  and Adam's moments would undo it.

  Args:
    decay: factor per layer, in (0, 1]; 0.65 to 0.9 is usual.
    order: regular expressions, one per depth from the input to the top, which are
      searched in the leaf's path (names joined by "/").

  Raises:
    ValueError: `decay` is out of range; or, in `init`, a leaf matches none of the
      expressions or several.

  Example:
    >>> tx = optax.chain(
    ...   adamw(1e-3), layerwise_rate_decay(0.75, ["^stem", "^block_0", "^head"]))
  """
  if not 0 < decay <= 1:
    raise ValueError(f"decay={decay} is out of range; give 0 < decay <= 1")
  patterns = [re.compile(pattern) for pattern in order]

  def factor(path: Any) -> float:
    name = path_name(path)
    hits = [i for i, pattern in enumerate(patterns) if pattern.search(name)]
    if len(hits) != 1:
      fits = [order[i] for i in hits] or "none"
      raise ValueError(f"order={list(order)}: {name} matches {fits}; it must match exactly one")
    return decay ** (len(patterns) - 1 - hits[0])

  def init(params: Any):
    jax.tree.map_with_path(lambda path, _: factor(path), params)
    return optax.EmptyState()

  def update(updates: Any, state: Any, params: Any = None):
    return jax.tree.map_with_path(lambda path, u: factor(path) * u, updates), state

  return optax.GradientTransformation(init, update)
