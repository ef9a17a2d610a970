"""Layers split over the stages of a pipeline: GPipe and 1F1B.

Layers stacked [L, ...] are sharded on their first dim over a mesh axis: a stage has
L/S consecutive ones. The batch is cut into M micro-batches that pass through the
stages one behind the other; a stage hands its output to the next by a permute. All
this is inside a fully manual `jax.shard_map(check_vma=True)`, as functions of a
device's own pieces.

    gpipe        (arXiv:1811.06965) all forwards, then, by autodiff, all backwards:
                 to be differentiated. Keeps the inputs of all M micro-batches.
    one_f_one_b  (PipeDream-flush, arXiv:2006.15704; arXiv:2104.04473, section 2.2)
                 a micro-batch backwards as soon as it is through: makes the
                 gradients itself. Keeps the inputs of at most 2S-1.

All devices run one program, in ticks with a permute at the end of each. In tick t
stage s works

    forwards    on micro-batch t - s
    backwards   on micro-batch t - 2(S-1) + s     (`one_f_one_b`)

so that 1F1B takes M+2(S-1) ticks. A stage keeps an input from its forward to its
backward, 2(S-1-s)+1 ticks: nearly twice the S-s of the paper, whose stages need no
common tick. Where a stage has nothing to do, its work is in a branch not taken; see
`bubble` for what that is worth.

Some of the devices run a collective in such a branch. That is well where its groups
are wholly in or wholly out, as those of an all-reduce over `model` are. It is not along
the stages themselves: half of the group never comes. Nor is it for a permute along any
axis: one instruction names all pairs of the mesh, and XLA on CPU waits for every device
in it. `_check_branch` refuses it before the program hangs.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxscale.cluster.jax_internals import varying_axes
from jaxscale.collectives import vary
from jaxscale.collectives.typed import axis_sizes, in_mesh_order, varying
from jaxscale.errors import ConfigError

RunLayers = Callable[[Any, jax.Array], jax.Array]  # (this stage's layers, h) -> h
Totals = dict[str, jax.Array]  # sums over examples

_COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all")


def bubble(
  schedule: Literal["gpipe", "1f1b"], stages: int, num_microbatches: int, *, skip: bool = True
) -> float:
  """The share of a step's time in which a stage is idle.

  Of GPipe (S-1)/(M+S-1): M of the M+S-1 ticks are of use to a stage, forwards and
  backwards (arXiv:1811.06965, section 2.3). 1F1B has the same (arXiv:2104.04473,
  section 2.2, which divides by the time of use: (S-1)/M). So has ours, for all M:
  M+S-1 of its ticks have a forward on some stage, and M+S-1 a backward; a tick takes
  as long as the longest in it, and those without one or the other are short. Without
  branches every tick has both, and of M+2(S-1) ticks M are of use. Embedding and
  head, which stand on one stage each, are not in this.

  Args:
    schedule: "gpipe" or "1f1b".
    stages: S.
    num_microbatches: M, of one device.
    skip: as of `one_f_one_b`; of no effect on GPipe's time, where in every tick
      some stage has work.

  Raises:
    ConfigError: there is no such schedule.

  Example:
    >>> bubble("gpipe", 4, 12), bubble("1f1b", 4, 12, skip=False)
    (0.2, 0.3333333333333333)
  """
  if schedule not in ("gpipe", "1f1b"):
    raise ConfigError(f"schedule={schedule!r}: give 'gpipe' or '1f1b'")
  fill = (stages - 1) * (2 if schedule == "1f1b" and not skip else 1)
  return fill / (num_microbatches + fill)


def split_microbatches(batch: Any, num_microbatches: int) -> Any:
  """A device's rows [rows, ...] as micro-batches [M, rows/M, ...].

  Raises:
    ConfigError: they do not divide.
  """

  def split(x: jax.Array):
    if len(x) % num_microbatches:
      why = f"does not divide the {len(x)} rows of a device, give a divisor"
      raise ConfigError(f"num_microbatches={num_microbatches}: {why}")
    return x.reshape(num_microbatches, -1, *x.shape[1:])

  return jax.tree.map(split, batch)


def gpipe(
  run_layers: RunLayers,
  layers: Any,
  microbatches: jax.Array,
  *,
  axis: str = "stage",
  skip: bool = True,
  remat: bool = True,
) -> jax.Array:
  """Return the outputs of all stages' layers, shared out over the stages.

  With `stage_microbatches` the head and the loss are shared out too: each stage works
  on M/S of the micro-batches, and a sum over `axis` makes the totals. Where S does
  not divide M, all stages have all outputs, typed invariant over `axis`, and do the
  same work on them; differentiation counts it once. Results of `microbatches` and of
  parameters that are invariant over `axis` have the right gradients, by the types.

  Args:
    run_layers: (layers, h) -> h, for this device's layers; shape, dtype and type of
      h stay.
    layers: this device's, of which every leaf varies over `axis`.
    microbatches: [M, rows, tokens, width], inputs of the first layer; the same on all
      stages, and only the first one's is used.
    axis: mesh axis of the stages.
    skip: leave out the ticks without work by a branch. It saves no time, but energy
      and what the layers gather. False where they permute, as a ring does; then they
      run on the first micro-batch, and what comes of it reaches neither output nor
      gradient.
    remat: keep a stage's inputs alone and compute its layers again in the backward
      pass, as the paper does (section 2.3). False: keep what `run_layers` keeps.

  Returns:
    [M/S, rows, tokens, width], those of `stage_microbatches`; [M, ...] where S does
    not divide M.

  Raises:
    ConfigError: no such axis; or `skip`, and the layers permute.

  Example:
    >>> h = gpipe(run, params["layers"], embedded)         # doctest: +SKIP
    >>> totals = finish(h, stage_microbatches(batch))              # doctest: +SKIP
  """
  stages, stage = axis_sizes((axis,))[axis], lax.axis_index(axis)
  count = len(microbatches)
  axes = _carried_axes(run_layers, layers, microbatches[0], axis)
  microbatches = vary(microbatches, axes)
  if skip:
    _check_branch("run_layers", axis, run_layers, layers, microbatches[0])

  def work(is_work: jax.Array, layers: Any, h: jax.Array):
    if skip:
      return lax.cond(is_work, run_layers, lambda _, h: _zeros(h), layers, h)
    # The value is the same; of what is computed without use no gradient is left,
    # not even NaN.
    layers = jax.tree.map(lambda w: jnp.where(is_work, w, lax.stop_gradient(w)), layers)
    h = run_layers(layers, jnp.where(is_work, h, lax.stop_gradient(microbatches[0])))
    return jnp.where(is_work, h, _zeros(h))

  if remat:
    work = jax.checkpoint(work, prevent_cse=False)

  def tick(received: Any, now: Any):
    t, fresh = now
    is_work = (stage <= t) & (t < stage + count)
    h = work(is_work, layers, jnp.where(stage == 0, fresh, received))
    return _pass_on(h, axis, +1), h

  # The inputs are scanned over, not indexed: the gradient of an index is as large
  # as all of them, each tick.
  fill = vary(jnp.zeros((stages - 1, *microbatches.shape[1:]), microbatches.dtype), axes)
  ticks = jnp.arange(count + stages - 1), jnp.concatenate([microbatches, fill])
  _, out = lax.scan(tick, _zeros(microbatches[0]), ticks)
  out = jnp.where(stage == stages - 1, out[stages - 1 :], 0)
  if count % stages:
    return lax.psum(out, axis)
  return lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True)


def stage_microbatches(microbatches: Any, *, axis: str = "stage") -> Any:
  """Those micro-batches whose outputs `gpipe` hands to this stage.

  Args:
    microbatches: tree of [M, ...], the same on all stages.
    axis: mesh axis of the stages.

  Returns:
    tree of [M/S, ...]; as given where S does not divide M.
  """
  stages = axis_sizes((axis,))[axis]

  def own(x: jax.Array):
    if len(x) % stages:
      return x
    size = len(x) // stages
    start = lax.axis_index(axis) * size
    return lax.dynamic_slice_in_dim(vary(x, (axis,)), start, size)

  return jax.tree.map(own, microbatches)


def _carried_axes(run_layers: RunLayers, layers: Any, h: Any, axis: str) -> tuple[str, ...]:
  """The axes over which the activations between the layers vary."""
  axes = in_mesh_order((axis, *_type_axes(h)))

  def run():
    return run_layers(layers, vary(jnp.zeros(h.shape, h.dtype), axes))

  return in_mesh_order((*axes, *_type_axes(jax.eval_shape(run))))


def _pass_on(h: jax.Array, axis: str, by: int) -> jax.Array:
  """To the next stage, or back; where none sends, zeros arrive."""
  stages = lax.axis_size(axis)
  pairs = [(s, s + by) for s in range(stages) if 0 <= s + by < stages]
  return lax.ppermute(h, axis, pairs) if pairs else h


def one_f_one_b(
  embed: Callable[[Any, Any], jax.Array],
  run_layers: RunLayers,
  finish: Callable[[Any, jax.Array, Any], Totals],
  params: dict[str, Any],
  microbatches: Any,
  *,
  axis: str = "stage",
  skip: bool = True,
) -> tuple[dict[str, Any], Totals]:
  """Gradients and totals by 1F1B: each micro-batch backwards as soon as it can be.

  The loss is not differentiated by JAX but here, a stage at a time: a stage keeps
  the inputs of its micro-batches and computes its layers again when the gradient
  comes. Embedding on the first stage, head and loss on the last.

  Args:
    embed: (params, micro-batch) -> h [rows, tokens, width].
    run_layers: (params["layers"], h) -> h, for this device's layers.
    finish: (params, h, micro-batch) -> totals, of which "loss" is differentiated.
    params: whose "layers" are this device's and vary over `axis`. Cast the rest to
      varying over the axes whose sums are to be made elsewhere.
    microbatches: tree of [M, ...], the same on all stages.
    axis: mesh axis of the stages. `embed` and `finish` may not speak along it.
    skip: leave out forwards and backwards without work by branches. False where the
      layers permute, as a ring does; see `bubble` for what it costs.

  Returns:
    grads: of the sum of the losses, a tree and types as of `params`: of a parameter
      that is invariant over `axis` they are summed over it, as `jax.grad` would.
    totals: sums over the micro-batches on the last stage, zeros on the others: their
      sum over `axis` is that of the pipeline.

  Raises:
    ConfigError: no such axis; or, of what stands in a branch, that it permutes or
      speaks along `axis`.
  """
  stages, stage = axis_sizes((axis,))[axis], lax.axis_index(axis)
  count = len(jax.tree.leaves(microbatches)[0])
  work, *types = _stage(embed, run_layers, finish, params, microbatches, axis, skip)
  cond: Callable[..., Any] = lax.cond if skip else _where
  # From its forward to its backward, a stage has no more inputs than these.
  slots = min(2 * stages - 1, count)

  def tick(carry: Any, t: jax.Array):
    kept, h_received, g_received, sums = carry
    ahead, back = t - stage, t - 2 * (stages - 1) + stage
    goes, comes = (ahead >= 0) & (ahead < count), (back >= 0) & (back < count)

    def embedded():
      return work.enter(work.ends, _at(work.microbatches, ahead))

    def backward():
      h, micro = _at(kept, back % slots), _at(work.microbatches, back)
      return _backward(work, sums, h, g_received, micro)

    h_in = lax.cond(goes & work.is_first, embedded, lambda: h_received)
    # After the last micro-batch the slots belong to those that are on their way.
    h_in = jnp.where(goes, h_in, _at(kept, ahead % slots))
    kept = lax.dynamic_update_index_in_dim(kept, h_in, ahead % slots, 0)
    works = goes & ~work.is_last  # the last stage's own forward is in its backward
    h_out = cond(works, lambda: run_layers(work.layers, h_in), lambda: h_in)
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
    is_first: bool.
    is_last: bool.
    run_layers: (layers, h) -> h.
    layers: this stage's.
    ends: the other parameters, varying over the stages.
    enter: (ends, micro-batch) -> h.
    leave: (ends, h, micro-batch) -> totals.
    microbatches: tree of [M, ...].
  """

  is_first: jax.Array
  is_last: jax.Array
  run_layers: RunLayers
  layers: Any
  ends: Any
  enter: Callable[[Any, Any], jax.Array]
  leave: Callable[[Any, jax.Array, Any], Totals]
  microbatches: Any


