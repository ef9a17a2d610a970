"""The exchange of a step whose gradients are split.

Each device exchanges the parts that it has with those that have the same parts of
other gradients: any exchange does, as it is. What was summed in the backward pass
is left alone. Parameters that `fsdp` splits leave the slower axes to the exchange;
the small rest that it does not split is summed over all axes by `lax.psum`.

Parameters that are split along other axes are exchanged in groups of their own: an
exchange may put several in one vector, and what it does to those that are the same
on all devices along an axis must not depend on those that are not.
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
    name: of its part of the state.
    indices: numbers of the leaves.
    after: axes that they are summed over.
    others: axes along which all devices have the same of them.
    is_chosen: by the exchange that was asked for, or else by `lax.psum`.
  """

  name: str
  indices: list[int]
  after: tuple[str, ...]
  others: tuple[str, ...]
  is_chosen: bool


def exchange_axes(layout: Layout) -> tuple[str, ...]:
  """The axes that the exchange averages over; () where the backward pass does it."""
  entries = jax.tree.leaves(layout.gathers)
  scattered = [e for e in entries if e.scatter is not None]
  return scattered[0].sum_in_exchange if scattered else layout.token_axes


def make_layout_exchange(exchange: Exchange, layout: Layout) -> Exchange:
  """The exchange of a whole step under a layout.

  Args:
    exchange: for the axes of `exchange_axes`; not called where there are none.
    layout: whose gradients they are.
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
        # Typed as the state is, which every device has its own of.
        part = structure.unflatten(_only(vary(leaves, axes), group))
        part, state[group.name] = exchange.exchange(part, state[group.name])
        found = structure.flatten_up_to(part)
        # The same along axes whose devices had the same to begin with.
        means = [
          same_everywhere(x, tuple(a for a in group.others if a in varying(x)))
          for x in (found[i] for i in group.indices)
        ]
      else:
        size = lax.axis_size(group.after) if group.after else 1
        parts = [leaves[i] for i in group.indices]
        sums = lax.psum(parts, group.after) if group.after else parts
        means = [x / size for x in sums]
      for index, mean in zip(group.indices, means, strict=True):
        leaves[index] = mean
    return structure.unflatten(leaves), state

  # What becomes of it on other devices depends on the layouts (`checkpoint.reshard`).
  return Exchange(init, reduce)


class Split(NamedTuple):
  """Split of the gradients that an exchange's state depends on, as JSON can have it.

  Attributes:
    mesh: devices along each axis, in the order of the mesh.
    over: axes that are averaged over. Devices that differ along others alone keep
      something of other parts.
    dims: for each parameter, by path, the axis or None that splits each dim of its
      gradient.
  """

  mesh: dict[str, int]
  over: list[str]
  dims: dict[str, list[str | None]]


def exchange_split(layout: Layout | None) -> Split | None:
  """Return the split of the gradients that are exchanged; None: there is none.

  Then the state of `make_layout_exchange` is that of the exchange itself.
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
  """The leaves with None for those of other groups."""
  return [leaf if i in group.indices else None for i, leaf in enumerate(leaves)]


def _groups(layout: Layout) -> list[_Group]:
  """In the order of the parameters."""
  axes = exchange_axes(layout)
  found: dict[tuple[Axes, Axes], list[int]] = {}
  specs = jax.tree.leaves(grad_specs(layout))
  entries = jax.tree.leaves(layout.gathers)
  for i, (entry, spec) in enumerate(zip(entries, specs, strict=True)):
    split = tuple(a for a in layout.mesh.axis_names if a in spec)
    found.setdefault((entry.sum_in_exchange, split), []).append(i)
  made = []
  for (after, split), indices in found.items():
    name = "_".join(split) or "whole"
    others = tuple(a for a in layout.mesh.axis_names if a not in (*after, *split))
    is_chosen = bool(after) and after == axes
    made.append(_Group(name, indices, after, others, is_chosen))
  return made
