"""Attention, and which of JAX's implementations computes it.

softmax(q k^T / sqrt(width)) v (arXiv:1706.03762, eq. 1), the softmax in float32,
with fewer heads of keys and values than of queries where there are groups
(arXiv:2305.13245).

There are two implementations. "xla" writes the scores of all pairs of tokens to
memory, float32 [batch, heads, tokens, tokens], and keeps their softmax for the backward
pass unless the layer is rematerialised; it runs everywhere. "cudnn", by
`jax.nn.dot_product_attention`, keeps no scores and skips what a causal mask hides
(arXiv:2205.14135), on NVIDIA GPUs and half-precision numbers. Left to itself JAX
0.10.2 never takes it; so `fastest` chooses, and reports it.
"""

import functools
import math
import re
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.models.linear import alike

Implementation = Literal["xla", "cudnn"]


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  implementation: Implementation | None = None,
  device: Any = None,
) -> jax.Array:
  """Scaled dot-product attention; float32 softmax.

  Args:
    q: [batch, tokens, heads, width].
    k: [batch, tokens, groups, width]; groups divide heads.
    v: likewise.
    causal: a token sees itself and those before it.
    implementation: "xla" or "cudnn"; None: `fastest`.
    device: to run on; None: this process's.

  Returns:
    [batch, tokens, heads, width].

  Example:
    >>> x = jnp.ones((2, 8, 4, 16))
    >>> attention(x, x[:, :, :2], x[:, :, :2], causal=True).shape
    (2, 8, 4, 16)
  """
  by = implementation or fastest(q.dtype, q.shape[-1], device)
  if by == "cudnn":
    return fused_attention(q, k, v, causal=causal)
  ones = jnp.ones((q.shape[1], k.shape[1]), bool)
  return _attention(*alike(q, k, v), jnp.tril(ones) if causal else None)


def fused_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  implementation: Implementation = "cudnn",
) -> jax.Array:
  """JAX's attention, which is cuDNN's on GPUs, of any number of tokens.

  JAX 0.10.2 refuses to differentiate cuDNN's for an odd number, such as the 197 of a
  ViT (jax/_src/cudnn/fused_attention_stablehlo.py takes every call for one with a
  bias). There one token is added, which nobody sees.

  Args:
    q, k, v: as for `attention`.
    causal: likewise.
    implementation: of JAX.
  """
  tokens, lengths = q.shape[1], None
  if tokens % 2:
    q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    if not causal:
      lengths = jnp.full(q.shape[0], tokens, jnp.int32)
  options: Any = {"key_value_seq_lengths": lengths, "implementation": implementation}
  out = jax.nn.dot_product_attention(q, k, v, is_causal=causal, **options)
  return out[:, :tokens]


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array) -> jax.Array:
  """Causal attention of a few new tokens to all those there is room for.

  Args:
    q: [batch, new, heads, width], of the tokens start, start + 1, …
    k: [batch, room, groups, width]; what is behind the newest token is not seen.
    v: likewise.
    start: int32 [], tokens before the first of q.

  Returns:
    [batch, new, heads, width].
  """
  places = start + jnp.arange(q.shape[1], dtype=jnp.int32)
  sees = jnp.arange(k.shape[1], dtype=jnp.int32) <= places[:, None]  # [new, room]
  return _attention(*alike(q, k, v), sees)


@jax.custom_vjp
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, sees: jax.Array | None) -> jax.Array:
  """Attention by two products and a softmax, which XLA compiles everywhere.

  With a derivative of its own: the softmax's sum over all tokens seen, of weights times
  their gradients, is that of the output times its gradient (arXiv:2205.14135, appendix
  B.2). So of scores only the weights are kept; and XLA's CPU backend cannot fuse that
  sum with the product before it, which took 92 of the 533 ms of a step of
  configs/text.py. JAX's own form also mixes dtypes in half precision.

  Args:
    q: [batch, tokens, heads, width].
    k: [batch, seen, groups, width].
    v: likewise, and all three varying over the same mesh axes.
    sees: bool [tokens, seen], or None: all see all.
  """
  return _attention_forward(q, k, v, sees)[0]


