"""A layout: how the state of a model lies on a mesh, and how its parameters enter.

    shard          between steps                         gradients are
    nothing        everything on every device            summed by the exchange
    optimizer      optimizer state split over `fsdp`     summed by the exchange
    gradients      likewise                              split, layer by layer
    parameters     parameters too                        split, layer by layer

The second to fourth are ZeRO's stages 1 to 3 (arXiv:1910.02054), the fourth is also
called FSDP. With `replica` or `data` devices beside `fsdp` they are hybrid: state
is split within a group and the same in each. Whatever else splits a parameter
(`model`, `stage`) splits its gradient and optimizer state with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.collectives import vary
from jaxscale.errors import ConfigError
from jaxscale.mesh import batch_axes
from jaxscale.parallel.entering import FSDP, Beside, Entry, is_beside, own_shard
from jaxscale.parallel.rules import Rule, partition
from jaxscale.tree_paths import path_name

Shard = Literal["none", "zero1", "zero2", "fsdp"]
HOST = "pinned_host"  # JAX's name of the host's memory that devices copy from
Slow = Literal["in_backward", "after"]
# What the axis `model` splits: layers (heads, hidden units, classes); between their
# branches tokens as well; or tokens alone, whose attention goes by a ring or by
# all-to-alls.
Splits = Literal["layers", "layers_and_tokens", "ring", "all_to_all"]


class Layout(NamedTuple):
  """Trees are like the parameters, or a prefix of them.

  Attributes:
    mesh: where.
    shard: as in the module's table.
    token_axes: mesh axes along which devices have other examples or tokens; what a
      device has of the loss is summed over them.
    at_rest: a `PartitionSpec` a parameter, between steps.
    owned: likewise of its optimizer state.
    entries: an `Entry` a parameter.
    shapes: shapes and dtypes of the parameters; None where nothing is split.
    splits: what `model` splits; see `Splits`.
    dtype: of products; None: that of the parameters.
    sum_in: as of `tensor.tensor_ops`.
    opt_on_host: the arrays of the optimizer's state are in the host's memory between
      steps.
  """

  mesh: Mesh
  shard: Shard
  token_axes: tuple[str, ...]
  at_rest: Any
  owned: Any
  entries: Any
  shapes: Any = None
  splits: Splits = "layers"
  dtype: Any = None
  sum_in: Any = None
  opt_on_host: bool = False


def whole(mesh: Mesh) -> Layout:
  """Everything on every device, of any model.

  Raises:
    ConfigError: the mesh has `stage` or `model` axes, which would compute the same.
  """
  axes = batch_axes(mesh)
  if idle := [a for a in mesh.axis_names if a not in axes]:
    raise ConfigError(
      f"Mesh.{idle[0]}={mesh.shape[idle[0]]}: every device has the whole model, and "
      "those along this axis would compute the same; choose a layout that splits it"
    )
  return Layout(mesh, "none", axes, P(), P(), Entry(after=axes))


def make_layout(
  mesh: Mesh,
  shapes: Any,
  rules: Sequence[Rule],
  *,
  shard: Shard = "none",
  slow: Slow = "after",
  splits: Splits = "layers",
  sum_in: Any = None,
  dtype: Any = None,
  opt_on_host: bool = False,
) -> Layout:
  """The layout that rules make of a model's parameters.

  Args:
    mesh: whose axes the rules name.
    shapes: of the parameters: arrays or `jax.ShapeDtypeStruct`s.
    rules: one for each parameter; see `rules.partition`.
    shard: what is split over `fsdp`; see the module.
    slow: where gradients that are split over `fsdp` are summed over the other axes:
      "in_backward", layer by layer, where it can hide behind the layers that are
      left, or "after" by the exchange, once a step however many micro-batches.
    splits: what `model` splits; by "ring" and "all_to_all" parameters are whole along
      it.
    sum_in: dtype of what devices along `model` sum; None: float32.
    dtype: that the matrices of layers and head are sent and used in; None: their own.
    opt_on_host: keep the optimizer's state in the host's memory between steps.

  Raises:
    ConfigError: a parameter that no rule fits, or several, or whose shape does not
      divide; nothing to split for an axis of the mesh.

  Example:
    >>> mesh = make_mesh(data=1, fsdp=8)                       # doctest: +SKIP
    >>> layout = make_layout(mesh, shapes, rules, shard="fsdp")  # doctest: +SKIP
  """
  sizes = dict(mesh.shape)
  token_axes = batch_axes(mesh)
  if splits in ("ring", "all_to_all") and "model" in sizes:
    token_axes += ("model",)
    del sizes["model"]
  owned = partition(shapes, rules, sizes)
  if shard == "none":
    owned = jax.tree.map(_without_fsdp, owned)
  at_rest = owned if shard == "fsdp" else jax.tree.map(_without_fsdp, owned)
  _check_used(sizes, owned, shard)

  def entry(path: Any, leaf: Any, spec: P) -> Entry:
    dims = list(spec)
    scatter = None
    if shard in ("zero2", "fsdp") and FSDP in dims:
      scatter = dims.index(FSDP)
    rest = tuple(a for a in token_axes if a != FSDP) if scatter is not None else ()
    part = path_name(path).split("/")[0]
    # A table's rows are looked up as they are, so that gradients of frequent ones are
    # summed in float32 (models.transformer).
    casts = part != "embed" and leaf.ndim - (part == "layers") >= 2
    return Entry(
      scatter=scatter,
      gathers=shard == "fsdp",
      inside=rest if slow == "in_backward" else (),
      after=token_axes if scatter is None else () if slow == "in_backward" else rest,
      dtype=jnp.dtype(dtype) if casts and dtype is not None else None,
    )

  entries = jax.tree.map_with_path(entry, shapes, owned)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
  return Layout(
    mesh,
    shard,
    token_axes,
    at_rest,
    owned,
    entries,
    abstract,
    splits,
    dtype=dtype,
    sum_in=sum_in,
    opt_on_host=opt_on_host,
  )


def _without_fsdp(spec: P) -> P:
  return P(*(None if axis == FSDP else axis for axis in spec))


def _check_used(sizes: dict[str, int], owned: Any, shard: Shard) -> None:
  """Refuse an axis along which all devices would hold and compute the same."""
  used = {a for spec in jax.tree.leaves(owned) for a in spec}
  wanted = ["stage", "model"] + ([FSDP] if shard != "none" else [])
  for axis in wanted:
    if sizes.get(axis, 1) > 1 and axis not in used:
      raise ConfigError(
        f"Mesh.{axis}={sizes[axis]}: nothing of this model is split along it; give 1"
      )
  if shard != "none" and sizes.get(FSDP, 1) == 1:
    raise ConfigError(
      f"Layout.shard={shard!r}: is over the axis fsdp, which has one device; give "
      "Mesh.fsdp, e.g. -1 with Mesh.data=1"
    )


def entries_of(layout: Layout, params: Any) -> Any:
  """An `Entry` for each parameter."""
  return jax.tree.broadcast(layout.entries, params, is_leaf=is_beside)


def begin(params: Any, layout: Layout) -> tuple[Any, Any]:
  """What a step differentiates by, inside `shard_map`, and what stands beside it.

  Parameters are cast to varying over the axes that the exchange will sum over: else
  the derivative would sum over them by itself.

  Returns:
    Parameters or shards of them; the whole ones, None for those that need it not.
  """
  params = jax.tree.map(
    lambda w, e: vary(w, e.after), params, entries_of(layout, params)
  )
  entries = entries_of(layout, params)
  beside = layout.shard == "zero2"
  shards = jax.tree.map(
    lambda w, e: own_shard(w, e.scatter) if beside and e.scatter is not None else w,
    params,
    entries,
  )
  wholes = jax.tree.map(
    lambda w, e: w if beside and e.scatter is not None else None, params, entries
  )
  return shards, wholes


def join(shards: Any, wholes: Any) -> Any:
  """The tree that a loss takes, of what `begin` gave."""
  return jax.tree.map(
    lambda shard, w: shard if w is None else Beside(shard, w),
    shards,
    wholes,
    is_leaf=lambda x: x is None,
  )


def stacked(grads: Any, layout: Layout, examples: jax.Array) -> Any:
  """Gradients as they leave a device: a leading dim, scaled for the exchange.

  The exchange averages over the axes that are left; after it the gradient is that
  of the mean loss over all examples, however they are spread.

  Args:
    grads: sums over what the device has.
    layout: of the parameters.
    examples: over all devices.
  """

  def leave(g, entry):
    size = lax.axis_size(entry.after) if entry.after else 1
    scale = size / examples.astype(jnp.float32)
    return (g * scale.astype(g.dtype))[None]

  return jax.tree.map(leave, grads, entries_of(layout, grads))


def to_owners(trees: Any, layout: Layout) -> Any:
  """Trees like the parameters, in a jit, laid out like the optimizer's state."""
  if layout.shapes is None:
    return trees
  where = shardings(layout, layout.owned)
  return tuple(lax.with_sharding_constraint(tree, where) for tree in trees)


