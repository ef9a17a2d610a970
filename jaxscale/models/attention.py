"""Attention, with the choice between four implementations.

Attention is softmax(q k^T / sqrt(width)) v (arXiv:1706.03762, eq. 1), with the softmax in
float32 and optionally fewer heads of keys and values than of queries (grouped-query
attention, arXiv:2305.13245).

    xla     runs everywhere. It writes the scores of all pairs of tokens to memory, float32
            [batch, heads, tokens, tokens], and stores their softmax for the backward pass
            unless the layer is rematerialised
    flash   runs everywhere, in blocks, without such arrays (`models.flash_attention`)
    cudnn   needs an NVIDIA GPU and half precision, by `jax.nn.dot_product_attention`
    splash  needs a TPU, bfloat16 and a multiple of 128 tokens (`models.splash_attention`)

All but "xla" store no scores and skip blocks above the diagonal (arXiv:2205.14135). `fastest`
chooses, as JAX 0.10.2 never chooses cuDNN by default.

Several documents may be packed into a row (arXiv:2107.02027, section 3.2). `documents` then
has the number of each token's document, and a token attends to its own document alone. All
implementations apply this as a mask, so they compute as many products as without it.
"""

import functools
import math
import re
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.flash_attention import ATTENTION, flash_attention
from jaxscale.models.linear import alike

Implementation = Literal["xla", "flash", "cudnn", "splash"]

# Tokens up to which the scores of a row and head, 4 tokens^2 bytes, are 16 MiB or less.
MOST_FOR_SCORES = 2048


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  documents: jax.Array | None = None,
  implementation: Implementation | None = None,
  device: Any = None,
) -> jax.Array:
  """Compute scaled dot-product attention with a float32 softmax.

  Args:
    q: queries, [batch, tokens, heads, width].
    k: keys, [batch, tokens, groups, width]; groups divide heads.
    v: values, with the shape of `k`.
    causal: whether a token attends only to itself and earlier tokens.
    documents: numbers of the tokens' documents, int32 [batch, tokens]; a token attends only
      to tokens with its own number. None means one document per row.
    implementation: the implementation; None means the choice of `fastest`.
    device: the device that runs it; None means the first device of this process.

  Returns:
    Outputs, [batch, tokens, heads, width].

  Example:
    >>> x = jnp.ones((2, 8, 4, 16))
    >>> attention(x, x[:, :, :2], x[:, :, :2], causal=True).shape
    (2, 8, 4, 16)
  """
  by = implementation or fastest(q.dtype, q.shape[-1], device, tokens=q.shape[1])
  if by != "xla":
    attend: Any = {"cudnn": fused_attention, "flash": flash_attention}.get(by)
    if by == "splash":  # JAX's kernels are imported where a TPU runs them.
      from jaxscale.models.splash_attention import splash_attention as attend
    return attend(q, k, v, causal=causal, documents=documents)
  sees = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool)) if causal else None
  if documents is not None:
    same = documents[:, :, None] == documents[:, None, :]
    sees = same if sees is None else same & sees
  return _attention(*alike(q, k, v), sees)


def fused_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  documents: jax.Array | None = None,
  implementation: Implementation = "cudnn",
) -> jax.Array:
  """Compute attention by JAX, which uses cuDNN on GPUs, for any number of tokens.

  JAX (0.10.2 and 0.11.2) cannot differentiate cuDNN's attention for odd numbers of tokens, such
  as the 197 of a ViT (jax/_src/cudnn/fused_attention_stablehlo.py treats every call as one with
  a bias). Such sequences are padded by one masked token.

  Documents become a mask, which JAX passes to cuDNN as a bias in the dtype of q, shared by
  all heads: 2 batch tokens^2 bytes, and as many for the bias's unused gradient in the
  backward pass (16 MB each for a row of 2,896 tokens). cuDNN then skips the blocks above the
  diagonal, but not those of two different documents. Its packed layout, which has no such
  arrays, needs Hopper, a static limit on the documents of a row and a private function of
  JAX.

  Args:
    q: queries, as in `attention`.
    k: keys, as in `attention`.
    v: values, as in `attention`.
    causal: whether a token attends only to itself and earlier tokens.
    documents: numbers of the tokens' documents, 0 or more, as in `attention`.
    implementation: implementation for `jax.nn.dot_product_attention`.
  """
  tokens, lengths = q.shape[1], None
  if tokens % 2:
    q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    if documents is not None:
      documents = jnp.pad(documents, ((0, 0), (0, 1)), constant_values=-1)
    elif not causal:
      lengths = jnp.full(q.shape[0], tokens, jnp.int32)
  options: Any = {"key_value_seq_lengths": lengths, "implementation": implementation}
  if documents is not None:
    options["mask"] = (documents[:, :, None] == documents[:, None, :])[:, None]
  return jax.nn.dot_product_attention(q, k, v, is_causal=causal, **options)[:, :tokens]


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array) -> jax.Array:
  """Compute causal attention of a few new tokens to the tokens in a cache.

  Args:
    q: queries of the tokens start, start + 1, ..., [batch, new, heads, width].
    k: cached keys, [batch, room, groups, width]; those after the newest token are masked.
    v: cached values, with the shape of `k`.
    start: number of tokens before the first of q, int32 [].

  Returns:
    Outputs, [batch, new, heads, width].
  """
  positions = start + jnp.arange(q.shape[1], dtype=jnp.int32)
  sees = jnp.arange(k.shape[1], dtype=jnp.int32) <= positions[:, None]  # [new, room]
  return _attention(*alike(q, k, v), sees)