def _attention_forward(q, k, v, sees):
  tokens, groups = q.shape[1], k.shape[2]
  wide = jnp.dtype(jnp.float32) if q.dtype.itemsize < 4 else q.dtype
  q, k, v = (_by_group(x, groups) for x in (q, k, v))
  scores = jnp.matmul(q, k.mT, preferred_element_type=wide)
  scores = scores * jnp.asarray(1 / math.sqrt(q.shape[-1]), wide)
  if sees is not None:
    scores = scores.reshape(*scores.shape[:2], -1, *sees.shape)
    scores = jnp.where(sees, scores, jnp.finfo(wide).min)
    scores = scores.reshape(*q.shape[:3], -1)
  weights = jax.nn.softmax(scores, axis=-1)
  out = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=wide)
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
  """[batch, tokens, heads, width] -> [batch, groups, heads / groups * tokens, ...]."""
  x = x.reshape(*x.shape[:2], groups, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _by_token(x: jax.Array, tokens: int) -> jax.Array:
  """What `_by_group` makes, back as it was."""
  x = x.reshape(*x.shape[:2], -1, tokens, x.shape[-1]).transpose(0, 3, 1, 2, 4)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def fastest(dtype: Any, width: int, device: Any = None) -> Implementation:
  """The implementation that attention takes on a device.

  cuDNN's is for float16 and bfloat16 and heads whose width 8 divides and is at most
  128, or 256 from Hopper on (JAX's jax/_src/cudnn/fused_attention_stablehlo.py), on
  GPUs from Ampere on (cuDNN's documentation of fused attention).

  Args:
    dtype: of queries, keys and values.
    width: of a head.
    device: to run on, which need not be here; None: this process's.

  Example:
    >>> fastest("float32", 64)
    'xla'
  """
  capability = _cuda_capability(device)
  if jnp.dtype(dtype).itemsize != 2 or width % 8 or capability < (8, 0):
    return "xla"
  return "cudnn" if width <= (256 if capability >= (9, 0) else 128) else "xla"


@functools.cache
def _cuda_capability(device: Any) -> tuple[int, ...]:
  """Of a GPU, e.g. (9, 0); (0,) where it is none of NVIDIA's."""
  device = jax.local_devices()[0] if device is None else device
  capability = getattr(device, "compute_capability", "")  # of AMD's "gfx942", say
  if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", capability):
    return (0,)
  return tuple(int(part) for part in capability.split("."))


def split_heads(x: jax.Array, width: int) -> jax.Array:
  """[..., heads * width] -> [..., heads, width], however many heads are here."""
  return x.reshape(*x.shape[:-1], -1, width)


def join_heads(x: jax.Array) -> jax.Array:
  """[..., heads, width] -> [..., heads * width]."""
  return x.reshape(*x.shape[:-2], -1)


class RopeScaling(NamedTuple):
  """Llama 3.1's rotary positions for longer texts (`apply_scaling` of its code).

  A pair that turns fewer than `low` times in `length` tokens turns `factor` times
  slower, one that turns more than `high` times as before; between them it is a mean
  of both, by how often it turns.

  Attributes:
    factor: 8 in Llama 3.1, 32 in the small ones of 3.2.
    low: 1 in both.
    high: 4 in both.
    length: tokens that it was first trained on, 8,192 in both.
  """

  factor: float
  low: float
  high: float
  length: int


def rotate(
  x: jax.Array, positions: jax.Array, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
  """Rotary position embedding (RoFormer, arXiv:2104.09864, eq. 34).

  Pair i of a head at position p is turned by p * theta^(-2 i / width). Pairs are
  (i, i + width / 2), as in the weights that Hugging Face's Llama has; the paper's
  are neighbours, which is the same model with its columns in another order.
  Angles are float32: bfloat16 cannot tell position 257 from 256.

  Args:
    x: [batch, tokens, heads, width], an even width.
    positions: int32 [tokens].
    theta: 10,000 in the paper; 500,000 in Llama 3 (arXiv:2407.21783, §3.2).
    scaling: of the angles; None: they are as they are.

  Returns:
    As x.

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
  angles = positions.astype(jnp.float32)[:, None, None] * rates  # [tokens, 1, half]
  cos, sin = _cos_sin(angles)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _cos_sin(angles: jax.Array) -> tuple[jax.Array, ...]:
  """Both, computed once.

  XLA's CPU backend fuses them into what they are multiplied with, and computes them
  again for every row and head; what a loop gives it does not fuse.
  """

  def looped(angles):
    is_sin = jnp.array([False, True])
    both = lax.map(lambda s: jnp.where(s, jnp.sin(angles), jnp.cos(angles)), is_sin)
    return tuple(both)

  def written(angles):
    return jnp.cos(angles), jnp.sin(angles)

  return lax.platform_dependent(angles, cpu=looped, default=written)
