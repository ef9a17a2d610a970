"""LARS as published, and the variants of other implementations.

Let |w| and |g| be the norms of one layer's weights and gradient, eta the trust
coefficient, wd the weight decay, m the momentum, u = g + wd w, and

    ratio = eta |w| / (|g| + wd |w| + eps)

| variant | implementation | step |
|---|---|---|
| paper | arXiv:1708.03888; Intel Caffe; Flax and MLPerf's references | v = m v + lr ratio u; w -= v |
| nvidia | NVIDIA's MLPerf SGDwFASTLARS | paper with m lr_t / lr_{t-1} instead of m |
| tf_contrib | TensorFlow's contrib LARSOptimizer, decay added | v = m v + u; w -= lr ratio v |
| tf_contrib_l2_in_loss | TensorFlow's contrib code unchanged | v = m v + g; w -= lr ratio v |
| torch | lightning-bolts and similar | v = m v + ratio u; w -= lr v |
| optax | `optax.lars` | paper with ratio = eta |w| / (|u| + eps) |
| larc_scale | NVIDIA apex LARC | torch |
| larc_clip | NVIDIA apex LARC, clip=True | torch with min(ratio / lr, 1) instead of ratio |
| nvcaffe_scale | NVCaffe LARC | paper with ratio = (1 - m) eta |w| / (|g| + eps) |
| nvcaffe_clip | NVCaffe LARC | nvcaffe_scale with min(lr, ratio) instead of lr ratio |
| timm | timm lars | torch; no ratio if wd is 0 |
| timm_clip | timm larc | larc_clip; no ratio if wd is 0 |

Sources: the code of each implementation: intel/caffe 44d53638 and NVIDIA/caffe 87a25543
(src/caffe/solvers/sgd_solver.cpp), tensorflow 5c8077a6 (contrib/opt), NVIDIA/apex
LARC.py, optax 0.2.8 alias.py, timm 1.0.31 optim/lars.py (with eps = 1e-8).

If |w| or |g| (optax: |u|) is 0, the ratio is 1: the layer uses the plain learning rate,
with weight decay (apex also drops the decay). nvcaffe_clip and timm_clip clip this ratio
of 1, too, so that the layer's learning rate is min(lr, 1). In all other variants a kernel
that starts at 0 makes its first step with the full learning rate, which is 29 in some
recipes. Exclude such a layer by the mask.

One mask controls both decay and ratio, so two cases cannot be expressed: NVIDIA's
classifier bias, which has decay but no ratio, and the two masks of `optax.lars`.
"""  # noqa: E501

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import invalid
from jaxscale.optim import layers
from jaxscale.optim.layers import Layer, in_float32, layer_norm
from jaxscale.optim.masks import Mask
from jaxscale.optim.momentum import rate_at, scale_by_rate_and_momentum
from jaxscale.optim.settings import LarsVariant

Denominator = Literal["sum", "decayed", "gradient"]


class _Variant(NamedTuple):
  """A row of the module's table.

  Attributes:
    rate_in_velocity: the learning rate multiplies the terms added to the velocity, not
      the velocity.
    ratio_in_velocity: the trust ratio multiplies the terms added to the velocity.
    decays: wd w is added to the gradient.
    denominator: "sum": |g| + wd |w|; "decayed": |g + wd w|; "gradient": |g|.
    clip: the learning rate of a layer is min(lr, ratio) instead of lr ratio.
    clips_undefined: the clip also applies if a norm is 0, with ratio 1: min(lr, 1).
    adapts_undecayed: trust ratios are used even if wd is 0.
  """

  rate_in_velocity: bool = True
  ratio_in_velocity: bool = True
  decays: bool = True
  denominator: Denominator = "sum"
  clip: bool = False
  clips_undefined: bool = False
  adapts_undecayed: bool = True


