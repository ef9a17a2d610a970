"""A model of stacked layers whose layers are shared out over the stages of a pipeline.

What `pipeline` needs of a model and a layout: how micro-batches are embedded, what a
stage's layers are, and what the head makes of what comes out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax

from jaxscale.collectives import vary
from jaxscale.models.stack import Stack, Totals
from jaxscale.parallel.entering import enter
from jaxscale.parallel.layout import Layout, join
from jaxscale.parallel.one_f_one_b import one_f_one_b
from jaxscale.parallel.pipeline import gpipe, own_micros, split_micros
from jaxscale.parallel.stacked import ops_of, own_tokens, wrapped


class OwnGrads(NamedTuple):
  """A loss that has micro-batches and gradients of its own, for `make_train_step`.

  Attributes:
    grads: (what to differentiate by, what stands beside it, model state, this
      device's batch, micro-batches) -> (sums of gradients, model state, totals).
  """

  grads: Any


def gpipe_grads(stack: Stack, layout: Layout, *, remat: str = "none") -> OwnGrads:
  """The gradients of a step by GPipe.

  Args:
    stack: the model.
    layout: whose rules split the first dim of the layers along `stage`.
    remat: what a layer keeps when a stage's layers are computed again.
  """

  def grads(shards, beside, model_state, batch, micro_batches):
    def loss(shards):
      totals = run(
        stack, layout, join(shards, beside), batch,
        micro_batches=micro_batches, remat=remat,
      )  # fmt: skip
      return totals["loss"], totals

    found, totals = jax.grad(loss, has_aux=True)(shards)
    return found, model_state, totals

  return OwnGrads(grads)


def piped_totals(stack: Stack, layout: Layout) -> Any:
  """The totals of an eval step (`step.EvalFn`) of a pipeline."""
  stages = layout.mesh.shape["stage"]

  def eval_fn(params, model_state, batch):
    del model_state
    rows = len(jax.tree.leaves(batch)[0])
    micros = stages if rows % stages == 0 else 1
    return run(stack, layout, params, batch, micro_batches=micros, remat="none")

  return eval_fn


def run(
  stack: Stack, layout: Layout, params: Any, batch: Any, *, micro_batches: int,
  remat: str,
) -> Totals:  # fmt: skip
  """The totals of a device's rows, inside `shard_map` over the mesh."""
  ops, entries = ops_of(layout), layout.entries
  micros = split_micros(own_tokens(batch, layout), micro_batches)
  # Varying, so that gradients of the table cross the stages, not of all activations.
  embed = vary(enter(params["embed"], entries["embed"]), ("stage",))
  h = lax.map(lambda micro: stack.embed(embed, micro, ops), micros)
  layers = _layers(stack, layout, remat)
  h = gpipe(layers, params["layers"], h, skip=_skips(layout))
  # The head takes all of a stage's rows at once.
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (h, own_micros(micros)))
  head = enter(params["head"], entries["head"])
  return stack.finish(head, flat[0], flat[1], ops)


def one_f_one_b_grads(stack: Stack, layout: Layout, *, remat: str = "none") -> OwnGrads:
  """The gradients of a step by 1F1B.

  Args:
    stack: the model.
    layout: whose rules split the first dim of the layers along `stage`.
    remat: what a layer keeps in the backward pass of its stage.
  """
  ops, entries = ops_of(layout), layout.entries

  def grads(shards, beside, model_state, batch, micro_batches):
    micros = split_micros(own_tokens(batch, layout), micro_batches)

    def entered(part, params):
      return enter(join(params[part], beside[part]), entries[part])

    def embed(params, micro):
      return stack.embed(entered("embed", params), micro, ops)

    def finish(params, h, micro):
      return stack.finish(entered("head", params), h, micro, ops)

    run_layers = _layers(stack, layout, remat)
    found, totals = one_f_one_b(
      embed,
      lambda layers, h: run_layers(join(layers, beside["layers"]), h),
      finish,
      shards,
      micros,
      skip=_skips(layout),
    )
    return found, model_state, totals

  return OwnGrads(grads)


def _layers(stack: Stack, layout: Layout, remat: str) -> Any:
  """(a stage's layers, h) -> h."""
  ops = ops_of(layout)
  entries = jax.tree.map(lambda entry: entry.of_layer(), layout.entries["layers"])
  layer = wrapped(lambda w, h: stack.layer(enter(w, entries), h, ops), remat, layout)

  def run_layers(layers, h):
    h, _ = lax.scan(lambda h, w: (layer(w, h), None), h, layers)
    return h

  return run_layers


def _skips(layout: Layout) -> bool:
  """Whether work of no use can stand in a branch: a ring may not."""
  return layout.splits != "ring" or "model" not in layout.mesh.axis_names
