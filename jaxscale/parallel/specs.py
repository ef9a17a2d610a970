"""A layout: how the state of a model is sharded on a mesh, and how it is gathered.

    shard    between steps                         gradients are
    none     everything on every device            summed by the exchange
    zero1    optimizer state split over `fsdp`     summed by the exchange
    zero2    likewise                              reduce-scattered, layer by layer
    fsdp     parameters too                        reduce-scattered, layer by layer

`zero1`, `zero2` and `fsdp` are ZeRO's stages 1 to 3 (arXiv:1910.02054). With `replica`
or `data` devices as well they are hybrid: state is split within a group and the same in
each. Whatever else splits a parameter (`model`, `stage`) splits its gradient and
optimizer state with it.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.errors import ConfigError
from jaxscale.mesh import batch_axes
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.fsdp_gather import FSDP, Gather
from jaxscale.parallel.rules import Rule, partition

Shard = Literal["none", "zero1", "zero2", "fsdp"]
SlowAxes = Literal["in_backward", "after"]
# What the axis `model` splits: layers (heads, hidden units, classes); between their
# branches tokens as well; or tokens alone, whose attention goes by a ring or by
# all-to-alls.
Splits = Literal["layers", "layers_and_tokens", "ring", "all_to_all"]


class Layout(NamedTuple):
  """Sharding of a model. Trees are like the parameters, or a prefix of them.

  Attributes:
    mesh: where.
    shard: as in the module's table.
    token_axes: mesh axes along which devices have other examples or tokens; a
      device's sums of losses are summed over them.
    param_specs: a `PartitionSpec` for each parameter, between steps.
    opt_specs: likewise for its optimizer state.
    gathers: a `Gather` for each parameter.
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
  param_specs: Any
  opt_specs: Any
  gathers: Any
  shapes: Any = None
  splits: Splits = "layers"
  dtype: Any = None
  sum_in: Any = None
  opt_on_host: bool = False


def replicated_layout(mesh: Mesh) -> Layout:
  """Everything on every device, for any model.

  Raises:
    ConfigError: the mesh has `stage` or `model` axes, which would compute the same.
  """
  axes = batch_axes(mesh)
  if idle := [a for a in mesh.axis_names if a not in axes]:
    why = "every device has the whole model, and those along this axis would compute the same"
    fix = "choose a layout that splits it"
    raise ConfigError(f"Mesh.{idle[0]}={mesh.shape[idle[0]]}: {why}; {fix}")
  return Layout(mesh, "none", axes, P(), P(), Gather(sum_in_exchange=axes))


def make_layout(
  mesh: Mesh,
  shapes: Any,
  rules: Sequence[Rule],
  *,
  shard: Shard = "none",
  slow_axes: SlowAxes = "after",
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
    slow_axes: where gradients split over `fsdp` are summed over the other axes:
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
  split = partition(shapes, rules, sizes)
  none = {FSDP: None}
  without_fsdp = jax.tree.map(lambda spec: P(*(none.get(a, a) for a in spec)), split)
  opt_specs = without_fsdp if shard == "none" else split
  _check_used(sizes, opt_specs, shard)

  def gather(path: Any, leaf: Any, spec: P) -> Gather:
    dims, part = list(spec), path_name(path).split("/")[0]
    # A table's rows are looked up as they are, so that gradients of frequent ones are
    # summed in float32 (models.decoder).
    casts = part != "embed" and leaf.ndim - (part == "layers") >= 2
    sent = jnp.dtype(dtype) if casts and dtype is not None else None
    if shard not in ("zero2", "fsdp") or FSDP not in dims:
      return Gather(sum_in_exchange=token_axes, dtype=sent)
    slow = tuple(a for a in token_axes if a != FSDP)
    in_backward, after = (slow, ()) if slow_axes == "in_backward" else ((), slow)
    return Gather(dims.index(FSDP), shard == "fsdp", in_backward, after, sent)

  param_specs = split if shard == "fsdp" else without_fsdp
  gathers = jax.tree.map_with_path(gather, shapes, opt_specs)
  types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
  layout = Layout(mesh, shard, token_axes, param_specs, opt_specs, gathers, types)
  options: Any = {"dtype": dtype, "sum_in": sum_in, "opt_on_host": opt_on_host}
  return layout._replace(splits=splits, **options)


def _check_used(sizes: dict[str, int], specs: Any, shard: Shard) -> None:
  """Refuse an axis along which all devices would have and compute the same."""
  used = {a for spec in jax.tree.leaves(specs) for a in spec}
  wanted = ["stage", "model"] + ([FSDP] if shard != "none" else [])
  for axis in wanted:
    if sizes.get(axis, 1) > 1 and axis not in used:
      reason = "nothing of this model is split along it; give 1"
      raise ConfigError(f"Mesh.{axis}={sizes[axis]}: {reason}")
  if shard != "none" and sizes.get(FSDP, 1) == 1:
    why = "is over the axis fsdp, which has one device; give Mesh.fsdp, e.g. -1 with Mesh.data=1"
    raise ConfigError(f"Layout.shard={shard!r}: {why}")


def grad_specs(layout: Layout) -> Any:
  """A `PartitionSpec` for each gradient, when all is summed."""
  if layout.shapes is None:
    return layout.param_specs

  def spec(gather: Gather, opt: P, param: P):
    return param if gather.scatter is None else opt

  return jax.tree.map(spec, layout.gathers, layout.opt_specs, layout.param_specs)


def exchange_specs(layout: Layout) -> Any:
  """Return the specs of gradients with a leading dim, over axes still to be summed."""

  def spec(gather: Gather, of_grad: P):
    return P(gather.sum_in_exchange or None, *of_grad)

  return jax.tree.map(spec, layout.gathers, grad_specs(layout))


def local_grad_shapes(layout: Layout) -> Any:
  """Shapes of the part of each gradient that one device has."""

  def local(x: Any, spec: P):
    dims = NamedSharding(layout.mesh, spec).shard_shape(x.shape)
    return jax.ShapeDtypeStruct(dims, x.dtype)

  return jax.tree.map(local, layout.shapes, grad_specs(layout))


def opt_state_specs(layout: Layout, tx: optax.GradientTransformation) -> Any:
  """A `PartitionSpec` for each leaf of an optimizer's state.

  A leaf whose path ends with that of a parameter and which has its shape is sharded
  like it. All else, counts and trust ratios, is whole.
  """
  if layout.shapes is None:
    return P()
  params = jax.tree_util.tree_leaves_with_path(layout.shapes)
  specs = zip(params, jax.tree.leaves(layout.opt_specs), strict=True)
  known = {path_name(path): (x.shape, spec) for (path, x), spec in specs}

  def spec_of(path: Any, leaf: Any) -> P:
    parts = path_name(path).split("/")
    for i in range(len(parts)):
      shape, spec = known.get("/".join(parts[i:]), (None, P()))
      if shape == leaf.shape:
        return spec
    return P()

  return jax.tree.map_with_path(spec_of, jax.eval_shape(tx.init, layout.shapes))


def backward_sum_axes(layout: Layout | None) -> dict[str, tuple[str, ...]]:
  """Axes that gradients are summed over in the backward pass, by parameter path."""
  if layout is None or layout.shapes is None:
    return {}
  found = {}
  for path, g in jax.tree_util.tree_leaves_with_path(layout.gathers):
    if axes := ((FSDP,) if g.scatter is not None else ()) + g.sum_in_backward:
      found[path_name(path)] = axes
  return found
