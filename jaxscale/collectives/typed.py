"""Helpers of the collectives: types, flat vectors, bits on the wire.

`shard_map` follows which values may differ between devices (they are *varying*
over mesh axes) and which are the same on all (*invariant*). JAX has no cast from
the first to the second: it cannot know that they are the same. After a ring has
copied every block to every device they are, bit for bit, and
`same_everywhere` declares it. It costs nothing in the compiled program; ending with
`lax.all_gather(..., to="invarying")` instead would move the data once more.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxscale.cluster.jax_internals import varying_axes, with_varying_axes
from jaxscale.errors import ConfigError

_same_everywhere = Primitive("same_everywhere")
_same_everywhere.def_impl(lambda x, *, axes: x)


@_same_everywhere.def_abstract_eval
def _drop_axes(x: Any, *, axes: tuple[str, ...]):
  return with_varying_axes(x, varying_axes(x) - set(axes))


mlir.register_lowering(_same_everywhere, lambda ctx, x, *, axes: [x])
batching.defvectorized(_same_everywhere)


def same_everywhere(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """`x`, typed invariant over `axes`; the caller vouches that it is.

  Nothing checks it: a value that differs between devices would be used as if it
  did not. It has no derivative of its own; what calls it defines one.

  Args:
    x: any array, equal in every bit on all devices along `axes`.
    axes: mesh axes.
  """
  return _same_everywhere.bind(x, axes=axes)


def in_mesh_order(axes: Iterable[str]) -> tuple[str, ...]:
  """Names of axes as the mesh has them, each once.

  Sets of names are ordered by Python's hashes, which have another seed in every
  process. Collectives over them in that order had other groups in each process, so
  that programs differed, and a step waited for ever.

  Args:
    axes: of the mesh that `jax.shard_map` is on; none may also be asked outside.
  """
  names = jax.sharding.get_abstract_mesh().axis_names
  return tuple(sorted(set(axes), key=names.index))


def varying(x: jax.Array) -> tuple[str, ...]:
  """The axes over which an array is typed varying, in the mesh's order."""
  return in_mesh_order(varying_axes(jax.typeof(x)))


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
  """A tree, typed varying over `axes` as well as over what it already is."""

  def cast(x: jax.Array):
    missing = tuple(a for a in axes if a not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def axis_sizes(axes: tuple[str, ...]) -> dict[str, int]:
  """Sizes of mesh axes, inside `shard_map`.

  Raises:
    ConfigError: there is no such axis here, or one is named twice.
  """
  if len(set(axes)) < len(axes):
    raise ConfigError(f"axes={axes}: an axis is named twice, name each once")
  sizes = {}
  for axis in axes:
    try:
      sizes[axis] = int(lax.axis_size(axis))
    except NameError:
      why = f"the mesh has no axis {axis!r} here, name axes of the shard_map that this is called in"
      raise ConfigError(f"axes={axes}: {why}") from None
  return sizes


def names(axes: str | Sequence[str]) -> tuple[str, ...]:
  """One axis or several, as a tuple."""
  return (axes,) if isinstance(axes, str) else tuple(axes)


def padded(x: jax.Array, multiple: int) -> jax.Array:
  """`x` as a vector, with zeros behind it up to a multiple of `multiple`."""
  flat = x.reshape(-1)
  rest = -flat.size % multiple
  return jnp.pad(flat, (0, rest)) if rest else flat


def unpadded(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The array of that shape at the start of a vector."""
  return flat[: math.prod(shape)].reshape(shape)


def to_wire(x: jax.Array, dtype: Any) -> jax.Array:
  """`x` rounded to `dtype`, as what is sent: narrow floats as integers.

  XLA on CPU sends bfloat16 and float16 as float32 (read from its programs, jax
  0.10.2), and every backend may keep more precision than was asked for, so that
  the device that owns a block would hold other bits than those it sent. Neither
  is done to integers.
  """
  dtype = np.dtype(dtype)
  x = x.astype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
    return x
  return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * dtype.itemsize}"))


def from_wire(bits: jax.Array, payload: Any, dtype: Any) -> jax.Array:
  """Decode the result of `to_wire(…, payload)` as `dtype`."""
  if bits.dtype != np.dtype(payload):
    bits = lax.bitcast_convert_type(bits, np.dtype(payload))
  return bits.astype(dtype)


def dtypes(x: jax.Array, payload: Any, accumulate: Any) -> tuple[Any, Any]:
  """Return the dtype that is sent and the dtype of sums.

  Integers are sent and summed as they are. Floats are sent as `payload` (None:
  as they are) and summed in `accumulate` (None: in what is sent).

  Raises:
    ConfigError: a payload or sum that is not a float, or one for complex numbers.
  """
  for name, dtype in (("payload", payload), ("accumulate", accumulate)):
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
      raise ConfigError(f"{name}={np.dtype(dtype).name}: give a float, e.g. bfloat16, or None")
  if x.dtype == np.dtype(bool):
    raise ConfigError("dtype=bool: has no sum, give int32")
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return x.dtype, x.dtype
  sent = np.dtype(x.dtype if payload is None else payload)
  return sent, sent if accumulate is None else np.dtype(accumulate)


def add_rows(x: jax.Array) -> jax.Array:
  """The sum over the first dim, by halves: [rows, ...] -> [...].

  XLA on CPU adds halves 40 times faster than `jnp.sum(x, axis=0)`, and the order of
  the additions is the same on every backend.

  Example:
    >>> add_rows(jnp.arange(6).reshape(3, 2))
    Array([6, 9], dtype=int32)
  """
  while len(x) > 1:
    half = len(x) // 2
    pairs = x[:half] + x[half : 2 * half]
    x = jnp.concatenate([pairs, x[2 * half :]]) if len(x) % 2 else pairs
  return x[0]
