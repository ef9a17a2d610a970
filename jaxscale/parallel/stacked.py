"""A model of stacked layers under a layout: the loss of a step and its totals.

The one place that runs layers. Each enters (`entering`) in the body of the scan and
inside what is recomputed, so that a device never holds more than one or two whole
layers; what is kept for the backward pass is chosen by name (`models.stacked`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax

from jaxscale.errors import ConfigError
from jaxscale.models.attention import attention
from jaxscale.models.stack import Ops, Stack, Totals
from jaxscale.models.stacked import REMAT, Layer
from jaxscale.parallel import sequence
from jaxscale.parallel.entering import enter, keep_all_but_entered
from jaxscale.parallel.layout import Layout
from jaxscale.parallel.tensor import tensor_ops


def stack_loss(stack: Stack, layout: Layout, *, remat: str = "none") -> Any:
  """The loss of a train step (`step.LossFn`) for a model of stacked layers.

  Args:
    stack: the model.
    layout: of its parameters.
    remat: what a layer keeps for the backward pass, a name of `models.REMAT`. What
      enters is never kept, but gathered again.
  """

  def loss_fn(params, model_state, batch, keys):
    del keys  # nothing is random
    totals = run(stack, layout, params, batch, remat=remat)
    return totals["loss"], (model_state, totals)

  return loss_fn


def stack_totals(stack: Stack, layout: Layout) -> Any:
  """The totals of an eval step (`step.EvalFn`) for a model of stacked layers."""

  def eval_fn(params, model_state, batch):
    del model_state
    return run(stack, layout, params, batch, remat="none")

  return eval_fn


def run(stack: Stack, layout: Layout, params: Any, batch: Any, *, remat: str) -> Totals:
  """The totals of a device's rows, inside `shard_map` over the mesh."""
  ops, entries = ops_of(layout), layout.entries
  batch = own_tokens(batch, layout)
  of_layer = jax.tree.map(lambda entry: entry.of_layer(), entries["layers"])
  layer = wrapped(lambda w, h: stack.layer(enter(w, of_layer), h, ops), remat, layout)
  h = stack.embed(enter(params["embed"], entries["embed"]), batch, ops)
  h, _ = lax.scan(lambda h, w: (layer(w, h), None), h, params["layers"])
  return stack.finish(enter(params["head"], entries["head"]), h, batch, ops)


def ops_of(layout: Layout) -> Ops:
  """The operations that a model needs under a layout."""
  # The program may be for devices that are not here.
  attend = functools.partial(attention, device=layout.mesh.devices.flat[0])
  if "model" not in layout.mesh.axis_names:
    return Ops(attend=attend)
  if layout.splits in ("layers", "layers_and_tokens"):
    regions = layout.splits == "layers_and_tokens"
    ops = tensor_ops(regions=regions, dtype=layout.dtype, sum_in=layout.sum_in)
    return ops._replace(attend=attend)
  if layout.splits == "ring":
    return sequence.split(attend="ring", order="zigzag")
  ops = sequence.split(attend="all_to_all")
  by_heads = functools.partial(
    sequence.all_to_all_attention, axis="model", attend=attend
  )
  return ops._replace(attend=by_heads)


def own_tokens(batch: Any, layout: Layout) -> Any:
  """The batch with this device's tokens, where devices split sequences.

  Raises:
    ConfigError: they do not divide: some would be left out.
  """
  if "model" not in layout.token_axes:
    return batch
  size = lax.axis_size("model")

  order = "zigzag" if layout.splits == "ring" else "contiguous"
  pieces = size * (2 if order == "zigzag" else 1)  # equal ones, of a sequence

  def own(x):
    if x.shape[1] % pieces:
      raise ConfigError(
        f"tokens={x.shape[1]}: layout.model={layout.splits!r} gives the {size} devices "
        f"of 'model' equal parts of a sequence; give a multiple of {pieces}"
      )
    return x[:, sequence.places(x.shape[1] // size, "model", order)]

  return {k: own(x) if k in ("tokens", "targets") else x for k, x in batch.items()}


def wrapped(layer: Layer, remat: str, layout: Layout) -> Layer:
  """A layer that keeps what `remat` says, and nothing that came in."""
  if remat == "none" and layout.shard in ("zero2", "fsdp"):
    keep = functools.partial(
      jax.checkpoint, policy=keep_all_but_entered, prevent_cse=False
    )
    return keep(layer)
  return REMAT[remat](layer)
