"""The gradient-noise scale: how large a batch is worth its examples.

McCandlish et al., "An empirical model of large-batch training"
(arXiv:1812.06162). With G the true gradient and S the trace of the covariance
of one example's gradient, B_noise = S / |G|^2. Squared norms of gradients over
b and B examples, which data parallelism has anyway, give unbiased estimates of
both (appendix A.1):

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)
    S     = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

The ratio of their running averages is what is reported. A run at batch size B
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

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

if TYPE_CHECKING:
  from jaxscale.training.state import TrainState
  from jaxscale.training.step import Gradients, Update

# Of the micro-batches: squared norms of summed gradients, squared numbers of examples.
_SQ, _COUNT_SQ = "_squared_norms", "_squared_counts"


class NoiseScale(NamedTuple):
  """Running averages, float32 scalars.

  Attributes:
    signal: of |G|^2.
    noise: of S.
    weight: of 1, by which both are corrected.
  """

  signal: jax.Array
  noise: jax.Array
  weight: jax.Array


def observe(grads: Any, totals: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Of a micro-batch, what is to be summed over all of them.

  Args:
    grads: summed over its examples, as `totals["examples"]` counts them.
    totals: of it.
  """
  count = totals["examples"].astype(jnp.float32)
  return {_SQ: optax.tree.norm(grads, squared=True), _COUNT_SQ: count * count}


def init() -> NoiseScale:
  """Before the first step."""
  return NoiseScale(*(jnp.zeros((), jnp.float32) for _ in range(3)))


def estimate(small_sq, big_sq, small, big: float):
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
  state: NoiseScale, small_sq, big_sq, small, big: float, decay: float = 0.99
) -> NoiseScale:
  """Add a step, unless its estimate is NaN or Inf.

  `decay` is of the running averages; the rest as of `estimate`.
  """
  signal, noise = estimate(small_sq, big_sq, small, big)
  usable = jnp.isfinite(signal) & jnp.isfinite(noise)
  new = NoiseScale(signal, noise, jnp.ones((), jnp.float32))
  average = optax.incremental_update(new, state, 1 - decay)
  return jax.tree.map(lambda x, old: jnp.where(usable, x, old), average, state)


def with_noise_scale(update_state: Update) -> Update:
  """An update of the train state that updates its noise scale as well."""

  def updated(state: TrainState, new: Gradients) -> TrainState:
    sq, count_sq = new.totals[_SQ], new.totals[_COUNT_SQ]
    count = new.totals["examples"].astype(jnp.float32)
    small = new.rows * (count_sq / (count * count))
    big_sq = new.metrics["grad_norm"] ** 2
    noise = update(state.noise, sq / count_sq, big_sq, small, new.rows)
    return update_state(state, new)._replace(noise=noise)

  return updated


def metrics(state: NoiseScale) -> dict[str, jax.Array]:
  """What is logged: S / |G|^2 in rows of the batch, and both parts of it.

  Where the average of |G|^2 is not positive (all noise) the scale is infinite.
  """
  positive = state.signal > 0
  signal = jnp.where(positive, state.signal, 1.0)
  scale = jnp.where(positive, state.noise / signal, jnp.inf)
  return {
    "noise_scale": scale,
    "gradient_signal": state.signal / state.weight,
    "gradient_noise": state.noise / state.weight,
  }


def read(state: NoiseScale) -> float | None:
  """The scale in rows; None where nothing was measured, or it is infinite."""
  signal, noise, weight = (value.item() for value in state)
  return noise / signal if weight > 0 and signal > 0 else None


def describe(scale: float, batch_size: int) -> str:
  """What a noise scale means for a batch size, in a sentence (eq. 2.11).

  Args:
    scale: B_noise, in rows of the batch; the critical batch size is about as large.
    batch_size: of the run.
  """
  return (
    f"gradient-noise scale {scale:,.0f}, about the critical batch size: at batch "
    f"{batch_size:,} a run takes about {1 + scale / batch_size:.3g} times the fewest "
    f"steps and {1 + batch_size / scale:.3g} times the fewest examples"
  )
