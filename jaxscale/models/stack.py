"""Models of stacked, equal layers, and rematerialisation policies.

A `Stack` is a model as a few pure functions, so that a layout can control its execution:
the code that runs the layers (a scan or a pipeline) decides how one layer's parameters
reach the device and which values are stored for the backward pass. Parameters are

    {"embed": ..., "layers": every leaf [layers, ...], "head": ...}

with kernels [in, out], so that every optimizer sees them as matrices.

The functions read sizes from their arguments, never from settings: if a device holds only
some of the heads, hidden units or classes, the same code computes its part. The few
operations that complete the parts, or otherwise depend on the sharding, are in `Ops`.
Their defaults are for one device.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models import float8
from jaxscale.models.attention import attention, document_positions
from jaxscale.models.cross_entropy import classify
from jaxscale.models.linear import linear, linear_sum
from jaxscale.models.remat import BRANCH, with_remat

Totals = dict[str, jax.Array]  # sums over examples, with their number: "examples"


class Ops(NamedTuple):
  """Operations of a model that depend on its sharding.

  A branch of a layer (attention, MLP) is `h + reduce(branch(enter(h)))`. The bias of a
  branch's last matrix must be added after `reduce`, since otherwise every device would
  add it.

  Attributes:
    enter: the residual stream on the device -> input of a branch. The values are
      normalised and float32, so that their gradients are summed in float32.
    reduce: a device's part of a branch -> the sum over all heads or hidden units. The
      part is not yet rounded to the dtype of activations.
    attend: attention, with the signature of `attention.attention`. `for_rows` sets the
      documents of packed rows.
    positions: number of tokens on the device -> their positions in the sequence, int32
      [tokens], or in their documents, int32 [rows, tokens].
    lookup: (table [rows, width], ids) -> rows of the table, [..., width].
    classify: losses and hits, with the signature of `classify`.
  """

  enter: Callable[[jax.Array], jax.Array] = lambda x: x
  reduce: Callable[[jax.Array], jax.Array] = lambda x: x
  attend: Callable[..., jax.Array] = attention
  positions: Callable[[int], jax.Array] = lambda n: jnp.arange(n, dtype=jnp.int32)
  lookup: Callable[[jax.Array, jax.Array], jax.Array] = lambda rows, ids: rows[ids]
  classify: Callable[..., tuple[jax.Array, jax.Array]] = classify


# Numbers of the documents in packed rows, and positions in them, int32 [rows, tokens].
PACKING = ("documents", "document_positions")


def is_packed(batch: Any) -> bool:
  """Return whether the rows of a batch are packed documents of tokens."""
  return "tokens" in batch and "documents" in batch


def with_positions(batch: Any) -> Any:
  """Add the "document_positions" to a batch of packed rows."""
  if not is_packed(batch):
    return batch
  return batch | {"document_positions": document_positions(batch["documents"])}


def packing_of(batch: Any) -> tuple[jax.Array, ...]:
  """Return the arrays `PACKING` of a batch from `with_positions`; () if it is not packed."""
  return tuple(batch[name] for name in PACKING) if is_packed(batch) else ()


def for_rows(ops: Ops, *packing: jax.Array) -> Ops:
  """Return operations for the layers of some rows.

  Args:
    ops: operations of a layout.
    packing: result of `packing_of` for the rows, with the tokens of `ops.positions`.
  """
  if not packing:
    return ops
  documents, positions = packing
  attend = functools.partial(ops.attend, documents=documents)
  return ops._replace(attend=attend, positions=lambda n: positions)


def rejoin(
  y: Any, p: Any, ops: Ops, activation: Callable[..., jax.Array] | None = None
) -> jax.Array:
  """Compute the last product of a branch, summed over devices.

  The result has the checkpoint name `BRANCH`, so that remat policies can store it and
  need not communicate again.

  Args:
    y: outputs of a device's heads or hidden units, [..., in]; or a tuple of the activation's
      arguments.
    p: parameters {"kernel": its rows for them, [in, width]}, maybe with the leaves of an
      adapter (`models.lora`).
    ops: operations, whose `reduce` is used.
    activation: function of y that returns the outputs. Only its arguments are stored for the
      backward pass, and the outputs are computed again.
  """
  dtype = jax.tree.leaves(y)[0].dtype
  total: Any = _product(y, p) if activation is None else _activated(activation, y, p)
  return checkpoint_name(ops.reduce(total).astype(dtype), BRANCH)


def _product(y: jax.Array, p: Any) -> jax.Array:
  total = linear_sum(y, p["kernel"], p.get(float8.MAXIMA))
  if "kernel_lora_a" in p:
    total = total + linear_sum(linear(y, p["kernel_lora_a"]), p["kernel_lora_b"])
  return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activated(activation, parts, p):
  return _product(activation(*parts), p)


def _activated_backward(activation, kept, g):
  # Without a loop, XLA may merge both computations and keep the result. A barrier would prevent
  # that, but in a loop it writes copies of the parts, which are slices of stacks.
  return jax.vjp(lambda parts, p: _product(activation(*parts), p), *kept)[1](g)


_activated.defvjp(lambda *args: (_activated(*args), args[1:]), _activated_backward)


def split_of_last(shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[str | None, ...]:
  """Return the mesh axes that split the last matrices of branches, [layers, in, out].

  Along `fsdp` it is the inputs, as for the other matrices: a reduce-scatter over the other dim
  would begin with a transposed copy of the float32 gradient. It is the outputs if `model` splits
  the inputs, or `fsdp` does not divide them.

  Args:
    shape: shape of the parameter.
    sizes: sizes of the mesh axes by name.

  Example:
    >>> split_of_last((4, 64, 32), {"fsdp": 8}), split_of_last((4, 64, 32), {"model": 2})
    (('stage', 'fsdp', None), ('stage', 'model', 'fsdp'))
  """
  if sizes.get("model", 1) > 1 or shape[1] % sizes.get("fsdp", 1):
    return "stage", "model", "fsdp"
  return "stage", "fsdp", None


def at_least_float32(x: jax.Array) -> jax.Array:
  """Cast half precision to float32; float64 stays float64."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def sum_totals(losses: jax.Array, hits: jax.Array, counts: jax.Array) -> Totals:
  """Return the totals of a batch over the losses and hits whose `counts` is True."""
  whole = {"accuracy": hits & counts, "examples": counts}
  sums = {name: flags.sum(dtype=jnp.int32) for name, flags in whole.items()}
  return {"loss": jnp.where(counts, losses, 0.0).sum()} | sums


