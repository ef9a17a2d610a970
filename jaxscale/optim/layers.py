"""What a layer is to a layer-wise optimizer: one norm, one trust ratio.

A layer is a leaf of the parameters or, where layers are stacked for a scan, one
slice of a leaf along its first dim. Norms and states are float32 at least,
whatever the dtype of the parameters; float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.errors import invalid
from jaxscale.optim.masks import Mask, including
from jaxscale.optim.tree_paths import path_name


class Layer(NamedTuple):
  """How a leaf is treated.

  Attributes:
    chosen: by the mask: has decay, and a trust ratio if the optimizer has one.
    stacked: its first dim counts layers.
  """

  chosen: bool
  stacked: bool


def layers_of(params: Any, mask: Mask | Any, stacked: Mask | Any) -> list[Layer]:
  """A `Layer` for each leaf, in the order of `jax.tree.leaves`.

  Args:
    params: arrays, or anything with shape and dtype.
    mask: params -> bool per leaf, or such a tree (a prefix will do); None: all
      are chosen. It sees a stacked leaf without its first dim, so that `kernels`
      finds the stacked biases to be biases.
    stacked: the same, which leaves are stacked; None: no leaf is.

  Raises:
    ValueError: a leaf is called stacked and has no dims.
  """
  is_stacked = flags_of(stacked, params, default=False)
  leaves, treedef = jax.tree.flatten(params)
  for i in (i for i, many in enumerate(is_stacked) if many):
    if not leaves[i].shape:
      raise ValueError("stacked: a scalar has no first dim to count layers")
    leaves[i] = jax.ShapeDtypeStruct(leaves[i].shape[1:], leaves[i].dtype)
  chosen = flags_of(mask, treedef.unflatten(leaves), default=True)
  return [Layer(*flags) for flags in zip(chosen, is_stacked, strict=True)]


def map_layers(
  outputs: int, function: Callable[..., Any], params: Any, mask: Any, stacked: Any, *trees: Any
) -> list[Any]:
  """Trees like the parameters, one for each value that `function` gives for a leaf.

  Args:
    outputs: how many values.
    function: (layer, leaf of `params`, leaf of each of `trees`) -> values.
    params: arrays, or anything with shape and dtype.
    mask: as of `layers_of`.
    stacked: likewise.
    trees: like the parameters.
  """
  leaves, treedef = jax.tree.flatten(params)
  columns = [treedef.flatten_up_to(tree) for tree in trees]
  rows = zip(layers_of(params, mask, stacked), leaves, *columns, strict=True)
  values = [function(*row) for row in rows]
  return [treedef.unflatten([row[i] for row in values]) for i in range(outputs)]


def flags_of(mask: Mask | Any | None, params: Any, *, default: bool) -> list[bool]:
  """A bool for each leaf, `default` where there is no mask."""
  mask = including(mask) if isinstance(mask, str) else mask
  if mask is None:
    return [default] * len(jax.tree.leaves(params))
  if isinstance(mask, bool | jax.Array):
    why = "was called as a schedule by optax.inject_hyperparams"
    raise invalid("mask or stacked", ..., why, "add static_args=('mask', 'stacked')")
  tree = mask(params) if callable(mask) else mask
  return [bool(flag) for flag in jax.tree.leaves(jax.tree.broadcast(tree, params))]


def wide(dtype: Any) -> Any:
  """The dtype that norms and states have: float32 at least."""
  return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def is_injected(value: Any) -> bool:
  """True for a number of `optax.inject_hyperparams`, which a branch cannot read."""
  return isinstance(value, jax.Array)


def default_float() -> Any:
  """The dtype of a rate: float32, or float64 where JAX has it enabled."""
  return jnp.dtype(jax.dtypes.canonicalize_dtype(float))


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """`tx` on float32 at least, whatever the parameters are; it needs parameters.

  Under standard promotion, which optax's own transformations expect.
  """

  def widen(tree: Any):
    return jax.tree.map(lambda x: x.astype(wide(x.dtype)), tree)

  def init(params: Any):
    return tx.init(widen(params))

  def update(updates: Any, state: Any, params: Any = None):
    if params is None:
      raise ValueError("decay needs parameters: tx.update(grads, state, params)")
    with jax.numpy_dtype_promotion("standard"):
      steps, state = tx.update(widen(updates), state, widen(params))
    return jax.tree.map(lambda s, w: s.astype(w.dtype), steps, params), state

  return optax.GradientTransformation(init, update)


def add_decayed_weights(
  weight_decay: float, mask: Mask | None = "kernels", stacked: Mask | None = None
) -> optax.GradientTransformation:
  """`optax.add_decayed_weights` on the leaves of a mask that knows stacked layers.

  Args:
    weight_decay: wd; wd w is added.
    mask: params -> bool per leaf, or its name; None: everywhere.
    stacked: params -> bool per leaf: its first dim counts layers. None: none is.
  """

  def chosen(params: Any) -> Any:
    return map_layers(1, lambda layer, _: (layer.chosen,), params, mask, stacked)[0]

  return optax.add_decayed_weights(weight_decay, mask=chosen)


def layer_norm(x: jax.Array, layer: Layer) -> jax.Array:
  """Euclidean norm of each layer, of the dims [] or [layers, 1, 1, ...].

  Sums over dims, not over a flattened copy: a sharded array stays where it is and
  only the sums cross the network. x is first divided by a power of 2 near its
  largest magnitude: in float32, squares of 1e-24 would be 0 and the layer's ratio
  1, squares of 1e20 infinite and its ratio 0. A power of 2 costs no digit. The
  norm is 0 for zeros only; infinite or NaN where x has such a value.
  """
  dims = tuple(range(1 if layer.stacked else 0, x.ndim))
  largest = jnp.max(jnp.abs(x), axis=dims, keepdims=layer.stacked, initial=0)
  # Not beyond what has a normal inverse, and 0 where there is no exponent.
  limit = jnp.finfo(x.dtype).maxexp - 28
  exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
  exponent = jnp.clip(exponent, -limit, limit)
  scaled = x * jnp.ldexp(jnp.ones_like(largest), -exponent)
  squares = jnp.sum(scaled * scaled, axis=dims, keepdims=layer.stacked)
  return jnp.ldexp(jnp.sqrt(squares), exponent)


class TrustRatios(NamedTuple):
  """The trust ratios of the last step, inside an optimizer's state.

  Attributes:
    tree: like the parameters: float32 [] or, for stacked layers, [layers], all 1
      before the first step; `optax.MaskedNode` for leaves that have none.
  """

  tree: Any


def initial_ratios(params: Any, mask: Any, stacked: Any) -> TrustRatios:
  """Ones for every chosen layer."""

  def ones(layer: Any, leaf: Any):
    shape = leaf.shape[:1] if layer.stacked else ()
    return (jnp.ones(shape, jnp.float32) if layer.chosen else optax.MaskedNode(),)

  return TrustRatios(*map_layers(1, ones, params, mask, stacked))


def kept(ratio: jax.Array) -> jax.Array:
  """As `TrustRatios` keeps a ratio of any float dtype and dims [] or [layers, 1, …]."""
  return (ratio.reshape(-1) if ratio.ndim else ratio).astype(jnp.float32)


def trust_ratios(opt_state: Any) -> dict[str, jax.Array]:
  """The trust ratios of the last step, out of any optax state that holds them.

  Args:
    opt_state: of `lars` or `lamb`, chained, masked or alone; global arrays.

  Returns:
    float32 by the path of the layer, "/" between names: [], or [layers] for
    stacked ones. A leaf that is excluded is not there.

  Example:
    >>> head = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    >>> trust_ratios(lars(0.1).init({"head": head}))
    {'head/kernel': Array(1., dtype=float32)}
  """
  nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, TrustRatios))
  trees = [node.tree for node in nodes if isinstance(node, TrustRatios)]
  leaves = [pair for tree in trees for pair in jax.tree.leaves_with_path(tree)]
  return {path_name(path): ratio for path, ratio in leaves}
