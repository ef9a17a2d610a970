"""Pipeline parallelism over stages of layers: GPipe and 1F1B.

Layers stacked [L, ...] are sharded on their first dim over a mesh axis, so that a stage
has L/S consecutive layers. The batch is cut into M micro-batches that pass through the
stages one after another. A stage sends its output to the next stage by a permute. The
functions work on one device's parts, inside a fully manual
`jax.shard_map(check_vma=True)`.

    gpipe        (arXiv:1811.06965) all forward passes; autodiff adds all backward
                 passes. Stores the inputs of all M micro-batches.
    one_f_one_b  (PipeDream-flush, arXiv:2006.15704; arXiv:2104.04473, section 2.2)
                 the backward pass of a micro-batch starts as soon as possible; computes
                 the gradients itself. Stores the inputs of at most 2S-1 micro-batches.

All devices run the same program, in ticks with a permute at the end of each. In tick t
stage s computes

    forward     micro-batch t - s
    backward    micro-batch t - 2(S-1) + s     (`one_f_one_b`)

so that 1F1B takes M+2(S-1) ticks. A stage stores an input from its forward to its
backward pass, 2(S-1-s)+1 ticks. This is nearly twice the S-s of the paper, whose stages
are not synchronized by ticks. A stage without work in a tick skips it by a branch; see
`bubble` for the time that this saves.

Only some devices then run the collectives inside the branch. This works if all devices of
a collective's group take the same branch, as for an all-reduce over `model`. It fails for
collectives along the stages, where a part of the group never joins, and for permutes
along any axis: the instruction lists all pairs of the mesh, and XLA on CPU waits for
every device in it. `_check_branch` raises an error before the program can hang.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxscale.cluster.jax_internals import varying_axes
from jaxscale.collectives import vary
from jaxscale.collectives.typed import axes_of, in_mesh_order, jaxprs_in, varying
from jaxscale.errors import ConfigError

# (this stage's layers, h, *the micro-batch's context) -> h
RunLayers = Callable[..., jax.Array]
Totals = dict[str, jax.Array]  # sums over examples

_COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all")


def bubble(stages: int, num_microbatches: int) -> float:
  """Return the pipeline bubble: the share of a step's time in which a stage is idle.

  For GPipe it is (S-1)/(M+S-1): a stage works in M of M+S-1 ticks, both forward and
  backward (arXiv:1811.06965, section 2.3). 1F1B has the same bubble (arXiv:2104.04473,
  section 2.2, which divides by the time of work: (S-1)/M). It also holds for this
  implementation and any M: in M+S-1 ticks some stage runs a forward pass and in M+S-1
  some stage runs a backward pass, and a tick takes as long as its longest work. Without
  branches, as ring attention needs them, every tick of 1F1B runs both, so that a stage works
  in M of M+2(S-1) ticks. Embedding and head, which run on one stage each, are not counted.

  Args:
    stages: number of stages S.
    num_microbatches: number of micro-batches M per device.

  Example:
    >>> bubble(4, 12)
    0.2
  """
  return (stages - 1) / (num_microbatches + stages - 1)


def split_microbatches(batch: Any, num_microbatches: int) -> Any:
  """Split a device's rows [rows, ...] into micro-batches [M, rows/M, ...]."""
  return jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)


