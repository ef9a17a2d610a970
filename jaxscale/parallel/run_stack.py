"""Loss and gradients of a model of stacked layers (`models.Stack`) under a layout.

Each layer's parameters are gathered (`fsdp_gather`) in the body of the scan, inside the
part that remat recomputes, so that a device never holds more than one or two full layers.
`models.remat.REMAT` has the policies for the values that the backward pass stores. The
schedules for layers split over pipeline stages are in `pipeline`.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from jaxscale.collectives import vary
from jaxscale.errors import ConfigError
from jaxscale.mesh import on_cpu
from jaxscale.models import float8
from jaxscale.models.attention import attention
from jaxscale.models.remat import Layer, with_remat
from jaxscale.models.stack import PACKING, Ops, Stack, Totals, for_rows, packing_of, with_positions
from jaxscale.parallel import sequence
from jaxscale.parallel.fsdp_gather import gather_params, save_all_but_gathered
from jaxscale.parallel.pipeline import gpipe, one_f_one_b, split_microbatches, stage_microbatches
from jaxscale.parallel.placement import pair_shards
from jaxscale.parallel.ring import ring_attention
from jaxscale.parallel.specs import Layout
from jaxscale.parallel.table_lookup import SplitTable
from jaxscale.parallel.tensor import tensor_ops

# Layers that are written out by default. On GPUs each one adds half a second to compilation.
_FEW_LAYERS, _MANY_LAYERS = 6, 32  # on CPUs, on GPUs and TPUs
Unroll = int | Literal["all"] | None
_BY_TOKEN = ("tokens", "targets", *PACKING)  # arrays of a batch, [rows, tokens]
_SPLIT = {"model", "stage"}  # axes that split layers, or the list of layers


class PipelineGrads(NamedTuple):
  """Loss for `make_train_step` that computes its own micro-batches and gradients.

  Attributes:
    grads: (shards, full parameters, model state, this device's batch, number of
      micro-batches) -> (sums of gradients, model state, totals). Shards and full
      parameters are those of `placement.shards_and_full`.
  """

  grads: Any


def stack_loss(stack: Stack, layout: Layout, *, remat: str = "none", unroll: Unroll = None) -> Any:
  """Return the loss for a train step (`step.LossFn`).

  Args:
    stack: the model.
    layout: the layout of the parameters.
    remat: rematerialisation policy, a name in `models.remat.REMAT`. Gathered parameters are never
      stored, but gathered again.
    unroll: number of layers that an iteration of the loop over layers computes, or "all";
      None means the choice of `_unrolled`.
  """
  run_layers = _layers(stack, layout, remat, unroll)

  def loss_fn(params: Any, model_state: Any, batch: Any, keys: jax.Array):  # nothing is random
    params = float8.with_maxima(params, model_state)
    totals = _run(stack, layout, run_layers, params, batch)
    return totals["loss"], (model_state, totals)

  return loss_fn


def gpipe_grads(
  stack: Stack, layout: Layout, *, remat: str = "none", unroll: Unroll = None
) -> PipelineGrads:
  """Return the gradients of a step by GPipe; the arguments are those of `stack_loss`."""
  run_layers = _layers(stack, layout, remat, unroll)

  def grads(shards: Any, full: Any, model_state: Any, batch: Any, num_microbatches: int):
    def loss(shards: Any):
      params = pair_shards(shards, full)
      totals = _run(stack, layout, run_layers, params, batch, num_microbatches)
      return totals["loss"], totals

    found, totals = jax.grad(loss, has_aux=True)(shards)
    return found, model_state, totals

  return PipelineGrads(grads)


def one_f_one_b_grads(
  stack: Stack, layout: Layout, *, remat: str = "none", unroll: Unroll = None
) -> PipelineGrads:
  """Return the gradients of a step by 1F1B; the arguments are those of `stack_loss`."""
  ops, run_layers = layout_ops(layout), _layers(stack, layout, remat, unroll)

  def grads(shards: Any, full: Any, model_state: Any, batch: Any, num_microbatches: int):
    def gathered(params: Any, part: str):
      return gather_params(pair_shards(params[part], full[part]), layout.gathers[part])

    def finish(params: Any, h: jax.Array, micro: Any):
      return stack.finish(stack.head_of(functools.partial(gathered, params)), h, micro, ops)

    microbatches = split_microbatches(local_tokens(batch, layout), num_microbatches)
    found, totals = one_f_one_b(
      lambda params, micro: stack.embed(gathered(params, "embed"), micro, ops),
      lambda layers, *of_rows: run_layers(pair_shards(layers, full["layers"]), *of_rows),
      finish,
      shards,
      microbatches,
      packing_of(microbatches),
      skip=_can_skip(layout),
    )
    return found, model_state, totals

  return PipelineGrads(grads)


def stack_totals(stack: Stack, layout: Layout) -> Any:
  """Return the totals for an eval step (`step.EvalFn`), with or without a pipeline."""
  stages = layout.mesh.shape.get("stage", 1)
  run_layers = _layers(stack, layout, "none", None if on_cpu(layout.mesh) else 1)

  def eval_fn(params: Any, model_state: Any, batch: Any):
    num_microbatches = stages if len(jax.tree.leaves(batch)[0]) % stages == 0 else 1
    params = float8.with_maxima(params, model_state)
    return _run(stack, layout, run_layers, params, batch, num_microbatches)

  return eval_fn


def _run(
  stack: Stack, layout: Layout, run_layers: Any, params: Any, batch: Any, num_microbatches: int = 1
) -> Totals:
  """Compute the totals of a device's rows, inside `shard_map` over the mesh."""
  ops, gathers = layout_ops(layout), layout.gathers
  batch = local_tokens(batch, layout)

  def gathered(part: str) -> Any:  # A tied table is gathered twice, and not kept in between.
    return gather_params(params[part], gathers[part])

  if "stage" not in layout.mesh.axis_names:
    h = stack.embed(_embedding(stack, layout, params), batch, ops)
    h = run_layers(params["layers"], h, *packing_of(batch))
    return stack.finish(stack.head_of(gathered), h, batch, ops)
  microbatches = split_microbatches(batch, num_microbatches)
  # The cast to varying makes gradients of the table cross the stages, instead of those of
  # all activations.
  embed = vary(gathered("embed"), ("stage",))
  h = lax.map(lambda micro: stack.embed(embed, micro, ops), microbatches)
  h = gpipe(run_layers, params["layers"], h, packing_of(microbatches), skip=_can_skip(layout))
  # The head processes all rows of a stage at once.
  parts = h, stage_microbatches(microbatches)
  h, rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
  return stack.finish(stack.head_of(gathered), h, rows, ops)


