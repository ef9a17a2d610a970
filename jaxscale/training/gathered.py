"""Losses whose rows use the outputs of the whole global batch, such as contrastive losses.

A `GatheredObjective` gets the outputs and the batch arrays of all devices, gathered by
`lax.all_gather`. The transpose of that gather sums the cotangents of all devices' losses,
so each device gets the gradient of the whole loss with respect to its own outputs.

With micro-batches, two passes compute the same gradient (GradCache, arXiv:2101.06983): the
first computes the outputs of all micro-batches without gradients, then the loss gives the
cotangents of this device's outputs, and the second pass takes the gradient of each
micro-batch for them. The memory is that of one micro-batch and of all outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import vary
from jaxscale.models.model_fns import inputs_of
from jaxscale.training.losses import Apply, Objective, eval_totals, training_loss
from jaxscale.training.metrics import Metric
from jaxscale.training.types import Batch, EvalFn, LossFn, Totals, Tree

# Attribute of a `LossFn` with its `Parts`, from which a step computes two passes.
PARTS = "gathered_parts"
Sharded = Callable[[Any], Any]


class Everyone(NamedTuple):
  """All rows of the global batch.

  Attributes:
    outputs: the model's outputs, arrays [all rows, ...].
    batch: the arrays of the batch, [all rows, ...].
    rows: the positions of this device's rows among all rows, int32 [rows].
    mask: False for rows that must not count, which are padding in evaluation and rows of
      "weight" 0, bool [all rows].
  """

  outputs: Any
  batch: Batch
  rows: jax.Array
  mask: jax.Array


class GatheredObjective(NamedTuple):
  """Loss and metrics of each example, computed from all rows of the global batch.

  The training loss is the mean over all rows. A loss of the batch as a whole, such as
  Barlow Twins', is returned for every row.

  Attributes:
    loss: (outputs, batch, everyone) -> float32 [rows]. `outputs` and `batch` are this
      device's rows, `everyone` is an `Everyone`.
    metrics: (outputs, batch, everyone) -> a dict of arrays [rows], as in `Objective`.
    eval_loss: the loss in evaluation; None uses `loss`. All rows are those of one
      evaluation batch.

  Example:
    >>> def loss(z, batch, everyone):  # distance to the mean of all rows
    ...   return ((z - everyone.outputs.mean(0)) ** 2).sum(-1)
    >>> objective = GatheredObjective(loss)
  """

  loss: Callable[[Any, Batch, Everyone], Any]
  metrics: Callable[[Any, Batch, Everyone], Any] = lambda outputs, batch, everyone: {}
  eval_loss: Callable[[Any, Batch, Everyone], Any] | None = None


class Parts(NamedTuple):
  """The two parts of a gathered loss.

  Attributes:
    outputs: (params, model_state, batch, keys) -> (outputs, model_state).
    totals: (outputs, batch) -> sums over a device's rows, with collectives over all
      devices.
  """

  outputs: Callable[..., tuple[Any, Tree]]
  totals: Callable[[Any, Batch], Totals]


def gathered_loss(
  apply: Apply,
  objective: GatheredObjective,
  axes: tuple[str, ...],
  inputs: Callable[[Batch], Any] = inputs_of,
  sharded: Sharded = lambda function: function,
) -> LossFn:
  """Return the loss function of a train step for a `GatheredObjective`.

  Args:
    apply: (params, model_state, inputs, train, keys) -> (outputs, model_state).
    objective: the loss and the metrics.
    axes: mesh axes that split the rows (`mesh.batch_axes`).
    inputs: batch -> inputs of `apply`.
    sharded: wrapper of a function of full parameters, for parameters that are split
      (`parallel.with_gathered_params`).
  """

  def outputs_of(params: Tree, model_state: Tree, batch: Batch, keys: jax.Array):
    return apply(params, model_state, inputs(batch), True, keys)

  def totals_of(outputs: Any, batch: Batch) -> Totals:
    loss = training_loss(lambda *_: (outputs, ()), _bound(objective, outputs, batch, axes))
    return loss((), (), batch, jnp.zeros(0))[1][1]

  parts = Parts(sharded(outputs_of), totals_of)

  def loss_fn(params: Tree, model_state: Tree, batch: Batch, keys: jax.Array):
    outputs, model_state = parts.outputs(params, model_state, batch, keys)
    totals = parts.totals(outputs, batch)
    return totals["loss"], (model_state, totals)

  setattr(loss_fn, PARTS, parts)
  return loss_fn


def gathered_totals(
  apply: Apply,
  objective: GatheredObjective,
  axes: tuple[str, ...],
  inputs: Callable[[Batch], Any] = inputs_of,
  metrics: Mapping[str, Metric] = MappingProxyType({}),
) -> EvalFn:
  """Return the function of an eval step's totals, where rows see their evaluation batch.

  Args:
    apply: (params, model_state, inputs, train, keys) -> (outputs, model_state).
    objective: the loss and the metrics.
    axes: mesh axes that split the rows.
    inputs: batch -> inputs of `apply`.
    metrics: further metrics by name, as in `losses.eval_totals`.
  """

  def eval_fn(params: Tree, model_state: Tree, batch: Batch):
    outputs, _ = apply(params, model_state, inputs(batch), False, None)
    bound = _bound(objective, outputs, batch, axes)
    return eval_totals(lambda *_: (outputs, ()), bound, metrics=metrics)((), (), batch)

  return eval_fn


def _bound(
  objective: GatheredObjective, outputs: Any, batch: Batch, axes: tuple[str, ...]
) -> Objective:
  """Return an `Objective` of this device's rows that has gathered all rows.

  XLA removes the gathers of arrays that the objective does not use.
  """
  count = len(jax.tree.leaves(batch)[0])
  mask = batch.get("mask", jnp.ones(count, bool))
  if "weight" in batch:
    mask &= (batch["weight"].reshape(count, -1) > 0).any(-1)
  rows = lax.axis_index(axes) * count + jnp.arange(count, dtype=jnp.int32)

  def every(tree: Any) -> Any:
    return lax.all_gather(vary(tree, axes), axes, tiled=True)

  named = {name: x for name, x in batch.items() if name != "mask"}
  everyone = Everyone(every(outputs), every(named), rows, every(mask))

  def bind(function: Any):
    return function and (lambda outputs, batch: function(outputs, batch, everyone))

  loss, metrics, eval_loss = map(bind, objective)
  return Objective(loss, metrics, eval_loss)


def cotangents(parts: Parts, outputs: Any, batch: Batch) -> tuple[Totals, list[jax.Array]]:
  """Return a device's totals, and the gradient of all losses for its floating outputs."""

  def loss(outputs: Any):
    totals = parts.totals(outputs, batch)
    return totals["loss"], totals

  grads, totals = jax.grad(loss, has_aux=True, allow_int=True)(outputs)
  pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(grads), strict=True)
  return totals, [g for x, g in pairs if jnp.issubdtype(x.dtype, jnp.inexact)]


def second_pass(parts: Parts) -> LossFn:
  """Return the loss of the second pass: the inner product of outputs and cotangents.

  Its batch is a pair of the batch and the result of `cotangents`, which is constant.
  """

  def loss_fn(params: Tree, model_state: Tree, batch: Any, keys: jax.Array):
    batch, grads = batch
    outputs, model_state = parts.outputs(params, model_state, batch, keys)
    floats = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    products = ((x * g).sum(dtype=jnp.float32) for x, g in zip(floats, grads, strict=True))
    return sum(products, jnp.zeros((), jnp.float32)), (model_state, {})

  return loss_fn
