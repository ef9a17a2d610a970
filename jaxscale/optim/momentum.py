"""Momentum, in every place that the rate and a trust ratio can have in it.

The one transformation behind SGD and all forms of LARS. With gradient g, weights
w, velocity v, rate lr, trust ratio r (1 for SGD), decay wd and momentum m:

    u = g + wd w
    v = m c v + [lr] [r] u
    w = w - [lr] [r] (v, or with Nesterov's look-ahead m v + what entered it)

`Form` says in which of the two places lr and r stand. c = lr_t / lr_{t-1} is the
momentum correction of Goyal et al. (arXiv:1706.02677, §3, eq. 9 and 10): with lr
inside the velocity, it makes up for a rate that changes, and gives what lr
outside gives, as long as rates are > 0. At rate 0 they part: neither moves the
weights in that step, but the velocity that has lr inside is emptied (c = 0, and
lr u = 0) and starts afresh, while the one that has lr outside takes in u as ever.
So with MLPerf's schedules, whose first rate is 0, lr inside is lr outside without
the gradient of step 0. c is 1 after a rate of 0, and at the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim.layers import (
  Layer,
  TrustRatios,
  default_float,
  initial_ratios,
  layers_of,
  ratio_tree,
  wide,
)
from jaxscale.optim.masks import Mask

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
    last_rate: [], the learning rate of the step before; 0 before the first.
    velocity: like the parameters, float32 at least.
    trust_ratios: of the last step; see `trust_ratios`.
  """

  count: Any
  last_rate: Any
  velocity: Any
  trust_ratios: TrustRatios


class Rule(NamedTuple):
  """The numbers of an optimizer.

  Attributes:
    form: where rate and trust ratio enter.
    momentum: m.
    weight_decay: wd.
    nesterov: look ahead.
    ratio: the trust ratio of a layer; None: there is none.
  """

  form: Form
  momentum: float
  weight_decay: float
  nesterov: bool
  ratio: RatioFn | None = None


def momentum_rule(
  learning_rate: optax.ScalarOrSchedule,
  rule: Rule,
  *,
  momentum_correction: bool | int = False,
  mask: Mask | None = None,
  stacked: Mask | None = None,
) -> optax.GradientTransformation:
  """The update of the module's docstring.

  Args:
    learning_rate: a number or a function of the step.
    rule: the rest of the equations.
    momentum_correction: False: c is 1; True: always lr_t / lr_{t-1}; a number:
      in that many first steps.
    mask: which leaves have decay and trust ratio; None: all.
    stacked: which leaves hold layers along their first dim; None: none.
  """

  def init(params):
    layers = layers_of(params, mask, stacked)
    return MomentumState(
      count=jnp.zeros([], jnp.int32),
      last_rate=jnp.zeros([], default_float()),
      velocity=jax.tree.map(lambda w: jnp.zeros_like(w, wide(w.dtype)), params),
      trust_ratios=initial_ratios(params, layers if rule.ratio else None),
    )

  def update(updates, state, params=None):
    if params is None:
      raise ValueError("decay needs parameters: tx.update(grads, state, params)")
    rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
    rate = jnp.asarray(rate, state.last_rate.dtype)
    correction = _correction(momentum_correction, rate, state)
    leaves, treedef = jax.tree.flatten(params)
    trees = [treedef.flatten_up_to(t) for t in (updates, state.velocity)]
    layers = layers_of(params, mask, stacked)
    moved = [
      _leaf(rule, rate, correction, *leaf)
      for leaf in zip(leaves, *trees, layers, strict=True)
    ]
    return jax.tree.unflatten(treedef, [step for step, *_ in moved]), MomentumState(
      count=state.count + 1,
      last_rate=rate,
      velocity=jax.tree.unflatten(treedef, [v for _, v, _ in moved]),
      trust_ratios=ratio_tree(treedef, [r for *_, r in moved]),
    )

  return optax.GradientTransformation(init, update)


def _leaf(
  rule: Rule,
  rate: jax.Array,
  correction: jax.Array | float,
  w: jax.Array,
  g: jax.Array,
  v: jax.Array,
  layer: Layer,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """(update in the dtype of w, velocity, trust ratio) of one leaf."""
  narrow, dtype = w.dtype, v.dtype
  g, w, lr = g.astype(dtype), w.astype(dtype), rate.astype(dtype)
  r = rule.ratio(g, w, lr, layer) if rule.ratio and layer.chosen else None
  inside, outside = _factors(rule.form, lr, 1.0 if r is None else r)
  decays = rule.form.decays and layer.chosen
  entered = inside * (g + rule.weight_decay * w if decays else g)
  v = jnp.asarray(rule.momentum * correction, dtype) * v + entered
  # The look-ahead is not corrected: the next step's rate is not known yet.
  step = outside * (entered + rule.momentum * v if rule.nesterov else v)
  return -step.astype(narrow), v, r


def _factors(form: Form, rate: jax.Array, ratio: Any) -> tuple[Any, Any]:
  """(what multiplies the gradient, what multiplies the velocity)."""
  inside = outside = 1.0
  if form.ratio_in_velocity:
    inside = ratio
  else:
    outside = ratio
  if form.rate_in_velocity:
    return rate * inside, outside
  return inside, rate * outside


def _correction(
  wanted: bool | int, rate: jax.Array, state: MomentumState
) -> jax.Array | float:
  """lr_t / lr_{t-1}, or 1."""
  if wanted is False:
    return 1.0
  usable = state.last_rate > 0  # 0 also stands for "no step yet"
  if wanted is not True:
    usable &= state.count < wanted
  return jnp.where(usable, rate / jnp.where(usable, state.last_rate, 1.0), 1.0)
