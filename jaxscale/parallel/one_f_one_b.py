"""One micro-batch forwards, one backwards: the gradients of a pipeline, made here.

See `jaxscale.parallel.pipeline` for the schedule and for what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import vary
from jaxscale.collectives.typed import axis_sizes, varying
from jaxscale.parallel.branches import check_branch, choose, zeros_like, zeros_of
from jaxscale.parallel.pipeline import RunLayers, carried_axes, pass_on

Totals = dict[str, jax.Array]  # sums over examples


def one_f_one_b(
  embed: Callable[[Any, Any], jax.Array],
  run_layers: RunLayers,
  finish: Callable[[Any, jax.Array, Any], Totals],
  params: dict[str, Any],
  micros: Any,
  *,
  axis: str = "stage",
  skip: bool = True,
) -> tuple[dict[str, Any], Totals]:
  """Gradients and totals of a pipeline that turns each micro-batch round at once.

  The loss is not differentiated by JAX but here, a stage at a time: a stage keeps
  the inputs of its micro-batches and computes its layers again when the gradient
  comes. Embedding on the first stage, head and loss on the last.

  Args:
    embed: (params, micro-batch) -> h [rows, tokens, width].
    run_layers: (params["layers"], h) -> h, for this device's layers.
    finish: (params, h, micro-batch) -> totals, of which "loss" is differentiated.
    params: whose "layers" are this device's and vary over `axis`. Cast the rest to
      varying over the axes whose sums are to be made elsewhere.
    micros: tree of [M, ...], the same on all stages.
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
  count = len(jax.tree.leaves(micros)[0])
  work, h_type, totals_type = _stage(
    embed, run_layers, finish, params, micros, axis=axis, skip=skip
  )
  # From its forward to its backward, a stage has no more inputs than these.
  slots = min(2 * stages - 1, count)

  def tick(carry, t):
    kept, h_received, g_received, sums = carry
    ahead, back = t - stage, t - 2 * (stages - 1) + stage
    goes, comes = (ahead >= 0) & (ahead < count), (back >= 0) & (back < count)
    h_in = lax.cond(
      goes & work.is_first,
      lambda: work.enter(work.ends, _at(work.micros, ahead)),
      lambda: h_received,
    )
    # After the last micro-batch the slots belong to those that are on their way.
    h_in = jnp.where(goes, h_in, _at(kept, ahead % slots))
    kept = lax.dynamic_update_index_in_dim(kept, h_in, ahead % slots, 0)
    h_out = choose(  # the last stage's own forward is in its backward
      goes & ~work.is_last,
      lambda: run_layers(work.layers, h_in),
      lambda: h_in,
      skip=skip,
    )
    sums, g_out = choose(
      comes,
      lambda: _backward(
        work, sums, _at(kept, back % slots), g_received, _at(work.micros, back)
      ),
      lambda: (sums, g_received),
      skip=skip,
    )
    return (kept, pass_on(h_out, axis, +1), pass_on(g_out, axis, -1), sums), None

  h = zeros_of(h_type)
  kept = vary(jnp.zeros((slots, *h.shape), h.dtype), varying(h))
  zeros = jax.tree.map(zeros_like, (work.layers, work.ends))
  ticks = jnp.arange(count + 2 * (stages - 1))
  start = kept, h, h, (*zeros, zeros_of(totals_type))
  (_, _, _, (by_layers, by_ends, totals)), _ = lax.scan(tick, start, ticks)
  by_ends = {
    name: jax.tree.map(
      lambda g, p: g if axis in varying(p) else lax.psum(g, axis), g, params[name]
    )
    for name, g in by_ends.items()
  }
  return by_ends | {"layers": by_layers}, totals


class _Stage(NamedTuple):
  """What a stage works with.

  Attributes:
    is_first: bool.
    is_last: bool.
    run_layers: (layers, h) -> h.
    layers: this stage's.
    ends: the other parameters, varying over the stages.
    enter: (ends, micro-batch) -> h.
    leave: (ends, h, micro-batch) -> totals.
    micros: tree of [M, ...].
  """

  is_first: jax.Array
  is_last: jax.Array
  run_layers: RunLayers
  layers: Any
  ends: Any
  enter: Callable[[Any, Any], jax.Array]
  leave: Callable[[Any, jax.Array, Any], Totals]
  micros: Any


def _stage(
  embed: Callable, run_layers: RunLayers, finish: Callable, params: Any, micros: Any,
  *, axis: str, skip: bool,
) -> tuple[_Stage, Any, Any]:  # fmt: skip
  """The stage, and what `jax.eval_shape` says of h and of the totals."""
  layers = params["layers"]
  ends = {name: p for name, p in params.items() if name != "layers"}
  # Else the sums over the stages that make gradients would stand in branches.
  ends, micros = vary((ends, micros), (axis,))
  first = jax.tree.map(lambda x: x[0], micros)
  h = jax.eval_shape(lambda: embed(ends | {"layers": layers}, first))
  axes = carried_axes(run_layers, layers, h, axis)

  def enter(ends, micro):
    return vary(embed(ends | {"layers": layers}, micro), axes)

  def leave(ends, h, micro):
    return vary(finish(ends | {"layers": layers}, h, micro), (axis,))

  h_type = jax.eval_shape(enter, ends, first)
  h = zeros_of(h_type)
  check_branch("embed", axis, enter, ends, first)
  check_branch("finish", axis, leave, ends, h, first)
  if skip:
    check_branch("run_layers", axis, run_layers, layers, h)
  stage = lax.axis_index(axis)
  is_last = stage == lax.axis_size(axis) - 1
  work = _Stage(stage == 0, is_last, run_layers, layers, ends, enter, leave, micros)
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
    def loss(ends, h):
      totals = work.leave(ends, h, micro)
      return totals["loss"], totals

    value, pull, new = jax.vjp(loss, work.ends, h, has_aux=True)
    more, by_h = pull(vary(jnp.ones_like(value), varying(value)))
    return _add(by_ends, more), _add(totals, new), by_h

  by_ends, totals, by_h = lax.cond(
    work.is_last, turn, lambda: (by_ends, totals, received)
  )
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
