"""Types of a training step: state, batch, results, options and functions.

The modules of this package share these types, so that none imports another for a type
alone. A *tree* is a pytree of arrays (`jax.tree`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxscale.parallel.trainable import merge

Tree = Any
Batch = dict[str, jax.Array]  # arrays [rows, ...], whose rows are split over the devices
Metrics = dict[str, jax.Array]  # scalars
# Sums over examples, scalars, weighted if they have weights. "examples" is the divisor of
# their means: the number of examples or the sum of their weights.
Totals = dict[str, jax.Array]
LOSS_WEIGHT = "_loss_weight"  # the divisor of the loss, if it differs from "examples"
# (params, model_state, batch [rows, ...], keys: one per row, [rows]) -> loss summed over the
# rows, float [], (new model_state, totals). Rows are those of one device and micro-batch.
LossFn = Callable[[Tree, Tree, Batch, jax.Array], tuple[jax.Array, tuple[Tree, Totals]]]
# (params, model_state, batch with "mask": bool [rows]) -> totals
EvalFn = Callable[[Tree, Tree, Batch], Totals]
EvalStep = Callable[[Tree, Tree, Batch], Totals]


class TrainState(NamedTuple):
  """Train state: a tree of global arrays with everything that a checkpoint stores.

  Attributes:
    step: optimizer steps done, int32 []; also the position in the data.
    params: float32 parameters.
    model_state: state that the model itself updates, e.g. BatchNorm statistics.
    opt_state: the optimizer's state, such as momenta.
    exchange_state: the exchange's state, with a leading dim of one entry per device,
      sharded over the devices.
    average: exponential averages of (trainable part of params, model_state), or () if none
      are kept.
    noise: running averages of the gradient-noise scale, or () if it is not measured.
    loss_scale: state of the dynamic loss scale, or () if the loss is not scaled.
  """

  step: Any
  params: Tree
  model_state: Tree
  opt_state: Tree
  exchange_state: Tree
  average: Tree
  noise: Tree = ()
  loss_scale: Tree = ()

  def evaluated(self) -> tuple[Tree, Tree]:
    """Return (params, model_state) for evaluation: the averages if there are any."""
    if not self.average:
      return self.params, self.model_state
    params, model_state = self.average
    return merge(params, self.params), model_state


class WorkerState(NamedTuple):
  """State of one device under local updates: the `exchange_state` of a `TrainState`.

  In a `TrainState` every array has a leading dim of one entry per device.

  Attributes:
    params: the worker's trainable parameters w_k, float32; the same on all devices of a
      worker.
    model_state: the model state for these parameters.
    opt_state: the state of the inner optimizer.
    exchange_state: the state of the exchange of pseudo-gradients.
  """

  params: Tree
  model_state: Tree
  opt_state: Tree
  exchange_state: Tree


class StepOutputs(NamedTuple):
  """Results of a step before its update.

  Attributes:
    grads: mean gradients over the global batch, shaped like the parameters.
    model_state: the new model state.
    exchange_state: the new exchange state, arrays [devices, ...].
    totals: sums of metrics over the global batch, scalars.
    num_rows: number of rows of the global batch.
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
    num_microbatches: number of micro-batches that a device computes one after another;
      gradients are exchanged once, after the last.
    unroll: unroll the loop over micro-batches; None means only on CPU, where XLA canonicalises
      convolutions only outside of loops (inside a loop the gradient of a 3x3 kernel was 37
      times slower).
    ema_decay: decay of the averages that `init_state(..., average=True)` began; None
      keeps no averages.
    ema_warmup: raise the decay to `ema_decay` over the first steps; see
      `step.with_average`.
    measure_noise_scale: measure the gradient-noise scale, in rows of the batch, from
      the gradients of the micro-batches and of the whole step. The state must come from
      `init_state(..., noise_scale=True)`.
    skip_bad_steps: keep the old state, except for step counts, if the loss, the gradients,
      the learning rate or the model state have NaN or Inf. The loss of such a step is
      NaN, and the metric `nan_guard.CODES`, which is not a scalar, reports the findings of
      each device. The totals that the loss function returns must include "loss".
    trainable: pattern of the trainable parameters, as for `parallel.trainable.trainable_part`;
      None means that all are. The state must come from `init_state(..., trainable=...)` with
      the same pattern.
    scale_loss: scale the loss dynamically, for activations in float16 (`loss_scale`). The
      state must come from `init_state(..., loss_scale=True)`. Needs `skip_bad_steps`.
    observe: opt_state -> further metrics, scalars.
    seed: the seed of the random keys, one per row.
    compiler_options: options of XLA's compiler by name, as for `jax.jit`; None means none.
  """

  num_microbatches: int = 1
  unroll: bool | None = None
  ema_decay: float | None = None
  ema_warmup: bool = False
  measure_noise_scale: bool = False
  skip_bad_steps: bool = False
  trainable: str | None = None
  scale_loss: bool = False
  observe: Callable[[Tree], Metrics] | None = None
  seed: int = 0
  compiler_options: dict[str, Any] | None = None


Update = Callable[[TrainState, StepOutputs], TrainState]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
