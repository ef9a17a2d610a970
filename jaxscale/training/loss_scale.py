"""Dynamic loss scaling, for activations in float16.

Small gradients of activations underflow in float16, whose smallest number is 6e-8. The loss
is therefore multiplied by a scale s before the backward pass, and the gradients of the
float32 parameters are divided by it (Micikevicius et al., "Mixed precision training",
arXiv:1710.03740, section 3.2):

    gradient = d(loss s / r) / d(parameters) r / s

r is the number of rows (for text: of tokens) in a device's micro-batch, rounded up to a power
of two. So s refers to the mean loss of a micro-batch, as in other libraries, and hardly
depends on the number of devices. s and r are powers of two, which change no bit of a gradient
that neither underflows nor overflows.

The division comes right after each micro-batch, in float32. Sums over micro-batches, the
exchange, the noise scale and clipping thus see gradients without s, and cannot overflow
because of it. Under FSDP the backward pass sums gradients over devices before the division,
but in float32 (`parallel.fsdp_gather`).

A step overflows if a gradient on any device has NaN or Inf while the loss and the model state
have neither. It is skipped like other bad steps (`nan_guard`), but it is no fault: s is halved
and the run continues with the next batch. After `GROWTH_INTERVAL` steps without an overflow s
is doubled. NaN or Inf with s = 1 is a fault, because the scale did not cause it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.models import float8
from jaxscale.training.types import LossFn, Metrics, StepOutputs, Totals, TrainState, Update

# First scale, factors and interval are the defaults of `torch.amp.GradScaler` and of
# `flax.training.dynamic_scale.DynamicScale`. The least scale is that of TensorFlow's
# `LossScaleOptimizer`. The largest one is where NVIDIA's "Train with mixed precision" starts.
INITIAL, LEAST, LARGEST = 2.0**16, 1.0, 2.0**24
GROWTH_INTERVAL = 2000
OVERFLOWS = "_overflows"  # total: the number of devices whose gradients overflowed


class LossScale(NamedTuple):
  """State of the loss scale, scalars.

  Attributes:
    scale: the scale of the next step, a power of two, float32.
    good_steps: steps without an overflow since the scale changed, int32.
    overflows: steps of the run that were skipped because of an overflow, int32.
  """

  scale: jax.Array
  good_steps: jax.Array
  overflows: jax.Array


def init() -> LossScale:
  """Return the state before the first step."""
  zero = jnp.zeros((), jnp.int32)
  return LossScale(jnp.full((), INITIAL, jnp.float32), zero, jnp.copy(zero))


def value_and_grad(loss_fn: LossFn, scale: jax.Array | None) -> Callable[..., Any]:
  """Return `jax.value_and_grad(loss_fn, has_aux=True)`, computed with a scaled loss.

  Args:
    loss_fn: the loss, which sums over the rows.
    scale: the scale s, float32 []; None means no scaling.
  """
  if scale is None:
    return float8.value_and_grad(loss_fn)

  def call(params: Any, model_state: Any, batch: Any, keys: jax.Array):
    # A batch of text has only arrays [rows, tokens]; others have an array [rows].
    count = min(x.size for x in jax.tree.leaves(batch))
    factor = scale / 2 ** (count - 1).bit_length()

    def scaled(params: Any):
      loss, aux = loss_fn(params, model_state, batch, keys)
      return jnp.asarray(loss, jnp.float32) * factor, (loss, aux)

    (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
    return value, jax.tree.map(lambda g: (g / factor).astype(g.dtype), grads)

  return call


def find_overflow(codes: jax.Array, totals: Totals, scale: jax.Array, loss: jax.Array) -> Totals:
  """Tell overflows from faults on one device, after `nan_guard.find_bad`.

  Args:
    codes: the device's codes, int32 [3].
    totals: the totals of `find_bad`, whose loss is NaN if a code is not -1.
    scale: the scale of the step.
    loss: the loss before `find_bad`.

  Returns:
    The totals, with `OVERFLOWS`. The loss of an overflow is not NaN.
  """
  is_overflow = (codes[0] >= 0) & (codes[1:] < 0).all() & (scale > LEAST)
  totals = totals | {"loss": jnp.where(is_overflow, loss, totals["loss"])}
  return totals | {OVERFLOWS: is_overflow.astype(jnp.int32)}


def with_loss_scale(update: Update) -> Update:
  """Return an update that also skips overflows, and updates the loss scale.

  Args:
    update: an update that skips steps whose loss is NaN (`nan_guard.skip_bad_steps`).
  """

  def updated(state: TrainState, outputs: StepOutputs) -> TrainState:
    loss = outputs.metrics["loss"]
    # A gradient may also be NaN because of another device's loss, which is a fault.
    is_overflow = (outputs.totals[OVERFLOWS] > 0) & jnp.isfinite(loss)
    skipping = outputs.metrics | {"loss": jnp.where(is_overflow, jnp.nan, loss)}
    after = update(state, outputs._replace(metrics=skipping))
    is_good = jnp.isfinite(skipping["loss"])
    return after._replace(loss_scale=next_scale(state.loss_scale, is_overflow, is_good))

  return updated


def next_scale(state: LossScale, is_overflow: jax.Array, is_good: jax.Array) -> LossScale:
  """Return the state after a step; a fault, neither overflow nor good, leaves it unchanged."""
  good_steps = state.good_steps + is_good.astype(jnp.int32)
  grows = good_steps == GROWTH_INTERVAL
  grown = jnp.where(grows, jnp.minimum(2 * state.scale, LARGEST), state.scale)
  return LossScale(
    jnp.where(is_overflow, jnp.maximum(state.scale / 2, LEAST), grown),
    jnp.where(is_overflow | grows, 0, good_steps),
    state.overflows + is_overflow.astype(jnp.int32),
  )


def metrics(state: LossScale) -> Metrics:
  """Return the logged metrics: the scale of the next step, and the overflows so far."""
  return {"loss_scale": state.scale, "overflow_steps": state.overflows.astype(jnp.float32)}


def read(state: LossScale | tuple[()]) -> dict[str, int]:
  """Return the number of overflows for JSON, if the loss is scaled."""
  return {"overflow_steps": int(state.overflows)} if state else {}
