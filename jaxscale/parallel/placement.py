"""Arrays of a step where a layout has them: shards, shardings, the host's memory.

The functions of a step, in its order: `shards_and_full` and `pair_shards` give a loss
its parameters, `scale_for_exchange` prepares gradients, `shard_like_optimizer` and
`shard_like_params` surround the update, `opt_to_device` and `opt_to_host` move the
optimizer's state.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding

from jaxscale.collectives import vary
from jaxscale.parallel.fsdp_gather import Gather, ShardedAndFull, local_shard
from jaxscale.parallel.specs import Layout, opt_state_specs

HOST = "pinned_host"  # JAX's name of the host's memory that devices copy from


def shards_and_full(params: Any, layout: Layout) -> tuple[Any, Any]:
  """Return parameters to differentiate by, inside `shard_map`, and full ones.

  Parameters are cast to varying over the axes that the exchange will sum over: else
  the derivative would sum over them by itself.

  Returns:
    Parameters or shards of them; under ZeRO-2 the full ones of those that are split,
    else None.
  """
  gathers = jax.tree.broadcast(layout.gathers, params)
  params = jax.tree.map(lambda w, g: vary(w, g.sum_in_exchange), params, gathers)
  if layout.shard != "zero2":
    return params, jax.tree.map(lambda _: None, params)

  def shard(w: jax.Array, g: Gather):
    return w if g.scatter is None else local_shard(w, g.scatter)

  full = jax.tree.map(lambda w, g: None if g.scatter is None else w, params, gathers)
  return jax.tree.map(shard, params, gathers), full


def pair_shards(shards: Any, full: Any) -> Any:
  """The tree that a loss takes, of what `shards_and_full` gave."""

  def pair(shard: Any, w: Any):
    return shard if w is None else ShardedAndFull(shard, w)

  return jax.tree.map(pair, shards, full, is_leaf=lambda x: x is None)


def scale_for_exchange(grads: Any, layout: Layout, examples: jax.Array) -> Any:
  """Gradients as they leave a device: scaled, with a leading dim for the devices.

  The exchange averages over the axes that are left; after it the gradient is that
  of the mean loss over all examples, however they are spread.

  Args:
    grads: sums over what the device has.
    layout: of the parameters.
    examples: over all devices.
  """

  def leave(g: jax.Array, gather: Gather):
    axes = gather.sum_in_exchange
    scale = (lax.axis_size(axes) if axes else 1) / examples.astype(jnp.float32)
    return (g * scale.astype(g.dtype))[None]

  return jax.tree.map(leave, grads, jax.tree.broadcast(layout.gathers, grads))


def shard_like_optimizer(trees: Any, layout: Layout) -> Any:
  """Trees like the parameters, in a jit, sharded like the optimizer's state."""
  if layout.shapes is None:
    return trees
  where = shardings(layout, layout.opt_specs)
  return tuple(lax.with_sharding_constraint(tree, where) for tree in trees)


def shard_like_params(params: Any, layout: Layout) -> Any:
  """Parameters, in a jit, sharded as between steps."""
  if layout.shapes is None:
    return params
  return lax.with_sharding_constraint(params, shardings(layout, layout.param_specs))


def shardings(layout: Layout, specs: Any) -> Any:
  """A `NamedSharding` for each spec."""
  return jax.tree.map(lambda spec: NamedSharding(layout.mesh, spec), specs)


def opt_state_shardings(layout: Layout, tx: optax.GradientTransformation) -> Any:
  """A `NamedSharding` for each leaf of an optimizer's state, between steps.

  On the host, where the layout has it there, are matrices and stacks of vectors: all
  but a few thousandths of the state. What is small stays.
  """
  where = shardings(layout, opt_state_specs(layout, tx))
  if not layout.opt_on_host:
    return where

  def place(leaf: Any, sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(HOST) if leaf.ndim >= 2 else sharding

  return jax.tree.map(place, jax.eval_shape(tx.init, layout.shapes), where)


def opt_to_device(opt_state: Any, layout: Layout) -> Any:
  """An optimizer's state, in a jit, where it is computed with.

  To be called in a branch: XLA brings what it can as soon as there is room, before the
  backward pass has freed any, but not before it knows that a branch is taken.
  """
  return _moved(opt_state, layout, jax.memory.Space.Device)


def opt_to_host(opt_state: Any, layout: Layout) -> Any:
  """An optimizer's state, in a jit, where it is between steps."""
  return _moved(opt_state, layout, jax.memory.Space.Host)


def _moved(opt_state: Any, layout: Layout, space: Any) -> Any:
  if not layout.opt_on_host:
    return opt_state

  def move(x: jax.Array):
    return jax.device_put(x, space) if x.ndim >= 2 else x

  return jax.tree.map(move, opt_state)
