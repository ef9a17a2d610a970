"""SGD with momentum, and the two places where a learning rate can stand in it.

With u what comes in (gradient and decay, in LARS times a trust ratio), velocity v,
momentum m, rate lr and weights w:

    v = m v + u            w = w - lr v      `optax.trace`, then the rate
    v = m c v + lr u       w = w - v         `scale_by_rate_and_momentum`

or with Nesterov's look-ahead m v + what entered v in the place of the last v.

c = lr_t / lr_{t-1} is the momentum correction of Goyal et al. (arXiv:1706.02677, §3,
eq. 9 and 10): with lr inside the velocity, it compensates for a rate that changes, and
equals lr outside, as long as rates are > 0. At rate 0 they differ: neither moves the
weights in that step, but the velocity that has lr inside becomes 0 (c = 0, and lr u =
0), while the one that has lr outside takes in u as ever. So with MLPerf's schedules,
whose first rate is 0, lr inside is lr outside without the gradient of step 0. c is 1
after a rate of 0, and at the first step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import invalid
from jaxscale.optim.layers import add_decayed_weights, default_float, in_float32
from jaxscale.optim.masks import Mask


class MomentumState(NamedTuple):
  """State of `scale_by_rate_and_momentum`.

  Attributes:
    count: int32 [], steps done.
    learning_rate: [], of the last step; 0 before the first.
    velocity: like the parameters.
  """

  count: jax.Array
  learning_rate: jax.Array
  velocity: optax.Updates


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
    ConfigError: a correction, and a velocity without the rate.

  Example:
    >>> tx = sgd(warmup_steps(3.2, 780, (4680, 9360, 12480)), weight_decay=1e-4)
  """
  is_inside = momentum_correction is not False or bool(rate_in_velocity)
  if is_inside and rate_in_velocity is False:
    why = "corrects a velocity that holds the rate, and rate_in_velocity=False"
    raise invalid("momentum_correction", momentum_correction, why, "leave out one of them")
  decay = add_decayed_weights(weight_decay, mask, stacked)
  if not is_inside:
    trace = optax.trace(momentum, nesterov)
    return in_float32(optax.chain(decay, trace, optax.scale_by_learning_rate(learning_rate)))
  options: Any = {"nesterov": nesterov, "momentum_correction": momentum_correction}
  moved = scale_by_rate_and_momentum(learning_rate, momentum, **options)
  return in_float32(optax.chain(decay, moved))


def scale_by_rate_and_momentum(
  learning_rate: optax.ScalarOrSchedule,
  momentum: float = 0.9,
  *,
  nesterov: bool = False,
  momentum_correction: bool | int = False,
) -> optax.GradientTransformation:
  """Momentum whose velocity holds the rate, as Caffe's: v = m c v + lr u; w = w - v.

  The last of a chain: no other rate follows it. Its state keeps the rate for
  `momentum_correction`.

  Args:
    learning_rate: a number or a function of the step.
    momentum: m.
    nesterov: look ahead.
    momentum_correction: False: c is 1; True: always lr_t / lr_{t-1}; a number:
      in that many first steps.
  """

  def init(params: optax.Params) -> MomentumState:
    count, rate = jnp.zeros([], jnp.int32), jnp.zeros([], default_float())
    return MomentumState(count, rate, optax.tree.zeros_like(params))

  def correction(rate: jax.Array, state: MomentumState) -> jax.Array | float:
    if momentum_correction is False:
      return 1.0
    before = state.learning_rate
    usable = before > 0  # 0 also stands for "no step yet"
    if momentum_correction is not True:
      usable &= state.count < momentum_correction
    return jnp.where(usable, rate / jnp.where(usable, before, 1.0), 1.0)

  def update(
    updates: optax.Updates, state: Any, params: optax.Params | None = None
  ) -> tuple[optax.Updates, MomentumState]:
    rate = rate_at(learning_rate, state.count)
    kept = momentum * correction(rate, state)
    entered = jax.tree.map(lambda u: rate.astype(u.dtype) * u, updates)
    velocity = jax.tree.map(
      lambda v, e: jnp.asarray(kept, v.dtype) * v + e, state.velocity, entered
    )
    moved = velocity
    if nesterov:  # not corrected: the next step's rate is not known yet
      moved = jax.tree.map(lambda v, e: e + momentum * v, velocity, entered)
    state = MomentumState(state.count + 1, rate, velocity)
    return jax.tree.map(jnp.negative, moved), state

  return optax.GradientTransformation(init, update)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
  """The rate of the step after `count` steps, in the default float dtype."""
  rate = learning_rate(count) if callable(learning_rate) else learning_rate
  return jnp.asarray(rate, default_float())
