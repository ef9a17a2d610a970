"""LARS as published, and the variants that others ran.

With |w| and |g| the norms of one layer's weights and gradient, eta the trust
coefficient, wd the decay, m the momentum, u = g + wd w, and

    ratio = eta |w| / (|g| + wd |w| + eps)

| variant | whose | a step |
|---|---|---|
| paper | arXiv:1708.03888; Intel Caffe; Flax and MLPerf's references | v = m v + lr ratio u; w -= v |
| nvidia | NVIDIA's MLPerf SGDwFASTLARS | the same, m lr_t / lr_{t-1} for m |
| tf_contrib | TensorFlow's contrib LARSOptimizer, decay added | v = m v + u; w -= lr ratio v |
| tf_contrib_l2_in_loss | the same, its code as it was | v = m v + g; w -= lr ratio v |
| torch | lightning-bolts and its kin | v = m v + ratio u; w -= lr v |
| optax | `optax.lars` | paper's; ratio = eta |w| / (|u| + eps) |
| larc_scale | NVIDIA apex LARC | torch's |
| larc_clip | NVIDIA apex LARC, clip=True | torch's; min(ratio / lr, 1) for ratio |
| nvcaffe_scale | NVCaffe LARC | paper's; ratio = (1 - m) eta |w| / (|g| + eps) |
| nvcaffe_clip | NVCaffe LARC | the same; min(lr, ratio) for lr ratio |
| timm | timm lars | torch's; no ratio where wd is 0 |
| timm_clip | timm larc | larc_clip's; no ratio where wd is 0 |

Sources: the code of each, intel/caffe 44d53638 and NVIDIA/caffe 87a25543
(src/caffe/solvers/sgd_solver.cpp), tensorflow 5c8077a6 (contrib/opt), NVIDIA/apex
LARC.py, optax 0.2.8 alias.py, timm 1.0.31 optim/lars.py (whose eps is 1e-8).

The zero-norm rule: where |w| or |g| (optax: |u|) is 0, the layer moves by the bare
rate (ratio 1) and its decay stays; apex drops the decay too. nvcaffe_clip and
timm_clip clip here as well, by a ratio of 1: the layer's rate is min(lr, 1). In all
others a
kernel that starts at 0 makes a first step of the whole rate, which is 29 in some
recipes: such a layer is better left out by the mask.

One mask governs decay and ratio together, so two things cannot be expressed: NVIDIA's
bias of the classifier, which has decay and no ratio, and the two masks of
`optax.lars`.
"""  # noqa: E501

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import ConfigError
from jaxscale.optim.layers import Layer, is_injected, layer_norm
from jaxscale.optim.masks import Mask
from jaxscale.optim.momentum import Form, momentum_rule
from jaxscale.optim.settings import LarsVariant


class _Variant(NamedTuple):
  """A row of the module's table.

  Attributes:
    form: where rate and ratio enter.
    denominator: "sum": |g| + wd |w|; "decayed": |g + wd w|; "gradient": |g|.
    clip: the rate of a layer is min(lr, ratio), and not lr ratio.
    clips_undefined: so it is where a norm is 0, with ratio 1: min(lr, 1).
    adapts_undecayed: there are ratios also if wd is 0.
  """

  form: Form = Form()
  denominator: Literal["sum", "decayed", "gradient"] = "sum"
  clip: bool = False
  clips_undefined: bool = False
  adapts_undecayed: bool = True


