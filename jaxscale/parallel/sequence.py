"""Context parallelism for long inputs: tokens of a sequence split over a mesh axis.

Every device has the same parameters and a part of each sequence's tokens, h
[rows, tokens/n, width]. Everything in a model except attention and positions works on each
token separately. Attention reaches the tokens of other devices in one of two ways:

    ring_attention         keys and values go around a ring, n-1 permutes; any heads
    all_to_all_attention   exchange tokens for heads and back, 4 all-to-alls; n divides heads

With T tokens per row, `e` elements per token in queries, and a share r of that in keys
and in values (groups over heads), a device sends in the forward pass

    ring          2 r e T/n (n-1)         about 2 r e T for any number of devices
    all-to-all    (2 + 2r) e T/n (n-1)/n  about (2 + 2r) e T/n

`gather_tokens` and `scatter_tokens` are for tensor parallelism: between branches, where
all devices would hold the same values, each holds only its tokens (arXiv:2205.05198).
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.errors import ConfigError
from jaxscale.models.stack import attention

Order = Literal["contiguous", "zigzag"]


def token_positions(tokens: int, axis: str, order: Order = "contiguous") -> jax.Array:
  """Return the positions of this device's tokens in the sequence.

  Args:
    tokens: number of tokens t on this device, even for "zigzag".
    axis: mesh axis of the tokens, with n devices.
    order: "contiguous": device i has positions i t to (i+1) t. "zigzag": device i has the
      i-th piece from the front and the i-th from the back, of 2n equal pieces.

  Returns:
    Positions, int32 [tokens], varying over `axis`.
  """
  devices, here = lax.axis_size(axis), lax.axis_index(axis)
  if order == "contiguous":
    return here * tokens + jnp.arange(tokens, dtype=jnp.int32)
  piece = jnp.arange(tokens // 2, dtype=jnp.int32)
  back = 2 * devices - 1 - here
  return jnp.concatenate([here * len(piece) + piece, back * len(piece) + piece])


def all_to_all_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  axis: str,
  causal: bool,
  documents: jax.Array | None = None,
  attend: Callable[..., jax.Array] = attention,
) -> jax.Array:
  """Compute attention over split tokens by giving each device all tokens of some heads.

  This is DeepSpeed-Ulysses (arXiv:2309.14509, section 3).

  Args:
    q: queries of contiguous tokens, [rows, tokens/n, heads, width].
    k: keys, [rows, tokens/n, groups, width]; groups divide heads.
    v: values, with the shape of `k`.
    axis: mesh axis of the tokens, with n devices.
    causal: whether a token attends only to itself and earlier tokens.
    documents: numbers of the documents of this device's tokens, int32 [rows, tokens/n], which
      all devices gather; None means one document per row.
    attend: attention function for [rows, tokens, heads/n, width], with the signature of
      `jaxscale.models.stack.attention`.

  Returns:
    Outputs, [rows, tokens/n, heads, width].

  Raises:
    ConfigError: n does not divide heads and groups.
  """
  devices = lax.axis_size(axis)
  for name, x in (("heads", q), ("key/value heads", k)):
    if x.shape[2] % devices:
      problem = f"cannot split {x.shape[2]} {name} over the {devices} devices of {axis!r}"
      raise ConfigError(f"attend='all_to_all' {problem}; give attend='ring' or fewer devices")

  def to_heads(x: jax.Array):
    return lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)

  options = {}
  if documents is not None:
    options["documents"] = lax.all_gather(documents, axis, axis=1, tiled=True)
  out = attend(to_heads(q), to_heads(k), to_heads(v), causal=causal, **options)
  return lax.all_to_all(out, axis, split_axis=1, concat_axis=2, tiled=True)


def gather_tokens(h: jax.Array, *, axis: str) -> jax.Array:
  """Gather all tokens from the devices: `enter` in sequence-parallel regions.

  The backward pass is a reduce-scatter, because the heads or hidden units of each device
  contribute a part of the gradient (g of arXiv:2205.05198, section 4.2.2).

  Args:
    h: this device's tokens, [rows, tokens/n, ...].
    axis: mesh axis of tensor parallelism, with n devices.

  Returns:
    All tokens, [rows, tokens, ...], typed as varying over `axis`.
  """
  return lax.all_gather(h, axis, axis=1, tiled=True)


def scatter_tokens(h: jax.Array, *, axis: str) -> jax.Array:
  """Sum a branch over devices, each for its tokens: `reduce` in sequence-parallel regions.

  Args:
    h: this device's part of the sum, [rows, tokens, ...].
    axis: mesh axis of tensor parallelism, with n devices.

  Returns:
    The sum for this device's tokens, [rows, tokens/n, ...].

  Raises:
    ConfigError: n does not divide the tokens.
  """
  devices = lax.axis_size(axis)
  if h.shape[1] % devices:
    problem = f"cannot be split over the {devices} devices of {axis!r}; give a multiple"
    raise ConfigError(f"tokens={h.shape[1]} {problem}")
  return lax.psum_scatter(h, axis, scatter_dimension=1, tiled=True)