class Stack(NamedTuple):
  """A model of stacked layers as pure functions.

  Attributes:
    init: key -> float32 params {"embed", "layers", "head"}.
    embed: (params["embed"], batch, ops) -> activations h, [rows, tokens, width].
    layer: (one layer's params, h, ops) -> h.
    finish: (head, h, batch, ops) -> totals: float32 sum "loss", int32 sums "accuracy"
      (hits) and "examples". The head is that of `head_of`. If the batch has a "mask" (bool
      [rows]), only rows with True count.
    logits: (head, h) -> float32 [rows, (tokens,) classes].
    num_layers: number of layers.
    tied: whether the head's kernel is the transposed table of the embedding,
      params["embed"]["table"], and params["head"] has none.
    has_lora: whether `layer` computes with adapters itself (`models.lora`): all its products
      with kernels are by `linear.dense` or `rejoin`.
    has_lookup: whether `embed` reads params["embed"]["table"] only by `ops.lookup` and rounds the
      rows to the dtype of activations. The table then need not be gathered.
    in_float8: whether the products of layers are in FP8, whose state is in the model state
      (`models.float8`).
  """

  init: Callable[[jax.Array], Any]
  embed: Callable[[Any, Any, Ops], jax.Array]
  layer: Callable[[Any, jax.Array, Ops], jax.Array]
  finish: Callable[[Any, jax.Array, Any, Ops], Totals]
  logits: Callable[[Any, jax.Array], jax.Array]
  num_layers: int
  tied: bool = False
  has_lora: bool = False
  has_lookup: bool = False
  in_float8: bool = False

  def head_of(self, part: Callable[[str], Any]) -> Any:
    """Return the parameters that `finish` and `logits` take.

    The gradient of a tied kernel is added to that of the table's lookups by autodiff. A
    pipeline needs no exchange of its own for it: all stages hold embedding and head, whose
    gradients are summed over the stages.

    Args:
      part: "embed" or "head" -> these full parameters.
    """
    head = part("head")
    return head | {"kernel": part("embed")["table"].T} if self.tied else head


def hidden_states(
  stack: Stack, params: Any, batch: Any, ops: Ops | None = None, *, remat: str = "none"
) -> jax.Array:
  """Return the output of the last layer, [rows, tokens, width].

  Args:
    stack: the model.
    params: parameters from `stack.init`.
    batch: the batch.
    ops: operations of a layout; None means operations of one device.
    remat: rematerialisation policy, a name in `remat.REMAT`.
  """
  ops = for_rows(ops or Ops(), *packing_of(with_positions(batch)))
  layer = with_remat(lambda p, h: stack.layer(p, h, ops), remat)
  h = stack.embed(params["embed"], batch, ops)
  h, _ = jax.lax.scan(lambda h, p: (layer(p, h), None), h, params["layers"])
  return h


def stack_logits(stack: Stack, params: Any, batch: Any, model_state: Any = ()) -> jax.Array:
  """Return the logits of all classes, float32 [rows, (tokens,) classes].

  Args:
    stack: the model.
    params: parameters from `stack.init`.
    batch: the batch.
    model_state: model state, with the maxima of products in FP8; () means no FP8.
  """
  params = float8.with_maxima(params, model_state)
  return stack.logits(stack.head_of(params.get), hidden_states(stack, params, batch))
