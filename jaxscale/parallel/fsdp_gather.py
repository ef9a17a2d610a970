"""FSDP's gathers: a parameter from its shards, and its gradient back to them.

With a parameter that is sharded along `fsdp`,

    forward     w = all_gather(shard)                    over `fsdp`
    backward    g_shard = psum(reduce_scatter(g))        over `fsdp`, then slow axes

Applied to one layer's parameters in the body of a scan, the gather runs layer by
layer, and so do the reductions in the backward scan: over `fsdp` the reduce-scatter
(arXiv:1910.02054, section 5: ZeRO's stages 2 and 3), over the slow axes the sum
that hybrid sharding needs between groups of devices. A hand-written derivative has
them in the dtype of the parameter, float32, whatever the layer computes in; JAX's
own would sum what the cast gives.

Under ZeRO-2 every device has the full parameter already: it comes as
`ShardedAndFull`, with the shard that the derivative is taken by.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.collectives import vary
from jaxscale.collectives.typed import varying

FSDP = "fsdp"
GATHERED = "gathered"  # the name of gathered parameters, to remat policies


@dataclasses.dataclass(frozen=True)
class Gather:
  """Description of one parameter's gather; a leaf of trees like the parameters.

  Attributes:
    scatter: dim along which its gradient is split over `fsdp`; None: it is not.
    is_sharded: whether that dim of the parameter is split between steps as well.
    sum_in_backward: further axes that the gradient is summed over in the backward
      pass.
    sum_in_exchange: axes that it is summed over by the exchange that follows.
    dtype: that it is rounded to before it is sent; None: as it is. It comes out in
      its own dtype all the same, so that its gradient keeps that dtype; compilers
      drop the cast back to what the layer computes in.
  """

  scatter: int | None = None
  is_sharded: bool = False
  sum_in_backward: tuple[str, ...] = ()
  sum_in_exchange: tuple[str, ...] = ()
  dtype: Any = None

  def for_layer(self) -> Gather:
    """Return the gather of one layer, where the parameter's first dim counts layers."""
    scatter = None if self.scatter is None else self.scatter - 1
    return dataclasses.replace(self, scatter=scatter)


class ShardedAndFull(NamedTuple):
  """A device's shard, to differentiate by, and the full parameter."""

  shard: Any
  full: Any


def gather_params(params: Any, gathers: Any) -> Any:
  """Parameters as a device computes with them, inside `shard_map`.

  Args:
    params: a tree of this device's shards, or of `ShardedAndFull`.
    gathers: a `Gather` for each.
  """

  def is_pair(x: Any):
    return isinstance(x, ShardedAndFull)

  return jax.tree.map(_gather, params, gathers, is_leaf=is_pair)


def _gather(w: Any, how: Gather) -> jax.Array:
  shard, full = w if isinstance(w, ShardedAndFull) else (w, None)
  dim = how.scatter
  if dim is None and not how.sum_in_backward:
    return shard

  def forward(shard: jax.Array, full: jax.Array | None):
    axes = how.sum_in_backward + ((FSDP,) if dim is not None else ())
    if full is not None or not how.is_sharded:
      # As varying as the shard is, which the gradient is of.
      out = vary(shard if full is None else full, axes + varying(shard))
    else:
      assert dim is not None
      sent = vary(shard if how.dtype is None else shard.astype(how.dtype), axes)
      out = lax.all_gather(sent, FSDP, axis=dim, tiled=True).astype(shard.dtype)
    # Named in here as well: to a policy this is one operation, known by what is in it.
    return checkpoint_name(out, GATHERED)

  def backward(_: None, g: jax.Array):
    if dim is not None:
      g = lax.psum_scatter(g, FSDP, scatter_dimension=dim, tiled=True)
    return lax.psum(g, how.sum_in_backward) if how.sum_in_backward else g, None

  gather = jax.custom_vjp(forward)
  gather.defvjp(lambda *given: (gather(*given), None), backward)
  return checkpoint_name(gather(shard, full), GATHERED)


def local_shard(w: jax.Array, dim: int) -> jax.Array:
  """A device's part along `fsdp` of a parameter that every device has in full."""
  size, here = w.shape[dim] // lax.axis_size(FSDP), lax.axis_index(FSDP)
  return lax.dynamic_slice_in_dim(vary(w, (FSDP,)), here * size, size, dim)


# Cheap enough to be made again, wherever they are: what is between the name and the
# gather, which a policy would keep otherwise.
_CASTS = ("convert_element_type", "pvary", "pcast")


def save_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
  """A remat policy: all is kept but gathered parameters.

  The one place that looks at primitives. `save_anything_except_these_names` would
  keep the array that the name was given to.
  """
  match primitive.name:
    case "name":
      return params["name"] != GATHERED
    case "custom_vjp_call":  # `gather`, by the name inside it
      eqns = params["call_jaxpr"].jaxpr.eqns
      return not any(eqn.params.get("name") == GATHERED for eqn in eqns)
    case "all_gather":
      return FSDP not in params["axis_name"]
    case name:
      return name not in _CASTS


def with_gathered_params(function: Any, gathers: Any) -> Any:
  """A function of full parameters as one of a device's shards.

  For models that are not a stack of layers: everything is gathered at the start, and
  again for the backward pass, when the compiler wants it.

  Args:
    function: a `step.LossFn` or `step.EvalFn`; parameters come first.
    gathers: a `Gather` for each parameter.
  """

  def on_shards(params: Any, *args: Any):
    return function(gather_params(params, gathers), *args)

  return jax.checkpoint(on_shards, policy=save_all_but_gathered)
