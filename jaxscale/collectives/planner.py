"""Planner of all-reduces: choose algorithm and dimensions from the costs of links.

A link of axis a takes alpha_a + beta_a m seconds for a message of m bytes. For M bytes
in N = n_1 ... n_d devices, with P_k = n_1 ... n_k:

    ring     2 (N - 1) max_a (alpha_a + beta_a M / N)
    torus    2 sum_k (n_k - 1) (alpha_k + beta_k M / P_k)

All devices of an axis are equally distant, as on a switch. The other algorithms are cases
of the torus: hierarchical has one dimension per mesh axis; halving_doubling has
dimensions of two. The cost of hierarchical assumes that XLA's collectives are rings. The
cost of `psum` is unknown. (arXiv:1708.02188 as reconstructed; alpha and beta: Thakur et
al., 2005.)

N devices form a grid n_1 x ... x n_d, with the dimension of the fastest links first. A
dimension is a mesh axis, a factor of an axis, or several axes in one ring. A device's
position along the dimension is (i // stride) % size, where i is its index along the axes.
The factors of an axis of 64 = 8 x 8 are therefore neighbours of stride 1 and neighbours
of stride 8. (Grids: IBM DDL, arXiv:1708.02188.)

Dimensions of one axis share beta, so that more dimensions save steps, but no bytes. Beyond
a few dimensions the gain is smaller than the error of the model. The plan has the fewest
dimensions whose cost is within 1 % of the best.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError

TOLERANCE = 0.01  # relative slowdown that fewer dimensions may cost
Dims = Sequence[tuple[str, int]]  # (axis, size) pairs, fastest links first
Sizes = Mapping[str, int]  # sizes of mesh axes, slowest first
ALGORITHMS = ("ring", "torus", "hierarchical", "halving_doubling", "psum")


class Link(NamedTuple):
  """Cost of sending along an axis.

  Attributes:
    alpha: latency of a message in seconds.
    beta: seconds per byte.
  """

  alpha: float
  beta: float


Links = Mapping[str, Link]  # links by axis

# Assumed, not measured values for NVLink inside a node and InfiniBand between nodes in 2017,
# as in IBM DDL's example of 256 P100. Measure your links with `jaxscale bench`.
FAST = Link(alpha=5e-6, beta=1 / 32e9)
SLOW = Link(alpha=3e-6, beta=1 / 10e9)


class Dim(NamedTuple):
  """Dimension of a torus.

  Attributes:
    axes: mesh axes of the dimension, slowest first; several axes form one ring.
    size: number of devices along the dimension.
    stride: distance between neighbours, in positions along the axes.
  """

  axes: tuple[str, ...]
  size: int
  stride: int = 1

  def __str__(self) -> str:
    return f"{'+'.join(self.axes)}:{self.size}"


class Plan(NamedTuple):
  """Algorithm of a sum over devices.

  Attributes:
    algorithm: one of `ALGORITHMS`.
    axes: mesh axes to sum over, slowest first.
    dims: dimensions of the torus in the order of reduction; () for `psum`.
    seconds: predicted time, or time measured by `measure_algorithms`; None means unknown.
  """

  algorithm: str
  axes: tuple[str, ...]
  dims: tuple[Dim, ...]
  seconds: float | None

  def __str__(self) -> str:
    shape = " x ".join(map(str, self.dims))
    took = "" if self.seconds is None else f", {1e3 * self.seconds:.4g} ms"
    return self.algorithm + (f" {shape}" if shape else "") + took


def axis_dims(sizes: Sizes) -> tuple[Dim, ...]:
  """Return a dimension per mesh axis of size > 1, with the last (fastest) axis first.

  Example:
    >>> [str(d) for d in axis_dims({"replica": 2, "data": 4})]
    ['data:4', 'replica:2']
  """
  return tuple(Dim((a,), n) for a, n in reversed(list(sizes.items())) if n > 1)


def one_ring(sizes: Sizes) -> tuple[Dim, ...]:
  """Return a single dimension, a ring through all axes."""
  total = math.prod(sizes.values())
  return (Dim(tuple(sizes), total),) if total > 1 else ()


def two_by_two(sizes: Sizes) -> tuple[Dim, ...]:
  """Return dimensions of size 2, the hypercube of recursive halving and doubling.

  Raises:
    ConfigError: the size of an axis is not a power of two.
  """
  dims = []
  for axis, n in reversed(list(sizes.items())):
    if n & (n - 1):
      problem = f"needs powers of two, but axis {axis} has {n} devices; use 'torus' or 'psum'"
      raise ConfigError(f"algorithm='halving_doubling' {problem}")
    dims += [Dim((axis,), 2, 1 << k) for k in range(n.bit_length() - 1)]
  return tuple(dims)


def given_dims(dims: Dims, sizes: Sizes) -> tuple[Dim, ...]:
  """Return dimensions from a user's (axis, size) pairs, fastest links first.

  The strides of an axis's dimensions increase from one to the next.

  Raises:
    ConfigError: an axis does not exist, or sizes do not multiply to the axis.

  Example:
    >>> given_dims([("data", 2), ("data", 2), ("replica", 2)],
    ...            {"replica": 2, "data": 4})[1]
    Dim(axes=('data',), size=2, stride=2)
  """
  result, strides = [], dict.fromkeys(sizes, 1)
  option = "dims=" + ",".join(f"{axis}:{size}" for axis, size in dims)
  for axis, size in dims:
    if axis not in sizes:
      raise ConfigError(f"{option}: there is no axis {axis!r}; {nearest(axis, sizes)}")
    if size > 1:
      result.append(Dim((axis,), size, strides[axis]))
    strides[axis] *= size
  for axis, n in sizes.items():
    if strides[axis] != n:
      fix = f"they must multiply to the {n} devices of the axis"
      raise ConfigError(f"{option}: sizes of {axis} multiply to {strides[axis]}; {fix}")
  return tuple(result)


def pairs(dim: Dim, total: int, shift: int) -> list[tuple[int, int]]:
  """Return (source, target) pairs in which devices send `shift` positions ahead.

  Args:
    dim: the dimension.
    total: number of devices along its axes.
    shift: number of positions, which wrap around.

  Example:
    >>> pairs(Dim(("data",), 2, stride=2), 4, 1)
    [(0, 2), (1, 3), (2, 0), (3, 1)]
  """

  def target(source: int):
    position = source // dim.stride % dim.size
    return source + ((position + shift) % dim.size - position) * dim.stride

  return [(source, target(source)) for source in range(total)]


def torus_seconds(dims: Sequence[Dim], num_bytes: float, links: Links) -> float:
  """Return the time of a torus, 2 sum_k (n_k - 1) (alpha_k + beta_k M / P_k).

  Each step takes as long as its slowest link.

  Args:
    dims: dimensions in the order of reduction.
    num_bytes: whole payload M of a device, in bytes.
    links: links by axis.

  Example:
    >>> dims = (Dim(("data",), 4), Dim(("data",), 2, stride=4))
    >>> torus_seconds(dims, 8e9, {"data": Link(0.0, 1e-9)})
    14.0
  """
  seconds, product = 0.0, 1
  for dim in dims:
    product *= dim.size
    message = num_bytes / product
    slowest = max(links[a].alpha + links[a].beta * message for a in dim.axes)
    seconds += 2 * (dim.size - 1) * slowest
  return seconds


@functools.cache
def factorizations(number: int) -> tuple[tuple[int, ...], ...]:
  """Return all ways to write a number as an ordered product of factors above 1.

  Example:
    >>> factorizations(8)
    ((8,), (2, 4), (2, 2, 2), (4, 2))
  """
  if number == 1:
    return ((),)
  result = [(number,)]
  for first in range(2, number // 2 + 1):
    if number % first == 0:
      result += [(first, *rest) for rest in factorizations(number // first)]
  return tuple(result)


def best_dims(sizes: Sizes, num_bytes: float, links: Links) -> tuple[Dim, ...]:
  """Return the fewest dimensions whose cost is within `TOLERANCE` of the fastest torus.

  Axes are ordered by their seconds per byte, the best order among those that keep the
  dimensions of an axis together. The cost of an axis then does not depend on the factors
  of other axes.
  """
  axes = (axis for axis in reversed(list(sizes)) if sizes[axis] > 1)
  # Maps the number of dimensions so far to (seconds, dimensions).
  best: dict[int, tuple[float, tuple[Dim, ...]]] = {0: (0.0, ())}
  message = num_bytes
  for axis in sorted(axes, key=lambda axis: links[axis].beta):
    extended: dict[int, tuple[float, tuple[Dim, ...]]] = {}
    for factors in factorizations(sizes[axis]):
      added = given_dims([(axis, n) for n in factors], {axis: sizes[axis]})
      took = torus_seconds(added, message, links)
      for count, (seconds, dims) in best.items():
        number = count + len(added)
        if number not in extended or seconds + took < extended[number][0]:
          extended[number] = (seconds + took, dims + added)
    best, message = extended, message / sizes[axis]
  fastest = min(seconds for seconds, _ in best.values())
  enough = [n for n in best if best[n][0] <= fastest * (1 + TOLERANCE)]
  return best[min(enough)][1]


def plan(
  sizes: Sizes,
  num_bytes: float,
  algorithm: str = "auto",
  *,
  dims: Dims | None = None,
  links: Links | None = None,
) -> Plan:
  """Plan the sum of `num_bytes` over the devices of some mesh axes.

  Args:
    sizes: sizes of the axes, slowest first, as in `mesh.shape`.
    num_bytes: payload of one device in bytes.
    algorithm: one of `ALGORITHMS`, or "auto" for the cheapest on the links.
    dims: dimensions of "torus", (axis, size) pairs, fastest links first; None means the
      planner's choice.
    links: links by axis; None assumes that the last axis is fast and the others are slow.

  Raises:
    ConfigError: an algorithm or axis is unknown, a link is out of range, or dims do not
      fit the axes.

  Example: 256 GPUs, 102 MB, on assumed links.
    >>> print(plan({"node": 64, "gpu": 4}, 102e6))
    torus gpu:4 x node:8 x node:8, 9.916 ms
    >>> print(plan({"node": 64, "gpu": 4}, 102e6, "ring"))
    ring node+gpu:256, 21.85 ms
  """
  links = _checked_links(sizes, links)
  if dims is not None and algorithm != "torus":
    raise ConfigError(f"algorithm={algorithm!r} takes no dims; use 'torus'")
  if algorithm not in (*ALGORITHMS, "auto"):
    hint = nearest(algorithm, (*ALGORITHMS, "auto"))
    raise ConfigError(f"algorithm={algorithm!r} is unknown; {hint}")
  if algorithm == "auto":
    return _cheapest(sizes, num_bytes, links)
  if algorithm == "psum":
    return Plan(algorithm, tuple(sizes), (), None)
  forms = {"ring": one_ring, "hierarchical": axis_dims, "halving_doubling": two_by_two}
  if dims is not None:
    planned = given_dims(dims, sizes)
  elif algorithm == "torus":
    planned = best_dims(sizes, num_bytes, links)
  else:
    planned = forms[algorithm](sizes)
  return Plan(algorithm, tuple(sizes), planned, torus_seconds(planned, num_bytes, links))


def _cheapest(sizes: Sizes, num_bytes: float, links: dict[str, Link]) -> Plan:
  """Return the cheapest plan by the equations, for "auto"."""
  if math.prod(sizes.values()) == 1:
    return Plan("psum", tuple(sizes), (), 0.0)
  torus = plan(sizes, num_bytes, "torus", links=links)
  if all(dim.size == 2 for dim in torus.dims):
    return torus._replace(algorithm="halving_doubling")
  # A torus of one dimension is called a ring.
  return torus._replace(algorithm="ring") if len(torus.dims) == 1 else torus


def _checked_links(sizes: Sizes, links: Mapping[str, Link] | None) -> dict[str, Link]:
  """Return a link for every axis: the checked links, or assumed ones."""
  if links is None:
    return {axis: FAST if axis == [*sizes][-1] else SLOW for axis in sizes}
  for axis, link in links.items():
    if axis not in sizes:
      raise ConfigError(f"links[{axis!r}]: the mesh has no such axis; {nearest(axis, sizes)}")
    if not all(math.isfinite(x) and x >= 0 for x in link):
      raise ConfigError(f"links[{axis!r}]={link} is out of range; give alpha, beta >= 0")
  for axis, n in sizes.items():
    if axis not in links and n > 1:
      raise ConfigError(f"links has no axis {axis!r}; give alpha and beta of every axis")
  return {axis: links.get(axis, FAST) for axis in sizes}
