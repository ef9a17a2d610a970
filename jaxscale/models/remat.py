"""Rematerialisation: the values that are stored for the backward pass.

`REMAT` names the policies for a layer of a stack. A loop over layers always stores the input of
every layer, b = rows * tokens * width numbers. The policies store and recompute
(`jax.ad_checkpoint.print_saved_residuals`; for as many heads of keys as of queries, and MLPs of
the usual size):

    none      stores about 30 b, and with XLA's attention its weights, rows * heads *
              tokens^2 float32 numbers; recomputes nothing
    dots_attention
              stores 11 b: the products with weights and the output of attention, with one
              float32 number per query and head. Norms and activations are recomputed,
              without communication; XLA's attention also recomputes its weights
    dots      stores 9 or 10 b: the products with weights. Attention is recomputed, too
    branches  stores 2 b: also the output of attention. The layer is recomputed except
              for the last product of each branch, without communication
    full      stores b. The layer is recomputed except for its last product: almost a
              third more work per step. The sum at the end of attention is
              communicated again; the sum at the end of the layer is not

    offload   like full, but b is in host memory: the inputs of layers are copied to the
              host and back during computation

If a layout gathers parameters inside the layer, all policies except "none" gather them
again.

Policies identify values by names (`jax.ad_checkpoint.checkpoint_name`): `PRODUCT` for products
with weights, `BRANCH` for the output of `stack.rejoin`, `INPUT` for the input of a layer. A
kernel of attention gives the name `ATTENTION` to its output and to all else that its backward
pass reads except queries, keys and values, inside its derivative's forward rule: then it is not
called again. JAX's call of cuDNN, which has no such names, is found by its primitive.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import eval_jaxpr

from jaxscale.errors import invalid
from jaxscale.models.attention import ATTENTION
from jaxscale.models.linear import PRODUCT
from jaxscale.models.model_fns import ModelFns, init_shapes

Layer = Callable[..., jax.Array]  # (one layer's params, h, *packing of the rows) -> h

BRANCH = "branch"
INPUT = "input"

_keep = jax.checkpoint_policies
_products = _keep.save_only_these_names(PRODUCT, BRANCH, ATTENTION)


def _products_and_attention(primitive: Any, *values: Any, **params: Any) -> Any:
  """Policy that stores products with weights and all that kernels of attention return."""
  return "dot_product_attention_fwd" in primitive.name or _products(primitive, *values, **params)


# Policies of JAX by name, from the most that is stored to the least; None stores all.
REMAT: dict[str, Any] = {
  "none": None,
  "dots_attention": _products_and_attention,
  "dots": _keep.save_only_these_names(PRODUCT, BRANCH),
  "branches": _keep.save_only_these_names(BRANCH),
  "full": _keep.nothing_saveable,
  "offload": _keep.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[INPUT],
    offload_src="device",
    offload_dst="pinned_host",
  ),
}


def with_remat(layer: Layer, remat: str, *, in_loop: bool = True, gathers: bool = False) -> Layer:
  """Apply a policy to a layer.

  Args:
    layer: the function (parameters, h, *packing) -> h.
    remat: name of a policy in `REMAT`.
    in_loop: whether a loop calls the layer, which keeps the compiler from undoing the
      rematerialisation. Elsewhere a barrier does.
    gathers: whether the layer gathers its parameters. Only then does the barrier include
      them, since a barrier writes a copy of what the compiler has sliced from a stack.
  """
  if (policy := REMAT[remat]) is None:
    return layer

  def named(params: Any, h: jax.Array, *packing: jax.Array) -> jax.Array:
    return layer(params, checkpoint_name(h, INPUT), *packing)

  def run(params: Any, h: jax.Array, *packing: jax.Array) -> jax.Array:
    barred = False if in_loop else (gathers, *(True for _ in (h, *packing)))
    function = named if remat == "offload" else layer
    return jax.checkpoint(function, policy=policy, prevent_cse=barred)(params, h, *packing)

  return run


def functions_with_remat(model: ModelFns, remat: str, batch: Any) -> ModelFns:
  """Apply a policy to the blocks of a model that is not a stack.

  A block ends where the input of the next one has the name `INPUT`.

  Args:
    model: the model. For "dots" it also names its products and convolutions `PRODUCT`.
    remat: "none", "dots", "full" or "offload".
    batch: a batch, or its shapes, to find the names.

  Raises:
    ConfigError: the model has no such names, or the policy is one for stacks.
  """
  if remat == "none":
    return model
  if remat not in (known := ("dots", "full", "offload")):
    problem = "stores parts of a stack's layers, and this model is no stack"
    raise invalid("Layout.remat", repr(remat), problem, f"use none, {', '.join(known)}")
  arguments = *init_shapes(model.init), model.inputs(batch), False, None
  text = str(jax.make_jaxpr(model.apply, static_argnums=3)(*arguments))
  for name in (INPUT, *[PRODUCT] * (remat == "dots")):
    if f"[name={name}]" not in text:
      problem = f"needs values that the model names {name!r}, and it names none"
      fix = f"name them by jax.ad_checkpoint.checkpoint_name(x, {name!r}), or use 'none'"
      raise invalid("Layout.remat", repr(remat), problem, fix)

  def apply(params: Any, model_state: Any, inputs: Any, train: bool, keys: Any):
    def of_arrays(*arrays: Any):
      return model.apply(*arrays[:3], train, arrays[3])

    return _by_block(of_arrays, remat, params, model_state, inputs, keys)

  return model._replace(apply=apply)


def _by_block(function: Any, remat: str, *args: Any) -> Any:
  """Call a function, with a policy on each of its blocks.

  With one policy on the whole, the compiler would recompute and bring back from the host as
  early as it can. The barrier of each block waits for the gradient of its output.
  """
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  jaxpr = closed.jaxpr
  values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
  values |= zip(jaxpr.invars, jax.tree.leaves(args), strict=True)
  starts = [i for i, e in enumerate(jaxpr.eqns) if e.params.get("name") == INPUT]
  for start, stop in itertools.pairwise([0, *starts, len(jaxpr.eqns)]):
    block, rest = jaxpr.eqns[start:stop], jaxpr.eqns[stop:]
    made = dict.fromkeys(x for e in block for x in e.outvars)
    # The first is the input of the block.
    read = [x for x in _variables(block) if x not in made]
    later = {*_variables(rest), *filter(_is_variable, jaxpr.outvars)}
    outs = [x for x in made if x in later]
    part = jaxpr.replace(eqns=block, constvars=[], invars=read, outvars=outs)
    run = functools.partial(eval_jaxpr, part, ())
    is_moved = remat == "offload" and start in starts
    run = _offloaded(run) if is_moved else jax.checkpoint(run, policy=REMAT[remat])
    values |= zip(outs, run(*(values[x] for x in read)), strict=True)
  results = [values[x] if _is_variable(x) else x.val for x in jaxpr.outvars]
  return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _offloaded(block: Any) -> Any:
  """Store the first argument of a block on the host, and recompute the block from it.

  The barriers make outputs wait until the copy to the host is done, and the copy back for
  the gradients of the outputs. Without them the compiler does both just before they are needed.
  """

  def forward(x: jax.Array, *others: Any):
    outs = block(x, *others)
    host = jax.device_put(x, jax.memory.Space.Host)
    return lax.optimization_barrier((outs, (host, others)))

  def backward(kept: Any, grads: Any):
    (host, others), grads = lax.optimization_barrier((kept, grads))
    x = jax.device_put(host, jax.memory.Space.Device)
    return jax.vjp(block, x, *others)[1](grads)

  call = jax.custom_vjp(block)
  call.defvjp(forward, backward)
  return call


def _variables(equations: Any) -> list[Any]:
  """Return the variables that equations read, each once."""
  return list(dict.fromkeys(x for e in equations for x in e.invars if _is_variable(x)))


def _is_variable(x: Any) -> bool:
  return not hasattr(x, "val")  # a literal has one
