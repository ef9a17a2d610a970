"""Models whose layers are alike and stacked: what is common to all of them.

A `Stack` is a model in four pure functions, so that a layout can be put around it
from outside: who runs the layers (a scan, a pipeline) decides how the parameters of
one layer come to the device and what is kept for the backward pass. Parameters are

    {"embed": ..., "layers": every leaf [layers, ...], "head": ...}

with kernels [in, out], so that a matrix is a matrix to every optimizer.

The functions read sizes from the arrays they are given, never from a setting: where
a device holds some of the heads, hidden units or classes, the same code computes
its part. What then completes the parts, and anything else that depends on who
holds what, are the few operations in `Ops`. Their defaults are those of one device.

What a layer keeps for the backward pass is a policy by name, `REMAT`. A scan keeps
the input of every layer in any case, b = rows * tokens * width numbers. What JAX
keeps in all (`jax.ad_checkpoint.print_saved_residuals`; heads as many for keys as
for queries, MLPs of the usual size), and what it computes again:

    none      some 30 b, and with XLA's attention its weights, rows * heads *
              tokens^2 float32 numbers; nothing is computed again
    dots      9 or 10 b: the products with weights. Norms, activations and
              attention are computed again; nothing is communicated again
    branches  2 b: what attention added to the stream. The layer is computed again
              but for the last product of each branch; nothing is communicated again
    full      b. The layer is computed again but for its last product: close to a
              third more work per step. The sum at the end of attention is
              communicated again; that at the end of the layer is in the next input

    offload   as full, but b waits in the host's memory: the input of a layer is
              copied there and back, while others compute

Gathering a layer's parameters is not a product: where a layout does it inside of the
layer, each but "none" gathers again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.attention import attention
from jaxscale.models.linear import PRODUCT, linear, linear_sum

Totals = dict[str, jax.Array]  # sums over examples, with their number: "examples"
Layer = Callable[[Any, jax.Array], jax.Array]  # (one layer's params, h) -> h

# Names for remat policies: the output of `rejoin`, and the input of a layer.
BRANCH = "branch"
INPUT = "input"


def classify(
  h: jax.Array,
  kernel: jax.Array,
  bias: jax.Array | None,
  labels: jax.Array,
  *,
  num_classes: int,
  label_smoothing: float = 0.0,
  dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Cross entropy of a linear classifier, and whether its best class is the label.

  Args:
    h: [..., width].
    kernel: [width, classes], of which the last may be padding.
    bias: [classes] or None.
    labels: int [...], below `num_classes`.
    num_classes: how many classes there are without padding.
    label_smoothing: share of the target spread over all classes.
    dtype: of the product; None: that of h.

  Returns:
    losses: float32 [...].
    hits: bool [...].
  """
  logits = linear(h, kernel, dtype).astype(jnp.float32)
  if bias is not None:
    logits = logits + bias.astype(jnp.float32)
  logits = logits[..., :num_classes]
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  if label_smoothing:
    uniform = -jax.nn.log_softmax(logits).mean(axis=-1)
    losses = (1 - label_smoothing) * losses + label_smoothing * uniform
  return losses, logits.argmax(-1) == labels


class Ops(NamedTuple):
  """What depends on who holds which part of a model.

  A branch of a layer (attention, MLP) is `h + reduce(branch(enter(h)))`; a bias
  behind the branch's last matrix is added after `reduce`, or it would count once a
  device.

  Attributes:
    enter: what a branch reads, from what the residual stream holds: normalised, and
      float32, so that what flows back is summed in it.
    reduce: the sum over all heads or hidden units, from a device's part of it, which
      is not yet rounded to the dtype of activations.
    attend: as `attention.attention`.
    positions: number of tokens here -> int32 [tokens], their places in the sequence.
    lookup: (table [rows, width], ids) -> rows by their numbers, [..., width].
    classify: as `classify`.
  """

  enter: Callable[[jax.Array], jax.Array] = lambda x: x
  reduce: Callable[[jax.Array], jax.Array] = lambda x: x
  attend: Callable[..., jax.Array] = attention
  positions: Callable[[int], jax.Array] = lambda n: jnp.arange(n, dtype=jnp.int32)
  lookup: Callable[[jax.Array, jax.Array], jax.Array] = lambda rows, ids: rows[ids]
  classify: Callable[..., tuple[jax.Array, jax.Array]] = classify


