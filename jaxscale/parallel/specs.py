"""Layout of a model on a mesh: sharding of its state, and gathering of its parameters.

    shard    between steps                            gradients are
    none     everything replicated                    summed by the exchange
    zero1    optimizer state split over `fsdp`        summed by the exchange
    zero2    optimizer state split over `fsdp`        reduce-scattered, layer by layer
    fsdp     parameters and optimizer state split     reduce-scattered, layer by layer

`zero1`, `zero2` and `fsdp` are ZeRO's stages 1 to 3 (arXiv:1910.02054). If the mesh also
has `replica` or `data` devices they are hybrid: state is split within each group and
replicated between groups. Other axes that split a parameter (`model`, `stage`) also split
its gradient and optimizer state.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.errors import ConfigError
from jaxscale.mesh import batch_axes
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.fsdp_gather import FSDP, Gather
from jaxscale.parallel.rules import Rule, partition

Shard = Literal["none", "zero1", "zero2", "fsdp"]
SlowAxes = Literal["in_backward", "after"]
# The axis `model` splits layers (heads, hidden units, classes); or layers, and tokens
# between their branches; or only tokens, with attention by a ring or by all-to-alls.
Splits = Literal["layers", "layers_and_tokens", "ring", "all_to_all"]


class Layout(NamedTuple):
  """Sharding of a model. Trees have the structure of the parameters or a prefix of it.

  Attributes:
    mesh: the mesh.
    shard: "none", "zero1", "zero2" or "fsdp"; see the module's table.
    token_axes: mesh axes along which devices have different examples or tokens; the
      losses of devices are summed over them.
    param_specs: a `PartitionSpec` for each parameter, between steps.
    opt_specs: a `PartitionSpec` for the optimizer state of each parameter.
    gathers: a `Gather` for each parameter.
    shapes: shapes and dtypes of the parameters; None if nothing is split.
    splits: dims that the axis `model` splits; see `Splits`.
    dtype: dtype of matrix products; None means the dtype of the parameters.
    sum_in: dtype of sums over `model`; see `tensor.tensor_ops`.
    opt_on_host: whether the optimizer state is in host memory between steps.
    loss_chunk: number of a device's labels whose logits exist at a time; 0 means all.
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
  loss_chunk: int = 0


def replicated_layout(mesh: Mesh) -> Layout:
  """Return a layout that replicates everything, for any model.

  Raises:
    ConfigError: the mesh has `stage` or `model` axes, whose devices would all compute the
      same.
  """
  axes = batch_axes(mesh)
  if idle := [a for a in mesh.axis_names if a not in axes]:
    problem = "makes devices compute the same, because the model is not split along this axis"
    fix = "give 1, or choose a layout that splits the model"
    raise ConfigError(f"Mesh.{idle[0]}={mesh.shape[idle[0]]} {problem}; {fix}")
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
  reduce_in: Any = None,
  dtype: Any = None,
  opt_on_host: bool = False,
  loss_chunk: int = 0,
) -> Layout:
  """Create the layout of a model's parameters from sharding rules.

  Args:
    mesh: the mesh whose axes the rules use.
    shapes: the parameters, as arrays or `jax.ShapeDtypeStruct`s.
    rules: sharding rules, exactly one for each parameter; see `rules.partition`.
    shard: the state that is split over `fsdp`; see the module's table.
    slow_axes: when gradients that are split over `fsdp` are summed over the other axes:
      "in_backward" layer by layer, overlapping with the remaining layers, or "after" by
      the exchange, once per step for any number of micro-batches.
    splits: dims that the axis `model` splits. With "ring" and "all_to_all" parameters are
      not split along it.
    sum_in: dtype of sums over devices along `model`; None means float32.
    reduce_in: dtype in which the backward pass sums gradients of matrices that are split over
      `fsdp`; None means that of the parameters.
    dtype: dtype in which matrices are sent and used; None means their own.
    opt_on_host: keep the optimizer state in host memory between steps.
    loss_chunk: number of labels for `cross_entropy.classify`; 0 means all of a device.

  Raises:
    ConfigError: a parameter is matched by no rule or by several, or its shape cannot be
      divided; or an axis of the mesh splits nothing.

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
    casts = leaf.ndim - (part == "layers") >= 2
    sent = jnp.dtype(dtype) if casts and dtype is not None else None
    if shard not in ("zero2", "fsdp") or FSDP not in dims:
      return Gather(sum_in_exchange=token_axes, dtype=sent)
    slow = tuple(a for a in token_axes if a != FSDP)
    in_backward, after = (slow, ()) if slow_axes == "in_backward" else ((), slow)
    reduced = reduce_in if casts else None
    return Gather(dims.index(FSDP), shard == "fsdp", in_backward, after, sent, reduced)

  param_specs = split if shard == "fsdp" else without_fsdp
  gathers = jax.tree.map_with_path(gather, shapes, opt_specs)
  types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
  trees = param_specs, opt_specs, gathers, types
  return Layout(mesh, shard, token_axes, *trees, splits, dtype, sum_in, opt_on_host, loss_chunk)


def _check_used(sizes: dict[str, int], specs: Any, shard: Shard) -> None:
  """Raise if all devices along an axis would compute the same."""
  used = {a for spec in jax.tree.leaves(specs) for a in spec}
  for axis in ["stage", "model"] + ([FSDP] if shard != "none" else []):
    if sizes.get(axis, 1) > 1 and axis not in used:
      reason = "splits nothing of this model; give 1"
      raise ConfigError(f"Mesh.{axis}={sizes[axis]} {reason}")
  if shard != "none" and sizes.get(FSDP, 1) == 1:
    problem = "needs several devices along the axis fsdp; give Mesh.fsdp, e.g. -1 with Mesh.data=1"
    raise ConfigError(f"Layout.shard={shard!r} {problem}")


def grad_specs(layout: Layout) -> Any:
  """Return a `PartitionSpec` for each gradient after all sums."""
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
  """Return the shape of each gradient's part on one device."""

  def local(x: Any, spec: P):
    return jax.ShapeDtypeStruct(NamedSharding(layout.mesh, spec).shard_shape(x.shape), x.dtype)

  return jax.tree.map(local, layout.shapes, grad_specs(layout))


def backward_sum_axes(layout: Layout | None) -> dict[str, tuple[str, ...]]:
  """Return the axes over which the backward pass sums gradients, by parameter path."""
  if layout is None or layout.shapes is None:
    return {}
  found = {}
  for path, g in jax.tree_util.tree_leaves_with_path(layout.gathers):
    if axes := ((FSDP,) if g.scatter is not None else ()) + g.sum_in_backward:
      found[path_name(path)] = axes
  return found
