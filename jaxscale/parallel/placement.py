"""Placement of a step's arrays under a layout: shards, shardings, host memory.

A step uses the functions in this order: `shards_and_full` and `pair_shards` prepare the
parameters for the loss, `scale_for_exchange` prepares the gradients,
`shard_like_optimizer` and `shard_like_params` come before and after the update, and
`move_opt_state` moves the optimizer state.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.collectives import vary
from jaxscale.optim.matrices import dealt_by, is_dealt
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.deal import make_dealer
from jaxscale.parallel.fsdp_gather import Gather, ShardedAndFull, local_shard
from jaxscale.parallel.specs import Layout
from jaxscale.parallel.trainable import trainable_part

HOST = "pinned_host"  # JAX's name for host memory that devices can copy from


def shards_and_full(params: Any, layout: Layout, trainable: str | None = None) -> tuple[Any, Any]:
  """Return the parameters for which gradients are computed, and other parameters.

  Call it inside `shard_map`. Parameters are cast to varying over the axes that the
  exchange sums over. Otherwise the derivative itself would sum over these axes.

  Args:
    params: the device's part of all parameters.
    layout: the layout of the parameters.
    trainable: pattern of the trainable parameters, as for `trainable_part`.

  Returns:
    A tree of trainable parameters or their shards; and a tree of the frozen parameters and,
    under ZeRO-2, of the full parameters of those that are split, with None elsewhere.
  """
  gathers = jax.tree.broadcast(layout.gathers, params)
  params = jax.tree.map(lambda w, g: vary(w, g.sum_in_exchange), params, gathers)
  part = trainable_part(params, trainable)

  def split_dim(g: Gather) -> int | None:
    return g.scatter if layout.shard == "zero2" else None

  def shard(w: jax.Array | None, g: Gather):
    dim = split_dim(g)
    return w if w is None or dim is None else local_shard(w, dim)

  def full(trained: jax.Array | None, w: jax.Array, g: Gather):
    return w if trained is None or split_dim(g) is not None else None

  trees = part, params, gathers
  shards = jax.tree.map(shard, part, gathers, is_leaf=lambda x: x is None)
  return shards, jax.tree.map(full, *trees, is_leaf=lambda x: x is None)


def pair_shards(shards: Any, full: Any) -> Any:
  """Return the parameters for a loss from the results of `shards_and_full`."""

  def pair(shard: Any, w: Any):
    if shard is None:  # frozen
      return w
    return shard if w is None else ShardedAndFull(shard, w)

  return jax.tree.map(pair, shards, full, is_leaf=lambda x: x is None)


def scale_for_exchange(grads: Any, layout: Layout, examples: jax.Array) -> Any:
  """Scale a device's gradients for the exchange and add a leading dim for devices.

  The exchange averages over the remaining axes. The result is the gradient of the mean
  loss over all examples, for any distribution of the examples over devices.

  Args:
    grads: gradients summed over the device's examples.
    layout: the layout of the parameters.
    examples: number of examples, or sum of their weights, on all devices.
  """

  def leave(g: jax.Array, gather: Gather):
    axes = gather.sum_in_exchange
    scale = (lax.axis_size(axes) if axes else 1) / examples.astype(jnp.float32)
    return (g * scale.astype(g.dtype))[None]

  return jax.tree.map(leave, grads, jax.tree.broadcast(layout.gathers, grads))


def shard_like_optimizer(trees: Any, layout: Layout) -> Any:
  """Shard trees like the optimizer state, inside a jit."""
  if layout.shapes is None:
    return trees
  where = shardings(layout, layout.opt_specs)
  return tuple(lax.with_sharding_constraint(tree, where) for tree in trees)


def shard_like_params(params: Any, layout: Layout) -> Any:
  """Shard parameters as between steps, inside a jit."""
  if layout.shapes is None:
    return params
  return lax.with_sharding_constraint(params, shardings(layout, layout.param_specs))


def shardings(layout: Layout, specs: Any) -> Any:
  """Return a `NamedSharding` for each spec."""
  return jax.tree.map(lambda spec: NamedSharding(layout.mesh, spec), specs)


def init_opt_state(layout: Layout, tx: optax.GradientTransformation, params: Any) -> Any:
  """Return the initial optimizer state, whose matrices are dealt out under the layout."""
  with dealt_by(make_dealer(layout)):
    return tx.init(params)


def init_shapes(layout: Layout, tx: optax.GradientTransformation) -> Any:
  """Return the shapes and dtypes of the optimizer state."""
  # A function of its own: JAX would return the shapes that `tx.init` has in another layout.
  return jax.eval_shape(lambda params: init_opt_state(layout, tx, params), layout.shapes)


def opt_state_specs(layout: Layout, tx: optax.GradientTransformation) -> Any:
  """Return a `PartitionSpec` for each leaf of an optimizer state.

  A leaf is sharded like a parameter if its path ends with the parameter's path and its
  shape is the same. The rows of a `MatrixState` are sharded over all axes. Other leaves, such
  as counts and trust ratios, are replicated.
  """
  if layout.shapes is None:
    return P()
  params = jax.tree_util.tree_leaves_with_path(layout.shapes)
  specs = zip(params, jax.tree.leaves(layout.opt_specs), strict=True)
  known = {path_name(path): (x.shape, spec) for (path, x), spec in specs}

  def spec_of(path: Any, leaf: Any) -> Any:
    if is_dealt(leaf):
      return jax.tree.map(lambda _: P(layout.mesh.axis_names), leaf)
    parts = path_name(path).split("/")
    for i in range(len(parts)):
      shape, spec = known.get("/".join(parts[i:]), (None, P()))
      if shape == leaf.shape:
        return spec
    return P()

  return jax.tree.map_with_path(spec_of, init_shapes(layout, tx), is_leaf=is_dealt)


def opt_state_shardings(layout: Layout, tx: optax.GradientTransformation) -> Any:
  """Return the shardings of an optimizer state between steps.

  With `opt_on_host`, arrays of two dims or more are in host memory. Smaller arrays, a few
  thousandths of the state, stay on the devices.
  """
  where = shardings(layout, opt_state_specs(layout, tx))
  if not layout.opt_on_host:
    return where

  def place(leaf: Any, sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(HOST) if leaf.ndim >= 2 else sharding

  return jax.tree.map(place, init_shapes(layout, tx), where)


def move_opt_state(opt_state: Any, layout: Layout, space: Any) -> Any:
  """Move an optimizer state that is kept on the host between steps, inside a jit.

  Move it to the devices in a branch. Otherwise XLA copies arrays as soon as there is room for
  them, before the backward pass has freed its memory. It cannot start before a branch is taken.
  """
  if not layout.opt_on_host:
    return opt_state

  def move(x: jax.Array):
    return jax.device_put(x, space) if x.ndim >= 2 else x

  return jax.tree.map(move, opt_state)
