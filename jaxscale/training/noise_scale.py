"""Gradient-noise scale: an estimate of the critical batch size.

The method is from McCandlish et al., "An empirical model of large-batch training"
(arXiv:1812.06162). With G the true gradient and S the trace of the covariance of one
example's gradient, B_noise = S / |G|^2. Data parallelism computes gradients over b and B
examples anyway, and their squared norms give unbiased estimates of |G|^2 and S
(appendix A.1):

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)
    S     = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

The ratio of their running averages over about 200 steps is reported, with a 95 %
confidence interval (Fieller's theorem, applied to the scatter of the steps). The
interval is narrow if the scale is below the batch size. A scale of many batches needs
more steps: the interval is then wide, and its upper end is infinite if |G|^2 may be 0.
A drift within the 200 steps widens the interval, too.

A run at batch size B takes about 1 + B_noise/B times the minimum number of steps and
1 + B/B_noise times the minimum number of examples (eq. 2.11). At B = B_noise it takes
twice the minimum of each.

An example is a row of the batch, the unit of Config.batch_size. For text this is a
window of tokens: windows are drawn independently of each other, tokens are not. The
mean gradient, however, is an average over the examples that the loss counts
(`totals["examples"]`), which are tokens for text, as in `grad_norm`. Papers on language
models give the scale in tokens: multiply this scale by the tokens of a row.

Micro-batches may contain different numbers n_i of the N counted examples, so their mean
gradients g_i are weighted. For R rows:

    |G_b|^2 = sum n_i^2 |g_i|^2 / sum n_i^2     b = R sum n_i^2 / N^2     B = R

With equal n_i, |G_b|^2 is the plain mean and b is the number of rows of a micro-batch.
In general B |G_B|^2 - b |G_b|^2 is R / N^2 times the sum of n_i g_i . n_j g_j over
i != j, and B - b is R / N^2 times the sum of n_i n_j over i != j. Independent
micro-batches therefore give an unbiased |G|^2 for any n_i. S is also unbiased if the
expected gradient of a token does not depend on the number of tokens in its row.
Otherwise its bias is 2 G . cov(e, n) over the squared mean of n, with n the number of
tokens of a row and e their summed gradient minus n G.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.training.types import LOSS_WEIGHT, StepOutputs, TrainState, Update

# Totals over micro-batches: squared norms of summed gradients, squared example counts.
_SQ, _COUNT_SQ = "_squared_norms", "_squared_counts"


_DECAY = 0.99  # decay of the running averages


class NoiseScale(NamedTuple):
  """Running averages for the gradient-noise scale, in float32.

  Attributes:
    signal: average of |G|^2, a scalar.
    noise: average of S, a scalar.
    weight: average of 1, which corrects the bias of the other averages.
    scatter: average of the products of deviations of (|G|^2, S), [2, 2].
  """

  signal: jax.Array
  noise: jax.Array
  weight: jax.Array
  scatter: jax.Array


def observe(grads: Any, totals: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Return further totals of a micro-batch, to be summed over all micro-batches.

  Args:
    grads: gradients summed over the examples that `totals["examples"]` counts.
    totals: totals of the micro-batch.
  """
  count = totals.get(LOSS_WEIGHT, totals["examples"]).astype(jnp.float32)
  return {_SQ: optax.tree.norm(grads, squared=True), _COUNT_SQ: count * count}


def init() -> NoiseScale:
  """Return the running averages before the first step."""
  signal, noise, weight = (jnp.zeros((), jnp.float32) for _ in range(3))
  return NoiseScale(signal, noise, weight, jnp.zeros((2, 2), jnp.float32))


def estimate(small_sq: jax.Array, big_sq: jax.Array, small: jax.Array, big: float):
  """Return unbiased estimates of |G|^2 and S from one step.

  Args:
    small_sq: mean squared norm of the gradients over `small` examples each.
    big_sq: squared norm of the mean gradient, over `big` examples.
    small: b, the rows of a device's micro-batch.
    big: B, the rows of the step.
  """
  signal = (big * big_sq - small * small_sq) / (big - small)
  return signal, (small_sq - big_sq) / (1 / small - 1 / big)


