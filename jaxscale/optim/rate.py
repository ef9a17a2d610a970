"""The learning rate of a step, in the optimizer and in the metrics.

1. settings.py: `Cosine`, `Polynomial`, `Steps` build a schedule, step -> rate, from the
   functions in schedules.py; its peak is computed in experiment/derive.py.
2. Here: an optimizer evaluates it (`rate_at`) and keeps it in its state, by
   `scale_by_rate`, or in a state of its own (momentum.py).
3. training/step.py: the step evaluates the same schedule for its metrics.
4. run/reporter.py: `Reporter` logs it as `train/learning_rate`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim.layers import default_float


class ScaleByRateState(NamedTuple):
  """State of `scale_by_rate`.

  Attributes:
    count: int32 [], steps done.
    learning_rate: [], of the last step; 0 before the first.
  """

  count: Any
  learning_rate: Any


def scale_by_rate(
  learning_rate: optax.ScalarOrSchedule, *, flip_sign: bool = True
) -> optax.GradientTransformation:
  """`optax.scale_by_learning_rate` whose state keeps the rate, for `learning_rate`."""

  def init(params):
    return ScaleByRateState(jnp.zeros([], jnp.int32), jnp.zeros([], default_float()))

  def update(updates, state, params=None):
    rate = rate_at(learning_rate, state.count)
    factor = -rate if flip_sign else rate
    scaled = jax.tree.map(lambda u: factor.astype(u.dtype) * u, updates)
    return scaled, ScaleByRateState(state.count + 1, rate)

  return optax.GradientTransformation(init, update)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
  """The rate of the step after `count` steps, in the default float dtype."""
  rate = learning_rate(count) if callable(learning_rate) else learning_rate
  return jnp.asarray(rate, default_float())


def learning_rate(opt_state: Any) -> jax.Array | None:
  """The rate of the last step, float32 []; None if the optimizer does not keep it.

  The optimizers of this package do, and so does `optax.inject_hyperparams`. Where
  several rates are kept, the first in the order of `jax.tree`.

  Example:
    >>> tx, w = optax.chain(optax.clip_by_global_norm(1.0), sgd(0.5)), jnp.ones(3)
    >>> _, state = tx.update(w, tx.init(w), w)
    >>> learning_rate(state)
    Array(0.5, dtype=float32)
  """
  found = optax.tree.get_all_with_path(opt_state, "learning_rate")
  return jnp.asarray(found[0][1], jnp.float32) if found else None