def _stage(
  embed: Callable[[Any, Any], jax.Array],
  run_layers: RunLayers,
  finish: Callable[[Any, jax.Array, Any], Totals],
  params: dict[str, Any],
  microbatches: Any,
  axis: str,
  skip: bool,
) -> Any:
  """The stage, and what `jax.eval_shape` says of h and of the totals."""
  layers = params["layers"]
  ends = {name: p for name, p in params.items() if name != "layers"}
  # Else the sums over the stages that make gradients would stand in branches.
  ends, microbatches = vary((ends, microbatches), (axis,))
  first = jax.tree.map(lambda x: x[0], microbatches)
  h = jax.eval_shape(lambda: embed(ends | {"layers": layers}, first))
  axes = _carried_axes(run_layers, layers, h, axis)

  def enter(ends: Any, micro: Any):
    return vary(embed(ends | {"layers": layers}, micro), axes)

  def leave(ends: Any, h: jax.Array, micro: Any):
    return vary(finish(ends | {"layers": layers}, h, micro), (axis,))

  h_type = jax.eval_shape(enter, ends, first)
  h = _zeros(h_type)
  _check_branch("embed", axis, enter, ends, first)
  _check_branch("finish", axis, leave, ends, h, first)
  if skip:
    _check_branch("run_layers", axis, run_layers, layers, h)
  stage = lax.axis_index(axis)
  is_last = stage == lax.axis_size(axis) - 1
  work = _Stage(stage == 0, is_last, run_layers, layers, ends, enter, leave, microbatches)
  return work, h_type, jax.eval_shape(leave, ends, h, first)


