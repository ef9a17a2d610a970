"""Sums over devices by a plan, for trees inside `shard_map` and for global arrays."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.collectives.algorithms import hierarchical, over_dims, psum
from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.collectives.planner import Link, Plan, plan
from jaxscale.errors import ConfigError
from jaxscale.metrics.text import grouped


def sum_tree(tree: Any, by: Plan, *, payload: Any = None, accumulate: Any = None) -> Any:
  """Sum a tree over devices by a plan, inside `shard_map`.

  Leaves of the same dtype are sent as one vector, so they need only the permutes of one leaf.

  Args:
    tree: arrays of this device.
    by: result of `plan` for the axes of this `shard_map`.
    payload: dtype in which floats are sent; None means their own.
    accumulate: dtype of sums, see `algorithms.over_dims`; None means `payload`.

  Returns:
    The tree of sums, typed invariant over the axes of the plan.

  Raises:
    ConfigError: the plan is for a different mesh, or a dtype cannot be summed.
  """
  sizes = {axis: lax.axis_size(axis) for axis in by.axes}
  covered = math.prod(d.size for d in by.dims)
  if by.algorithm != "psum" and covered != math.prod(sizes.values()):
    raise ConfigError(f"plan={by} is for a mesh other than {sizes}; call `plan` with this mesh")

  def total(x: jax.Array):
    if own := {"psum": psum, "hierarchical": hierarchical}.get(by.algorithm):
      return own(x, by.axes, payload=payload, accumulate=accumulate)
    return over_dims(x, sizes, by.dims, payload, accumulate)

  # XLA merges the psums of the leaves itself, without a copy.
  return jax.tree.map(total, tree) if by.algorithm == "psum" else joined(total, tree)


def joined(total: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
  """Apply a sum to every leaf, with leaves of the same dtype joined into one vector."""
  leaves, treedef = jax.tree.flatten(tree)
  leaves = [jnp.asarray(x) for x in leaves]
  for indices in grouped((leaf.dtype, index) for index, leaf in enumerate(leaves)).values():
    if len(indices) == 1:
      leaves[indices[0]] = total(leaves[indices[0]])
      continue
    sums = total(jnp.concatenate([leaves[i].reshape(-1) for i in indices]))
    ends = np.cumsum([leaves[i].size for i in indices])
    for index, part in zip(indices, jnp.split(sums, ends[:-1]), strict=True):
      leaves[index] = part.reshape(leaves[index].shape)
  return jax.tree.unflatten(treedef, leaves)


def payload_bytes(tree: Any, payload: Any = None, *, rows: bool = False) -> int:
  """Return the bytes of a device's part of a tree in the dtype that is sent.

  Args:
    tree: arrays or their shapes.
    payload: dtype in which floats are sent, as in `sum_tree`.
    rows: every leaf has a leading dim of one row per device, which is not sent.
  """

  def size(x: Any):
    is_cast = payload is not None and jnp.issubdtype(x.dtype, jnp.floating)
    sent = np.dtype(payload) if is_cast else x.dtype
    return math.prod(x.shape[1:] if rows else x.shape) * sent.itemsize

  return sum(map(size, jax.tree.leaves(tree)))


def all_reduce(
  tree: Any,
  mesh: Mesh,
  algorithm: str = "auto",
  *,
  dims: Sequence[tuple[str, int]] | None = None,
  links: Mapping[str, Link] | None = None,
  payload: Any = None,
  accumulate: Any = None,
) -> Any:
  """Sum global arrays over all devices of a mesh, outside of `shard_map`.

  Row r of every leaf is the addend of the device `mesh.devices.flat[r]` and is on that
  device (`NamedSharding(mesh, P(mesh.axis_names))`; other arrays are moved first). The
  result is the sum over the rows, without that dim, on every device.

  Args:
    tree: arrays [devices of the mesh, ...], floating or integer.
    mesh: the mesh, whose axes are all summed over, slowest links first.
    algorithm: "ring", "torus", "hierarchical", "halving_doubling", "psum", or "auto" for
      the choice of `plan`.
    dims, links: as in `plan`.
    payload, accumulate: as in `sum_tree`.

  Returns:
    The tree of sums, [...], in the dtypes of the tree, replicated.

  Raises:
    ConfigError: as in `plan`; or a leaf lacks one row per device, or a dtype cannot be
      summed.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,),
    ...                      devices=jax.devices()[:1])
    >>> all_reduce({"w": jnp.ones((1, 3))}, mesh, "ring")["w"]
    Array([1., 1., 1.], dtype=float32)
  """
  for path, x in jax.tree.leaves_with_path(tree):
    if (shape := np.shape(x))[:1] != (mesh.size,):
      key = f"tree{jax.tree_util.keystr(path)}.shape={shape}"
      raise ConfigError(f"{key} needs one row per device; give a leading dim of {mesh.size}")
  num_bytes = payload_bytes(tree, payload, rows=True)
  by = plan(dict(mesh.shape), num_bytes, algorithm, dims=dims, links=links)
  return reducer(mesh, by, payload, accumulate)(tree)


@functools.lru_cache(maxsize=256)
def reducer(mesh: Mesh, by: Plan, payload: Any = None, accumulate: Any = None) -> Any:
  """Return the jitted `all_reduce` of a plan: a tree of rows -> the tree of sums."""

  def local(tree: Any):
    own = jax.tree.map(lambda x: x[0], tree)
    return sum_tree(own, by, payload=payload, accumulate=accumulate)

  rows = P(mesh.axis_names)
  mapped = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=P(), check_vma=True)
  return one_at_a_time(jax.jit(mapped, out_shardings=NamedSharding(mesh, P())), mesh)
