"""Dimensions of a logical torus, and who is whose neighbour along them.

N devices are seen as a grid n_1 x ... x n_d, the dimension of the fastest links
first. A dimension is a mesh axis, a factor of one, or several axes in one ring.
A device's place along the dimension is (i // stride) % size, i its index along
the axes; so the factors of an axis of 64 = 8 x 8 are neighbours of stride 1 and
neighbours of stride 8. (Grids: IBM DDL, arXiv:1708.02188.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError


class Dim(NamedTuple):
  """One dimension of a torus.

  Attributes:
    axes: mesh axes it lies in, slowest first; several are one ring over all.
    size: devices along it.
    stride: how far apart they are, in places along the axes.
    live: only the first so many places of the axes take part; None: all.
  """

  axes: tuple[str, ...]
  size: int
  stride: int = 1
  live: int | None = None

  def __str__(self) -> str:
    return f"{'+'.join(self.axes)}:{self.size}"


def axis_dims(sizes: Mapping[str, int]) -> tuple[Dim, ...]:
  """One dimension a mesh axis, the last (fastest) first; none of size 1.

  Example:
    >>> [str(d) for d in axis_dims({"replica": 2, "data": 4})]
    ['data:4', 'replica:2']
  """
  return tuple(Dim((a,), n) for a, n in reversed(list(sizes.items())) if n > 1)


def one_ring(sizes: Mapping[str, int]) -> tuple[Dim, ...]:
  """All axes in one ring."""
  total = math.prod(sizes.values())
  return (Dim(tuple(sizes), total),) if total > 1 else ()


def two_by_two(sizes: Mapping[str, int]) -> tuple[Dim, ...]:
  """Dimensions of two, the hypercube of recursive halving and doubling.

  An axis that is no power of two takes part with the largest one below it.
  """
  dims = []
  for axis, n in reversed(list(sizes.items())):
    live = 1 << (n.bit_length() - 1)
    dims += [
      Dim((axis,), 2, 1 << k, None if live == n else live)
      for k in range(live.bit_length() - 1)
    ]
  return tuple(dims)


def given_dims(
  dims: Sequence[tuple[str, int]], sizes: Mapping[str, int]
) -> tuple[Dim, ...]:
  """Dimensions as somebody writes them: (axis, size), fastest links first.

  Those of one axis have neighbours further apart one after another.

  Raises:
    ConfigError: an axis that is not there, or sizes that do not multiply to its.

  Example:
    >>> given_dims([("data", 2), ("data", 2), ("replica", 2)],
    ...            {"replica": 2, "data": 4})[1]
    Dim(axes=('data',), size=2, stride=2, live=None)
  """
  made, strides = [], dict.fromkeys(sizes, 1)
  for axis, size in dims:
    if axis not in sizes:
      raise ConfigError(
        f"dims={_written(dims)}: no axis {axis!r}, {nearest(axis, sizes)}"
      )
    if size < 1:
      raise ConfigError(f"dims={_written(dims)}: {size} devices, give 1 or more")
    if size > 1:
      made.append(Dim((axis,), size, strides[axis]))
    strides[axis] *= size
  for axis, n in sizes.items():
    if strides[axis] != n:
      raise ConfigError(
        f"dims={_written(dims)}: those of {axis} multiply to {strides[axis]}, "
        f"make them multiply to the {n} devices of the axis"
      )
  return tuple(made)


def _written(dims: Sequence[tuple[str, int]]) -> str:
  return ",".join(f"{axis}:{size}" for axis, size in dims)


def pairs(dim: Dim, total: int, shift: int) -> list[tuple[int, int]]:
  """(source, target) of everybody sending to whom is `shift` places further.

  Args:
    dim: the dimension.
    total: devices along its axes.
    shift: places, around the end to the start.

  Example:
    >>> pairs(Dim(("data",), 2, stride=2), 4, 1)
    [(0, 2), (1, 3), (2, 0), (3, 1)]
  """
  moved = []
  for source in range(dim.live or total):
    place = source // dim.stride % dim.size
    further = (place + shift) % dim.size - place
    moved.append((source, source + further * dim.stride))
  return moved
