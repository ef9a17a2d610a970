"""The gradient-noise scale: how large a batch is worth its examples.

McCandlish et al., "An empirical model of large-batch training"
(arXiv:1812.06162). With G the true gradient and S the trace of the covariance
of one example's gradient, B_noise = S / |G|^2. Squared norms of gradients over
b and B examples, which data parallelism has anyway, give unbiased estimates of
both (appendix A.1):

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)
    S     = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

The ratio of their running averages over about 200 steps is reported with a 95 %
interval (Fieller's, from the scatter of the steps). The interval is narrow where the
scale is below the batch size. A scale of many batches needs more steps: the interval
is then wide, and its upper end infinite where |G|^2 may be 0. A drift
within the 200 steps widens it, too.

A run at batch size B
needs about 1 + B_noise/B times the fewest steps and 1 + B/B_noise times the
fewest examples (eq. 2.11): at B_noise twice the least of either.

An example here is a row of the batch, as Config.batch_size counts: of text a window
of tokens, which are not drawn independently of each other, while windows are. The
mean gradient, though, is over what the loss counts (`totals["examples"]`), of text
over tokens, as in `grad_norm`. In tokens, as papers on language models have it, the
scale is this times the tokens of a row.

Micro-batches may count different numbers n_i of N, which is why their mean gradients
g_i have weights. Over R rows take

    |G_b|^2 = sum n_i^2 |g_i|^2 / sum n_i^2     b = R sum n_i^2 / N^2     B = R

With equal n_i these are the plain mean and the rows of a micro-batch. Else
B |G_B|^2 - b |G_b|^2 is R / N^2 times the sum of n_i g_i . n_j g_j over i != j, and
B - b the same of n_i n_j: independent micro-batches make |G|^2 unbiased whatever was
counted. S is so as well where the expected gradient of a token does not depend on how
many there are in its row; else it is off by 2 G . cov(e, n) over the squared mean of
n, with n the tokens of a row and e their summed gradient less n G.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.training.types import StepOutputs, TrainState, Update

# Of the micro-batches: squared norms of summed gradients, squared numbers of examples.
_SQ, _COUNT_SQ = "_squared_norms", "_squared_counts"


_DECAY = 0.99  # of the running averages


class NoiseScale(NamedTuple):
  """Running averages in float32.

  Attributes:
    signal: average of |G|^2, a scalar.
    noise: average of S, a scalar.
    weight: average of 1, by which the others are corrected.
    scatter: average of the products of deviations of (|G|^2, S), [2, 2].
  """

  signal: jax.Array
  noise: jax.Array
  weight: jax.Array
  scatter: jax.Array


def observe(grads: Any, totals: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Return totals of a micro-batch, to be summed over all micro-batches.

  Args:
    grads: summed over its examples, as `totals["examples"]` counts them.
    totals: of it.
  """
  count = totals["examples"].astype(jnp.float32)
  return {_SQ: optax.tree.norm(grads, squared=True), _COUNT_SQ: count * count}


def init() -> NoiseScale:
  """Before the first step."""
  signal, noise, weight = (jnp.zeros((), jnp.float32) for _ in range(3))
  return NoiseScale(signal, noise, weight, jnp.zeros((2, 2), jnp.float32))


def estimate(small_sq: jax.Array, big_sq: jax.Array, small: jax.Array, big: float):
  """Unbiased (|G|^2, S) of one step.

  Args:
    small_sq: mean squared norm of gradients over `small` examples each.
    big_sq: squared norm of their mean, over `big` examples.
    small: b, rows of a device's micro-batch.
    big: B, rows of the step.
  """
  signal = (big * big_sq - small * small_sq) / (big - small)
  noise = (small_sq - big_sq) / (1 / small - 1 / big)
  return signal, noise


