"""FSDP: gather parameters from their shards, and reduce-scatter their gradients.

For a parameter that is sharded along `fsdp`:

    forward     w = all_gather(shard)                    over `fsdp`
    backward    g_shard = psum(reduce_scatter(g))        over `fsdp`, then slow axes

In the body of a scan over layers, the gather runs layer by layer, and so do the
reductions in the backward scan: the reduce-scatter over `fsdp` (arXiv:1910.02054,
section 5: ZeRO's stages 2 and 3), and the sum over the slow axes between the groups of
hybrid sharding. A custom derivative keeps them in the parameter's dtype, float32, for any
dtype of the layer, or rounds them to `Gather.reduce_dtype`. JAX's own derivative would sum in
the dtype of the cast.

With ZeRO-2 every device already has the full parameter. It is passed as `ShardedAndFull`,
together with the shard for which the gradient is computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.collectives import vary
from jaxscale.collectives.typed import varying
from jaxscale.models.float8 import MAXIMA, rounded_kernel, values

FSDP, KERNEL = "fsdp", "kernel"
GATHERED = "gathered"  # checkpoint name of gathered parameters, for remat policies


@dataclasses.dataclass(frozen=True)
class Gather:
  """Description of one parameter's gather; a leaf of trees like the parameters.

  Attributes:
    scatter: dim along which the gradient is split over `fsdp`; None means that it is not split.
    is_sharded: whether this dim of the parameter is also split between steps.
    sum_in_backward: further axes over which the gradient is summed in the backward pass.
    sum_in_exchange: axes over which the gradient is summed by the exchange.
    dtype: dtype to which the parameter is rounded before it is sent; None means no rounding.
      The result has the parameter's own dtype, so that its gradient keeps that dtype;
      compilers remove the cast back to the dtype of the layer.
    reduce_dtype: dtype to which gradients are rounded before the backward pass sums them over
      devices; None means no rounding. The sum has the parameter's dtype.
  """

  scatter: int | None = None
  is_sharded: bool = False
  sum_in_backward: tuple[str, ...] = ()
  sum_in_exchange: tuple[str, ...] = ()
  dtype: Any = None
  reduce_dtype: Any = None

  def for_layer(self) -> Gather:
    """Return the gather of one layer of a parameter whose first dim counts layers."""
    return dataclasses.replace(self, scatter=None if self.scatter is None else self.scatter - 1)


class ShardedAndFull(NamedTuple):
  """A device's shard, for which gradients are computed, and the full parameter."""

  shard: Any
  full: Any


def gather_params(params: Any, gathers: Any) -> Any:
  """Gather the full parameters from shards, inside `shard_map`.

  Args:
    params: a tree of this device's shards, or of `ShardedAndFull`.
    gathers: a `Gather` for each parameter.
  """

  def is_whole(x: Any):
    return isinstance(x, ShardedAndFull) or (isinstance(x, dict) and MAXIMA in x)

  def gather(w: Any, how: Any):
    if not isinstance(w, dict):
      return _gather(w, how)
    # A product in FP8 uses the kernel as it is sent.
    rest = {name: x for name, x in w.items() if name not in (KERNEL, MAXIMA)}
    kernel = _gather(w[KERNEL], how[KERNEL], w[MAXIMA])
    return w | gather_params(rest, {name: how[name] for name in rest}) | {KERNEL: kernel}

  return jax.tree.map(gather, params, gathers, is_leaf=is_whole)


def _gather(w: Any, how: Gather, maxima: jax.Array | None = None) -> jax.Array:
  shard, full = w if isinstance(w, ShardedAndFull) else (w, None)
  dim = how.scatter
  if dim is None and not how.sum_in_backward:
    return shard

  def forward(shard: jax.Array, full: jax.Array | None, maxima: jax.Array | None):
    axes = how.sum_in_backward + ((FSDP,) if dim is not None else ())
    if full is not None or not how.is_sharded:
      # The result must vary over the same axes as the shard, which gets the gradient.
      out = vary(shard if full is None else full, axes + varying(shard))
    else:
      assert dim is not None
      sent, scale = shard if how.dtype is None else shard.astype(how.dtype), None
      if maxima is not None:
        sent, scale = rounded_kernel(shard, maxima)
      out = lax.all_gather(vary(sent, axes), FSDP, axis=dim, tiled=True)
      out = out.astype(shard.dtype) if scale is None else values(out, scale, shard.dtype)
    # Also named inside, because a policy sees this function as one operation and can
    # identify it only by its contents.
    return checkpoint_name(out, GATHERED)

  def backward(_: None, g: jax.Array):
    part = g if how.reduce_dtype is None else g.astype(how.reduce_dtype)
    if dim is not None:
      part = lax.psum_scatter(part, FSDP, scatter_dimension=dim, tiled=True)
    total = lax.psum(part, how.sum_in_backward) if how.sum_in_backward else part
    return total.astype(g.dtype), None, None

  gather = jax.custom_vjp(forward)
  gather.defvjp(lambda *given: (gather(*given), None), backward)
  return checkpoint_name(gather(shard, full, maxima), GATHERED)


def local_shard(w: jax.Array, dim: int) -> jax.Array:
  """Return a device's shard along `fsdp` of a replicated parameter."""
  size, here = w.shape[dim] // lax.axis_size(FSDP), lax.axis_index(FSDP)
  return lax.dynamic_slice_in_dim(vary(w, (FSDP,)), here * size, size, dim)


# Cheap operations between the checkpoint name and the gather. They are always recomputed,
# because a policy would otherwise save their results.
_CASTS = ("convert_element_type", "pvary", "pcast")


def save_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
  """Remat policy that saves everything except gathered parameters.

  JAX's `save_anything_except_these_names` would save the array before it was named.
  """
  match primitive.name:
    case "name":
      return params["name"] != GATHERED
    case "custom_vjp_call":  # `gather` is identified by the name inside it
      return not any(eqn.params.get("name") == GATHERED for eqn in params["call_jaxpr"].jaxpr.eqns)
    case "all_gather":
      return FSDP not in params["axis_name"]
    case name:
      return name not in _CASTS


def with_gathered_params(function: Any, gathers: Any) -> Any:
  """Turn a function of full parameters into a function of a device's shards.

  Use it for models that are not a stack of layers. All parameters are gathered at the
  start, and again for the backward pass if the compiler does not keep them.

  Args:
    function: a `step.LossFn` or `step.EvalFn`, whose first argument is the parameters.
    gathers: a `Gather` for each parameter.
  """

  def on_shards(params: Any, *args: Any):
    return function(gather_params(params, gathers), *args)

  if not any(how.is_sharded for how in jax.tree.leaves(gathers)):
    return on_shards  # XLA does not optimize convolutions in jax.checkpoint for CPUs.
  return jax.checkpoint(on_shards, policy=save_all_but_gathered)