def rejoin(y: jax.Array, kernel: jax.Array, ops: Ops) -> jax.Array:
  """A branch's end: its last product, summed over devices, under the name `BRANCH`.

  Rematerialisation can so keep what was communicated, and not communicate again.

  Args:
    y: what a device's heads or hidden units give, [..., in].
    kernel: their rows of it, [in, width].
    ops: whose `reduce` is used.
  """
  return checkpoint_name(ops.reduce(linear_sum(y, kernel)).astype(y.dtype), BRANCH)


def at_least_float32(x: jax.Array) -> jax.Array:
  """For what half precision is too coarse for; float64 stays float64."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def sum_totals(losses: jax.Array, hits: jax.Array, counts: jax.Array) -> Totals:
  """The totals of a batch; `counts` says which losses and hits count, all [...]."""
  whole = {"accuracy": hits & counts, "examples": counts}
  sums = {name: flags.sum(dtype=jnp.int32) for name, flags in whole.items()}
  return {"loss": jnp.where(counts, losses, 0.0).sum()} | sums


class Stack(NamedTuple):
  """A model of stacked layers as pure functions.

  Attributes:
    init: key -> params, float32: {"embed", "layers", "head"}.
    embed: (params["embed"], batch, ops) -> h [rows, tokens, width], activations.
    layer: (one layer's params, h, ops) -> h.
    finish: (params["head"], h, batch, ops) -> totals: float32 sum "loss", int32
      "accuracy" (hits) and "examples", over what counts in the batch: rows whose
      "mask" (bool [rows], where there is one) is True.
    logits: (params["head"], h) -> float32 [rows, (tokens,) classes].
    num_layers: how many.
  """

  init: Callable[[jax.Array], Any]
  embed: Callable[[Any, Any, Ops], jax.Array]
  layer: Callable[[Any, jax.Array, Ops], jax.Array]
  finish: Callable[[Any, jax.Array, Any, Ops], Totals]
  logits: Callable[[Any, jax.Array], jax.Array]
  num_layers: int


def _remat(policy: Any) -> Callable[[Layer], Layer]:
  # A scan keeps the compiler from undoing it by itself.
  return functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)


def _offload(layer: Layer) -> Layer:
  names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": [INPUT]}
  where = {"offload_src": "device", "offload_dst": "pinned_host"}
  policy = _keep.save_and_offload_only_these_names(**names, **where)
  return _remat(policy)(lambda params, h: layer(params, checkpoint_name(h, INPUT)))


_keep = jax.checkpoint_policies
# Name -> what makes a layer that keeps so much, to be run in a scan.
REMAT: dict[str, Callable[[Layer], Layer]] = {
  "none": lambda layer: layer,
  "dots": _remat(_keep.save_only_these_names(PRODUCT, BRANCH)),
  "branches": _remat(_keep.save_only_these_names(BRANCH)),
  "full": _remat(_keep.nothing_saveable),
  "offload": _offload,
}


def run_stack(stack: Stack, params: Any, batch: Any, *, remat: str = "none") -> Totals:
  """The totals of a batch on one device; layouts are tested against it.

  Args:
    remat: a name in `REMAT`.

  Returns:
    Totals as `stack.finish` has them; the gradient of "loss" is the training one.

  Example:
    >>> from jaxscale.models import make_transformer
    >>> stack = make_transformer(
    ...   vocab_size=256, num_layers=2, width=64, num_heads=4, hidden=128
    ... )
    >>> tokens = jnp.zeros((1, 8), jnp.int32)
    >>> batch = {"tokens": tokens, "targets": tokens}
    >>> int(run_stack(stack, stack.init(jax.random.key(0)), batch)["examples"])
    8
  """
  h = hidden_states(stack, params, batch, remat=remat)
  return stack.finish(params["head"], h, batch, Ops())


def hidden_states(
  stack: Stack, params: Any, batch: Any, ops: Ops | None = None, *, remat: str = "none"
) -> jax.Array:
  """The output of the last layer, [rows, tokens, width].

  Args:
    ops: what a layout replaces; None: one device's.
    remat: a name in `REMAT`.
  """
  ops = ops or Ops()
  layer = REMAT[remat](lambda p, h: stack.layer(p, h, ops))
  h = stack.embed(params["embed"], batch, ops)
  h, _ = jax.lax.scan(lambda h, p: (layer(p, h), None), h, params["layers"])
  return h


def stack_logits(stack: Stack, params: Any, batch: Any) -> jax.Array:
  """The scores of all classes, float32 [rows, (tokens,) classes]."""
  return stack.logits(params["head"], hidden_states(stack, params, batch))
