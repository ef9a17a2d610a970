"""Predict the time of a collective from the links that its mesh axes cross.

Devices are counted in the mesh's order, with a fixed number per node. A group along an axis of n
devices whose neighbours are s positions apart has min(n, devices per node / s) devices in a
node, and spans nodes for the rest. An all-reduce is planned for these two numbers as
`collectives.planner` does (arXiv:1708.02188); a reduce-scatter or an all-gather takes half of it.
In an all-to-all or a permute, the part that stays in the node uses its links, and the rest uses
the network's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from jaxscale.collectives.planner import Link, plan
from jaxscale.hlo import Collective

Sizes = Mapping[str, int]  # of mesh axes, slowest first


def split(axes: tuple[str, ...] | None, sizes: Sizes, per_node: int) -> tuple[int, int]:
  """Return the number of a group's devices per node, and the number of nodes.

  Args:
    axes: the axes along which the group's devices differ; None stands for all axes.
    sizes: the sizes of the mesh axes.
    per_node: the number of devices per node.

  Example:
    >>> split(("data",), {"replica": 4, "data": 16}, 8)
    (8, 2)
    >>> split(("replica",), {"replica": 4, "data": 16}, 8)
    (1, 4)
  """
  inside, total, stride = 1, 1, 1
  for axis, size in reversed(list(sizes.items())):
    if axes is None or axis in axes:
      here = max(min(per_node // stride, size), 1)
      inside, total = inside * math.gcd(here, size), total * size
    stride *= size
  return inside, total // inside


def seconds(collective: Collective, sizes: Sizes, per_node: int, links: tuple[Link, Link]) -> float:
  """Return the seconds of one execution of a collective.

  Args:
    collective: the collective of a compiled program. Only its payload and axes count, not
      the number of devices that the program was compiled for.
    sizes: the sizes of the mesh axes that it runs on.
    per_node: the number of devices per node.
    links: the links of the node and of the network, from `machine.links`.

  Example:
    >>> from jaxscale import hlo
    >>> (one,) = hlo.collectives(text, {"data": 8})                # doctest: +SKIP
    >>> seconds(one, {"data": 8}, 4, (Link(0, 1e-9), Link(0, 1e-8)))  # doctest: +SKIP
    0.04
  """
  inside, nodes = split(collective.axes, sizes, per_node)
  payload = float(collective.payload_bytes)
  if inside * nodes == 1:
    return 0.0
  kind = collective.kind
  if kind in ("all-to-all", "ragged-all-to-all"):
    near, far = links
    leaves = payload * (nodes - 1) / nodes
    stays = payload / nodes * (inside - 1) / inside
    rounds = (near.alpha * (inside - 1), far.alpha * (nodes - 1))
    return max(stays * near.beta + rounds[0], leaves * far.beta + rounds[1])
  if kind in ("collective-permute", "send", "collective-broadcast"):
    moved = any(pair[0] != pair[-1] for pair in collective.groups)
    link = links[nodes > 1]
    return link.alpha + link.beta * payload if moved or not collective.groups else 0.0
  took = _all_reduce(inside, nodes, payload, links)
  return took if kind == "all-reduce" else took / 2


@functools.lru_cache(maxsize=10_000)
def _all_reduce(inside: int, nodes: int, payload: float, links: tuple[Link, Link]) -> float:
  near, far = links
  sizes = {"network": nodes, "node": inside}
  return plan(sizes, payload, links={"network": far, "node": near}).seconds or 0.0