def _embedding(stack: Stack, layout: Layout, params: Any) -> Any:
  """Return the gathered parameters of the embedding; a table's rows are gathered by lookups."""
  embed, gathers = params["embed"], layout.gathers["embed"]
  if not stack.has_lookup:
    return gather_params(embed, gathers)
  rest = {name: x for name, x in embed.items() if name != "table"}
  table = SplitTable(embed["table"], gathers["table"])
  return gather_params(rest, {name: gathers[name] for name in rest}) | {"table": table}


def _layers(stack: Stack, layout: Layout, remat: str, unroll: Unroll) -> Any:
  """Return a function (a device's layers, h, *packing of the rows) -> h."""
  ops = layout_ops(layout)
  gathers = jax.tree.map(lambda gather: gather.for_layer(), layout.gathers["layers"])

  def layer(w: Any, h: jax.Array, *packing: jax.Array) -> jax.Array:
    return stack.layer(gather_params(w, gathers), h, for_rows(ops, *packing))

  def run_layers(layers: Any, h: jax.Array, *packing: jax.Array):
    count = len(jax.tree.leaves(layers)[0])
    unrolled = _unrolled(layout, remat, count, unroll)
    splits_grads = layout.shard in ("zero2", "fsdp")
    run: Layer = with_remat(layer, remat, in_loop=unrolled < count, gathers=splits_grads)
    if remat == "none" and splits_grads:
      run = jax.checkpoint(layer, policy=save_all_but_gathered, prevent_cse=unrolled == count)
    return lax.scan(lambda h, w: (run(w, h, *packing), None), h, layers, unroll=unrolled)[0]

  return run_layers


