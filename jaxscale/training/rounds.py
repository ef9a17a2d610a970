"""Metrics of a round of local steps, without a collective in the steps between.

A worker that takes fewer steps lets the others wait only where they synchronize, so no other
step may have a collective. Each device adds up what its steps report; when workers synchronize,
the sums are averaged over all steps of all workers, and the means are reported until the next
time. The first step of a run also reports.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import vary
from jaxscale.collectives.typed import same_everywhere
from jaxscale.training.types import LOSS_WEIGHT, Metrics, Totals

Axes = tuple[str, ...]


class Round(NamedTuple):
  """Results of a device's steps; a pair with the exchange's state in `WorkerState`.

  Attributes:
    taken: steps that the device's worker has taken in the run, int32 [].
    sums: loss and its divisor, gradient norm, and steps since the last report, float32 [4].
    means: loss, gradient norm and steps per worker of the last report, float32 [3].
    codes: the device's first findings of NaN or Inf since the last report, int32 [3].
  """

  taken: jax.Array
  sums: jax.Array
  means: jax.Array
  codes: jax.Array


def init() -> Round:
  """Return the state before the first step."""
  sums, means = jnp.zeros(4, jnp.float32), jnp.zeros(3, jnp.float32)
  return Round(jnp.zeros((), jnp.int32), sums, means, jnp.full(3, -1, jnp.int32))


def count(state: Round, totals: Totals, norm: jax.Array, is_active: jax.Array, codes: Any) -> Round:
  """Add the results of a device's step.

  Args:
    state: the state before the step.
    totals: the device's totals.
    norm: the norm of the worker's gradient, float32 [].
    is_active: whether the worker took the step, bool [].
    codes: findings of `nan_guard`, int32 [3]; steps with one are not counted. () without guard.
  """
  weight = totals.get(LOSS_WEIGHT, totals["examples"])
  added = jnp.stack([x.astype(jnp.float32) for x in (totals["loss"], weight, norm, is_active)])
  if len(codes):
    added = jnp.where(jnp.isfinite(totals["loss"]), added, 0)
    state = state._replace(codes=jnp.where((state.codes < 0).all(), codes, state.codes))
  taken = state.taken + added[3].astype(jnp.int32)
  return state._replace(taken=taken, sums=state.sums + added)


def report(state: Round, is_due: jax.Array, axes: Axes) -> tuple[Round, Metrics]:
  """Return the state for the next step, and the metrics, which are equal on all devices.

  Args:
    state: the state with the results of this step.
    is_due: whether workers have synchronized, equal on all devices, bool [].
    axes: the mesh axes.

  Returns:
    The state, and "loss", "grad_norm" and "worker_steps". The loss is NaN in a report of steps of
    which a worker has skipped one.
  """

  def averaged(state: Round):
    is_bad = (state.codes >= 0).any().astype(jnp.float32)
    sums, bad = lax.psum((state.sums, is_bad), axes)
    loss, weight, norm, steps = sums
    size = jnp.float32(lax.axis_size(axes))
    divisors = jnp.stack([jnp.where(weight == 0, 1, weight), jnp.maximum(steps, 1), size])
    means = jnp.stack([loss, norm, steps]) / divisors
    start = init()._replace(taken=state.taken, means=means)
    return vary(start, axes), jnp.where(bad > 0, jnp.nan, means[0])

  def kept(state: Round):
    return state, same_everywhere(state.means[0], axes)

  after, loss = lax.cond(is_due, averaged, kept, state)
  _, norm, steps = same_everywhere(after.means, axes)
  return after, {"loss": loss, "grad_norm": norm, "worker_steps": steps}
