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
from jaxscale.models.cross_entropy import classify
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
    return gather_tokens(x if dtype is None else x.astype(dtype), axis=MODEL).astype(x.dtype)

  enter.defvjp(lambda x: (enter(x), None), lambda _, g: (add(g).astype(g.dtype),))
  lookup = functools.partial(split_lookup, scatter=regions)
  of_part = functools.partial(classify, axis=MODEL)
  return Ops(enter=enter, reduce=add, lookup=lookup, classify=of_part)


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
