"""Layers of layer-wise optimizers: their norms and trust ratios.

A layer is a leaf of the parameters or, if layers are stacked for a scan, one slice of a
leaf along its first dim. Norms and states have at least float32 for any dtype of the
parameters; float64 stays float64.
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
  """Flags of a leaf.

  Attributes:
    chosen: the mask includes the leaf: it has decay, and trust ratios if the optimizer
      uses them.
    stacked: the first dim of the leaf counts layers.
  """

  chosen: bool
  stacked: bool


def layers_of(params: Any, mask: Mask | Any, stacked: Mask | Any) -> list[Layer]:
  """Return a `Layer` for each leaf, in the order of `jax.tree.leaves`.

  Args:
    params: arrays, or objects with shape and dtype.
    mask: params -> bool per leaf, or a tree of bools or a prefix of it; None means all leaves
      are chosen. The mask sees stacked leaves without their first dim, so that `kernels`
      excludes stacked biases.
    stacked: the stacked leaves, given as for `mask`; None means that no leaf is stacked.

  Raises:
    ValueError: a stacked leaf is a scalar.
  """
  is_stacked = flags_of(stacked, params, default=False)
  leaves, treedef = jax.tree.flatten(params)
  for i in (i for i, many in enumerate(is_stacked) if many):
    if not leaves[i].shape:
      raise ValueError("stacked selects a scalar, which has no layer dimension; exclude it")
    leaves[i] = jax.ShapeDtypeStruct(leaves[i].shape[1:], leaves[i].dtype)
  chosen = flags_of(mask, treedef.unflatten(leaves), default=True)
  return [Layer(*flags) for flags in zip(chosen, is_stacked, strict=True)]


def map_layers(
  outputs: int, function: Callable[..., Any], params: Any, mask: Any, stacked: Any, *trees: Any
) -> list[Any]:
  """Map a function over leaves and return one tree for each of its results.

  Args:
    outputs: number of results of the function.
    function: (layer, leaf of `params`, leaf of each of `trees`) -> results.
    params: arrays, or objects with shape and dtype.
    mask: the chosen leaves, as in `layers_of`.
    stacked: the stacked leaves, as in `layers_of`.
    trees: trees with the structure of the parameters.
  """
  leaves, treedef = jax.tree.flatten(params)
  columns = [treedef.flatten_up_to(tree) for tree in trees]
  rows = zip(layers_of(params, mask, stacked), leaves, *columns, strict=True)
  values = [function(*row) for row in rows]
  return [treedef.unflatten([row[i] for row in values]) for i in range(outputs)]


def flags_of(mask: Mask | Any | None, params: Any, *, default: bool) -> list[bool]:
  """Return a bool for each leaf; `default` if the mask is None."""
  mask = including(mask) if isinstance(mask, str) else mask
  if mask is None:
    return [default] * len(jax.tree.leaves(params))
  if isinstance(mask, bool | jax.Array):
    problem = "was called as a schedule by optax.inject_hyperparams"
    raise invalid("mask or stacked", ..., problem, "add static_args=('mask', 'stacked')")
  tree = mask(params) if callable(mask) else mask
  return [bool(flag) for flag in jax.tree.leaves(jax.tree.broadcast(tree, params))]


def matrix_labels(
  name: str, mask: Mask | None, stacked: Mask | None, by_adam: Mask | None
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
  """Return the labels of an optimizer of matrices and its mask of weight decay.

  Args:
    name: label of the leaves that it updates: matrices or, if stacked, stacks of matrices.
    mask: the leaves that it may update, as in `layers_of`.
    stacked: the stacked leaves, as in `layers_of`.
    by_adam: the leaves of `mask` with the label "adam", given as for `mask`; None means none.

  Returns:
    params -> `name` or "adam" per leaf, for `optax.partition`; params -> bool per leaf, True
    for all matrices of `mask`.
  """

  def is_matrix(layer: Layer, leaf: Any) -> bool:
    return layer.chosen and leaf.ndim > 1 + layer.stacked

  def decays(params: Any):
    return map_layers(1, lambda *leaf: (is_matrix(*leaf),), params, mask, stacked)[0]

  def labels(params: Any):
    outer = flags_of(by_adam, params, default=False)
    outer = jax.tree.structure(params).unflatten(outer)

    def label(layer: Layer, leaf: Any, is_outer: bool):
      return (name if is_matrix(layer, leaf) and not is_outer else "adam",)

    return map_layers(1, label, params, mask, stacked, outer)[0]

  return labels, decays


def wide(dtype: Any) -> Any:
  """Return the dtype of norms and states: at least float32."""
  return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def is_injected(value: Any) -> bool:
  """Return whether `optax.inject_hyperparams` made a number an array.

  Python's `if` cannot test an array that is traced.
  """
  return isinstance(value, jax.Array)


def default_float() -> Any:
  """Return the dtype of learning rates: float32, or float64 if JAX has x64 enabled."""
  return jnp.dtype(jax.dtypes.canonicalize_dtype(float))


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """Run a transformation in at least float32 for any dtype of the parameters.

  Its update requires `params`. Standard dtype promotion is enabled, which optax's own
  transformations need.
  """

  def widen(tree: Any):
    return jax.tree.map(lambda x: x.astype(wide(x.dtype)), tree)

  def init(params: Any):
    return tx.init(widen(params))

  def update(updates: Any, state: Any, params: Any = None):
    if params is None:
      raise ValueError("params=None: call tx.update(grads, state, params)")
    with jax.numpy_dtype_promotion("standard"):
      steps, state = tx.update(widen(updates), state, widen(params))
    return jax.tree.map(lambda s, w: s.astype(w.dtype), steps, params), state

  return optax.GradientTransformation(init, update)


def add_decayed_weights(
  weight_decay: float, mask: Mask | None = "kernels", stacked: Mask | None = None
) -> optax.GradientTransformation:
  """`optax.add_decayed_weights` with a mask that supports stacked layers.

  Args:
    weight_decay: weight decay wd; wd w is added to the updates.
    mask: params -> bool per leaf, or a name or pattern of `including`; None means all leaves.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      layers. None means that no leaf is stacked.
  """

  def chosen(params: Any) -> Any:
    return map_layers(1, lambda layer, _: (layer.chosen,), params, mask, stacked)[0]

  return optax.add_decayed_weights(weight_decay, mask=chosen)


def layer_norm(x: jax.Array, layer: Layer) -> jax.Array:
  """Return the Euclidean norm of each layer, [] or [layers, 1, 1, ...].

  The sum runs over dims instead of a flattened copy, so that a sharded array stays in
  place and only sums cross the network. x is first divided by a power of 2 near its
  largest magnitude, which is exact. Otherwise squares of 1e-24 would underflow in float32
  (ratio 1) and squares of 1e20 would overflow (ratio 0). The norm is 0 only if all values
  are 0, and it is infinite or NaN if x has such a value.
  """
  dims = tuple(range(1 if layer.stacked else 0, x.ndim))
  largest = jnp.max(jnp.abs(x), axis=dims, keepdims=layer.stacked, initial=0)
  # The exponent is limited so that the inverse is a normal number; it is 0 for Inf and NaN.
  limit = jnp.finfo(x.dtype).maxexp - 28
  exponent = jnp.where(jnp.isfinite(largest), jnp.frexp(largest)[1], 0)
  exponent = jnp.clip(exponent, -limit, limit)
  scaled = x * jnp.ldexp(jnp.ones_like(largest), -exponent)
  squares = jnp.sum(scaled * scaled, axis=dims, keepdims=layer.stacked)
  return jnp.ldexp(jnp.sqrt(squares), exponent)


class TrustRatios(NamedTuple):
  """Trust ratios of the last step, a part of an optimizer state.

  Attributes:
    tree: a tree like the parameters: float32 [] or, for stacked layers, [layers], all 1
      before the first step; `optax.MaskedNode` for leaves without a ratio.
  """

  tree: Any


def initial_ratios(params: Any, mask: Any, stacked: Any) -> TrustRatios:
  """Return trust ratios of 1 for every chosen layer."""

  def ones(layer: Any, leaf: Any):
    shape = leaf.shape[:1] if layer.stacked else ()
    return (jnp.ones(shape, jnp.float32) if layer.chosen else optax.MaskedNode(),)

  return TrustRatios(*map_layers(1, ones, params, mask, stacked))


def kept(ratio: jax.Array) -> jax.Array:
  """Convert a ratio [] or [layers, 1, ...] to the dtype and dims of `TrustRatios`."""
  return (ratio.reshape(-1) if ratio.ndim else ratio).astype(jnp.float32)


def trust_ratios(opt_state: Any) -> dict[str, jax.Array]:
  """Return the trust ratios of the last step from any optax state that contains them.

  Args:
    opt_state: a state of `lars` or `lamb`, alone or chained or masked; global arrays.

  Returns:
    Ratios by the path of the leaf, with "/" between names: float32 [], or [layers] for
    stacked layers. Leaves without a ratio are left out.

  Example:
    >>> head = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    >>> trust_ratios(lars(0.1).init({"head": head}))
    {'head/kernel': Array(1., dtype=float32)}
  """
  nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, TrustRatios))
  trees = [node.tree for node in nodes if isinstance(node, TrustRatios)]
  leaves = [pair for tree in trees for pair in jax.tree.leaves_with_path(tree)]
  return {path_name(path): ratio for path, ratio in leaves}
