"""Model state: average running statistics, and check that devices agree on the rest.

Running statistics are averaged over devices and micro-batches. A leaf is a running
statistic if it is a float below a key "batch_stats" (Flax's collection of that name) or
an `nnx.BatchStat`. All other leaves (counts, flags, keys, queues, a teacher's parameters)
keep their dtype, and every device must compute the same value. `check_agrees` checks this
in the traced program. `jax.typeof` is not enough: the result of `lax.all_gather` is equal
on all devices, but typed as varying. A `Queue` is the exception: each device returns its
own rows, and the step gathers them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jaxscale.collectives import joined, same_everywhere, vary
from jaxscale.collectives.typed import axes_of, jaxprs_in, varying
from jaxscale.errors import invalid
from jaxscale.models import float8
from jaxscale.optim.tree_paths import path_name
from jaxscale.training.types import Batch, LossFn, Tree

_AVERAGED = "batch_stats"
_ROWS = "rows of the batch"  # a pseudo-axis, which no collective removes
_AGREEING = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
_DIFFERING = {"axis_index", "ppermute", "all_to_all", "reduce_scatter"}
Axes = frozenset[str]


class Queue(NamedTuple):
  """Model state that keeps the newest rows of all devices and micro-batches.

  A loss or model returns `Queue` with one new row per row of its batch. The step appends
  the rows of the global batch in order and drops the oldest ones. All devices hold the
  whole queue.

  Attributes:
    rows: the rows, oldest first, [length, ...].

  Example:
    >>> queue = Queue(jnp.zeros((4096, 128)))  # from `init`
    >>> new = Queue(jnp.ones((32, 128)))       # from a call with 32 rows
  """

  rows: Any


def _is_queue(node: Any) -> bool:
  return isinstance(node, Queue)


def queues(model_state: Any) -> list[Queue]:
  """Return the queues in a model state."""
  return [x for x in jax.tree.leaves(model_state, is_leaf=_is_queue) if _is_queue(x)]


def map_queues(function: Callable[[Queue, Queue], Queue], model_state: Any, others: Any) -> Any:
  """Apply a function to each queue of a model state and the next of `others`."""
  rest = iter(others)

  def one(node: Any):
    return function(node, next(rest, node)) if _is_queue(node) else node

  return jax.tree.map(one, model_state, is_leaf=_is_queue)


def push(old: Any, new: Any, axes: tuple[str, ...]) -> Any:
  """Return the new model state with whole queues, inside `shard_map`.

  Args:
    old: the model state before the step.
    new: the model state after it, whose queues have this device's rows.
    axes: mesh axes that split the rows.
  """

  def joined(new: Queue, old: Queue):
    rows = lax.all_gather(vary(new.rows, axes), axes, tiled=True)
    return Queue(jnp.concatenate([vary(old.rows, axes), rows])[-len(old.rows) :])

  return map_queues(joined, new, queues(old))


def averaged(model_state: Any) -> Any:
  """Return a tree of bools: True for running statistics, which are averaged.

  Example:
    >>> averaged({"batch_stats": {"mean": jnp.ones(3)}, "count": jnp.ones((), int)})
    {'batch_stats': {'mean': True}, 'count': False}
  """

  nnx = sys.modules.get("flax.nnx")  # if it is not imported, no model uses it

  def is_statistic(node: Any):
    return nnx is not None and isinstance(node, nnx.BatchStat)

  def flags(path: Any, node: Any):
    is_declared = is_statistic(node) or _AVERAGED in path_name(path).split("/")
    return jax.tree.map(lambda x: is_declared and jnp.issubdtype(x.dtype, jnp.inexact), node)

  return jax.tree.map_with_path(flags, model_state, is_leaf=is_statistic)


def map_averaged(function: Callable[..., Any], *states: Any) -> Any:
  """Apply a function to the averaged leaves; keep other leaves of the first tree."""
  return jax.tree.map(lambda f, *x: function(*x) if f else x[0], averaged(states[0]), *states)


def summed(model_state: Any, more: Any) -> Any:
  """Add the averaged leaves of two micro-batches; maxima for FP8 are the larger ones."""
  added = map_averaged(jnp.add, model_state, more)
  if isinstance(added, dict) and float8.STATE in added:
    trees = (state[float8.STATE] for state in (model_state, more))
    added = added | {float8.STATE: jax.tree.map(jnp.maximum, *trees)}
  return added


def agree(
  model_state: Any, axes: tuple[str, ...], *, apart: bool = False, together: bool = False
) -> Any:
  """Make the model state the same on all devices along `axes`, after `check_agrees`.

  Args:
    model_state: the model state of one device.
    axes: mesh axes.
    apart: devices have different parameters, so that all floats are averaged.
    together: average one vector per dtype. Between CPU processes gloo sums arrays one after
      another, and ResNet-50 has 106 of them; XLA for GPUs and TPUs combines them itself.
  """
  named, structure = jax.tree.flatten_with_path(model_state)
  leaves = [x for _, x in named]
  means: dict[tuple[str, ...], dict[int, jax.Array]] = {}  # by the axes along which they vary
  for i, is_mean in enumerate(jax.tree.leaves(averaged(model_state))):
    path, x = named[i]
    over = tuple(axis for axis in varying(x) if axis in axes)
    if is_mean or (apart and jnp.issubdtype(x.dtype, jnp.inexact)):
      means.setdefault(varying(x), {})[i] = x
    elif path_name(path).startswith(f"{float8.STATE}/"):
      leaves[i] = lax.pmax(x, over)
    else:
      leaves[i] = same_everywhere(x, over)
  for varied, xs in means.items():
    mean = partial(lax.pmean, axis_name=tuple(axis for axis in varied if axis in axes))
    for i, x in (joined(mean, xs) if together else jax.tree.map(mean, xs)).items():
      leaves[i] = x
  return structure.unflatten(leaves)


def check_agrees(
  loss_fn: LossFn,
  arguments: tuple[Tree, Tree, Batch, jax.Array],
  num_microbatches: int,
  over: tuple[str, ...],
) -> None:
  """Raise if model state differs between devices or between micro-batches.

  Call it inside `shard_map`, while a step is traced. It adds nothing to the program.

  Args:
    loss_fn: the loss, which returns the new model state.
    arguments: arguments of the loss on one device, with the rows of all micro-batches.
    num_microbatches: number of micro-batches per device.
    over: mesh axes along which devices have different rows.

  Raises:
    ConfigError: a leaf that is not averaged depends on the rows of one device.
  """
  model_state, rows = arguments[1], arguments[2:]
  if jax.tree.all(averaged(model_state)):
    return

  def first_state(params: Tree, model_state: Tree, batch: Batch, keys: jax.Array):
    first = jax.tree.map(lambda x: x[: len(x) // num_microbatches], (batch, keys))
    return loss_fn(params, model_state, *first)[1][0]

  jaxpr = jax.make_jaxpr(first_state)(*arguments).jaxpr
  axes = Axes(over)
  own = [axes | {_ROWS}] * len(jax.tree.leaves(rows))
  inputs = [Axes()] * (len(jaxpr.invars) - len(own)) + own
  remedy = f"or put floats that should be averaged below a key {_AVERAGED!r}"
  flags = jax.tree.leaves(map_queues(lambda x, _: Queue(True), averaged(model_state), repeat(None)))
  leaves = jax.tree.leaves_with_path(model_state)
  for (path, _), is_free, depends in zip(leaves, flags, differences(jaxpr, inputs), strict=True):
    if is_free:
      continue
    name = f"model state {path_name(path)}"
    if depends & axes:
      fix = f"compute it from all rows with jax.lax.all_gather or psum over {over}, {remedy}; "
      fix += "for a queue of rows, use training.Queue"
      raise invalid(name, ..., "differs between devices", fix)
    if num_microbatches > 1 and _ROWS in depends:
      problem = f"depends on the rows, which are computed in {num_microbatches} micro-batches"
      raise invalid(name, ..., problem, f"set accumulate_steps=1, use training.Queue, {remedy}")


def differences(jaxpr: Any, inputs: Sequence[Axes]) -> list[Axes]:
  """Return the axes along which devices have different values, for each output.

  Args:
    jaxpr: jaxpr of a function inside `shard_map`.
    inputs: axes along which each argument differs. Constants of the jaxpr are the same
      on all devices.
  """
  known = dict(zip(jaxpr.invars, inputs, strict=True))

  def read(variable: Any):
    return Axes() if isinstance(variable, Literal) else known.get(variable, Axes())

  for equation in jaxpr.eqns:
    outputs = _of_equation(equation, [read(v) for v in equation.invars])
    known.update(zip(equation.outvars, outputs, strict=True))
  return [read(v) for v in jaxpr.outvars]


def _of_equation(equation: Any, inputs: list[Axes]) -> list[Axes]:
  name, params = equation.primitive.name, equation.params
  every = Axes().union(*inputs)
  axes = Axes(axes_of(equation))
  if name in _AGREEING and params.get("axis_index_groups") is None:
    return [every - axes] * len(equation.outvars)
  if name in _AGREEING | _DIFFERING:
    return [every | axes] * len(equation.outvars)
  if name == "cond":
    each = [differences(b.jaxpr, inputs[1:]) for b in params["branches"]]
    return [inputs[0].union(*outputs) for outputs in zip(*each, strict=True)]
  if name in ("scan", "while"):
    return _of_loop(equation, inputs)
  for inner in jaxprs_in(equation):
    if len(inner.invars) == len(inputs):
      return differences(inner, inputs)
  return [every] * len(equation.outvars)


def _of_loop(equation: Any, inputs: list[Axes]) -> list[Axes]:
  """Return the axes of a loop's outputs, iterating its body to a fixed point."""
  params, is_scan = equation.params, equation.primitive.name == "scan"
  until = [] if is_scan else inputs[: params["cond_nconsts"]]
  inputs = inputs[len(until) :]
  body = params["jaxpr" if is_scan else "body_jaxpr"].jaxpr
  # JAX 0.11 has no numbers of carried arrays in a scan, whose shapes are those in its body.
  carried = [
    v.aval.shape == w.aval.shape for v, w in zip(equation.outvars, body.outvars, strict=True)
  ]
  scanned = []
  if is_scan:
    pairs = zip(equation.invars, body.invars, strict=True)
    scanned = [v.aval.shape != w.aval.shape for v, w in pairs]
  end = len(inputs) - sum(scanned)
  num_consts = end - sum(carried)
  consts, carry, rest = inputs[:num_consts], inputs[num_consts:end], inputs[end:]
  while True:
    outputs = differences(body, consts + carry + rest)
    stops = Axes()
    if not is_scan:
      (stops,) = differences(params["cond_jaxpr"].jaxpr, until + carry)
    after = [a | b | stops for a, b in zip(carry, outputs, strict=False)]
    if after == carry:
      return carry + outputs[len(carry) :]
    carry = after
