"""An exponential moving average of the parameters, kept by the optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax


class AverageParamsState(NamedTuple):
  """The average, shaped like the parameters."""

  average: Any


def average_params(decay: float) -> optax.GradientTransformation:
  """Average the parameters *after* each update; put it last in a chain.

      average = decay average + (1 - decay) (w + update)

  It starts from the initial parameters and leaves updates as they are.

  Args:
    decay: in (0, 1).
  """

  def init(params):
    # A copy: the parameters' own buffers are donated to every step.
    return AverageParamsState(jax.tree.map(lambda w: w.copy(), params))

  def update(updates, state, params=None):
    if params is None:
      raise ValueError("averaging needs the parameters: tx.update(g, state, params)")
    average = jax.tree.map(
      lambda a, w, u: decay * a + (1 - decay) * (w + u), state.average, params, updates
    )
    return updates, AverageParamsState(average)

  return optax.GradientTransformation(init, update)


def averaged_params(opt_state: Any) -> Any | None:
  """The average that `average_params` keeps in an optimizer state, or None."""
  states = jax.tree.leaves(
    opt_state, is_leaf=lambda s: isinstance(s, AverageParamsState)
  )
  found = [s.average for s in states if isinstance(s, AverageParamsState)]
  return found[0] if found else None
