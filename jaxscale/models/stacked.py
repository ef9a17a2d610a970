"""A stack on one device: its layers in a scan, and what a layer keeps.

Layouts run the layers in their own ways; this is the plain one that they are
tested against, and what evaluation and sampling in a notebook call.

What a layer keeps for the backward pass is a policy by name, `REMAT`. The scan keeps
the input of every layer in any case, b = rows * tokens * width numbers. What JAX
keeps in all (`jax.ad_checkpoint.print_saved_residuals`; heads as many for keys as
for queries, MLPs of the usual size), and what it computes again:

    none      some 30 b, and with XLA's attention its scores of rows * heads *
              tokens^2 float32 numbers, three times; nothing is computed again
    dots      9 or 10 b: what products with weights give. Norms, activations and
              attention are computed again; nothing is communicated again
    branches  2 b: what attention added to the stream. The layer is computed again
              but for the last product of each branch; nothing is communicated again
    full      b. The layer is computed again but for its last product: close to a
              third more work a step. The sum at the end of attention is
              communicated again; that at the end of the layer is in the next input

    offload   as full, but b waits in the host's memory: what came into a layer is
              copied there and back, while others compute

Gathering a layer's parameters is no product: where a layout does it inside of the
layer, each but "none" gathers again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.linear import PRODUCT
from jaxscale.models.stack import BRANCH, Ops, Stack, Totals

Layer = Callable[[Any, jax.Array], jax.Array]  # (one layer's params, h) -> h

_keep = jax.checkpoint_policies


def _remat(policy: Any) -> Callable[[Layer], Layer]:
  # A scan keeps the compiler from undoing it by itself.
  return functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)


INPUT = "input"  # the name, for remat policies, of what comes into a layer


def _offload(layer: Layer) -> Layer:
  def named(params: Any, h: jax.Array) -> jax.Array:
    return layer(params, checkpoint_name(h, INPUT))

  policy = _keep.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[INPUT],
    offload_src="device",
    offload_dst="pinned_host",
  )
  return _remat(policy)(named)


# Name -> what makes a layer that keeps so much, to be run in a scan.
REMAT: dict[str, Callable[[Layer], Layer]] = {
  "none": lambda layer: layer,
  "dots": _remat(_keep.save_only_these_names(PRODUCT, BRANCH)),
  "branches": _remat(_keep.save_only_these_names(BRANCH)),
  "full": _remat(_keep.nothing_saveable),
  "offload": _offload,
}


def run(
  stack: Stack, params: Any, batch: Any, ops: Ops | None = None, *, remat: str = "none"
) -> Totals:
  """The totals of a batch, on one device.

  Args:
    stack: the model.
    params: as `stack.init` gives.
    batch: as the model takes.
    ops: what a layout replaces; None: one device's.
    remat: a name in `REMAT`.

  Returns:
    Totals as `stack.finish` has them; the gradient of "loss" is the training one.

  Example:
    >>> from jaxscale.models import make_transformer
    >>> stack = make_transformer(
    ...   vocab_size=256, num_layers=2, width=64, num_heads=4, hidden=128
    ... )
    >>> tokens = jnp.zeros((1, 8), jnp.int32)
    >>> totals = run(
    ...   stack, stack.init(jax.random.key(0)), {"tokens": tokens, "targets": tokens}
    ... )
    >>> int(totals["examples"])
    8
  """
  ops = ops or Ops()
  h = hidden_states(stack, params, batch, ops, remat=remat)
  return stack.finish(params["head"], h, batch, ops)


def hidden_states(
  stack: Stack, params: Any, batch: Any, ops: Ops | None = None, *, remat: str = "none"
) -> jax.Array:
  """What the last layer gives, [rows, tokens, width]; arguments as of `run`."""
  ops = ops or Ops()
  layer = REMAT[remat](lambda p, h: stack.layer(p, h, ops))
  h = stack.embed(params["embed"], batch, ops)
  h, _ = jax.lax.scan(lambda h, p: (layer(p, h), None), h, params["layers"])
  return h


def logits(stack: Stack, params: Any, batch: Any) -> jax.Array:
  """The scores of all classes, float32 [rows, (tokens,) classes]."""
  return stack.logits(params["head"], hidden_states(stack, params, batch))
