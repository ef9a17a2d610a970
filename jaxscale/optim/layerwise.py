"""Layer-wise adaptive optimizers: LARS and LAMB.

LARS, in the form of its paper (arXiv:1708.03888), of Intel Caffe and of the
MLPerf references; w, g and v are one layer's weights, gradient and velocity:

    ratio = eta |w| / (|g| + wd |w| + eps)        1 where |w| or |g| is 0
    v     = m v + lr ratio (g + wd w)
    w     = w - v

`optax.lars` differs: it has |g + wd w| in the denominator and by default scales
and decays biases and normalisation parameters too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim.masks import Mask, kernels


def _norm(x: jax.Array) -> jax.Array:
  """Euclidean norm in float32 at least, whatever the dtype of the leaf."""
  dtype = x.dtype if jnp.finfo(x.dtype).bits >= 32 else jnp.float32
  return jnp.linalg.norm(x.astype(dtype).reshape(-1))


def scale_by_lars_trust_ratio(
  weight_decay: float = 0.0,
  trust_coefficient: float = 1e-3,
  eps: float = 0.0,
) -> optax.GradientTransformation:
  """G -> ratio (g + wd w), with LARS's ratio of the module's docstring.

  Args:
    weight_decay: wd.
    trust_coefficient: eta; 0.001 in every recipe its authors shipped.
    eps: added to the denominator.
  """

  def init(params):
    del params
    return optax.EmptyState()

  def update(updates, state, params=None):
    if params is None:
      raise ValueError("LARS needs the parameters: tx.update(grads, state, params)")

    def scale(g, w):
      w_norm, g_norm = _norm(w), _norm(g)
      ratio = trust_coefficient * w_norm / (g_norm + weight_decay * w_norm + eps)
      ratio = jnp.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
      return ratio.astype(g.dtype) * (g + weight_decay * w)

    return jax.tree.map(scale, updates, params), state

  return optax.GradientTransformation(init, update)


def lars(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.9,
  weight_decay: float = 1e-4,
  trust_coefficient: float = 1e-3,
  eps: float = 0.0,
  nesterov: bool = False,
  mask: Mask | None = kernels,
) -> optax.GradientTransformation:
  """LARS as published and as run in MLPerf (equations in the module).

  Args:
    learning_rate: a number or a function of the step.
    momentum: m.
    weight_decay: wd.
    trust_coefficient: eta.
    eps: added to the denominator of the ratio.
    nesterov: look ahead.
    mask: params -> bool per leaf; a leaf that is False gets plain momentum at
      the same rate, without ratio and decay. None: every leaf is scaled.

  Example:
    >>> tx = lars(warmup_polynomial(10.0, 500, 5000), weight_decay=5e-5)
  """
  ratio = scale_by_lars_trust_ratio(weight_decay, trust_coefficient, eps)
  return optax.chain(
    ratio if mask is None else optax.masked(ratio, mask),
    # The rate is inside the velocity: `trace` comes last.
    optax.scale_by_learning_rate(learning_rate),
    optax.trace(momentum, nesterov),
  )


def lamb(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-6,
  weight_decay: float = 1e-2,
  mask: Mask | None = kernels,
) -> optax.GradientTransformation:
  """LAMB (arXiv:1904.00962, algorithm 2, phi the identity).

      r = m_hat / (sqrt(v_hat) + eps) + wd w
      w = w - lr |w| / |r| r                      ratio 1 where a norm is 0

  Args:
    learning_rate: a number or a function of the step.
    b1: decay of the first moment m.
    b2: decay of the second moment v.
    eps: added to the square root of v_hat.
    weight_decay: wd.
    mask: params -> bool per leaf; a leaf that is False gets neither decay nor
      trust ratio, as in the authors' released ResNet-50 code. None: all do.
  """
  layer = optax.chain(
    optax.add_decayed_weights(weight_decay), optax.scale_by_trust_ratio()
  )
  return optax.chain(
    optax.scale_by_adam(b1, b2, eps),
    layer if mask is None else optax.masked(layer, mask),
    optax.scale_by_learning_rate(learning_rate),
  )