def gpipe(
  run_layers: RunLayers,
  layers: Any,
  microbatches: jax.Array,
  context: tuple[jax.Array, ...] = (),
  *,
  axis: str = "stage",
  skip: bool = True,
) -> jax.Array:
  """Return the outputs of the last layer by GPipe, divided among the stages.

  A stage stores only its inputs and recomputes its layers in the backward pass, as in the
  paper (section 2.3).

  With `stage_microbatches` the head and the loss are divided, too: each stage processes
  M/S of the micro-batches, and a sum over `axis` gives the totals. If S does not divide
  M, all stages get all outputs, typed invariant over `axis`, and process them all;
  differentiation counts them once. Gradients are correct for `microbatches` and for
  parameters that are invariant over `axis`.

  Args:
    run_layers: (layers, h, *context) -> h, for this device's layers, with the same shape,
      dtype and varying axes of h.
    layers: this device's layers; every leaf varies over `axis`.
    microbatches: inputs of the first layer, [M, rows, tokens, width]; the same on all
      stages, but only the first stage uses them.
    context: what layers know of the rows of each micro-batch, arrays [M, ...] without
      gradients, the same on all stages.
    axis: mesh axis of the stages.
    skip: skip ticks without work by a branch. This saves no time, but energy and the
      gathering of parameters. Use False if the layers permute, as ring attention does.
      Idle stages then run on the first micro-batch, and their results are discarded.

  Returns:
    Outputs of the micro-batches of `stage_microbatches`, [M/S, rows, tokens, width], or of
    all micro-batches if S does not divide M.

  Raises:
    ConfigError: `skip` is True and the layers permute.

  Example:
    >>> h = gpipe(run, params["layers"], embedded)         # doctest: +SKIP
    >>> totals = finish(h, stage_microbatches(batch))              # doctest: +SKIP
  """
  stages, stage = lax.axis_size(axis), lax.axis_index(axis)
  count = len(microbatches)
  context = vary(context, (axis,))
  first = [x[0] for x in context]
  axes = _carried_axes(run_layers, layers, microbatches[0], axis, first)
  microbatches = vary(microbatches, axes)
  if skip:
    _check_branch("run_layers", axis, run_layers, layers, microbatches[0], *first)

  def work(is_work: jax.Array, layers: Any, h: jax.Array, *context: jax.Array):
    if skip:
      return lax.cond(is_work, run_layers, lambda _, h, *__: _zeros(h), layers, h, *context)
    # `stop_gradient` does not change values. It prevents gradients, even NaN, from work
    # whose results are discarded.
    layers = jax.tree.map(lambda w: jnp.where(is_work, w, lax.stop_gradient(w)), layers)
    h = jnp.where(is_work, h, lax.stop_gradient(microbatches[0]))
    h = run_layers(layers, h, *context)
    return jnp.where(is_work, h, _zeros(h))

  work = jax.checkpoint(work, prevent_cse=False)

  def tick(received: Any, now: Any):
    t, fresh = now
    is_work = (stage <= t) & (t < stage + count)
    h = jnp.where(stage == 0, fresh, received)
    h = work(is_work, layers, h, *_at(context, t - stage))
    return _pass_on(h, axis, +1), h

  # The scan runs over the inputs instead of indexing them, because the gradient of an
  # index has the size of all inputs in every tick.
  fill = vary(jnp.zeros((stages - 1, *microbatches.shape[1:]), microbatches.dtype), axes)
  ticks = jnp.arange(count + stages - 1), jnp.concatenate([microbatches, fill])
  _, out = lax.scan(tick, _zeros(microbatches[0]), ticks)
  out = jnp.where(stage == stages - 1, out[stages - 1 :], 0)
  if count % stages:
    return lax.psum(out, axis)
  return lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True)


def stage_microbatches(microbatches: Any, *, axis: str = "stage") -> Any:
  """Return the micro-batches whose outputs this stage gets from `gpipe`.

  Args:
    microbatches: a tree of arrays [M, ...], the same on all stages.
    axis: mesh axis of the stages.

  Returns:
    A tree of arrays [M/S, ...]; unchanged if S does not divide M.
  """
  stages = lax.axis_size(axis)

  def own(x: jax.Array):
    if len(x) % stages:
      return x
    size = len(x) // stages
    return lax.dynamic_slice_in_dim(vary(x, (axis,)), lax.axis_index(axis) * size, size)

  return jax.tree.map(own, microbatches)


def _carried_axes(
  run_layers: RunLayers, layers: Any, h: Any, axis: str, context: Any
) -> tuple[str, ...]:
  """Return the axes over which activations between layers vary."""
  axes = in_mesh_order((axis, *_type_axes(h)))

  def run():
    return run_layers(layers, vary(jnp.zeros(h.shape, h.dtype), axes), *context)

  return in_mesh_order((*axes, *_type_axes(jax.eval_shape(run))))


def _pass_on(h: jax.Array, axis: str, by: int) -> jax.Array:
  """Send h to the next stage, or to the previous one; a stage without a sender gets zeros."""
  stages = lax.axis_size(axis)
  pairs = [(s, s + by) for s in range(stages) if 0 <= s + by < stages]
  return lax.ppermute(h, axis, pairs) if pairs else h


