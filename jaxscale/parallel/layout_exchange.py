"""Gradient exchange under a layout that splits gradients.

Each device exchanges its parts of the gradients with the devices that hold the same
parts, by any exchange. Axes over which the backward pass has already summed are skipped.
For parameters that `fsdp` splits, the exchange averages over the slower axes; the few
small parameters that `fsdp` does not split are summed over all axes by `lax.psum`.

Parameters that are split along different axes are exchanged in separate groups. An
exchange may put several parameters in one vector, and the result for a parameter that is
equal on all devices along an axis must not depend on one that differs there.
"""

from typing import Any, NamedTuple

import jax
from jax import lax

from jaxscale.collectives import same_everywhere, vary
from jaxscale.collectives.typed import varying
from jaxscale.exchange import Exchange
from jaxscale.exchange.base import Axes
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.specs import Layout, grad_specs


class _Group(NamedTuple):
  """Parameters that are exchanged together.

  Attributes:
    name: name of the group's part of the exchange state.
    indices: indices of the leaves.
    after: axes over which they are summed.
    others: axes along which all devices hold the same parts.
    is_chosen: whether they use the chosen exchange; otherwise they use `lax.psum`.
  """

  name: str
  indices: list[int]
  after: tuple[str, ...]
  others: tuple[str, ...]
  is_chosen: bool


def exchange_axes(layout: Layout) -> tuple[str, ...]:
  """Return the axes that the exchange averages over; () if the backward pass sums."""
  scattered = [e for e in jax.tree.leaves(layout.gathers) if e.scatter is not None]
  return scattered[0].sum_in_exchange if scattered else layout.token_axes


def make_layout_exchange(exchange: Exchange, layout: Layout) -> Exchange:
  """Return the exchange of all gradients under a layout.

  Args:
    exchange: an exchange over the axes of `exchange_axes`; not called if there are none.
    layout: the layout of the parameters.
  """
  if exchange_split(layout) is None:
    return exchange
  groups, axes = _groups(layout), layout.mesh.axis_names

  def init(grads: Any):
    leaves, structure = jax.tree.flatten(grads)
    parts = {g.name: structure.unflatten(_only(leaves, g)) for g in groups if g.is_chosen}
    return {name: exchange.init(part) for name, part in parts.items()}

  def reduce(grads: Any, state: Any):
    leaves, structure = jax.tree.flatten(grads)
    state = dict(state)
    for group in groups:
      if group.is_chosen:
        # Cast to varying, like the state, which every device has its own copy of.
        part = structure.unflatten(_only(vary(leaves, axes), group))
        part, state[group.name] = exchange.exchange(part, state[group.name])
        found = structure.flatten_up_to(part)
        # The means are equal along axes whose devices started with equal gradients.
        pairs = [(found[i], varying(found[i])) for i in group.indices]
        means = [same_everywhere(x, tuple(a for a in group.others if a in y)) for x, y in pairs]
      else:
        size = lax.axis_size(group.after) if group.after else 1
        parts = [leaves[i] for i in group.indices]
        sums = lax.psum(parts, group.after) if group.after else parts
        means = [x / size for x in sums]
      for index, mean in zip(group.indices, means, strict=True):
        leaves[index] = mean
    return structure.unflatten(leaves), state

  # Without `resize`: on a different number of devices `checkpoint.reshard` converts it,
  # depending on both layouts.
  return Exchange(init, reduce)


class Split(NamedTuple):
  """Split of the gradients on which an exchange's state depends, in JSON types.

  Attributes:
    mesh: number of devices along each axis, in the order of the mesh.
    over: axes that are averaged over. Along other axes devices hold state of different
      parts.
    dims: for each parameter path, the axis that splits each dim of its gradient, or None.
  """

  mesh: dict[str, int]
  over: list[str]
  dims: dict[str, list[str | None]]


def exchange_split(layout: Layout | None) -> Split | None:
  """Return the split of the exchanged gradients; None if they are not split.

  Without a split `make_layout_exchange` uses the state of the exchange itself.
  """
  if layout is None or layout.shapes is None:
    return None
  over = exchange_axes(layout)
  if [(g.name, g.after) for g in _groups(layout)] == [("whole", over)] and (
    set(over) == set(layout.mesh.axis_names)
  ):
    return None
  specs = jax.tree_util.tree_leaves_with_path(grad_specs(layout))
  dims = {path_name(path): list(spec) for path, spec in specs}
  return Split(dict(layout.mesh.shape), list(over), dims)


def _only(leaves: list[Any], group: _Group) -> list[Any]:
  """Replace the leaves of other groups by None."""
  return [leaf if i in group.indices else None for i, leaf in enumerate(leaves)]


def _groups(layout: Layout) -> list[_Group]:
  """Return the groups of parameters, in the order of the parameters."""
  axes = exchange_axes(layout)
  members: dict[tuple[Axes, Axes], list[int]] = {}
  specs = jax.tree.leaves(grad_specs(layout))
  entries = jax.tree.leaves(layout.gathers)
  for i, (entry, spec) in enumerate(zip(entries, specs, strict=True)):
    split = tuple(a for a in layout.mesh.axis_names if a in spec)
    members.setdefault((entry.sum_in_exchange, split), []).append(i)
  groups = []
  for (after, split), indices in members.items():
    others = tuple(a for a in layout.mesh.axis_names if a not in (*after, *split))
    is_chosen = bool(after) and after == axes
    groups.append(_Group("_".join(split) or "whole", indices, after, others, is_chosen))
  return groups
