"""How a parameter comes to the device that computes with it, and its gradient back.

With a parameter that is split along `fsdp`,

    forward     w = all_gather(shard)                    over `fsdp`
    backward    g_shard = psum(reduce_scatter(g))        over `fsdp`, then slow axes

Applied to one layer's parameters in the body of a scan, the gather runs layer by
layer, and so do the reductions in the backward scan: over `fsdp` the reduce-scatter
(arXiv:1910.02054, section 5: ZeRO's stages 2 and 3), over the slow axes the sum
that hybrid sharding needs between groups of devices. A hand-written derivative has
them in the dtype of the parameter, float32, whatever the layer computes in; JAX's
own would sum what the cast gives.

In stage 2 the whole parameter is on every device already: it stands `Beside` the
shard that the derivative is taken by.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.collectives import vary
from jaxscale.collectives.typed import varying

ENTERED = "entered"  # the name of what came in, to remat policies
FSDP = "fsdp"


@dataclasses.dataclass(frozen=True)
class Entry:
  """How one parameter enters; a leaf of trees shaped like the parameters.

  Attributes:
    scatter: dim along which its gradient is split over `fsdp`; None: it is not.
    gathers: whether that dim is split between steps as well.
    inside: further axes that the gradient is summed over in the backward pass.
    after: axes that it is summed over by the exchange that follows.
    dtype: that it is rounded to before it is sent; None: as it is. It comes out in
      its own dtype all the same, so that its gradient does not go by a narrower one;
      compilers drop the cast back to what the layer computes in.
  """

  scatter: int | None = None
  gathers: bool = False
  inside: tuple[str, ...] = ()
  after: tuple[str, ...] = ()
  dtype: Any = None

  def of_layer(self) -> Entry:
    """The entry of one layer, of a parameter whose first dim counts layers."""
    scatter = None if self.scatter is None else self.scatter - 1
    return dataclasses.replace(self, scatter=scatter)


class Beside(NamedTuple):
  """A device's shard, by which to differentiate, and the whole that it is of."""

  shard: Any
  whole: Any


def is_beside(x: Any) -> bool:
  """For `is_leaf` of tree functions."""
  return isinstance(x, Beside)


def enter(params: Any, entries: Any) -> Any:
  """Parameters as a device computes with them, inside `shard_map`.

  Args:
    params: a tree of this device's parts, or of `Beside`.
    entries: an `Entry` for each.
  """
  return jax.tree.map(_enter, params, entries, is_leaf=is_beside)


def _enter(w: Any, entry: Entry) -> jax.Array:
  shard, whole = w if is_beside(w) else (w, None)
  if entry.scatter is None and not entry.inside:
    return shard
  dim = entry.scatter

  @jax.custom_vjp
  def come(shard, whole):
    # Named in here as well: to a policy this is one operation, known by what is in it.
    return checkpoint_name(arrive(shard, whole), ENTERED)

  def arrive(shard, whole):
    inside = entry.inside + ((FSDP,) if dim is not None else ())
    if whole is not None or not entry.gathers:
      # As varying as the shard is, which the gradient is of.
      out = shard if whole is None else whole
      return vary(out, inside + varying(shard))
    assert dim is not None
    sent = shard if entry.dtype is None else shard.astype(entry.dtype)
    sent = vary(sent, inside)
    return lax.all_gather(sent, FSDP, axis=dim, tiled=True).astype(shard.dtype)

  def forward(shard, whole):
    return come(shard, whole), None

  def backward(_, g):
    if dim is not None:
      g = lax.psum_scatter(g, FSDP, scatter_dimension=dim, tiled=True)
    return lax.psum(g, entry.inside) if entry.inside else g, None

  come.defvjp(forward, backward)
  return checkpoint_name(come(shard, whole), ENTERED)


def own_shard(w: jax.Array, dim: int) -> jax.Array:
  """A device's part along `fsdp` of a parameter that is whole on all."""
  size = w.shape[dim] // lax.axis_size(FSDP)
  return lax.dynamic_slice_in_dim(
    vary(w, (FSDP,)), lax.axis_index(FSDP) * size, size, dim
  )


def keep_all_but_entered(primitive: Any, *_, **params: Any) -> bool:
  """A remat policy: all is kept but what entered, and what it was made of on the way.

  A policy that names it alone would keep the gathered array that the name was given
  to. Casts are cheap enough to be made again, wherever they are.
  """
  if primitive.name == "name":
    return params["name"] != ENTERED
  if primitive.name == "custom_vjp_call":
    eqns = params["call_jaxpr"].jaxpr.eqns
    return not any(eqn.params.get("name") == ENTERED for eqn in eqns)
  if primitive.name == "all_gather":
    return FSDP not in params["axis_name"]
  return primitive.name not in ("convert_element_type", "pvary", "pcast")


def entered(function: Any, entries: Any) -> Any:
  """A function of whole parameters as one of those that a device has.

  For models that are no stack of layers: everything is gathered at the start, and
  again for the backward pass, when the compiler wants it.

  Args:
    function: of a `step.LossFn` or `step.EvalFn`, whose first argument is the
      parameters.
    entries: an `Entry` a parameter.
  """

  def on_parts(params, *args):
    return function(enter(params, entries), *args)

  return jax.checkpoint(on_parts, policy=keep_all_but_entered)