def one_f_one_b(
  embed: Callable[[Any, Any], jax.Array],
  run_layers: RunLayers,
  finish: Callable[[Any, jax.Array, Any], Totals],
  params: dict[str, Any],
  microbatches: Any,
  context: tuple[jax.Array, ...] = (),
  *,
  axis: str = "stage",
  skip: bool = True,
) -> tuple[dict[str, Any], Totals]:
  """Return gradients and totals by 1F1B: backward passes start as soon as possible.

  This function differentiates the loss itself, stage by stage: a stage stores the inputs
  of its micro-batches and recomputes its layers when the gradient arrives. The embedding
  runs on the first stage, head and loss on the last.

  Args:
    embed: (params, micro-batch) -> h [rows, tokens, width].
    run_layers: (params["layers"], h, *context) -> h, for this device's layers.
    finish: (params, h, micro-batch) -> totals, whose "loss" is differentiated.
    params: parameters; "layers" are this device's and vary over `axis`. Cast the other
      parameters to varying over axes whose sums are computed elsewhere.
    microbatches: a tree of arrays [M, ...], the same on all stages.
    context: what layers know of the rows of each micro-batch, as in `gpipe`.
    axis: mesh axis of the stages. `embed` and `finish` may not communicate along it.
    skip: skip idle forward and backward passes by branches. Use False if the layers
      permute, as ring attention does; see `bubble` for the cost.

  Returns:
    grads: gradients of the sum of the losses, with the structure and varying axes of
      `params`. For parameters that are invariant over `axis` they are summed over it, as
      by `jax.grad`.
    totals: sums over the micro-batches on the last stage and zeros on the others; sum
      them over `axis`.

  Raises:
    ConfigError: work inside a branch permutes or communicates along `axis`.
  """
  stages, stage = lax.axis_size(axis), lax.axis_index(axis)
  count = len(jax.tree.leaves(microbatches)[0])
  work, *types = _stage(embed, run_layers, finish, params, microbatches, context, axis, skip)
  cond: Callable[..., Any] = lax.cond if skip else _where
  # A stage stores at most this many inputs between forward and backward passes.
  slots = min(2 * stages - 1, count)

  def tick(carry: Any, t: jax.Array):
    kept, h_received, g_received, sums = carry
    ahead, back = t - stage, t - 2 * (stages - 1) + stage
    goes, comes = (ahead >= 0) & (ahead < count), (back >= 0) & (back < count)

    def embedded():
      return work.enter(work.ends, _at(work.microbatches, ahead))

    def backward():
      h, micro = _at(kept, back % slots), _at(work.microbatches, back)
      return _backward(work, sums, h, g_received, micro, _at(work.context, back))

    h_in = lax.cond(goes & work.is_first, embedded, lambda: h_received)
    # After the last micro-batch, slots still hold inputs that wait for their backward pass.
    h_in = jnp.where(goes, h_in, _at(kept, ahead % slots))
    kept = lax.dynamic_update_index_in_dim(kept, h_in, ahead % slots, 0)
    works = goes & ~work.is_last  # the last stage's forward is part of its backward
    here = _at(work.context, ahead)
    h_out = cond(works, lambda: run_layers(work.layers, h_in, *here), lambda: h_in)
    sums, g_out = cond(comes, backward, lambda: (sums, g_received))
    return (kept, _pass_on(h_out, axis, +1), _pass_on(g_out, axis, -1), sums), None

  h, totals = map(_zeros, types)
  kept = vary(jnp.zeros((slots, *h.shape), h.dtype), varying(h))
  ticks = jnp.arange(count + 2 * (stages - 1))
  start = kept, h, h, (*_zeros((work.layers, work.ends)), totals)
  (_, _, _, (by_layers, by_ends, totals)), _ = lax.scan(tick, start, ticks)

  def whole(g: jax.Array, p: jax.Array):
    return g if axis in varying(p) else lax.psum(g, axis)

  by_ends = jax.tree.map(whole, by_ends, {name: params[name] for name in by_ends})
  return by_ends | {"layers": by_layers}, totals


class _Stage(NamedTuple):
  """Parameters, functions and micro-batches of a stage.

  Attributes:
    is_first: whether this is the first stage, bool [].
    is_last: whether this is the last stage, bool [].
    run_layers: (layers, h, *context) -> h.
    layers: layers of this stage.
    ends: parameters outside the layers, typed as varying over the stages.
    enter: (ends, micro-batch) -> h.
    leave: (ends, h, micro-batch) -> totals.
    microbatches: a tree of arrays [M, ...].
    context: arrays [M, ...].
  """

  is_first: jax.Array
  is_last: jax.Array
  run_layers: RunLayers
  layers: Any
  ends: Any
  enter: Callable[[Any, Any], jax.Array]
  leave: Callable[[Any, jax.Array, Any], Totals]
  microbatches: Any
  context: tuple[jax.Array, ...]