@jax.custom_vjp
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, sees: jax.Array | None) -> jax.Array:
  """Compute attention by two products and a softmax, which XLA compiles everywhere.

  It has a custom derivative. The sum of the softmax weights times their gradients equals
  the sum of the output times its gradient (arXiv:2205.14135, appendix B.2), so that only
  the weights need to be stored. This also prevents XLA's CPU backend from fusing that sum
  with the product before it, which took 92 of the 533 ms of a step of configs/text.py.
  JAX's own derivative also mixes dtypes in half precision.

  Args:
    q: queries, [batch, tokens, heads, width].
    k: keys, [batch, seen, groups, width].
    v: values, with the shape of `k`. All three vary over the same mesh axes.
    sees: mask, bool [tokens, seen] or [batch, tokens, seen]; None means no mask.
  """
  return _attention_forward(q, k, v, sees)[0]


def _attention_forward(q, k, v, sees):
  tokens, groups = q.shape[1], k.shape[2]
  wide = jnp.dtype(jnp.float32) if q.dtype.itemsize < 4 else q.dtype
  q, k, v = (_by_group(x, groups) for x in (q, k, v))
  scores = jnp.matmul(q, k.mT, preferred_element_type=wide)
  scores = scores * jnp.asarray(1 / math.sqrt(q.shape[-1]), wide)
  if sees is not None:
    scores = scores.reshape(*scores.shape[:2], -1, *sees.shape[-2:])
    sees = sees if sees.ndim == 2 else sees[:, None, None]
    scores = jnp.where(sees, scores, jnp.finfo(wide).min)
    scores = scores.reshape(*q.shape[:3], -1)
  weights = jax.nn.softmax(scores, axis=-1)
  out = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=wide)
  out = checkpoint_name(out, ATTENTION)
  return _by_token(out, tokens).astype(q.dtype), (q, k, v, weights, out)


def _attention_backward(kept, g):
  q, k, v, weights, out = kept
  tokens, wide = g.shape[1], out.dtype
  product = functools.partial(jnp.matmul, preferred_element_type=wide)
  g = _by_group(g, k.shape[1])
  by_v = product(weights.astype(g.dtype).mT, g)
  means = (out * g.astype(wide)).sum(axis=-1, keepdims=True)
  by_scores = weights * (product(g, v.mT) - means) / math.sqrt(q.shape[-1])
  by_scores = by_scores.astype(q.dtype)
  by_q, by_k = product(by_scores, k), product(by_scores.mT, q)
  counts = (by_q, tokens), (by_k, k.shape[2]), (by_v, k.shape[2])
  return (*(_by_token(x, n).astype(q.dtype) for x, n in counts), None)


_attention.defvjp(_attention_forward, _attention_backward)


