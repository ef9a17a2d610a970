"""Dropout masks that are drawn from the key of each row.

A library's dropout draws one mask for all rows of a device, so that results would depend
on the number of devices.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_CALL: contextvars.ContextVar[tuple] = contextvars.ContextVar("call", default=(None, None))


@contextlib.contextmanager
def during_call(rows: Any, shared: Any = None) -> Iterator[None]:
  """Set what the layers of a model need in a call.

  Args:
    rows: the keys of the rows, one each, or another array of rows.
    shared: a value for all rows; None means a counter of the dropout layers.
  """
  token = _CALL.set((rows, itertools.count() if shared is None else shared))
  try:
    yield
  finally:
    _CALL.reset(token)


def of_call() -> tuple[Any, Any]:
  """Return the arguments of `during_call`."""
  return _CALL.get()


def has_rows(x: jax.Array, broadcast_dims: Sequence[int] = ()) -> bool:
  """Return whether an input has a row, with its own mask, for each key of a call."""
  keys, _ = _CALL.get()
  shares = any(dim % max(x.ndim, 1) == 0 for dim in broadcast_dims)
  return keys is not None and x.shape[:1] == keys.shape and not shares


def drop_rows(
  x: jax.Array, rate: float, layer: jax.Array | None = None, broadcast_dims: Sequence[int] = ()
) -> jax.Array:
  """Drop units of an input for which `has_rows` is True.

  Args:
    x: inputs, [rows, ...].
    rate: probability of a zero.
    layer: key that distinguishes the dropout layers of a model; None counts their calls.
    broadcast_dims: dims along which units share a mask.
  """
  (keys, numbers), shape = _CALL.get(), list(x.shape)
  number = next(numbers) if layer is None else jax.random.bits(layer)
  for dim in broadcast_dims:
    shape[dim] = 1
  return drop(x, rate, keys, number, shape[1:])


def drop(x: jax.Array, rate: float, keys: jax.Array, number: Any, shape: Sequence[int]):
  """Drop units with masks of a shape, one per row, from the row's key and a layer's number."""

  def mask(key):
    return jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, shape)

  return jnp.where(jax.vmap(mask)(keys), x / (1 - rate), 0).astype(x.dtype)
