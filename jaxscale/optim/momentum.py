"""SGD with momentum, with the learning rate outside or inside the velocity.

With update u (gradient plus decay, in LARS times a trust ratio), velocity v, momentum m,
learning rate lr and weights w:

    v = m v + u            w = w - lr v      `optax.trace`, then the learning rate
    v = m c v + lr u       w = w - v         `scale_by_rate_and_momentum`

With Nesterov momentum the last v is replaced by m v + u (or m v + lr u).

c = lr_t / lr_{t-1} is the momentum correction of Goyal et al. (arXiv:1706.02677, §3,
eq. 9 and 10). It compensates for changes of a learning rate inside the velocity: the two
forms are then equal as long as learning rates are > 0. With lr = 0 neither form moves the
weights, but the velocity with lr inside becomes 0 (c = 0 and lr u = 0), while the other
velocity adds u as usual. With MLPerf's schedules, whose first learning rate is 0, the
form with lr inside therefore ignores the gradient of step 0. After a learning rate of 0
and in the first step c is 1.
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
    count: steps done, int32 [].
    learning_rate: learning rate of the last step, []; 0 before the first step.
    velocity: a tree like the parameters.
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

  By default the learning rate is outside the velocity, as in PyTorch. Goyal et al.
  (arXiv:1706.02677, §3) show that a velocity that contains the learning rate, as in Caffe
  (v = m v + lr (g + wd w); w = w - v), needs the momentum m lr_t / lr_{t-1} to behave the
  same when the learning rate changes.

  Nado et al. (arXiv:2102.06356) find Nesterov momentum as good as LARS for ResNet-50 at
  batch size 32,768 if it is tuned for that batch size: peak learning rate, 1 - m (on a
  log scale), weight decay, label smoothing and warm-up length. They use a polynomial
  schedule of power 2 and no weight decay on BatchNorm and biases, as `mask` does by
  default. Their values are in configs/resnet50_nesterov_32k.py and hold for that model
  and batch size only.

  Args:
    learning_rate: the learning rate, a number or a function of the step.
    momentum: momentum m.
    nesterov: use Nesterov momentum (Sutskever et al., ICML 2013), the form in brackets.
    weight_decay: weight decay wd, an L2 term in the gradient.
    momentum_correction: multiply m by lr_t / lr_{t-1}. True: in every step; a number: in
      that many first steps (Intel Caffe: the warm-up). Both use Caffe's form.
    rate_in_velocity: use Caffe's form; None means only if momentum is corrected.
    mask: params -> bool per leaf, or a name or pattern of `including`: the leaves with
      weight decay. None means all leaves.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      the layers of a scan, and `mask` sees one layer, so that stacked biases count as
      biases. None means that no leaf is stacked.

  Raises:
    ConfigError: `momentum_correction` is set and `rate_in_velocity` is False.

  Example:
    >>> tx = sgd(warmup_steps(3.2, 780, (4680, 9360, 12480)), weight_decay=1e-4)
  """
  is_inside = momentum_correction is not False or bool(rate_in_velocity)
  if is_inside and rate_in_velocity is False:
    problem = "requires a velocity that contains the lr, but rate_in_velocity=False"
    raise invalid("momentum_correction", momentum_correction, problem, "leave out one of them")
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
  """Momentum with the learning rate in the velocity: v = m c v + lr u; w = w - v.

  This is Caffe's form. Put it last in a chain, without a further learning rate. Its state
  stores the learning rate for `momentum_correction`.

  Args:
    learning_rate: the learning rate, a number or a function of the step.
    momentum: momentum m.
    nesterov: use Nesterov momentum.
    momentum_correction: False: c is 1; True: c is lr_t / lr_{t-1} in every step; a
      number: c is lr_t / lr_{t-1} in that many first steps.
  """

  def init(params: optax.Params) -> MomentumState:
    count, rate = jnp.zeros([], jnp.int32), jnp.zeros([], default_float())
    return MomentumState(count, rate, optax.tree.zeros_like(params))

  def correction(rate: jax.Array, state: MomentumState) -> jax.Array | float:
    if momentum_correction is False:
      return 1.0
    before = state.learning_rate
    usable = before > 0  # 0 also means that there was no step yet
    if momentum_correction is not True:
      usable &= state.count < momentum_correction
    return jnp.where(usable, rate / jnp.where(usable, before, 1.0), 1.0)

  def update(
    updates: optax.Updates, state: Any, params: optax.Params | None = None
  ) -> tuple[optax.Updates, MomentumState]:
    rate = rate_at(learning_rate, state.count)
    kept = jnp.asarray(momentum * correction(rate, state))
    entered = jax.tree.map(lambda u: rate.astype(u.dtype) * u, updates)
    velocity = jax.tree.map(lambda v, e: kept.astype(v.dtype) * v + e, state.velocity, entered)
    moved = velocity
    if nesterov:  # uncorrected, because the next step's learning rate is unknown
      moved = jax.tree.map(lambda v, e: e + momentum * v, velocity, entered)
    state = MomentumState(state.count + 1, rate, velocity)
    return jax.tree.map(jnp.negative, moved), state

  return optax.GradientTransformation(init, update)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
  """Return the learning rate after `count` steps, in the default float dtype."""
  rate = learning_rate(count) if callable(learning_rate) else learning_rate
  return jnp.asarray(rate, default_float())