_OUTSIDE = _Variant(rate_in_velocity=False)
_AFTER = _OUTSIDE._replace(ratio_in_velocity=False)
_TIMM = _OUTSIDE._replace(adapts_undecayed=False)
_VARIANTS: dict[str, _Variant] = {
  "paper": _Variant(),
  "nvidia": _Variant(),
  "tf_contrib": _AFTER,
  "tf_contrib_l2_in_loss": _AFTER._replace(decays=False),
  "torch": _OUTSIDE,
  "optax": _Variant(denominator="decayed"),
  "larc_clip": _OUTSIDE._replace(clip=True),
  "larc_scale": _OUTSIDE,
  "nvcaffe_clip": _Variant(denominator="gradient", clip=True, clips_undefined=True),
  "nvcaffe_scale": _Variant(denominator="gradient"),
  "timm": _TIMM,
  "timm_clip": _TIMM._replace(clip=True, clips_undefined=True),
}


def lars(
  learning_rate: optax.ScalarOrSchedule,
  *,
  variant: LarsVariant = "paper",
  momentum: float = 0.9,
  weight_decay: float = 1e-4,
  trust_coefficient: float = 1e-3,
  eps: float = 0.0,
  nesterov: bool = False,
  momentum_correction: bool | int = False,
  mask: Mask | None = "kernels",
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """LARS in the variants of the paper and of other implementations.

  The equations are in the module. `tf_contrib` adds the decay to the gradient, as all
  other variants do. The original code uses wd in the denominator only, for a loss that
  already contains wd |w|^2 / 2: that is `tf_contrib_l2_in_loss`.

  Args:
    learning_rate: the learning rate, a number or a function of the step.
    variant: name of the variant; see the module's table.
    momentum: momentum m.
    weight_decay: weight decay wd.
    trust_coefficient: trust coefficient eta; 0.001 in all recipes of the authors, 0.02 by
      default in apex.
    eps: term added to the denominator of the ratio.
    nesterov: use Nesterov momentum.
    momentum_correction: multiply m by lr_t / lr_{t-1} (arXiv:1706.02677, §3). True: in
      every step; a number: in that many first steps (Intel Caffe: the warm-up). "nvidia"
      corrects in every step. With True, "paper" equals "torch" as long as learning rates
      are > 0; see momentum.py for a learning rate of 0.
    mask: params -> bool per leaf, or a name or pattern of `including`. False: the leaf
      uses plain momentum with the same learning rate, without trust ratio and decay.
      None means that all leaves have trust ratio and decay, as in Caffe.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      the layers of a scan, each with its own ratio. None means that no leaf is stacked.

  Raises:
    ConfigError: the variant is unknown, or `momentum_correction` is set for a variant
      whose velocity does not contain the learning rate.

  Example:
    >>> tx = lars(warmup_polynomial(10.0, 500, 5000), weight_decay=5e-5)
    >>> caffe = lars(
    ...   warmup_polynomial(32.0, 400, 4000, start=1.0, end=0.0, restart=False),
    ...   weight_decay=5e-4, momentum_correction=400, mask=None)
  """
  if variant not in _VARIANTS:
    raise invalid("LARS.variant", repr(variant), "is unknown", f"use one of {', '.join(_VARIANTS)}")
  row = _VARIANTS[variant]
  if momentum_correction is not False and not row.rate_in_velocity:
    problem = f"does not apply to variant={variant!r}, whose velocity does not contain the lr"
    raise invalid("LARS.momentum_correction", momentum_correction, problem, "leave it out")
  eta = trust_coefficient * ((1 - momentum) if row.denominator == "gradient" else 1)
  trace, rate = optax.trace(momentum, nesterov), optax.scale_by_learning_rate(learning_rate)
  if row.rate_in_velocity:
    corrects = variant == "nvidia" or momentum_correction
    options: Any = {"nesterov": nesterov, "momentum_correction": corrects}
    moved = scale_by_rate_and_momentum(learning_rate, momentum, **options)
  else:
    moved = optax.chain(trace, rate) if row.ratio_in_velocity else rate
  adapts = row.adapts_undecayed or weight_decay > 0
  if adapts is False:  # without trust ratios there is no decay either
    return in_float32(moved)
  own: Any = {"denominator": row.denominator, "decays": row.decays, "adapts": adapts}
  own |= {"limit": learning_rate if row.clip else None, "limits_undefined": row.clips_undefined}
  own |= {"inner": None if row.ratio_in_velocity else trace, "mask": mask, "stacked": stacked}
  ratio = scale_by_lars_ratio(trust_coefficient=eta, weight_decay=weight_decay, eps=eps, **own)
  return in_float32(optax.chain(ratio, moved))


class LarsRatioState(NamedTuple):
  """State of `scale_by_lars_ratio`.

  Attributes:
    count: steps done, int32 [].
    inner: state of the transformation between decay and ratio.
    trust_ratios: trust ratios of the last step; see `trust_ratios`.
  """

  count: jax.Array
  inner: Any
  trust_ratios: layers.TrustRatios


def scale_by_lars_ratio(
  *,
  trust_coefficient: float = 1e-3,
  weight_decay: float = 1e-4,
  eps: float = 0.0,
  denominator: Denominator = "sum",
  decays: bool = True,
  adapts: bool | jax.Array = True,
  limit: optax.ScalarOrSchedule | None = None,
  limits_undefined: bool = False,
  inner: optax.GradientTransformation | None = None,
  mask: Mask | None = "kernels",
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """Add weight decay to each layer's gradient and multiply by LARS' trust ratio.

  Put it first in a chain, since its norms must be those of the gradient itself.

  Args:
    trust_coefficient: trust coefficient eta.
    weight_decay: weight decay wd.
    eps: term added to the denominator of the ratio.
    denominator: "sum": |g| + wd |w|; "decayed": |g + wd w|; "gradient": |g|.
    decays: False uses wd in the denominator only.
    adapts: False sets every ratio to 1.
    limit: the learning rate that follows in the chain. The layer's learning rate is then
      min(lr, ratio) instead of lr ratio. None means no limit.
    limits_undefined: with a limit, use min(lr, 1) for a layer with a norm of 0.
    inner: transformation between decay and ratio, such as the velocity in TensorFlow's
      contrib; None means no transformation.
    mask: params -> bool per leaf, or a name or pattern of `including`: the leaves with
      decay and ratio. None means all leaves.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      layers, each with its own ratio. None means that no leaf is stacked.

  Example:
    >>> rate = optax.scale_by_learning_rate(10.0)
    >>> tx = optax.chain(scale_by_lars_ratio(weight_decay=5e-5), optax.trace(0.9), rate)
  """
  between = optax.identity() if inner is None else inner

  def init(params: optax.Params) -> LarsRatioState:
    ratios = layers.initial_ratios(params, mask, stacked)
    return LarsRatioState(jnp.zeros([], jnp.int32), between.init(params), ratios)

  def ratio_of(
    layer: Layer, w: jax.Array, g: jax.Array, u: jax.Array, rate: jax.Array | None
  ) -> jax.Array:
    g_norm = layer_norm(u if denominator == "decayed" else g, layer)
    w_norm = layer_norm(w, layer)
    bottom = g_norm + eps
    if denominator == "sum":
      bottom = bottom + weight_decay * w_norm
    defined = (w_norm > 0) & (g_norm > 0) & adapts
    # The inner `where` avoids 0 / 0, which jax_debug_nans would report.
    ratio = trust_coefficient * w_norm / jnp.where(defined, bottom, 1.0)
    ratio = jnp.where(defined, ratio, 1.0)
    if rate is None:
      return ratio
    limited = ratio < rate  # implies a rate above 0
    if not limits_undefined:
      limited &= defined
    return jnp.where(limited, ratio / jnp.where(limited, rate, 1.0), 1.0)

  def update(
    updates: optax.Updates, state: Any, params: optax.Params | None = None
  ) -> tuple[optax.Updates, LarsRatioState]:
    rate = None if limit is None else rate_at(limit, state.count)

    def adapt(layer: Layer, w: jax.Array, g: jax.Array) -> tuple[Any, Any, Any]:
      """Return a leaf's gradient with decay, its factor, and the ratio to store."""
      if not layer.chosen:
        return g, 1.0, optax.MaskedNode()
      u = g + weight_decay * w
      ratio = ratio_of(layer, w, g, u, None if rate is None else rate.astype(g.dtype))
      return u if decays else g, ratio, layers.kept(ratio)

    decayed, factors, ratios = layers.map_layers(3, adapt, params, mask, stacked, updates)
    moved, inside = between.update(decayed, state.inner, params)
    moved = jax.tree.map(lambda u, factor: factor * u, moved, factors)
    state = LarsRatioState(state.count + 1, inside, layers.TrustRatios(ratios))
    return moved, state

  return optax.GradientTransformation(init, update)
