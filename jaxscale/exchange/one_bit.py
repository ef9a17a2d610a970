"""One bit an element with error feedback: CNTK's 1-bit SGD.

A tensor is a matrix whose column j holds the M weights into output j. With x the
gradient plus what was not sent before (the residual r), column by column:

    q = [x >= 0]
    Q(x) = mean{x | x >= 0} where q = 1, mean{x | x < 0} where q = 0 (none: 0)
    r' = x - Q(x)

The sum over N devices has two stages. Device d owns a stripe of the columns, and
keeps a residual R_d of what it could not pass on:

    stage 1   x_i = g_i + r_i;   device i sends Q(x_i) of stripe d to device d
    stage 2   y_d = sum_i Q(x_i) + R_d;   device d sends Q(y_d) to all
    result    Q(y) / N

A column of M elements is M bits and two float32: M / 8 + 8 bytes, rounded up. At
any time N sum_t result_t + sum_i r_i + sum_d R_d = sum_t sum_i g_i, and since the
residual of either half of a column sums to 0, Q keeps the sum of every column.

Sources: CNTK, Source/Math/ColumnQuantizer.h with zero as the threshold; the two
stages are those of Seide et al., "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.collectives import add_rows
from jaxscale.exchange import Exchange
from jaxscale.exchange.buckets import BUCKET_BYTES, leaf_groups, sum_together
from jaxscale.exchange.feedback import check_devices, zero_residuals
from jaxscale.exchange.resize import copies, mean_for_all
from jaxscale.settings import ConfigError

_VALUES = 8  # bytes of the two float32 of a column


class Columns(NamedTuple):
  """A tensor as columns, spread over the devices.

  Attributes:
    count: columns there are.
    rows: elements of a column.
    own: columns of a device's stripe; the last stripes are filled with zeros.
  """

  count: int
  rows: int
  own: int

  @property
  def payload(self) -> int:
    """Bytes of one stripe."""
    return self.own * (-(-self.rows // 8) + _VALUES)


def columns(shape: tuple[int, ...], num_devices: int) -> Columns:
  """The columns of a tensor: its last dim counts them; a vector is one column.

  Example:
    >>> columns((3, 3, 64, 128), 8)
    Columns(count=128, rows=576, own=16)
  """
  count = shape[-1] if len(shape) > 1 else 1
  return Columns(count, math.prod(shape) // max(count, 1), -(-count // num_devices))


def shrinks(shape: tuple[int, ...], num_devices: int) -> bool:
  """Whether the quantised stripes of a tensor are smaller than its float32."""
  return columns(shape, num_devices).payload * num_devices < 4 * math.prod(shape)


def one_bit(
  axes: tuple[str, ...], *, num_devices: int, bucket_bytes: int = BUCKET_BYTES
) -> Exchange:
  """The mean by CNTK's 1-bit quantiser with error feedback, as the module says.

  CNTK begins without quantisation: `warm_start(one_bit(...), axes, steps=...)`.
  Tensors that would not shrink (`shrinks`: biases of a few elements, say) are
  averaged in float32. A device also quantises the stripe that it owns itself.

  On N' devices instead of N, `resize` gives every device the mean of r, and cuts
  the columns of R into the new stripes, times N'/N since R enters a result as R/N.
  Where a tensor shrinks no longer, R/N is added to r, and the next step sends both.

  Args:
    axes: mesh axes to average over.
    num_devices: devices of those axes, `mesh.size`; the stripes depend on it.
    bucket_bytes: of gradients that are sent at once.

  Returns:
    State: "residual", r, shaped like the parameters, float32; "owner", R, of each
    tensor's stripe, float32 [columns, rows].

  Raises:
    ConfigError: the mesh has another number of devices.

  Example:
    >>> exchange = one_bit(("replica", "data"), num_devices=8)
    >>> exchange.init({"w": jnp.zeros((64, 20))})["owner"]["w"].shape
    (3, 64)
  """
  if num_devices < 1:
    raise ConfigError(f"num_devices={num_devices}: give mesh.size, >= 1")

  def init(params):
    def owner(p):
      _, rows, own = columns(p.shape, num_devices)
      return jnp.zeros((own, rows), jnp.float32)

    return {"residual": zero_residuals(params), "owner": jax.tree.map(owner, params)}

  def exchange(grads, state):
    check_devices("one_bit", axes, num_devices)
    leaves, structure = jax.tree.flatten(grads)
    residual, owner = (structure.flatten_up_to(state[k]) for k in ("residual", "owner"))
    means: list[Any] = list(leaves)
    for group in leaf_groups(leaves, bucket_bytes):
      small = [i for i in group if not shrinks(leaves[i].shape, num_devices)]
      # Their residuals are 0, but after `resize` from devices on which they shrank.
      xs = [leaves[i].astype(jnp.float32) + residual[i] for i in small]
      for i, total in zip(small, sum_together(xs, axes), strict=True):
        means[i] = (total / num_devices).astype(leaves[i].dtype)
        residual[i] = jnp.zeros_like(residual[i])
      large = [i for i in group if i not in small]
      picked = ([part[i] for i in large] for part in (leaves, residual, owner))
      done = _exchange_group(axes, *picked)
      for i, (total, left, own_left) in zip(large, done, strict=True):
        means[i] = (total / num_devices).astype(leaves[i].dtype)
        residual[i], owner[i] = left, own_left
    means, residual, owner = (structure.unflatten(x) for x in (means, residual, owner))
    return means, {"residual": residual, "owner": owner}

  return Exchange(init, exchange, resize)


def resize(state: Any, num_devices: int) -> Any:
  """The state of `one_bit` for another number of devices, as it says there.

  Args:
    state: with a leading dim of one entry a device.
    num_devices: the new number, N'.
  """

  def tensor(residual, owner):
    shape, old = residual.shape[1:], len(owner)
    size = columns(shape, num_devices)
    left = _from_stripes(owner, shape, columns(shape, old))
    if shrinks(shape, num_devices):
      owner = _to_stripes(left * (num_devices / old), size, num_devices)
      return mean_for_all(residual, num_devices), owner
    none = jnp.zeros((num_devices, size.own, size.rows), owner.dtype)
    mean = mean_for_all(residual, num_devices) + copies(left / old, num_devices)
    return mean, none

  residuals, structure = jax.tree.flatten(state["residual"])
  owners = structure.flatten_up_to(state["owner"])
  pairs = [tensor(r, o) for r, o in zip(residuals, owners, strict=True)]
  residual, owner = zip(*pairs, strict=True) if pairs else ((), ())
  return {
    "residual": structure.unflatten(residual),
    "owner": structure.unflatten(owner),
  }


def _exchange_group(axes, grads, residuals, owners):
  """[(sum over devices, residual, owner's residual)] of tensors sent at once."""
  if not grads:
    return []
  num_devices = lax.axis_size(axes)
  sizes = [columns(g.shape, num_devices) for g in grads]
  xs = [g.astype(jnp.float32) + r for g, r in zip(grads, residuals, strict=True)]
  stripes = [
    _to_stripes(x, size, num_devices) for x, size in zip(xs, sizes, strict=True)
  ]
  sent = [quantise(x) for x in stripes]
  received = lax.all_to_all(_join(sent, num_devices), axes, 0, 0)
  ys = [
    add_rows(dequantise(q, size.rows)) + owner
    for q, size, owner in zip(_split(received, sizes), sizes, owners, strict=True)
  ]
  passed = [quantise(y[None]) for y in ys]
  gathered = lax.all_gather(_join(passed, 1), axes, tiled=True, to="invarying")
  return [
    (
      _from_stripes(dequantise(q, size.rows), g.shape, size),
      _from_stripes(x - dequantise(own, size.rows), g.shape, size),
      y - dequantise(p, size.rows)[0],
    )
    for q, g, size, x, own, y, p in zip(
      _split(gathered, sizes), grads, sizes, stripes, sent, ys, passed, strict=True
    )
  ]


def quantise(x: jax.Array) -> jax.Array:
  """Columns as bits and two means.

  Args:
    x: float32 [..., rows], columns along the last dim.

  Returns:
    uint8 [..., ceil(rows / 8) + 8]: the bits [x >= 0], the first of eight highest,
    then the means of the negative and of the other elements as float32.
  """
  high = x >= 0
  zero = jnp.zeros_like(x)
  count = jnp.sum(high, axis=-1).astype(x.dtype)
  rest = x.shape[-1] - count
  means = jnp.stack(
    [
      jnp.sum(jnp.where(high, zero, x), axis=-1) / jnp.maximum(rest, 1),
      jnp.sum(jnp.where(high, x, zero), axis=-1) / jnp.maximum(count, 1),
    ],
    axis=-1,
  )
  values = lax.bitcast_convert_type(means, jnp.uint8)
  values = values.reshape(*x.shape[:-1], _VALUES)
  return jnp.concatenate([jnp.packbits(high, axis=-1), values], axis=-1)


def dequantise(q: jax.Array, rows: int) -> jax.Array:
  """What `quantise` stands for: float32 [..., rows]."""
  bits = jnp.unpackbits(q[..., :-_VALUES], axis=-1, count=rows)
  values = q[..., -_VALUES:].reshape(*q.shape[:-1], 2, 4)
  means = lax.bitcast_convert_type(values, jnp.float32)
  return jnp.where(bits == 1, means[..., 1:], means[..., :1])


def _to_stripes(x: jax.Array, size: Columns, num_devices: int) -> jax.Array:
  """[devices, own, rows] of a tensor, the missing columns zero."""
  matrix = x.reshape(size.rows, size.count).T
  matrix = jnp.pad(matrix, ((0, num_devices * size.own - size.count), (0, 0)))
  return matrix.reshape(num_devices, size.own, size.rows)


def _from_stripes(x: jax.Array, shape: tuple[int, ...], size: Columns) -> jax.Array:
  """The tensor of stripes [devices, own, rows]."""
  return x.reshape(-1, size.rows)[: size.count].T.reshape(shape)


def _join(parts: list[jax.Array], devices: int) -> jax.Array:
  """Quantised stripes of several tensors, end to end: uint8 [devices, bytes]."""
  return jnp.concatenate([p.reshape(devices, -1) for p in parts], axis=1)


def _split(joined: jax.Array, sizes: list[Columns]) -> list[jax.Array]:
  """The inverse of `_join`: uint8 [devices, own, bytes of a column] each."""
  parts, start = [], 0
  for size in sizes:
    part = joined[:, start : start + size.payload]
    parts.append(part.reshape(joined.shape[0], size.own, -1))
    start += size.payload
  return parts