def _unrolled(layout: Layout, remat: str, layers: int, unroll: Unroll) -> int:
  """Return the number of layers that an iteration of the loop over layers computes.

  A loop also clears and copies all values stored for the backward pass: on CPU a sixth of
  a step of configs/text.py, on an H100 4 to 29 % of a step by its compiled program. Several
  layers in an iteration only add copies. Unrolled layers take longer to compile, so they are
  written out by default only where they are few and much is stored.
  """
  if unroll is not None:
    return layers if unroll == "all" else min(unroll, layers)
  if on_cpu(layout.mesh):
    is_kept, few = remat == "none" and layout.shard == "none", _FEW_LAYERS
  else:
    is_kept, few = remat in ("none", "dots_attention", "dots"), _MANY_LAYERS
  is_whole = set(layout.mesh.axis_names).isdisjoint(_SPLIT)
  return layers if is_kept and is_whole and layers <= few else 1


def _can_skip(layout: Layout) -> bool:
  """Return whether idle work can be skipped by a branch, which ring attention forbids."""
  return layout.splits != "ring" or "model" not in layout.mesh.axis_names


def layout_ops(layout: Layout) -> Ops:
  """Return the operations that a model uses under a layout."""
  ops = _ops(layout)
  return ops._replace(classify=functools.partial(ops.classify, chunk=layout.loss_chunk))


def _ops(layout: Layout) -> Ops:
  # The program may be compiled for devices that this machine lacks.
  attend = functools.partial(attention, device=layout.mesh.devices.flat[0])
  if "model" not in layout.mesh.axis_names:
    return Ops(attend=attend)
  if layout.splits in ("ring", "all_to_all"):
    by_heads = functools.partial(sequence.all_to_all_attention, axis="model", attend=attend)
    by_ring = functools.partial(ring_attention, axis="model")
    by = by_ring if layout.splits == "ring" else by_heads
    return Ops(attend=by, positions=lambda n: sequence.token_positions(n, "model", _order(layout)))
  regions = layout.splits == "layers_and_tokens"
  ops = tensor_ops(regions=regions, dtype=layout.dtype, sum_in=layout.sum_in)
  return ops._replace(attend=attend)


def _order(layout: Layout) -> sequence.Order:
  """Return the order of tokens that are split over devices."""
  return "zigzag" if layout.splits == "ring" else "contiguous"


def local_tokens(batch: Any, layout: Layout) -> Any:
  """Return the batch with this device's tokens, if devices split sequences.

  Positions in packed documents are added before, since a document may begin on another device.

  Raises:
    ConfigError: the devices do not divide the tokens of a sequence.
  """
  batch = with_positions(batch)
  if "model" not in layout.token_axes:
    return batch
  size = lax.axis_size("model")
  order = _order(layout)
  pieces = size * (2 if order == "zigzag" else 1)  # equal pieces of a sequence

  def local(x: jax.Array):
    if x.shape[1] % pieces:
      problem = f"cannot be split evenly over the {size} devices of 'model'"
      fix = f"layout.model={layout.splits!r} needs a multiple of {pieces}"
      raise ConfigError(f"tokens={x.shape[1]} {problem}; {fix}")
    return x[:, sequence.token_positions(x.shape[1] // size, "model", order)]

  return {k: local(x) if k in _BY_TOKEN else x for k, x in batch.items()}