def update(
  state: NoiseScale, small_sq: jax.Array, big_sq: jax.Array, small: jax.Array, big: float
) -> NoiseScale:
  """Add a step, unless its estimate is NaN or Inf; arguments as of `estimate`."""
  values = jnp.stack(estimate(small_sq, big_sq, small, big)).astype(jnp.float32)
  # Welford's product, with weights that decay: no difference of large squares.
  off = values - jnp.stack(state[:2]) / jnp.where(state.weight > 0, state.weight, 1)
  weight = 1 - _DECAY + _DECAY * state.weight
  product = (1 - (1 - _DECAY) / weight) * jnp.outer(off, off)
  new = NoiseScale(values[0], values[1], jnp.ones((), jnp.float32), product)
  average = optax.incremental_update(new, state, 1 - _DECAY)
  usable = jnp.isfinite(values).all()
  return jax.tree.map(lambda x, old: jnp.where(usable, x, old), average, state)


def with_noise_scale(update_state: Update) -> Update:
  """An update of the train state that updates its noise scale as well."""

  def updated(state: TrainState, outputs: StepOutputs) -> TrainState:
    sq, count_sq = outputs.totals[_SQ], outputs.totals[_COUNT_SQ]
    count = outputs.totals["examples"].astype(jnp.float32)
    small = outputs.num_rows * (count_sq / (count * count))
    big_sq = outputs.metrics["grad_norm"] ** 2
    noise = update(state.noise, sq / count_sq, big_sq, small, outputs.num_rows)
    return update_state(state, outputs)._replace(noise=noise)

  return updated


def interval(state: NoiseScale) -> tuple[jax.Array, jax.Array]:
  """Limits of the 95 % interval of the scale, by Fieller's theorem.

  They are the scales r for which S - r |G|^2 is within its deviation of 0: from 0 to
  infinity after one step, and infinite above where |G|^2 may be 0.
  """
  weight = state.weight
  share = (1 - _DECAY) * (2 - weight) / ((1 + _DECAY) * weight)  # 1 / averaged steps
  z, rest = 1.96, 1 - share
  wide = z + (z**3 + z) / 4 * share / rest  # about Student's quantile
  (var_g, cov), (_, var_s) = wide**2 * state.scatter * weight * share / rest
  a = state.signal * jnp.abs(state.signal) - var_g
  b = state.signal * state.noise - cov
  c = state.noise * jnp.abs(state.noise) - var_s
  root = jnp.sqrt(jnp.maximum(b * b - a * c, 0))
  is_measured = (rest > 1e-3) & (weight > 0)
  low = jnp.where(is_measured & (c > 0), c / (b + root), 0)
  return low, jnp.where(is_measured & (a > 0), (b + root) / a, jnp.inf)


def metrics(state: NoiseScale) -> dict[str, jax.Array]:
  """Return what is logged: S / |G|^2 in rows of the batch, its interval, both parts.

  Where the average of |G|^2 is not positive (all noise) the scale is infinite.
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

  None stands for an infinite value where `noise_scale_low` is a number; nothing was
  measured where that is None, too.
  """
  names = ("noise_scale", "noise_scale_low", "noise_scale_high")
  values = jax.device_get(metrics(state)) if state and state.weight > 0 else {}
  found = {name: float(values.get(name, math.inf)) for name in names}
  return {name: x if math.isfinite(x) else None for name, x in found.items()}


def describe(scale: float, low: float, high: float, batch_size: int) -> str:
  """Return what a noise scale means for a batch size, in a sentence (eq. 2.11).

  Args:
    scale: B_noise, in rows of the batch; the critical batch size is about as large.
    low: the lower end of its interval.
    high: the upper end.
    batch_size: of the run.
  """
  if math.isinf(high):
    likely = f"gradient-noise scale above {low:,.3g} (95 %), without an upper limit: "
    return f"{likely}average over more steps, or measure at a batch above {batch_size:,}"
  return (
    f"gradient-noise scale {scale:,.3g} (95 %: {low:,.3g} to {high:,.3g}), about the "
    f"critical batch size: at batch {batch_size:,} a run takes about "
    f"{1 + scale / batch_size:.3g} times the fewest steps and "
    f"{1 + batch_size / scale:.3g} times the fewest examples"
  )
