"""Long inputs: the tokens of a sequence split over a mesh axis.

Every device has the same parameters and a part of each sequence's tokens, h
[rows, tokens/n, width]. All of a model but attention works on tokens alone; `split`
gives the operations (`Ops`) for the rest. Attention sees the other tokens by

    ring_attention         keys and values go round, n-1 permutes; any heads, exact
    all_to_all_attention   tokens for heads and back, 4 all-to-alls; n divides heads

With T tokens per row of `e` elements each in queries, and a share r of that in keys and
in values (heads over groups), a device sends forwards

    ring          2 r e T/n (n-1)         about 2 r e T, however many devices
    all-to-all    (2 + 2r) e T/n (n-1)/n  about (2 + 2r) e T/n

`gather_tokens` and `scatter_tokens` are for tensor parallelism: between the branches,
where each device would hold the same, it holds its tokens (arXiv:2205.05198).
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.collectives.typed import axis_sizes
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError
from jaxscale.models.stack import Ops, attention
from jaxscale.parallel.ring import check_zigzag, ring_attention

Order = Literal["contiguous", "zigzag"]


def split(
  *,
  axis: str = "model",
  attend: Literal["ring", "all_to_all"] = "ring",
  order: Order = "contiguous",
) -> Ops:
  """The operations of a model whose tokens are split over a mesh axis.

  Tables, classes and heads are whole on every device. Inside `shard_map`.

  Args:
    axis: mesh axis of the tokens.
    attend: "ring" or "all_to_all".
    order: which tokens each device has, as of `token_positions`. "zigzag" is for the
      ring; the tokens must have been put in `zigzag_order`.

  Raises:
    ConfigError: there is no such way, or not in this order.

  Example:
    >>> ops = split(axis="model", attend="ring")
  """
  by_ring = functools.partial(ring_attention, order=order)
  ways = {"ring": by_ring, "all_to_all": all_to_all_attention}
  if attend not in ways:
    raise ConfigError(f"attend={attend!r}: {nearest(attend, ways)}")
  if order not in ("contiguous", "zigzag"):
    raise ConfigError(f"order={order!r}: give 'contiguous' or 'zigzag'")
  if order == "zigzag" and attend != "ring":
    why = f"does nothing for attend={attend!r}, whose devices have all tokens; give 'contiguous'"
    raise ConfigError(f"order='zigzag': {why}")

  here = functools.partial(ways[attend], axis=axis)
  return Ops(attend=here, positions=lambda tokens: token_positions(tokens, axis, order))


def token_positions(tokens: int, axis: str, order: Order = "contiguous") -> jax.Array:
  """Return the positions of this device's tokens in the sequence.

  Args:
    tokens: t, how many this device has.
    axis: mesh axis of the tokens, n devices.
    order: "contiguous": device i has positions i t to (i+1) t. "zigzag": of 2n equal
      pieces the i-th from the front and the i-th from the back.

  Returns:
    int32 [tokens], varying over `axis`.

  Raises:
    ConfigError: "zigzag", and an odd number of tokens.
  """
  devices, here = axis_sizes((axis,))[axis], lax.axis_index(axis)
  if order == "contiguous":
    return here * tokens + jnp.arange(tokens, dtype=jnp.int32)
  check_zigzag(tokens)
  piece = jnp.arange(tokens // 2, dtype=jnp.int32)
  back = 2 * devices - 1 - here
  return jnp.concatenate([here * len(piece) + piece, back * len(piece) + piece])


def zigzag_order(tokens: int, devices: int) -> np.ndarray:
  """The order to put a sequence's tokens in before they are split, int [tokens].

  Raises:
    ConfigError: 2 x devices does not divide the tokens.

  Example:
    >>> zigzag_order(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
  """
  if tokens % (2 * devices):
    raise ConfigError(f"tokens={tokens}: give a multiple of {2 * devices}, two pieces per device")
  pieces = np.arange(tokens).reshape(2 * devices, -1)
  front, back = pieces[:devices], pieces[::-1][:devices]
  return np.stack([front, back], axis=1).reshape(-1)


def all_to_all_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  axis: str,
  causal: bool,
  attend: Callable[..., jax.Array] = attention,
) -> jax.Array:
  """Attention over tokens that are split, by a device having all tokens of some heads.

  DeepSpeed-Ulysses, arXiv:2309.14509, section 3.

  Args:
    q: [rows, tokens/n, heads, width], of contiguous tokens.
    k: [rows, tokens/n, groups, width]; groups divide heads.
    v: likewise.
    axis: mesh axis of the tokens, n devices.
    causal: a token sees itself and those before it.
    attend: as `jaxscale.models.stack.attention`, on [rows, tokens, heads/n, width].

  Returns:
    [rows, tokens/n, heads, width].

  Raises:
    ConfigError: n does not divide heads and groups.
  """
  devices = axis_sizes((axis,))[axis]
  for name, x in (("heads", q), ("key/value heads", k)):
    if x.shape[2] % devices:
      why = f"{x.shape[2]} {name} cannot be split over the {devices} devices of {axis!r}"
      raise ConfigError(f"attend='all_to_all': {why}, give attend='ring' or a divisor of them")

  def to_heads(x: jax.Array):
    return lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)

  out = attend(to_heads(q), to_heads(k), to_heads(v), causal=causal)
  return lax.all_to_all(out, axis, split_axis=1, concat_axis=2, tiled=True)


def gather_tokens(h: jax.Array, *, axis: str) -> jax.Array:
  """All tokens from each device's: the `enter` of sequence-parallel regions.

  Backwards a reduce-scatter: each device's heads or hidden units have a part of the
  gradient (g of arXiv:2205.05198, section 4.2.2).

  Args:
    h: [rows, tokens/n, ...].
    axis: mesh axis of tensor parallelism, n devices.

  Returns:
    [rows, tokens, ...], typed varying over `axis`.
  """
  return lax.all_gather(h, axis, axis=1, tiled=True)


def scatter_tokens(h: jax.Array, *, axis: str) -> jax.Array:
  """The sum over a branch's parts, a device's tokens of it: the `reduce` of the above.

  Args:
    h: [rows, tokens, ...], a part of a sum.
    axis: mesh axis of tensor parallelism, n devices.

  Returns:
    [rows, tokens/n, ...].

  Raises:
    ConfigError: n does not divide the tokens.
  """
  devices = axis_sizes((axis,))[axis]
  if h.shape[1] % devices:
    why = f"cannot be split over the {devices} devices of {axis!r}, give a multiple"
    raise ConfigError(f"tokens={h.shape[1]}: {why}")
  return lax.psum_scatter(h, axis, scatter_dimension=1, tiled=True)