def update(
  state: NoiseScale, small_sq: jax.Array, big_sq: jax.Array, small: jax.Array, big: float
) -> NoiseScale:
  """Update the averages by a step, unless its estimate is NaN or Inf.

  The arguments are those of `estimate`.
  """
  values = jnp.stack(estimate(small_sq, big_sq, small, big)).astype(jnp.float32)
  # Welford's update with decaying weights avoids a difference of large squares.
  off = values - jnp.stack(state[:2]) / jnp.where(state.weight > 0, state.weight, 1)
  weight = 1 - _DECAY + _DECAY * state.weight
  product = (1 - (1 - _DECAY) / weight) * jnp.outer(off, off)
  new = NoiseScale(values[0], values[1], jnp.ones((), jnp.float32), product)
  average = optax.incremental_update(new, state, 1 - _DECAY)
  usable = jnp.isfinite(values).all()
  return jax.tree.map(lambda x, old: jnp.where(usable, x, old), average, state)


def with_noise_scale(update_state: Update) -> Update:
  """Return an update of the train state that also updates its noise scale."""

  def updated(state: TrainState, outputs: StepOutputs) -> TrainState:
    sq, count_sq = outputs.totals[_SQ], outputs.totals[_COUNT_SQ]
    totals = outputs.totals
    count = totals.get(LOSS_WEIGHT, totals["examples"]).astype(jnp.float32)
    small = outputs.num_rows * (count_sq / (count * count))
    big_sq = outputs.metrics["grad_norm"] ** 2
    noise = update(state.noise, sq / count_sq, big_sq, small, outputs.num_rows)
    return update_state(state, outputs)._replace(noise=noise)

  return updated


def interval(state: NoiseScale) -> tuple[jax.Array, jax.Array]:
  """Return the limits of the scale's 95 % confidence interval, by Fieller's theorem.

  The interval contains the scales r for which S - r |G|^2 is compatible with 0. It is
  0 to infinity after one step, and its upper end is infinite if |G|^2 may be 0.
  """
  weight = state.weight
  share = (1 - _DECAY) * (2 - weight) / ((1 + _DECAY) * weight)  # 1 / averaged steps
  z, rest = 1.96, 1 - share
  wide = z + (z**3 + z) / 4 * share / rest  # approximate quantile of Student's t
  (var_g, cov), (_, var_s) = wide**2 * state.scatter * weight * share / rest
  a = state.signal * jnp.abs(state.signal) - var_g
  b = state.signal * state.noise - cov
  c = state.noise * jnp.abs(state.noise) - var_s
  root = jnp.sqrt(jnp.maximum(b * b - a * c, 0))
  is_measured = (rest > 1e-3) & (weight > 0)
  low = jnp.where(is_measured & (c > 0), c / (b + root), 0)
  return low, jnp.where(is_measured & (a > 0), (b + root) / a, jnp.inf)


def metrics(state: NoiseScale) -> dict[str, jax.Array]:
  """Return the logged metrics: S / |G|^2 in rows of the batch, its interval, |G|^2, S.

  The scale is infinite if the average of |G|^2 is not positive.
  """
  positive = state.signal > 0
  signal = jnp.where(positive, state.signal, 1.0)
  scale, (low, high) = (jnp.where(positive, state.noise / signal, jnp.inf), interval(state))
  return {
    "noise_scale": scale,
    "noise_scale_low": low,
    "noise_scale_high": high,
    "gradient_signal": state.signal / state.weight,
    "gradient_noise": state.noise / state.weight,
  }


def read(state: NoiseScale) -> dict[str, float | None]:
  """Return the scale in rows and its interval for JSON, which has no infinity.

  None is an infinite value. If `noise_scale_low` is None, nothing was measured.
  """
  names = ("noise_scale", "noise_scale_low", "noise_scale_high")
  values = jax.device_get(metrics(state)) if state and state.weight > 0 else {}
  result = {name: float(values.get(name, math.inf)) for name in names}
  return {name: x if math.isfinite(x) else None for name, x in result.items()}


def describe(scale: float, low: float, high: float, batch_size: int) -> str:
  """Describe in one sentence the cost of a batch size at a noise scale (eq. 2.11).

  Args:
    scale: B_noise, in rows of the batch; about the critical batch size.
    low: the lower end of the confidence interval.
    high: the upper end of the confidence interval.
    batch_size: the batch size of the run.
  """
  if math.isinf(high):
    likely = f"gradient-noise scale above {low:,.3g} (95 %), no upper limit: "
    return f"{likely}average over more steps, or measure at a batch size above {batch_size:,}"
  return (
    f"gradient-noise scale {scale:,.3g} (95 %: {low:,.3g} to {high:,.3g}), about the "
    f"critical batch size: at batch size {batch_size:,} a run takes about "
    f"{1 + scale / batch_size:.3g} times the minimum number of steps and "
    f"{1 + batch_size / scale:.3g} times the minimum number of examples"
  )