def _by_group(x: jax.Array, groups: int) -> jax.Array:
  """Reshape [batch, tokens, heads, width] to [batch, groups, heads / groups * tokens, ...]."""
  x = x.reshape(*x.shape[:2], groups, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _by_token(x: jax.Array, tokens: int) -> jax.Array:
  """Invert `_by_group`."""
  x = x.reshape(*x.shape[:2], -1, tokens, x.shape[-1]).transpose(0, 3, 1, 2, 4)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def fastest(dtype: Any, width: int, device: Any = None, *, tokens: int = 0) -> Implementation:
  """Return the implementation that `attention` uses on a device.

  cuDNN supports float16 and bfloat16 and heads whose width is a multiple of 8 and at most
  128, or 256 since Hopper (jax/_src/cudnn/fused_attention_stablehlo.py), on GPUs since
  Ampere (cuDNN's documentation of fused attention). TPUs use "splash" in bfloat16 for any
  multiple of 128 tokens, the width of a TPU's vector registers.

  Everywhere else (CPUs, AMD's GPUs, older GPUs, float32) "xla" serves up to
  `MOST_FOR_SCORES` tokens, and "flash" more. With 32 heads, the scores of a row and layer are
  then at most 0.5 GiB; at 8,192 tokens they would be 8 GiB.

  Args:
    dtype: dtype of queries, keys and values.
    width: width of a head.
    device: the device that runs it, which this machine may lack; None means the first device
      of this process.
    tokens: number of tokens of a row; 0 means few.

  Example:
    >>> fastest("float32", 64), fastest("float32", 64, tokens=8192)
    ('xla', 'flash')
  """
  anywhere: Implementation = "xla" if tokens <= MOST_FOR_SCORES else "flash"
  device = jax.local_devices()[0] if device is None else device
  if device.platform == "tpu":
    fits = jnp.dtype(dtype) == jnp.bfloat16 and tokens and tokens % 128 == 0
    return "splash" if fits else anywhere
  capability = cuda_capability(device)
  if jnp.dtype(dtype).itemsize != 2 or width % 8 or capability < (8, 0):
    return anywhere
  return "cudnn" if width <= (256 if capability >= (9, 0) else 128) else anywhere


@functools.cache
def cuda_capability(device: Any) -> tuple[int, ...]:
  """Return a GPU's compute capability, e.g. (9, 0); (0,) if it is not an NVIDIA GPU."""
  capability = getattr(device, "compute_capability", "")  # on AMD GPUs e.g. "gfx942"
  if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", capability):
    return (0,)
  return tuple(int(part) for part in capability.split("."))


def split_heads(x: jax.Array, width: int) -> jax.Array:
  """Reshape [..., heads * width] to [..., heads, width] for any number of heads."""
  return x.reshape(*x.shape[:-1], -1, width)


def join_heads(x: jax.Array) -> jax.Array:
  """Reshape [..., heads, width] to [..., heads * width]."""
  return x.reshape(*x.shape[:-2], -1)


def document_positions(documents: jax.Array) -> jax.Array:
  """Return the position of each token in its document, counted from 0.

  Args:
    documents: numbers of the documents, int [rows, tokens], whose tokens are consecutive.

  Returns:
    Positions, int32 [rows, tokens].

  Example:
    >>> document_positions(jnp.array([[0, 0, 0, 1, 1, 2]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
  """
  places = jnp.arange(documents.shape[1], dtype=jnp.int32)
  is_first = documents != jnp.roll(documents, 1, axis=1)
  starts = jnp.where(is_first, places, jnp.zeros_like(places))  # 0 for the first document
  return places - lax.cummax(starts, axis=1)


class RopeScaling(NamedTuple):
  """RoPE scaling of Llama 3.1 for longer texts (`apply_scaling` in its code).

  A pair of units that rotates fewer than `low` times in `length` tokens is slowed down by
  `factor`. A pair that rotates more than `high` times is unchanged. Pairs between them
  are interpolated.

  Attributes:
    factor: factor of the slowdown; 8 in Llama 3.1, 32 in Llama 3.2 1B and 3B.
    low: rotations below which a pair is slowed down fully; 1 in Llama 3.1 and 3.2.
    high: rotations above which a pair is unchanged; 4 in Llama 3.1 and 3.2.
    length: context length of the original training, in tokens; 8,192 in both.
  """

  factor: float
  low: float
  high: float
  length: int


def rotate(
  x: jax.Array, positions: jax.Array, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
  """Rotary position embedding (RoFormer, arXiv:2104.09864, eq. 34).

  Pair i of a head at position p is rotated by p * theta^(-2 i / width). Pairs are
  (i, i + width / 2), as in Hugging Face's Llama weights. In the paper pairs are
  neighbours, which is the same model with permuted columns. Angles are float32, because
  bfloat16 cannot distinguish positions 256 and 257.

  Args:
    x: queries or keys, [batch, tokens, heads, width], with an even width.
    positions: positions of the tokens, int32 [tokens] or [batch, tokens].
    theta: base of the rotation; 10,000 in the paper, 500,000 in Llama 3
      (arXiv:2407.21783, §3.2).
    scaling: scaling of the angles; None means no scaling.

  Returns:
    The rotated x.

  Example:
    >>> x = jnp.ones((1, 1, 1, 2))
    >>> float(rotate(x, jnp.array([0]), 10_000.0)[0, 0, 0, 0])
    1.0
  """
  half = x.shape[-1] // 2
  rates = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-math.log(theta) / half))
  if scaling is not None:
    turns = rates * (scaling.length / (2 * math.pi))
    kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    rates = rates * (kept + (1 - kept) / scaling.factor)
  angles = positions.astype(jnp.float32)[..., None, None] * rates  # [..., tokens, 1, half]
  cos, sin = _cos_sin(angles)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _cos_sin(angles: jax.Array) -> tuple[jax.Array, ...]:
  """Return cosine and sine, computed once.

  XLA's CPU backend would fuse them into the multiplication and recompute them for every
  row and head. It does not fuse the results of a loop.
  """

  def looped(angles):
    is_sin = jnp.array([False, True])
    return tuple(lax.map(lambda s: jnp.where(s, jnp.sin(angles), jnp.cos(angles)), is_sin))

  def written(angles):
    return jnp.cos(angles), jnp.sin(angles)

  return lax.platform_dependent(angles, cpu=looped, default=written)
