"""Plans of all-reduces: which algorithm, and how many dimensions, from costs of links.

A link of axis a takes alpha_a + beta_a m seconds for a message of m bytes. For M
bytes in N = n_1 ... n_d devices, P_k = n_1 ... n_k:

    ring     2 (N - 1) max_a (alpha_a + beta_a M / N)
    torus    2 sum_k (n_k - 1) (alpha_k + beta_k s_k M / P_k)

s_k is 1 where the axis is a switch, and the stride of the dimension where its
devices are wired in a ring, whose links messages of that stride share. The other
algorithms are cases of the torus: hierarchical has one dimension per mesh axis,
halving_doubling dimensions of two, and 2 (alpha + beta M) more for each axis that
is not a power of two. Hierarchical costs what the torus does, as if XLA's collectives
were rings; of `psum` nothing is known.
(arXiv:1708.02188 as reconstructed; alpha and beta: Thakur et al., 2005.)

N devices are seen as a grid n_1 x ... x n_d, the dimension of the fastest links
first. A dimension is a mesh axis, a factor of one, or several axes in one ring.
A device's place along the dimension is (i // stride) % size, i its index along
the axes; so the factors of an axis of 64 = 8 x 8 are neighbours of stride 1 and
neighbours of stride 8. (Grids: IBM DDL, arXiv:1708.02188.)

Dimensions of one axis share beta, so that more of them save steps and no bytes;
beyond a few the gain is smaller than what the equations leave out. The plan has the
fewest dimensions that come within a hundredth of the best.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError

TOLERANCE = 0.01  # how much slower a plan of fewer dimensions may be
Dims = Sequence[tuple[str, int]]  # (axis, size), fastest links first
Sizes = Mapping[str, int]  # of mesh axes, slowest first
ALGORITHMS = ("ring", "torus", "hierarchical", "halving_doubling", "psum")


class Link(NamedTuple):
  """Cost of sending along an axis.

  Attributes:
    alpha: seconds of a message however short.
    beta: seconds per byte.
    switched: every device reaches every other alike; False: they are wired in a
      ring, and what goes s places further takes s links.
  """

  alpha: float
  beta: float
  switched: bool = True


Links = Mapping[str, Link]  # by axis

# Assumed, not measured: NVLink inside a node and InfiniBand between nodes of 2017,
# the illustration of IBM DDL's 256 P100. Measure yours with `jaxscale bench`.
FAST = Link(alpha=5e-6, beta=1 / 32e9)
SLOW = Link(alpha=3e-6, beta=1 / 10e9)


class Dim(NamedTuple):
  """One dimension of a torus.

  Attributes:
    axes: its mesh axes, slowest first; several are one ring over all.
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


