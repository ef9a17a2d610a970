"""SGD with momentum, and the rule of momentum that it shares with LARS.

With gradient g, weights w, velocity v, rate lr, trust ratio r (1 for SGD), decay wd
and momentum m:

    u = g + wd w
    v = m c v + [lr] [r] u
    w = w - [lr] [r] (v, or with Nesterov's look-ahead m v + what entered it)

`Form` says in which of the two places lr and r stand. c = lr_t / lr_{t-1} is the
momentum correction of Goyal et al. (arXiv:1706.02677, §3, eq. 9 and 10): with lr
inside the velocity, it compensates for a rate that changes, and equals lr outside,
as long as rates are > 0. At rate 0 they differ: neither moves the weights in that
step, but the velocity that has lr inside becomes 0 (c = 0, and lr u = 0), while the
one that has lr outside takes in u as ever. So with MLPerf's schedules, whose first
rate is 0, lr inside is lr outside without the gradient of step 0. c is 1 after a rate
of 0, and at the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim import layers
from jaxscale.optim.layers import Layer, TrustRatios, default_float
from jaxscale.optim.masks import Mask
from jaxscale.optim.rate import rate_at

# (gradient, weights, rate, layer) -> trust ratio, [] or [layers, 1, ...]
RatioFn = Callable[[jax.Array, jax.Array, jax.Array, Layer], jax.Array]


class Form(NamedTuple):
  """Where the rate and the trust ratio enter.

  Attributes:
    rate_in_velocity: lr multiplies what enters the velocity, not the velocity.
    ratio_in_velocity: the same of the trust ratio.
    decays: wd w is added to the gradient.
  """

  rate_in_velocity: bool = True
  ratio_in_velocity: bool = True
  decays: bool = True


class MomentumState(NamedTuple):
  """State of SGD and LARS.

  Attributes:
    count: int32 [], steps done.
    learning_rate: [], of the last step; 0 before the first.
    velocity: like the parameters, float32 at least.
    trust_ratios: of the last step; see `trust_ratios`.
  """

  count: Any
  learning_rate: Any
  velocity: Any
  trust_ratios: TrustRatios


def sgd(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.9,
  nesterov: bool = True,
  weight_decay: float = 0.0,
  momentum_correction: bool | int = False,
  rate_in_velocity: bool | None = None,
  mask: Mask | None = "kernels",
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """Momentum SGD: v = m v + g + wd w; w = w - lr v (or lr (g + wd w + m v)).

  Goyal et al. (arXiv:1706.02677, §3) show that a velocity that holds the rate,
  v = m v + lr (g + wd w) and w = w - v as in Caffe, needs m lr_t / lr_{t-1} for m
  to do the same when the rate changes. The default here has the rate outside
  (their eq. 9, PyTorch's), where there is nothing to correct.

  Nado et al. (arXiv:2102.06356) find this with Nesterov's look-ahead as good as
  LARS on ResNet-50 at batch 32,768, if it is tuned for that batch: peak rate,
  1 - m (on a log scale), decay, label smoothing and length of the warm-up, with a
  polynomial decay of power 2 and no decay on BatchNorm and biases, which is
  `mask`'s default. configs/resnet50_nesterov_32k.py has their values, which are
  for that model and batch alone.

  Args:
    learning_rate: a number or a function of the step.
    momentum: m.
    nesterov: the form in brackets (Sutskever et al., ICML 2013).
    weight_decay: wd, an L2 term in the gradient.
    momentum_correction: multiply m by lr_t / lr_{t-1}: True: always; a number:
      in that many first steps (Intel Caffe: the warm-up), and then Caffe's form.
    rate_in_velocity: Caffe's form; None: if momentum is corrected.
    mask: params -> bool per leaf, where to decay. None: everywhere.
    stacked: params -> bool per leaf: its first dim counts layers (of a scan), and
      `mask` is applied to one of them, so that their biases are biases. None: none
      is.

  Raises:
    ValueError: a correction, and a velocity without the rate.

  Example:
    >>> tx = sgd(warmup_steps(3.2, 780, (4680, 9360, 12480)), weight_decay=1e-4)
  """
  corrected = momentum_correction is not False
  if corrected and rate_in_velocity is False:
    raise ValueError(
      f"momentum_correction={momentum_correction}: a velocity without the rate "
      "needs none; leave out rate_in_velocity=False"
    )
  form = Form(rate_in_velocity=corrected or bool(rate_in_velocity))
  rule = momentum, weight_decay, nesterov, momentum_correction
  return momentum_rule(learning_rate, form, None, *rule, mask, stacked)


def momentum_rule(
  learning_rate: optax.ScalarOrSchedule,
  form: Form,
  ratio: RatioFn | None,
  momentum: float,
  weight_decay: float,
  nesterov: bool,
  momentum_correction: bool | int,
  mask: Mask | None,
  stacked: Mask | None,
) -> optax.GradientTransformation:
  """The update of the module's docstring.

  Args:
    learning_rate: a number or a function of the step.
    form: where rate and trust ratio enter.
    ratio: the trust ratio of a layer; None: there is none.
    momentum: m.
    weight_decay: wd.
    nesterov: look ahead.
    momentum_correction: False: c is 1; True: always lr_t / lr_{t-1}; a number:
      in that many first steps.
    mask: which leaves have decay and trust ratio; None: all.
    stacked: which leaves hold layers along their first dim; None: none.
  """

  def init(params):
    has_ratio = mask if ratio else (lambda _: False)
    count, rate = jnp.zeros([], jnp.int32), jnp.zeros([], default_float())
    ratios = layers.initial_ratios(params, has_ratio, stacked)
    return MomentumState(count, rate, optax.tree.zeros_like(params), ratios)

  def update(updates, state, params=None):
    rate = rate_at(learning_rate, state.count)
    correction = 1.0  # or lr_t / lr_{t-1}
    if momentum_correction is not False:
      before = state.learning_rate
      usable = before > 0  # 0 also stands for "no step yet"
      if momentum_correction is not True:
        usable &= state.count < momentum_correction
      correction = jnp.where(usable, rate / jnp.where(usable, before, 1.0), 1.0)

    def step(layer, w, g, v):
      """(update, velocity, trust ratio) of one leaf."""
      lr = rate.astype(v.dtype)
      r = ratio(g, w, lr, layer) if ratio and layer.chosen else None
      inside, outside = (1.0 if r is None else r), 1.0
      if not form.ratio_in_velocity:
        inside, outside = outside, inside
      if form.rate_in_velocity:
        inside = lr * inside
      else:
        outside = lr * outside
      entered = inside * (g + weight_decay * w if form.decays and layer.chosen else g)
      v = jnp.asarray(momentum * correction, v.dtype) * v + entered
      # The look-ahead is not corrected: the next step's rate is not known yet.
      moved = outside * (entered + momentum * v if nesterov else v)
      return -moved, v, optax.MaskedNode() if r is None else layers.kept(r)

    trees = updates, state.velocity
    moved, velocity, ratios = layers.map_layers(3, step, params, mask, stacked, *trees)
    return moved, MomentumState(state.count + 1, rate, velocity, TrustRatios(ratios))

  return layers.in_float32(optax.GradientTransformation(init, update))
