"""Types of a training step: its state, its batch, what it computes, its functions.

The modules of this package import their types from here, so that none imports another
for a type alone. A *tree* is a pytree of arrays (`jax.tree`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Tree = Any
Batch = dict[str, jax.Array]  # each [rows, ...], split over the devices by its rows
Metrics = dict[str, jax.Array]  # scalars
Totals = dict[str, jax.Array]  # sums over examples, with their number: "examples"
# (params, model_state, batch, keys: one per row) -> loss summed over the rows,
# (new model_state, totals)
LossFn = Callable[[Tree, Tree, Batch, jax.Array], tuple[jax.Array, tuple[Tree, Totals]]]
# (params, model_state, batch with "mask": bool [rows]) -> totals
EvalFn = Callable[[Tree, Tree, Batch], Totals]
EvalStep = Callable[[Tree, Tree, Batch], Totals]


class TrainState(NamedTuple):
  """A tree of global arrays: everything that a checkpoint keeps.

  Attributes:
    step: int32 [], optimizer steps done; also the position in the data.
    params: float32 parameters.
    model_state: what the model updates itself, e.g. BatchNorm statistics.
    opt_state: optax's state (momenta, average of parameters).
    exchange_state: a leading dim of one entry per device, sharded over them.
    average: exponential averages of (params, model_state), or () without.
    noise: running averages of the gradient-noise scale, or () without.
  """

  step: Any
  params: Tree
  model_state: Tree
  opt_state: Tree
  exchange_state: Tree
  average: Tree
  noise: Tree = ()

  def evaluated(self) -> tuple[Tree, Tree]:
    """(params, model_state) to evaluate: the averages where the state has them."""
    return self.average or (self.params, self.model_state)


class WorkerState(NamedTuple):
  """State that a device keeps for itself under local updates, as `exchange_state`.

  In a `TrainState` every array has a leading dim of one entry per device.

  Attributes:
    params: w_k, float32; the same on all devices of a worker.
    model_state: the model state at these parameters.
    opt_state: state of the inner optimizer.
    exchange_state: state of the exchange of pseudo-gradients.
  """

  params: Tree
  model_state: Tree
  opt_state: Tree
  exchange_state: Tree


class StepOutputs(NamedTuple):
  """Results of a step before its update.

  Attributes:
    grads: means over the global batch, shaped like the parameters.
    model_state: the new one.
    exchange_state: the new one, each array [devices, ...].
    totals: sums over the global batch, scalars.
    num_rows: rows of the global batch.
    metrics: means over the global batch, scalars, with `grad_norm`.
  """

  grads: Tree
  model_state: Tree
  exchange_state: Tree
  totals: Totals
  num_rows: int
  metrics: Metrics


class StepOptions(NamedTuple):
  """Options of a train step.

  Attributes:
    num_microbatches: micro-batches that a device computes one after another; gradients
      are exchanged once, after the last.
    unroll: write the micro-batches out one after another instead of looping; None: on
      CPU, where XLA canonicalises convolutions only outside of loops: inside, the
      gradient of a 3x3 kernel was 37 times slower.
    ema_decay: decay of the averages that `init_state(..., average=True)` began; None
      keeps no averages.
    ema_warmup: raise the decay to `ema_decay` over the first steps, see
      `step.with_average`.
    measure_noise_scale: measure the gradient-noise scale, in rows of the batch, from
      the gradients of the micro-batches and of the whole step. The state was made with
      `init_state(..., noise_scale=True)`.
    skip_bad_steps: leave the state as it was, but for the counts of steps, where the
      loss, the gradients, the learning rate or the model state hold NaN or Inf. The
      loss of such a step is NaN, and the metric `nan_guard.CODES`, which is not a
      scalar, has what each device found. The totals of the loss must have "loss".
    observe: opt_state -> further metrics, scalars.
    seed: seed of the rows' keys.
  """

  num_microbatches: int = 1
  unroll: bool | None = None
  ema_decay: float | None = None
  ema_warmup: bool = False
  measure_noise_scale: bool = False
  skip_bad_steps: bool = False
  observe: Callable[[Tree], Metrics] | None = None
  seed: int = 0


Update = Callable[[TrainState, StepOutputs], TrainState]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