class Plan(NamedTuple):
  """Algorithm of a sum over devices.

  Attributes:
    algorithm: one of `ALGORITHMS`.
    axes: the mesh axes to sum over, slowest first.
    dims: of the torus, in the order they are reduced; () for `psum`.
    seconds: predicted, or measured by `measure_algorithms`; None: not known.
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
  """One dimension per mesh axis, the last (fastest) first; none of size 1.

  Example:
    >>> [str(d) for d in axis_dims({"replica": 2, "data": 4})]
    ['data:4', 'replica:2']
  """
  return tuple(Dim((a,), n) for a, n in reversed(list(sizes.items())) if n > 1)


def one_ring(sizes: Sizes) -> tuple[Dim, ...]:
  """All axes in one ring."""
  total = math.prod(sizes.values())
  return (Dim(tuple(sizes), total),) if total > 1 else ()


def two_by_two(sizes: Sizes) -> tuple[Dim, ...]:
  """Dimensions of two, the hypercube of recursive halving and doubling.

  An axis that is not a power of two takes part with the largest one below it.
  """
  dims = []
  for axis, n in reversed(list(sizes.items())):
    live = 1 << (n.bit_length() - 1)
    steps = range(live.bit_length() - 1)
    dims += [Dim((axis,), 2, 1 << k, None if live == n else live) for k in steps]
  return tuple(dims)


def given_dims(dims: Dims, sizes: Sizes) -> tuple[Dim, ...]:
  """Dimensions as a user writes them: (axis, size), fastest links first.

  Those of one axis have neighbours further apart one after another.

  Raises:
    ConfigError: an axis that is not there, or sizes that do not multiply to its.

  Example:
    >>> given_dims([("data", 2), ("data", 2), ("replica", 2)],
    ...            {"replica": 2, "data": 4})[1]
    Dim(axes=('data',), size=2, stride=2, live=None)
  """
  made, strides = [], dict.fromkeys(sizes, 1)
  given = "dims=" + ",".join(f"{axis}:{size}" for axis, size in dims)
  for axis, size in dims:
    if axis not in sizes:
      raise ConfigError(f"{given}: no axis {axis!r}, {nearest(axis, sizes)}")
    if size < 1:
      raise ConfigError(f"{given}: {size} devices, give 1 or more")
    if size > 1:
      made.append(Dim((axis,), size, strides[axis]))
    strides[axis] *= size
  for axis, n in sizes.items():
    if strides[axis] != n:
      fix = f"make them multiply to the {n} devices of the axis"
      raise ConfigError(f"{given}: those of {axis} multiply to {strides[axis]}, {fix}")
  return tuple(made)


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

  def target(source: int):
    place = source // dim.stride % dim.size
    return source + ((place + shift) % dim.size - place) * dim.stride

  return [(source, target(source)) for source in range(dim.live or total)]


def default_links(axes: Sequence[str]) -> dict[str, Link]:
  """Links where none were given: the last axis fast, the others slow; assumed."""
  return {a: FAST if a == axes[-1] else SLOW for a in axes}


def torus_seconds(dims: Sequence[Dim], num_bytes: float, links: Links) -> float:
  """2 sum_k (n_k - 1) (alpha_k + beta_k s_k M / P_k), each step as its slowest link.

  Args:
    dims: in the order they are reduced.
    num_bytes: M, of the whole payload of a device.
    links: by axis.

  Example:
    >>> dims = (Dim(("data",), 4), Dim(("data",), 2, stride=4))
    >>> torus_seconds(dims, 8e9, {"data": Link(0.0, 1e-9)})
    14.0
  """
  seconds, product = 0.0, 1
  for dim in dims:
    product *= dim.size
    message = num_bytes / product
    used = (links[a] for a in dim.axes)
    loads = ((link, 1 if link.switched else dim.stride) for link in used)
    slowest = max(link.alpha + link.beta * message * load for link, load in loads)
    seconds += 2 * (dim.size - 1) * slowest
  return seconds


@functools.cache
def factorizations(number: int) -> tuple[tuple[int, ...], ...]:
  """Every way to write a number as an ordered product of factors above 1.

  Example:
    >>> factorizations(8)
    ((8,), (2, 4), (2, 2, 2), (4, 2))
  """
  if number == 1:
    return ((),)
  found = [(number,)]
  for first in range(2, number // 2 + 1):
    if number % first == 0:
      found += [(first, *rest) for rest in factorizations(number // first)]
  return tuple(found)


def best_dims(
  sizes: Sizes, num_bytes: float, links: Links, tolerance: float = TOLERANCE
) -> tuple[Dim, ...]:
  """The fewest dimensions that come within `tolerance` of the fastest torus.

  Axes go by their seconds per byte, which is the best order of any that keep the
  dimensions of an axis together; then what an axis costs depends on the factors of
  no other.
  """
  axes = (axis for axis in reversed(list(sizes)) if sizes[axis] > 1)
  axes = sorted(axes, key=lambda axis: links[axis].beta)
  # Number of dimensions so far -> (seconds, dimensions).
  best: dict[int, tuple[float, tuple[Dim, ...]]] = {0: (0.0, ())}
  message = num_bytes
  for axis in axes:
    extended: dict[int, tuple[float, tuple[Dim, ...]]] = {}
    for factors in _shortest(axis, sizes[axis], message, links):
      for count, (seconds, dims) in best.items():
        total = seconds + torus_seconds(factors, message, links)
        other = extended.get(count + len(factors))
        if other is None or total < other[0]:
          extended[count + len(factors)] = (total, dims + factors)
    best, message = extended, message / sizes[axis]
  fastest = min(seconds for seconds, _ in best.values())
  enough = [n for n in best if best[n][0] <= fastest * (1 + tolerance)]
  return best[min(enough)][1]


def _shortest(
  axis: str, size: int, message: float, links: Mapping[str, Link]
) -> list[tuple[Dim, ...]]:
  """For each number of factors of an axis, the dimensions that cost least."""
  found: dict[int, tuple[float, tuple[Dim, ...]]] = {}
  for factors in factorizations(size):
    dims = given_dims([(axis, n) for n in factors], {axis: size})
    seconds = torus_seconds(dims, message, links)
    if len(dims) not in found or seconds < found[len(dims)][0]:
      found[len(dims)] = (seconds, dims)
  return [dims for _, dims in found.values()]


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
    sizes: of the axes, slowest first, as `mesh.shape`.
    num_bytes: of the payload of one device.
    algorithm: one of `ALGORITHMS`, or "auto": whatever costs least on the links.
    dims: of "torus", (axis, size) pairs, fastest links first; None: the planner's.
    links: by axis; None: `default_links`.

  Raises:
    ConfigError: an unknown algorithm or axis, a link without sense, or dims that do
      not fit.

  Example: 256 GPUs, 102 MB, on links that are assumed.
    >>> print(plan({"node": 64, "gpu": 4}, 102e6))
    torus gpu:4 x node:8 x node:8, 9.916 ms
    >>> print(plan({"node": 64, "gpu": 4}, 102e6, "ring"))
    ring node+gpu:256, 21.85 ms
  """
  links = _checked_links(sizes, links)
  if dims is not None and algorithm != "torus":
    raise ConfigError(f'algorithm={algorithm!r}: takes no dims, "torus" does')
  if algorithm not in (*ALGORITHMS, "auto"):
    hint = nearest(algorithm, (*ALGORITHMS, "auto"))
    raise ConfigError(f"algorithm={algorithm!r}: not an algorithm, {hint}")
  if not (math.isfinite(num_bytes) and num_bytes >= 0):
    raise ConfigError(f"num_bytes={num_bytes}: give 0 or more")
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
  seconds = torus_seconds(planned, num_bytes, links)
  if algorithm == "halving_doubling":  # what is folded is sent there and back
    folded = [links[axis] for axis, n in sizes.items() if n & (n - 1)]
    seconds += sum(2 * (link.alpha + link.beta * num_bytes) for link in folded)
  return Plan(algorithm, tuple(sizes), planned, seconds)


