"""Contrastive losses of pairs of embeddings over the global batch: InfoNCE, NT-Xent, SigLIP.

For embeddings a_i and b_i of the pair i, normalised to length 1, a scale s = 1 /
temperature and a bias c:

    InfoNCE   l_i = (-log softmax_j(s a_i b_j)_i - log softmax_j(s b_i a_j)_i) / 2
    NT-Xent   the same, with s a_i a_j and s b_i b_j for j != i also in the softmax
    SigLIP    l_i = sum_j log(1 + exp(-z_ij (s a_i b_j + c))), z_ii = 1, else z_ij = -1

(arXiv:2103.00020, figure 3; arXiv:2002.05709, algorithm 1; arXiv:2303.15343, algorithm 1.)
The products are computed in blocks of columns, and again in the backward pass, so that
the matrix [rows, all rows] never exists as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.errors import invalid
from jaxscale.training.gathered import Everyone, GatheredObjective
from jaxscale.training.types import Batch

_LOW = -1e30  # instead of -inf, whose differences are NaN in the backward pass
Towers = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Pair = tuple[jax.Array, jax.Array]


def contrastive(
  kind: Literal["infonce", "nt_xent", "siglip"] = "infonce",
  *,
  temperature: float = 0.07,
  bias: float = -10.0,
  chunk: int = 1024,
) -> GatheredObjective:
  """Return the objective of pairs of embeddings, with retrieval accuracies.

  The outputs are two arrays [rows, dim], in a tuple or a dict; they need not be
  normalised. A third and a fourth array [rows], or "scale" and "bias" in the dict, replace
  1 / `temperature` and `bias`, for models that learn them.

  Args:
    kind: the loss; see the equations of this module.
    temperature: temperature of the softmax or sigmoid.
    bias: bias of SigLIP.
    chunk: number of columns per block.

  Returns:
    An objective with the metrics "accuracy", the share of rows whose first embedding is
    closest to its own second embedding among all rows, and "reverse_accuracy".
  """
  nt_xent = functools.partial(_info_nce, within=True)
  loss_of = {"infonce": _info_nce, "nt_xent": nt_xent, "siglip": _sig_lip}[kind]

  def towers(outputs: Any) -> Towers:
    return _towers(outputs, 1 / temperature, bias)

  def loss(outputs: Any, batch: Batch, everyone: Everyone):
    every = towers(everyone.outputs)[:2]
    return loss_of(towers(outputs), every, _in_blocks(everyone, chunk))

  def metrics(outputs: Any, batch: Batch, everyone: Everyone):
    own, every = lax.stop_gradient((towers(outputs), towers(everyone.outputs)))
    (a, b, *_), over_blocks = own, _in_blocks(everyone, chunk)
    cosines = (a * b).sum(-1)
    return {
      "accuracy": cosines > _closest(a, every[1], over_blocks),
      "reverse_accuracy": cosines > _closest(b, every[0], over_blocks),
    }

  return GatheredObjective(loss, metrics)


def _towers(outputs: Any, scale: float, bias: float) -> Towers:
  """Return two normalised embeddings in float32, and each row's scale and bias.

  Raises:
    ConfigError: the outputs are not two arrays [rows, dim].
  """
  if isinstance(outputs, list | tuple):
    outputs = {{2: "scale", 3: "bias"}.get(i, f"{i}"): x for i, x in enumerate(outputs)}
  named = dict(outputs) if isinstance(outputs, dict) else {"": outputs}
  learned = [named.pop(name, None) for name in ("scale", "bias")]
  shapes = [jnp.shape(named[name]) for name in sorted(named)]
  if not (len(shapes) == 2 and len(shapes[0]) == 2 and shapes[0] == shapes[1]):
    problem = f"takes two embeddings [rows, dim], but the outputs have the shapes {shapes}"
    raise invalid("Config.loss", ..., problem, "return a tuple or a dict of two arrays")
  a, b = (named[name].astype(jnp.float32) for name in sorted(named))
  pairs = zip(learned, (scale, bias), strict=True)
  scales, biases = (jnp.full(len(a), y) if x is None else x.astype(a.dtype) for x, y in pairs)
  a, b = (x * lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-12) for x in (a, b))
  return a, b, scales, biases


def _in_blocks(everyone: Everyone, chunk: int) -> Callable[..., jax.Array]:
  """Return a function that reduces the cosines of own rows with all rows, in blocks.

  Returns:
    (reduce, own [rows, dim], every [all rows, dim]) -> [blocks, rows]. `reduce` gets
    cosines [rows, chunk], and two bools of that shape: which pairs are a row with itself,
    and which are a row with another one that counts.
  """
  mask, rows = everyone.mask, everyone.rows
  size = min(chunk, len(mask))

  def blocks(x: jax.Array, fill: int = 0):
    pad = [(0, -len(mask) % size)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad, constant_values=fill).reshape(-1, size, *x.shape[1:])

  def over_blocks(reduce: Callable[..., jax.Array], own: jax.Array, every: jax.Array):
    @jax.checkpoint
    def block(part: tuple[jax.Array, ...]):
      every, mask, columns = part
      cosines = jnp.matmul(own, every.T, precision=lax.Precision.HIGHEST)
      is_own = columns == rows[:, None]
      return reduce(cosines, is_own, mask & ~is_own)

    columns = jnp.arange(len(mask), dtype=jnp.int32)
    return lax.map(block, (blocks(every), blocks(mask), blocks(columns, -1)))

  return over_blocks


def _info_nce(own: Towers, every: Pair, over_blocks: Any, *, within: bool = False) -> jax.Array:
  """Return InfoNCE of each row; `within` adds the pairs inside each view (NT-Xent)."""
  a, b, scale, _ = own

  def log_sum(cosines: jax.Array, counts: jax.Array):
    return jax.nn.logsumexp(jnp.where(counts, scale[:, None] * cosines, _LOW), axis=-1)

  def normalizer(x: jax.Array, y: jax.Array, every_x: jax.Array, every_y: jax.Array):
    sums = over_blocks(
      lambda cosines, is_own, others: log_sum(cosines, is_own | others), x, every_y
    )
    if within:
      more = over_blocks(lambda s, _, others: log_sum(s, others), x, every_x)
      sums = jnp.concatenate([sums, more])
    return jax.nn.logsumexp(sums, axis=0)

  both = normalizer(a, b, *every) + normalizer(b, a, *every[::-1])
  return 0.5 * both - scale * (a * b).sum(-1)


def _sig_lip(own: Towers, every: Pair, over_blocks: Any) -> jax.Array:
  """Return the sigmoid loss of each row."""
  a, _, scale, bias = own

  def losses(cosines: jax.Array, is_own: jax.Array, others: jax.Array):
    logits = scale[:, None] * cosines + bias[:, None]
    loss = jax.nn.softplus(jnp.where(is_own, -logits, logits))
    return jnp.where(is_own | others, loss, 0).sum(-1)

  return over_blocks(losses, a, every[1]).sum(0)


def _closest(own: jax.Array, every: jax.Array, over_blocks: Any) -> jax.Array:
  """Return the largest cosine of each row with other rows that count."""

  def largest(cosines: jax.Array, _: jax.Array, others: jax.Array):
    return jnp.where(others, cosines, _LOW).max(-1)

  return over_blocks(largest, own, every).max(0)
