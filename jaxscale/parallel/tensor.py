"""Tensor parallelism: a layer's heads, hidden units, vocabulary and classes split.

A device holds some columns of the first matrix of a branch and the rows of the
second that belong to them, so that what the branch gives is a sum over devices
(Megatron-LM, arXiv:1909.08053, section 3): one all-reduce a branch forwards, two a
layer, and as many backwards where the branch reads the residual stream.

Sums over devices are float32 unless asked otherwise. In bfloat16, as is common, half
the bytes are sent, and gradients of a small model were 3e-3 to 6e-3 off those of one
device (tests/parallel/test_parity.py).

Tables and classifiers are split by rows and classes (section 3 there): of a table a
device gives the rows it has and zeros for others; of the logits [..., classes] it
has its part, and only maxima and sums of them cross the network.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import vary
from jaxscale.models.linear import linear
from jaxscale.models.stack import Ops
from jaxscale.parallel.sequence import gather_tokens, scatter_tokens

MODEL = "model"


def tensor_ops(*, regions: bool, dtype: Any = None, sum_in: Any = None) -> Ops:
  """The operations of a model that is split along `MODEL`, inside `shard_map`.

  Args:
    regions: between branches, where every device would hold the same, each holds its
      part of the tokens (arXiv:2205.05198): as many bytes cross the network, by a
      reduce-scatter and an all-gather in place of an all-reduce.
    dtype: of products, to which what is gathered is rounded; None: as it is.
    sum_in: dtype to which a device's part of a sum is rounded before it is sent. None:
      float32, so that a layer that is split gives what a whole one does.
  """

  def add(x: jax.Array):
    x = x if sum_in is None else x.astype(sum_in)
    return scatter_tokens(x, axis=MODEL) if regions else lax.psum(x, MODEL)

  @jax.custom_vjp
  def enter(x: jax.Array):
    if not regions:
      return vary(x, (MODEL,))
    sent = x if dtype is None else x.astype(dtype)
    return gather_tokens(sent, axis=MODEL).astype(x.dtype)

  enter.defvjp(lambda x: (enter(x), None), lambda _, g: (add(g).astype(g.dtype),))
  lookup = functools.partial(split_lookup, scatter=regions)
  return Ops(enter=enter, reduce=add, lookup=lookup, classify=split_classify)


def split_lookup(table: jax.Array, ids: jax.Array, *, scatter: bool) -> jax.Array:
  """Rows of a table [rows / n, width] that is split by rows, by their numbers.

  Args:
    table: this device's rows.
    ids: int [batch, tokens], the same on all devices along the axis.
    scatter: give a device its part of the tokens alone.
  """
  here = ids - lax.axis_index(MODEL) * table.shape[0]
  is_here = (here >= 0) & (here < table.shape[0])
  rows = table[jnp.where(is_here, here, 0)]
  rows = jnp.where(is_here[..., None], rows, jnp.zeros_like(rows))
  return scatter_tokens(rows, axis=MODEL) if scatter else lax.psum(rows, MODEL)


def split_classify(
  h: jax.Array,
  kernel: jax.Array,
  bias: jax.Array | None,
  labels: jax.Array,
  *,
  num_classes: int,
  label_smoothing: float = 0.0,
  dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """`models.stack.classify` for a classifier that is split by classes.

  With z the logits, all sums over classes:

      loss = log sum exp(z - m) + m - z_label        m = max z, a constant
      smoothing adds e (z_label - mean z)            (arXiv:1512.00567, section 7)

  Args:
    h: [..., width], the same on all devices along the axis.
    kernel: [width, classes / n].
    bias: [classes / n] or None.
    labels: int [...].
    num_classes: without padding; what is behind it counts for nothing.
    label_smoothing: e.
    dtype: of the product; None: that of h.

  Returns:
    losses float32 [...] and hits bool [...], the same on all devices.
  """
  logits = linear(h, kernel, dtype).astype(jnp.float32)
  if bias is not None:
    logits = logits + bias.astype(jnp.float32)
  size = kernel.shape[1]
  first = lax.axis_index(MODEL) * size
  classes = first + jnp.arange(size)
  is_class = classes < num_classes
  logits = jnp.where(is_class, logits, -jnp.inf)
  own_top = lax.stop_gradient(logits.max(-1))
  top = lax.pmax(own_top, MODEL)
  of_label = jnp.where(classes == labels[..., None], logits, 0.0).sum(-1)
  exps = jnp.exp(logits - top[..., None]).sum(-1)
  # Everything at once: latency, not bytes.
  sums = [exps, of_label]
  if label_smoothing:
    sums.append(jnp.where(is_class, logits, 0.0).sum(-1))
  total, of_label, *every = lax.psum(sums, MODEL)
  losses = jnp.log(total) + top - of_label
  if label_smoothing:
    losses = losses + label_smoothing * (of_label - every[0] / num_classes)
  # As argmax: of equal ones the first.
  best = jnp.where(own_top == top, first + logits.argmax(-1), num_classes)
  best = lax.pmin(vary(best, (MODEL,)), MODEL)
  return losses, best == labels
