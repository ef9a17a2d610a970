"""Adam's moments, with a trust ratio (LAMB) and without (AdamW).

    m = b1 m + (1 - b1) g                 m_hat = m / (1 - b1^t)
    v = b2 v + (1 - b2) g^2               v_hat = v / (1 - b2^t)
    r = m_hat / (sqrt(v_hat) + eps) + wd w
    w = w - lr r                                       AdamW, arXiv:1711.05101
    w = w - lr phi(|w|) / |r| r                        LAMB, arXiv:1904.00962
    phi(z) = min(max(z, phi_min), phi_max)

Moments are float32 at least: bfloat16 has 8 bits, and 0.999 v + 0.001 g^2 would
stand still in it. 1 - b^t is -expm1(t log b): in float32, 1 - 0.999 alone is off by
5e-5 of itself. All dtypes are written out, so it runs under strict promotion too,
which optax's bias correction does not.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim.layers import (
  Layer,
  TrustRatios,
  default_float,
  initial_ratios,
  layer_norm,
  layers_of,
  ratio_tree,
  wide,
)
from jaxscale.optim.masks import Mask, kernels


class AdamState(NamedTuple):
  """State of AdamW and LAMB.

  Attributes:
    count: int32 [], steps done.
    mean: m, like the parameters, float32 at least.
    square: v, likewise.
    trust_ratios: of the last step; see `trust_ratios`.
  """

  count: Any
  mean: Any
  square: Any
  trust_ratios: TrustRatios


class _Phi(NamedTuple):
  low: float
  high: float | None


def lamb(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-6,
  weight_decay: float = 1e-2,
  bias_correction: bool = True,
  phi_min: float = 0.0,
  phi_max: float | None = None,
  mask: Mask | None = kernels,
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """LAMB (arXiv:1904.00962, algorithm 2; equations in the module).

  The ratio is 1 where phi(|w|) or |r| is 0.

  Args:
    learning_rate: a number or a function of the step.
    b1: decay of the first moment m.
    b2: decay of the second moment v.
    eps: added to the square root of v_hat.
    weight_decay: wd; 1.5 in the authors' ResNet-50 at 32K (rate 0.04).
    bias_correction: False: m_hat = m and v_hat = v, as in that code.
    phi_min: |w| counts as this at least.
    phi_max: |w| counts as this at most; None: no bound.
    mask: params -> bool per leaf; a leaf that is False gets neither decay nor
      trust ratio, as in that code, which leaves out BatchNorm and nothing else.
      None: all do.
    stacked: params -> bool per leaf: its first dim counts layers (of a scan), each
      with a ratio of its own. None: none is.

  Raises:
    ValueError: phi_min is negative or above phi_max.

  Example:
    >>> schedule = warmup_polynomial(
    ...   0.04, 782, 3519, end=0.0, power=1.0, decay_steps=3519 - 782)
    >>> tx = lamb(schedule, weight_decay=1.5, bias_correction=False,
    ...           mask=matching("kernel$|^Dense_0/bias$"))
  """
  if phi_min < 0 or (phi_max is not None and phi_max < phi_min):
    raise ValueError(f"phi_min={phi_min}, phi_max={phi_max}: need 0 <= min <= max")
  return _adam(
    learning_rate, b1, b2, eps, weight_decay, bias_correction, mask, stacked,
    _Phi(phi_min, phi_max),
  )  # fmt: skip


def adamw(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 1e-4,
  mask: Mask | None = kernels,
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """AdamW (arXiv:1711.05101), decaying kernels only by default.

  As in PyTorch and optax, the decay is multiplied by the rate. Tuned anew for the
  batch size it is a strong baseline: Nado et al. (arXiv:2102.06356) match LAMB with
  it, given bias correction (always on here) and a schedule of its own.

  Args:
    learning_rate: a number or a function of the step.
    b1: decay of the first moment m.
    b2: decay of the second moment v.
    eps: added to the square root of v_hat.
    weight_decay: wd.
    mask: params -> bool per leaf, where to decay. None: everywhere.
    stacked: params -> bool per leaf: its first dim counts layers (of a scan), and
      `mask` sees one of them, so that their biases are biases. None: none is.

  Example:
    >>> tx = adamw(warmup_cosine(1e-3, 100, 1000), weight_decay=0.05)
  """
  return _adam(learning_rate, b1, b2, eps, weight_decay, True, mask, stacked, None)


def _adam(
  learning_rate: optax.ScalarOrSchedule,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  bias_correction: bool,
  mask: Mask | None,
  stacked: Mask | None,
  phi: _Phi | None,
) -> optax.GradientTransformation:
  """The module's equations; `phi` None: no trust ratio."""

  def init(params):
    layers = layers_of(params, mask, stacked) if phi else None

    def zeros():
      return jax.tree.map(lambda w: jnp.zeros_like(w, wide(w.dtype)), params)

    count = jnp.zeros([], jnp.int32)
    return AdamState(count, zeros(), zeros(), initial_ratios(params, layers))

  def update(updates, state, params=None):
    if params is None:
      raise ValueError("decay needs parameters: tx.update(grads, state, params)")
    rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
    rate = jnp.asarray(rate, default_float())
    count = state.count + 1
    corrections = [
      _one_minus_power(b, count) if bias_correction else jnp.ones([], default_float())
      for b in (b1, b2)
    ]

    def step(g, w, m, v, layer):
      g, w = g.astype(m.dtype), w.astype(m.dtype)
      c1, c2, lr = (x.astype(m.dtype) for x in (*corrections, rate))
      m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g * g)
      r = (m / c1) / (jnp.sqrt(v / c2) + eps)
      if layer.chosen:
        r = r + weight_decay * w
      ratio = _ratio(w, r, layer, phi) if phi and layer.chosen else None
      return lr * r if ratio is None else lr * ratio * r, m, v, ratio

    leaves, treedef = jax.tree.flatten(params)
    trees = [treedef.flatten_up_to(t) for t in (updates, state.mean, state.square)]
    layers = layers_of(params, mask, stacked)
    moved = [
      step(g, w, m, v, layer)
      for w, g, m, v, layer in zip(leaves, *trees, layers, strict=True)
    ]
    steps = [-s.astype(w.dtype) for (s, *_), w in zip(moved, leaves, strict=True)]
    return jax.tree.unflatten(treedef, steps), AdamState(
      count,
      jax.tree.unflatten(treedef, [m for _, m, _, _ in moved]),
      jax.tree.unflatten(treedef, [v for _, _, v, _ in moved]),
      ratio_tree(treedef, [ratio for *_, ratio in moved]),
    )

  return optax.GradientTransformation(init, update)


def _one_minus_power(b: float, count: jax.Array) -> jax.Array:
  """1 - b^count without cancellation."""
  if b == 0:
    return jnp.ones([], default_float())
  return -jnp.expm1(count.astype(default_float()) * math.log(b))


def _ratio(w: jax.Array, r: jax.Array, layer: Layer, phi: _Phi) -> jax.Array:
  """phi(|w|) / |r|, 1 where one of them is 0."""
  top, bottom = jnp.clip(layer_norm(w, layer), phi.low, phi.high), layer_norm(r, layer)
  defined = (top > 0) & (bottom > 0)
  return jnp.where(defined, top / jnp.where(defined, bottom, 1.0), 1.0)