_OUTSIDE = Form(rate_in_velocity=False)
_AFTER = Form(rate_in_velocity=False, ratio_in_velocity=False)
_VARIANTS: dict[str, _Variant] = {
  "paper": _Variant(),
  "nvidia": _Variant(),
  "tf_contrib": _Variant(_AFTER),
  "tf_contrib_l2_in_loss": _Variant(_AFTER._replace(decays=False)),
  "torch": _Variant(_OUTSIDE),
  "optax": _Variant(denominator="decayed"),
  "larc_clip": _Variant(_OUTSIDE, clip=True),
  "larc_scale": _Variant(_OUTSIDE),
  "nvcaffe_clip": _Variant(denominator="gradient", clip=True, clips_undefined=True),
  "nvcaffe_scale": _Variant(denominator="gradient"),
  "timm": _Variant(_OUTSIDE, adapts_undecayed=False),
  "timm_clip": _Variant(
    _OUTSIDE, clip=True, clips_undefined=True, adapts_undecayed=False
  ),
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
  """LARS as published, and as run by others (equations in the module).

  `tf_contrib` adds the decay to the gradient, as all other variants do; the code
  it comes from had it in the denominator only, for a loss that already contains
  wd |w|^2 / 2: that is `tf_contrib_l2_in_loss`.

  Args:
    learning_rate: a number or a function of the step.
    variant: whose equations.
    momentum: m.
    weight_decay: wd.
    trust_coefficient: eta; 0.001 in every recipe its authors shipped, 0.02 by
      default in apex.
    eps: added to the denominator of the ratio.
    nesterov: look ahead.
    momentum_correction: multiply m by lr_t / lr_{t-1} (arXiv:1706.02677, §3):
      True: always; a number: in that many first steps (Intel Caffe: the
      warm-up); "nvidia" always does. Always, it makes "paper" equal "torch" as
      long as rates are > 0; momentum.py says what a rate of 0 does.
    mask: params -> bool per leaf; a leaf that is False gets plain momentum at
      the same rate, without ratio and decay. None: every leaf is scaled and
      decayed, as in Caffe.
    stacked: params -> bool per leaf: its first dim counts layers (of a scan), each
      with a ratio of its own. None: none is.

  Raises:
    ConfigError: the variant is not known, or is one whose velocity does not hold
      the rate and needs no correction.

  Example:
    >>> tx = lars(warmup_polynomial(10.0, 500, 5000), weight_decay=5e-5)
    >>> caffe = lars(
    ...   warmup_polynomial(32.0, 400, 4000, start=1.0, end=0.0, restart=False),
    ...   weight_decay=5e-4, momentum_correction=400, mask=None)
  """
  if variant not in _VARIANTS:
    known = ", ".join(_VARIANTS)
    raise ConfigError(f"LARS.variant={variant!r}: not known, give one of {known}")
  form, denominator, clip, clips_undefined, adapts_undecayed = _VARIANTS[variant]
  if momentum_correction is not False and not form.rate_in_velocity:
    raise ConfigError(
      f"LARS.momentum_correction={momentum_correction}: the velocity of "
      f"variant={variant!r} does not hold the rate, there is nothing to correct; "
      "leave it out"
    )
  eta = trust_coefficient * ((1 - momentum) if denominator == "gradient" else 1)

  def ratio(g: jax.Array, w: jax.Array, rate: jax.Array, layer: Layer) -> jax.Array:
    g_norm = layer_norm(g + weight_decay * w if denominator == "decayed" else g, layer)
    w_norm = layer_norm(w, layer)
    bottom = g_norm + eps
    if denominator == "sum":
      bottom = bottom + weight_decay * w_norm
    defined = (w_norm > 0) & (g_norm > 0)
    if not adapts_undecayed:
      defined &= weight_decay > 0
    # The inner `where` keeps 0 / 0 out, also under jax_debug_nans.
    local = eta * w_norm / jnp.where(defined, bottom, 1.0)
    local = jnp.where(defined, local, 1.0)
    if not clip:
      return local
    clipped = local < rate  # so the rate is not 0
    if not clips_undefined:
      clipped &= defined
    return jnp.where(clipped, local / jnp.where(clipped, rate, 1.0), 1.0)

  correction = variant == "nvidia" or momentum_correction
  rule = momentum, weight_decay, nesterov, correction
  adapts = adapts_undecayed or is_injected(weight_decay) or weight_decay > 0
  chosen = ratio if adapts else None
  return momentum_rule(learning_rate, form, chosen, *rule, mask, stacked)
