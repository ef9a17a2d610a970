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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.attention import attention
from jaxscale.models.linear import linear, linear_sum

Totals = dict[str, jax.Array]  # sums over examples, with their number: "examples"


BRANCH = "branch"  # the name, for remat policies, of what `rejoin` gives


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
  """Rows of a table [rows, width] by their numbers, [..., width]."""
  return table[ids]


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


def _same(x: jax.Array) -> jax.Array:
  return x


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
    lookup: as `lookup`.
    classify: as `classify`.
  """

  enter: Callable[[jax.Array], jax.Array] = _same
  reduce: Callable[[jax.Array], jax.Array] = _same
  attend: Callable[..., jax.Array] = attention
  positions: Callable[[int], jax.Array] = lambda n: jnp.arange(n, dtype=jnp.int32)
  lookup: Callable[[jax.Array, jax.Array], jax.Array] = lookup
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