def to_rest(params: Any, layout: Layout) -> Any:
  """Parameters, in a jit, laid out as between steps."""
  if layout.shapes is None:
    return params
  return lax.with_sharding_constraint(params, shardings(layout, layout.at_rest))


def grad_specs(layout: Layout) -> Any:
  """A `PartitionSpec` for each gradient, when all is summed."""
  if layout.shapes is None:
    return layout.at_rest
  return jax.tree.map(
    lambda entry, owned, rest: rest if entry.scatter is None else owned,
    layout.entries,
    layout.owned,
    layout.at_rest,
  )


def stacked_specs(layout: Layout) -> Any:
  """Likewise of what leaves a device: a leading dim of what is still to be summed."""
  return jax.tree.map(
    lambda entry, spec: P(entry.after or None, *spec),
    layout.entries,
    grad_specs(layout),
  )


def local_shapes(layout: Layout) -> Any:
  """Shapes of the part of each gradient that one device has."""

  def local(shape, spec):
    split = [layout.mesh.shape[a] if a else 1 for a in spec]
    split += [1] * (shape.ndim - len(split))
    dims = [n // k for n, k in zip(shape.shape, split, strict=True)]
    return jax.ShapeDtypeStruct(dims, shape.dtype)

  return jax.tree.map(local, layout.shapes, grad_specs(layout))


def shardings(layout: Layout, specs: Any) -> Any:
  """A `NamedSharding` for each spec."""
  return jax.tree.map(lambda spec: NamedSharding(layout.mesh, spec), specs)


def summed_axes(layout: Layout | None) -> dict[str, tuple[str, ...]]:
  """Axes that gradients are summed over in the backward pass, by parameter path."""
  if layout is None or layout.shapes is None:
    return {}
  found = {
    path_name(path): ((FSDP,) if e.scatter is not None else ()) + e.inside
    for path, e in jax.tree_util.tree_leaves_with_path(layout.entries)
  }
  return {name: axes for name, axes in found.items() if axes}


def opt_specs(layout: Layout, tx: optax.GradientTransformation) -> Any:
  """A `PartitionSpec` for each leaf of an optimizer's state.

  What is like a parameter lies like it: a leaf whose path ends with that of a
  parameter and which has its shape. All else, counts and trust ratios, is whole.
  """
  if layout.shapes is None:
    return P()
  state = jax.eval_shape(tx.init, layout.shapes)
  return like_params(state, layout.shapes, layout.owned)


def opt_shardings(layout: Layout, tx: optax.GradientTransformation) -> Any:
  """A `NamedSharding` for each leaf of an optimizer's state, between steps.

  On the host, where the layout has it there, are matrices and stacks of vectors: all
  but a few thousandths of the state. What is small stays.
  """
  where = shardings(layout, opt_specs(layout, tx))
  if not layout.opt_on_host:
    return where

  def place(leaf: Any, sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(HOST) if leaf.ndim >= 2 else sharding

  return jax.tree.map(place, jax.eval_shape(tx.init, layout.shapes), where)


def to_device(opt_state: Any, layout: Layout) -> Any:
  """An optimizer's state, in a jit, where it is computed with.

  To be called in a branch: XLA brings what it can as soon as there is room, before the
  backward pass has freed any, but not before it knows that a branch is taken.
  """
  return _moved(opt_state, layout, jax.memory.Space.Device)


def to_host(opt_state: Any, layout: Layout) -> Any:
  """An optimizer's state, in a jit, where it lies between steps."""
  return _moved(opt_state, layout, jax.memory.Space.Host)


def _moved(opt_state: Any, layout: Layout, space: Any) -> Any:
  if not layout.opt_on_host:
    return opt_state
  return jax.tree.map(
    lambda x: jax.device_put(x, space) if x.ndim >= 2 else x, opt_state
  )


def like_params(tree: Any, params: Any, specs: Any) -> Any:
  """The spec of the parameter that each leaf is like, or `P()`.

  Args:
    tree: shapes of, say, an optimizer's state.
    params: shapes of the parameters.
    specs: one for each parameter.
  """
  leaves = zip(
    jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(specs), strict=True
  )
  known = {path_name(path): (x.shape, spec) for (path, x), spec in leaves}

  def spec_of(path: Any, leaf: Any) -> P:
    parts = path_name(path).split("/")
    for i in range(len(parts)):
      shape, spec = known.get("/".join(parts[i:]), (None, None))
      if spec is not None and shape == leaf.shape:
        return spec
    return P()

  return jax.tree.map_with_path(spec_of, tree)
