"""AdamW and LAMB: Adam without and with trust ratios.

    m = b1 m + (1 - b1) g                 m_hat = m / (1 - b1^t)
    v = b2 v + (1 - b2) g^2               v_hat = v / (1 - b2^t)
    r = m_hat / (sqrt(v_hat) + eps) + wd w
    w = w - lr r                                       AdamW, arXiv:1711.05101
    w = w - lr phi(|w|) / |r| r                        LAMB, arXiv:1904.00962
    phi(z) = min(max(z, phi_min), phi_max)

LAMBC replaces the trust ratio phi(|w|) / |r| by min(phi(|w|) / |r|, 1) (J. Fong et al.,
"Improving layer-wise adaptive rate methods using trust ratio clipping",
arXiv:2011.13584). timm (1.0.31, optim/lamb.py) first divides the gradients by
max(|g|, 1), where |g| is their global norm, and uses no trust ratio if wd is 0.

Moments have at least float32: with the 8 significant bits of bfloat16, 0.999 v +
0.001 g^2 would round to v.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import invalid
from jaxscale.optim import layers
from jaxscale.optim.layers import Layer, add_decayed_weights, in_float32
from jaxscale.optim.masks import Mask


def lamb(
  learning_rate: optax.ScalarOrSchedule,
  *,
  variant: Literal["paper", "timm"] = "paper",
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-6,
  weight_decay: float = 1e-2,
  bias_correction: bool = True,
  phi_min: float = 0.0,
  phi_max: float | None = None,
  trust_clip: bool = False,
  mask: Mask | None = "kernels",
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """LAMB (arXiv:1904.00962, algorithm 2; equations in the module).

  The trust ratio is 1 if phi(|w|) or |r| is 0.

  Args:
    learning_rate: the learning rate, a number or a function of the step.
    variant: "paper", or "timm" for timm's gradient clipping and its rule for wd = 0.
    b1: decay of the first moment m.
    b2: decay of the second moment v.
    eps: term added to the square root of v_hat.
    weight_decay: weight decay wd; the authors use 1.5 for ResNet-50 at batch size 32K
      (learning rate 0.04).
    bias_correction: False sets m_hat = m and v_hat = v, as in the authors' code.
    phi_min: lower bound of phi.
    phi_max: upper bound of phi; None means no bound.
    trust_clip: True limits the trust ratio to 1 (LAMBC).
    mask: params -> bool per leaf, or a name or pattern of `including`. False excludes the
      leaf from decay and trust ratio. The authors' code excludes only BatchNorm. None
      includes all leaves.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      the layers of a scan, each with its own trust ratio. None means that no leaf is stacked.

  Raises:
    ConfigError: phi_min is negative or above phi_max.

  Example:
    >>> schedule = warmup_polynomial(
    ...   0.04, 782, 3519, end=0.0, power=1.0, decay_steps=3519 - 782)
    >>> tx = lamb(schedule, weight_decay=1.5, bias_correction=False,
    ...           mask=matching("kernel$|^Dense_0/bias$"))
  """
  adam = scale_by_adam(b1, b2, eps, bias_correction)
  decay = add_decayed_weights(weight_decay, mask, stacked)
  adapts = variant == "paper" or weight_decay > 0
  options: Any = {"clip": trust_clip, "adapts": adapts, "mask": mask, "stacked": stacked}
  ratio = scale_by_trust_ratio(phi_min=phi_min, phi_max=phi_max, **options)
  rate = optax.scale_by_learning_rate(learning_rate)
  parts = (adam, decay, ratio, rate) if adapts is not False else (adam, rate)
  clip = (optax.clip_by_global_norm(1.0),) if variant == "timm" else ()
  return in_float32(optax.chain(*clip, *parts))


def scale_by_trust_ratio(
  *,
  phi_min: float = 0.0,
  phi_max: float | None = None,
  clip: bool = False,
  adapts: bool | jax.Array = True,
  mask: Mask | None = "kernels",
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """Multiply each layer's update r by LAMB's trust ratio phi(|w|) / |r|.

  Unlike `optax.scale_by_trust_ratio` it bounds |w| from both sides, takes a mask,
  supports stacked layers, and stores the ratios for `trust_ratios`.

  Args:
    phi_min: lower bound of phi.
    phi_max: upper bound of phi; None means no bound.
    clip: True limits the ratio to 1.
    adapts: False sets every ratio to 1.
    mask: params -> bool per leaf, or a name or pattern of `including`: the leaves with a
      trust ratio. None means all leaves.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      layers, each with its own ratio. None means that no leaf is stacked.

  Raises:
    ConfigError: phi_min is negative or above phi_max.

  Example:
    >>> tx = optax.chain(
    ...   optax.scale_by_adam(), scale_by_trust_ratio(), optax.scale_by_learning_rate(1e-3))
  """
  bounds = [x for x in (phi_min, phi_max) if isinstance(x, int | float)]
  if bounds != sorted(bounds) or min(bounds, default=0) < 0:
    problem = f"with phi_max={phi_max} is out of range"
    raise invalid("phi_min", phi_min, problem, "give 0 <= phi_min <= phi_max")

  def init(params: optax.Params) -> layers.TrustRatios:
    return layers.initial_ratios(params, mask, stacked)

  def scaled(layer: Layer, w: jax.Array, r: jax.Array) -> tuple[jax.Array, Any]:
    if not layer.chosen:
      return r, optax.MaskedNode()
    top = jnp.clip(layers.layer_norm(w, layer), phi_min, phi_max)
    bottom = layers.layer_norm(r, layer)
    defined = (top > 0) & (bottom > 0) & adapts
    ratio = jnp.where(defined, top / jnp.where(defined, bottom, 1.0), 1.0)
    ratio = jnp.minimum(ratio, 1.0) if clip else ratio
    return ratio * r, layers.kept(ratio)

  def update(
    updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
  ) -> tuple[optax.Updates, layers.TrustRatios]:
    updates, ratios = layers.map_layers(2, scaled, params, mask, stacked, updates)
    return updates, layers.TrustRatios(ratios)

  return optax.GradientTransformation(init, update)


def adamw(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 1e-4,
  mask: Mask | None = "kernels",
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """AdamW (arXiv:1711.05101), by default with weight decay on kernels only.

  As in PyTorch and optax, the decay is multiplied by the learning rate. AdamW is a strong
  baseline if it is tuned for the batch size: Nado et al. (arXiv:2102.06356) match LAMB
  with bias correction (always used here) and a tuned schedule.

  Args:
    learning_rate: the learning rate, a number or a function of the step.
    b1: decay of the first moment m.
    b2: decay of the second moment v.
    eps: term added to the square root of v_hat.
    weight_decay: weight decay wd.
    mask: params -> bool per leaf, or a name or pattern of `including`: the leaves with
      weight decay. None means all leaves.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      the layers of a scan, and `mask` sees one layer, so that stacked biases count as
      biases. None means that no leaf is stacked.

  Example:
    >>> tx = adamw(warmup_cosine(1e-3, 100, 1000), weight_decay=0.05)
  """
  adam, decay = (scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay, mask, stacked))
  return in_float32(optax.chain(adam, decay, optax.scale_by_learning_rate(learning_rate)))


def scale_by_adam(
  b1: float, b2: float, eps: float, bias_correction: bool = True, nesterov: bool = False
) -> optax.GradientTransformation:
  """`optax.scale_by_adam` with an exact bias correction.

  Optax computes 1 - b^t in float32, where 1 - 0.999 has a relative error of 1e-5.

  Args:
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: term added to the square root of v_hat.
    bias_correction: False sets m_hat = m and v_hat = v.
    nesterov: True sets m_hat = b1 m / (1 - b1^(t+1)) + (1 - b1) g / (1 - b1^t), as in
      NAdam (T. Dozat, 2016).
  """

  def init(params: Any):
    mu, nu = optax.tree.zeros_like((params, params))
    return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

  def update(updates: Any, state: Any, params: Any = None):
    count = state.count + 1
    mu = optax.tree.update_moment(updates, state.mu, b1, 1)
    nu = optax.tree.update_moment(updates, state.nu, b2, 2)
    powers = (b1, count), (b2, count), (b1, count + 1)
    one = jnp.ones([])
    c1, c2, ahead = (one_minus_power(*power) if bias_correction else one for power in powers)

    def direction(g: Any, m: Any, v: Any):
      m_hat = m / c1.astype(m.dtype)
      if nesterov:
        m_hat = b1 * m / ahead.astype(m.dtype) + (1 - b1) * g / c1.astype(g.dtype)
      return m_hat / (jnp.sqrt(v / c2.astype(v.dtype)) + eps)

    state = optax.ScaleByAdamState(count, mu, nu)
    return jax.tree.map(direction, updates, mu, nu), state

  return optax.GradientTransformation(init, update)


def one_minus_power(base: float, count: jax.Array) -> jax.Array:
  """Return 1 - base^count without cancellation, in the default float dtype []."""
  steps = count.astype(layers.default_float())
  if layers.is_injected(base):
    return -jnp.expm1(steps * jnp.log(base))
  return -jnp.expm1(steps * math.log(base)) if base else jnp.ones_like(steps)