def _backward(
  work: _Stage, sums: Any, h_in: jax.Array, received: jax.Array, micro: Any
) -> tuple[Any, jax.Array]:
  """A micro-batch through the stage again, and its gradient back.

  Args:
    work: of the stage.
    sums: gradients by the layers and by the other parameters, totals.
    h_in: what the layers had.
    received: the gradient by what they gave; the last stage makes its own.
    micro: of the batch.

  Returns:
    sums, with this micro-batch's added.
    by_h: the gradient by `h_in`.
  """
  by_layers, by_ends, totals = sums
  h, pull = jax.vjp(work.run_layers, work.layers, h_in)

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
  """Row i of every leaf; any where there is none."""
  return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def _add(a: Any, b: Any) -> Any:
  return jax.tree.map(jnp.add, a, b)


def _type_axes(x: Any) -> tuple[str, ...]:
  """The axes over which an array varies, or one that `jax.eval_shape` describes."""
  if not isinstance(x, jax.ShapeDtypeStruct):
    return varying(x)
  return in_mesh_order(varying_axes(x))


def _zeros(tree: Any) -> Any:
  """Zeros of the same shapes, dtypes and varying axes."""
  return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), _type_axes(x)), tree)


def _where(taken: jax.Array, work: Callable[[], Any], rest: Callable[[], Any]) -> Any:
  """`work()` where `taken`, else `rest()`: as `lax.cond`, but both run.

  For work with collectives, in which every device must take part.
  """
  return jax.tree.map(lambda a, b: jnp.where(taken, a, b), work(), rest())


def _check_branch(name: str, axis: str, work: Callable[..., Any], *args: Any) -> None:
  """Refuse work that may not stand in a branch that some stages do not take.

  The derivatives are not looked at: what is sent backwards by rules of its own is
  the caller's.

  Args:
    name: of the work, for the message.
    axis: mesh axis along which some devices take the branch and others do not.
    work: args -> tree.
    args: trees of arrays or of what `jax.eval_shape` gives.

  Raises:
    ConfigError: it permutes, or has a collective along `axis`.
  """
  for eqn in _equations(jax.make_jaxpr(work)(*args).jaxpr):
    kind = eqn.primitive.name
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    if kind == "ppermute":
      why = "which all stages must take part in; give skip=False, or attention without a ring"
      raise ConfigError(f"{name}: permutes along {axes[0]!r}, {why}")
    if kind.startswith(_COLLECTIVES) and axis in axes:
      why = "where the other stages do not come; leave that axis to the pipeline"
      raise ConfigError(f"{name}: has a collective ({kind}) along {axis!r}, {why}")


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
  """Those of a program and of all programs in it."""

  def is_program(x: Any):
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)

  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
      if is_program(inner):
        yield from _equations(getattr(inner, "jaxpr", inner))