def _stage(
  embed: Callable[[Any, Any], jax.Array],
  run_layers: RunLayers,
  finish: Callable[[Any, jax.Array, Any], Totals],
  params: dict[str, Any],
  microbatches: Any,
  context: tuple[jax.Array, ...],
  axis: str,
  skip: bool,
) -> Any:
  """Return the stage and the abstract values of h and of the totals."""
  layers = params["layers"]
  ends = {name: p for name, p in params.items() if name != "layers"}
  # Without this cast the gradients' sums over stages would be inside branches.
  ends, microbatches, context = vary((ends, microbatches, context), (axis,))
  first, known = jax.tree.map(lambda x: x[0], (microbatches, context))
  h = jax.eval_shape(lambda: embed(ends | {"layers": layers}, first))
  axes = _carried_axes(run_layers, layers, h, axis, known)

  def enter(ends: Any, micro: Any):
    return vary(embed(ends | {"layers": layers}, micro), axes)

  def leave(ends: Any, h: jax.Array, micro: Any):
    return vary(finish(ends | {"layers": layers}, h, micro), (axis,))

  h_type = jax.eval_shape(enter, ends, first)
  h = _zeros(h_type)
  _check_branch("embed", axis, enter, ends, first)
  _check_branch("finish", axis, leave, ends, h, first)
  if skip:
    _check_branch("run_layers", axis, run_layers, layers, h, *known)
  stage = lax.axis_index(axis)
  parts = run_layers, layers, ends, enter, leave, microbatches, context
  work = _Stage(stage == 0, stage == lax.axis_size(axis) - 1, *parts)
  return work, h_type, jax.eval_shape(leave, ends, h, first)


def _backward(
  work: _Stage, sums: Any, h_in: jax.Array, received: jax.Array, micro: Any, context: Any
) -> tuple[Any, jax.Array]:
  """Recompute a micro-batch on the stage and backpropagate through it.

  Args:
    work: the stage.
    sums: gradients for the layers, gradients for the other parameters, and totals.
    h_in: input of the layers.
    received: gradient for the layers' output; the last stage computes its own.
    micro: the micro-batch.
    context: the micro-batch's context.

  Returns:
    sums: sums with this micro-batch added.
    by_h: gradient for `h_in`.
  """
  by_layers, by_ends, totals = sums
  h, pull = jax.vjp(lambda *args: work.run_layers(*args, *context), work.layers, h_in)

  def turn():
    def loss(ends: Any, h: jax.Array):
      totals = work.leave(ends, h, micro)
      return totals["loss"], totals

    value, pull, new = jax.vjp(loss, work.ends, h, has_aux=True)
    more, by_h = pull(vary(jnp.ones_like(value), varying(value)))
    return _add(by_ends, more), _add(totals, new), by_h

  given = by_ends, totals, received
  by_ends, totals, by_h = lax.cond(work.is_last, turn, lambda: given)
  more, by_h = pull(by_h)

  def into_embedding():
    _, pull = jax.vjp(lambda ends: work.enter(ends, micro), work.ends)
    return _add(by_ends, *pull(by_h))

  by_ends = lax.cond(work.is_first, into_embedding, lambda: by_ends)
  return (_add(by_layers, more), by_ends, totals), by_h


def _at(tree: Any, i: jax.Array) -> Any:
  """Return row i of every leaf; an arbitrary row if i is out of range."""
  return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def _add(a: Any, b: Any) -> Any:
  return jax.tree.map(jnp.add, a, b)


def _type_axes(x: Any) -> tuple[str, ...]:
  """Return the axes over which an array or an abstract array varies."""
  if not isinstance(x, jax.ShapeDtypeStruct):
    return varying(x)
  return in_mesh_order(varying_axes(x))


def _zeros(tree: Any) -> Any:
  """Return zeros with the shapes, dtypes and varying axes of a tree."""
  return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), _type_axes(x)), tree)


def _where(taken: jax.Array, work: Callable[[], Any], rest: Callable[[], Any]) -> Any:
  """Return `work()` if `taken`, else `rest()`, but run both, unlike `lax.cond`.

  Use it for work with collectives, in which every device must take part.
  """
  return jax.tree.map(lambda a, b: jnp.where(taken, a, b), work(), rest())


def _check_branch(name: str, axis: str, work: Callable[..., Any], *args: Any) -> None:
  """Raise if work would hang in a branch that some stages do not take.

  Only the forward computation is checked. The caller is responsible for collectives in
  custom derivatives.

  Args:
    name: name of the work in the error.
    axis: mesh axis along which some devices take the branch and others do not.
    work: args -> tree.
    args: trees of arrays or abstract arrays.

  Raises:
    ConfigError: the work permutes, or has a collective along `axis`.
  """
  for eqn in _equations(jax.make_jaxpr(work)(*args).jaxpr):
    kind, axes = eqn.primitive.name, axes_of(eqn)
    if kind == "ppermute":
      problem = "but idle stages would not take part; give skip=False, or attention without a ring"
      raise ConfigError(f"{name} permutes along {axes[0]!r}, {problem}")
    if kind.startswith(_COLLECTIVES) and axis in axes:
      problem = "but other stages would not take part; do not communicate along that axis"
      raise ConfigError(f"{name} has a collective ({kind}) along {axis!r}, {problem}")


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
  """Yield the equations of a jaxpr and of all jaxprs inside it."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jaxprs_in(eqn):
      yield from _equations(inner)
