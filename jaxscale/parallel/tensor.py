"""Tensor parallelism: split heads, hidden units, vocabulary and classes over devices.

A device holds some columns of the first matrix of a branch and the matching rows of the
second, so that the branch's output is a sum over devices (Megatron-LM, arXiv:1909.08053,
section 3). The forward pass has one all-reduce per branch, two per layer. The backward
pass has as many, for the gradient of the residual stream that the branch reads.

Sums over devices are float32 by default. In bfloat16, as is common, half the bytes are
sent, but gradients of a small model differed from those of one device by 3e-3 to 6e-3
(tests/parallel/test_parity.py).

Embedding tables and classifiers are split by rows and classes (section 3 of the paper). A
device returns the rows of its part of a table and zeros for other rows. It computes its
part of the logits [..., classes], and only their maxima and sums cross the network.
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
  """Return the operations of a model that is split along `MODEL`, inside `shard_map`.

  Args:
    regions: split tokens between branches, where all devices would hold the same values
      (arXiv:2205.05198). A reduce-scatter and an all-gather of as many bytes replace an
      all-reduce.
    dtype: dtype of products, to which gathered values are rounded; None means no rounding.
    sum_in: dtype to which a device's part of a sum is rounded before it is sent; None means
      float32, so that a split layer gives the result of an unsplit one.
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
  """Look up rows in a table that is split by rows.

  Args:
    table: rows of this device, [rows / n, width].
    ids: indices of rows, int [batch, tokens], the same on all devices along the axis.
    scatter: return only the device's part of the tokens.
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
  """Compute `models.stack.classify` for a classifier that is split by classes.

  With z the logits and sums over classes:

      loss = log sum exp(z - m) + m - z_label        m = max z, a constant
      smoothing adds e (z_label - mean z)            (arXiv:1512.00567, section 7)

  Args:
    h: inputs, [..., width], the same on all devices along the axis.
    kernel: kernel of this device, [width, classes / n].
    bias: bias of this device, [classes / n], or None.
    labels: labels, int [...].
    num_classes: number of classes without padding.
    label_smoothing: share e of the target that is spread over all classes.
    dtype: dtype of the product; None means the dtype of h.

  Returns:
    Losses, float32 [...], and hits, bool [...], the same on all devices.
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
  # One psum for all sums, since latency matters, not bytes.
  sums = [exps, of_label]
  if label_smoothing:
    sums.append(jnp.where(is_class, logits, 0.0).sum(-1))
  total, of_label, *every = lax.psum(sums, MODEL)
  losses = jnp.log(total) + top - of_label
  if label_smoothing:
    losses = losses + label_smoothing * (of_label - every[0] / num_classes)
  # The first of several equal maxima, as in argmax.
  best = jnp.where(own_top == top, first + logits.argmax(-1), num_classes)
  best = lax.pmin(vary(best, (MODEL,)), MODEL)
  return losses, best == labels