def _cheapest(sizes: Sizes, num_bytes: float, links: dict[str, Link]) -> Plan:
  """The plan of "auto", by the equations."""
  if math.prod(sizes.values()) == 1:
    return Plan("psum", tuple(sizes), (), 0.0)
  torus = plan(sizes, num_bytes, "torus", links=links)
  halving = plan(sizes, num_bytes, "halving_doubling", links=links)
  # Folding can beat a large prime where only steps count; else it is a torus.
  is_faster = (halving.seconds or 0.0) * (1 + TOLERANCE) < (torus.seconds or 0.0)
  if torus.dims == halving.dims or is_faster:
    return halving
  # A torus of one dimension goes by its shorter name.
  return torus._replace(algorithm="ring") if len(torus.dims) == 1 else torus


def _checked_links(sizes: Sizes, links: Mapping[str, Link] | None) -> dict[str, Link]:
  """A link for every axis: those given, which must make sense, or assumed ones."""
  if links is None:
    return default_links(tuple(sizes))
  for axis, link in links.items():
    if axis not in sizes:
      hint = nearest(axis, sizes)
      raise ConfigError(f"links[{axis!r}]: the mesh has no such axis, {hint}")
    if not all(math.isfinite(x) and x >= 0 for x in link[:2]):
      raise ConfigError(f"links[{axis!r}]={link}: give alpha and beta of 0 or more")
  for axis, n in sizes.items():
    if axis not in links and n > 1:
      raise ConfigError(f"links: none for {axis!r}, give alpha and beta of every axis")
  return {axis: links.get(axis, FAST) for axis in sizes}
