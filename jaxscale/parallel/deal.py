"""Whole matrices dealt out over devices, for matrix optimizers under every layout.

A matrix optimizer such as Muon applies a function to whole matrices (`optim.matrices`), of which
a device holds parts. Here every matrix has one owner:

1. Each device concatenates its parts of all matrices by owner, and one all-to-all over the axes
   that split the matrices brings the parts of each matrix together.
2. The owner computes the function, without any collective.
3. Another all-to-all takes the parts of the results back.

Along the other axes (`replica`, `data`) devices hold the same parts. They share the matrices, too:
each takes its own from the parts that it holds, so that 1. and 2. concern a part of the matrices,
and an all-gather along these axes follows 3. Along an axis that splits the layers of a stack
(`stage`) each device deals out its own layers.

Matrices are dealt out by cost: the most expensive first, each to the device with the least work
so far. The result depends only on shapes, layout and cost, so that all processes agree on it. An
owner computes matrices of one shape and split, a class, together. Owners with different numbers of
matrices take different branches of one condition.

With N devices that split the P elements of the matrices, and R that hold the same parts, a device
gets P / (N R) elements in each all-to-all, and P / N in the all-gather if R > 1, up to the padding
of all owners to the greatest load. Sharing over R devices saves (1 - 1 / R) of the FLOPs and sends
as much of the results. So a matrix with fewer FLOPs per byte than the devices compute while they
send a byte is not shared along these axes: each group of N devices computes it. If the devices
are more than the matrices, groups of fewer devices compute all of them. Large models are exchanged
in chunks, so that one is sent while another is computed.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxscale.collectives import same_everywhere, vary
from jaxscale.collectives.typed import names
from jaxscale.errors import invalid
from jaxscale.metrics.text import plural
from jaxscale.optim.matrices import HERE, Cost, Dealer, Leaf, as_text, dealt_matrices, slice_rows
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.specs import Layout

Axes = tuple[str, ...]
Owned = list[list[tuple[int, int]]]  # for each owner, its matrices: (leaf, layer)
_MOST_AT_A_TIME = 2**24  # elements of matrices that a function gets at a time
_CHUNK = 2**24  # elements of an owner's matrices in a chunk, 64 MiB in float32
_MOST_CHUNKS = 4
_GROUPS = "_groups"  # end of the name of an axis whose devices compute the same
# FLOPs per byte from which sharing pays. An H100 computes 310 TFLOP/s in TF32 (half of the 620 of
# benchmarks/compiled_gpu.py in bfloat16) while it sends 370 GB/s by NVLink or 45 between nodes:
# 800 or 6,900. Two CPU cores compute about 0.1 TFLOP/s per 1.25 GB/s of 10 Gb/s Ethernet.
_SHARED_FROM = {"cpu": 80}
_SHARED_FROM_ELSEWHERE = 2000


class _Class(NamedTuple):
  """Matrices of one shape that are split in the same way.

  Attributes:
    matrix: shape of a matrix.
    dims: shape of a matrix's dims in the parameter, e.g. [h, w, in, out].
    split: for each of them, the axes that split it.
  """

  matrix: tuple[int, int]
  dims: tuple[int, ...]
  split: tuple[Axes, ...]


def make_dealer(layout: Layout) -> Dealer:
  """Return the distribution of matrices over the devices of a layout.

  Example:
    >>> with dealt_by(make_dealer(layout)):                    # doctest: +SKIP
    ...   updates, state = tx.update(grads, state, params)
  """
  if layout.mesh.size == 1:
    return HERE
  plan = functools.cache(functools.partial(_Plan, layout))

  def rows(leaves: Sequence[Leaf], cost: Cost) -> Mapping[str, list[str]]:
    if layout.shapes is None:
      fix = "set has_matrix_state = True in the optimizer's class, or give the step a layout"
      raise invalid("init_matrices", ..., "needs the shapes of the parameters", fix)
    return plan(tuple(leaves), cost, True).rows()

  def apply(function: Any, leaves: Sequence[Leaf], arrays: Any, cost: Cost, by_shape: Any):
    return plan(tuple(leaves), cost, bool(by_shape)).apply(function, arrays, by_shape)

  return Dealer(rows, apply)


def summary(layout: Layout, tx: optax.GradientTransformation, params: Any) -> list[str]:
  """Return a line for each kind of exchange of the optimizer's matrices; [] if there are none.

  Args:
    layout: the layout of the parameters that are trained.
    tx: the optimizer.
    params: these parameters, or their shapes and dtypes.
  """
  found, totals, lines = dealt_matrices(tx, params), {}, []
  for has_state in sorted({x.has_state for x in found}):
    some = [x for x in found if x.has_state == has_state]
    costs = {x.leaf.matrix: x.flops for x in some}
    plan = _Plan(layout, [x.leaf for x in some], lambda *shape, c=costs: c[shape], has_state)
    for group in plan.groups:
      key = group.across, group.layers, group.others
      counts = [sum(map(len, owned)) for owned in group.owned]
      totals[key] = np.add(totals.get(key, 0), counts)
  for (across, layers, others), counts in totals.items():
    blocks = math.prod(layout.mesh.shape[a] for a in layers)
    count, owners = blocks * sum(counts), blocks * len(counts)
    line = f"optimizer: {count} whole matrices dealt out over {plural(owners, 'device')}, "
    line += f"at most {max(counts)} on each"
    line += f"; two all-to-alls along {' and '.join(across)}" if across else ""
    line += f"; an all-gather along {' and '.join(others)}" if others else ""
    again = layout.mesh.size // owners
    lines.append(line + f"; {again} groups of devices compute the same" * (again > 1))
  return lines


class _Plan:
  """The owners of some leaves' matrices under a layout."""

  def __init__(self, layout: Layout, leaves: Sequence[Leaf], cost: Cost, has_state: bool):
    self.leaves, self.specs = leaves, [_spec(layout, leaf) for leaf in leaves]
    split = {axis for spec in self.specs for axes in spec for axis in axes}
    self.mesh = layout.mesh if has_state else _with_groups(layout.mesh, split, leaves)
    self.sizes = {a: n for a, n in self.mesh.shape.items() if n > 1}
    platform = self.mesh.devices.flat[0].platform
    self.shared_from = 0 if has_state else _SHARED_FROM.get(platform, _SHARED_FROM_ELSEWHERE)
    self.groups = list(self._groups(cost))

  def size(self, axes: Axes) -> int:
    return math.prod(self.sizes[a] for a in axes)

  def _groups(self, cost: Cost) -> Iterator[_Group]:
    members: dict[Any, list[int]] = {}
    for i, (leaf, spec) in enumerate(zip(self.leaves, self.specs, strict=True)):
      parts = spec[: int(leaf.stacked)], spec[int(leaf.stacked) :]
      layers, across = (tuple(a for a in self.sizes if a in itertools.chain(*x)) for x in parts)
      size = math.prod(leaf.matrix) * jnp.dtype(leaf.dtype).itemsize
      is_shared = cost(*leaf.matrix) >= self.shared_from * size
      alike = [a for a in self.sizes if a not in across + layers and not a.endswith(_GROUPS)]
      others = tuple(alike) if is_shared else ()
      members.setdefault((across, layers, others, leaf.dtype), []).append(i)
    for (across, layers, others, _), indices in members.items():
      for owned in self._chunks(indices, layers, self.size(others + across), cost):
        yield _Group(self, across, layers, others, owned)

  def _chunks(self, indices: list[int], layers: Axes, count: int, cost: Cost) -> list[Owned]:
    """Deal matrices out; return the matrices of each owner for each chunk."""
    matrices = [
      (-cost(*self.leaves[i].matrix), i, layer)
      for i in indices
      for layer in range(self.leaves[i].count // self.size(layers))
    ]
    elements = sum(math.prod(self.leaves[i].matrix) for _, i, _ in matrices)
    chunks = min(max(elements // (count * _CHUNK), 1), _MOST_CHUNKS)
    loads, owned, of_class = [0.0] * count, [[] for _ in range(count)], collections.Counter()
    for negative, i, layer in sorted(matrices):
      kind = self.kind(i)
      owner = min(range(count), key=lambda j, k=kind: (loads[j], of_class[j, k], j))
      owned[owner].append((loads[owner], i, layer))
      loads[owner] -= negative
      of_class[owner, kind] += 1

    def chunk_of(load: float) -> int:  # Each load is in exactly one chunk; all may be 0.
      return min(int(load / (max(loads) or 1) * chunks), chunks - 1)

    parts = [[[m[1:] for m in own if chunk_of(m[0]) == n] for own in owned] for n in range(chunks)]
    return [owned for owned in parts if any(owned)]

  def kind(self, i: int) -> _Class:
    leaf, first = self.leaves[i], int(self.leaves[i].stacked)
    return _Class(leaf.matrix, leaf.shape[first:], tuple(self.specs[i][first:]))

  def rows(self) -> Mapping[str, list[str]]:
    """Return the matrix of each row of the state; rows are sharded over all axes."""
    found: dict[str, list[list[str]]] = {}
    for group in self.groups:
      order = group.layers + group.others + group.across
      grid = np.arange(self.mesh.size).reshape([*self.sizes.values()])
      grid = grid.transpose([[*self.sizes].index(a) for a in order])
      positions = grid.reshape(self.size(group.layers), -1)
      for index, kind in enumerate(group.classes):
        devices = found.setdefault(as_text(kind.matrix), [[] for _ in range(self.mesh.size)])
        for (block, owner), device in np.ndenumerate(positions):
          own = group.owned[owner][index]
          for i, layer in own:
            names_of = self.leaves[i].names
            devices[device].append(names_of[block * (len(names_of) // len(positions)) + layer])
          devices[device] += [""] * (group.slots[index] - len(own))
    return {key: [row for rows in devices for row in rows] for key, devices in found.items()}

  def apply(self, function: Any, arrays: Sequence[Any], by_shape: dict[str, Any]):
    """Apply the function to all matrices, at their owners."""

    def on_device(arrays: list[Any], by_shape: dict[str, Any]):
      found, states, taken = {}, {}, collections.Counter()
      for group in self.groups:
        rows = []
        for kind, slots in zip(group.classes, group.slots, strict=True):
          key = as_text(kind.matrix)
          first, taken[key] = taken[key], taken[key] + slots
          rows.append(slice_rows(by_shape.get(key), first, slots))
        buffer, rows = group.compute(function, group.gather(arrays), rows)
        found |= group.scatter(buffer)
        for kind, state in zip(group.classes, rows, strict=True):
          states.setdefault(as_text(kind.matrix), []).append(state)
      results = [self._leaf(found, i, x.shape) for i, x in enumerate(arrays)]
      joined = {key: jax.tree.map(lambda *x: jnp.concatenate(x), *states[key]) for key in by_shape}
      return results, joined

    specs = [P(*(axes or None for axes in spec)) for spec in self.specs]
    where = specs, P(self.mesh.axis_names)
    mapped = jax.shard_map(on_device, mesh=self.mesh, in_specs=where, out_specs=where)
    return mapped(list(arrays), by_shape)

  def _leaf(self, found: dict[tuple[int, int], Any], i: int, shape: tuple[int, ...]) -> jax.Array:
    """Return a device's part of a leaf from the results of its matrices."""
    count = shape[0] if self.leaves[i].stacked else 1
    return jnp.stack([found[i, layer] for layer in range(count)]).reshape(shape)


class _Group:
  """Matrices that are exchanged together, and their positions in the buffers that are sent.

  A buffer [devices of `across`, elements] has one row per sender, with its parts of the
  matrices of one owner: class after class, each part in the order of its dims.
  """

  def __init__(self, plan: _Plan, across: Axes, layers: Axes, others: Axes, owned: Owned):
    """Create the group.

    Args:
      plan: the plan of all groups.
      across: axes that split the matrices, over which they are sent.
      layers: axes that split the layers of stacks.
      others: axes along which devices hold the same parts and share the matrices.
      owned: the matrices of each owner, in the order of `others` and `across`; layers are
        counted among those of a device.
    """
    self.plan, self.across, self.layers, self.others = plan, across, layers, others
    self.classes = sorted({plan.kind(i) for own in owned for i, _ in own})
    self.owned = [[[m for m in own if plan.kind(m[0]) == k] for k in self.classes] for own in owned]
    self.dtype = next(plan.leaves[i].dtype for own in owned for i, _ in own)
    self.senders = plan.size(across)
    self.parts = [math.prod(kind.matrix) // self.senders for kind in self.classes]
    self.counts = [tuple(map(len, own)) for own in self.owned]
    self.length = max(int(np.dot(counts, self.parts)) for counts in self.counts)
    self.slots = [max(counts) for counts in zip(*self.counts, strict=True)]

  def gather(self, arrays: Sequence[Any]) -> jax.Array:
    """Return the parts of this device's matrices, [senders, elements]."""
    across, others = self.across, self.others
    rows: list[jax.Array] = []
    for counts, owned in zip(self.counts, self.owned, strict=True):
      for i, layer in itertools.chain(*owned):
        x = arrays[i][layer] if self.plan.leaves[i].stacked else arrays[i]
        rows.append(x.reshape(-1))
      rows.append(jnp.zeros(self.length - int(np.dot(counts, self.parts)), self.dtype))
    buffer = jnp.concatenate(vary(rows, across + self.layers))
    buffer = buffer.reshape(-1, self.senders, self.length)
    buffer = lax.dynamic_index_in_dim(buffer, lax.axis_index(others) if others else 0, 0, False)
    return lax.all_to_all(buffer, across, 0, 0) if across else buffer

  def compute(self, function: Any, buffer: Any, rows: list[Any]) -> tuple[Any, list[Any]]:
    """Replace this device's matrices by their results; return the buffer and the state."""
    axes, numbers = self.others + self.across, sorted(set(self.counts))
    branches = [functools.partial(self._compute, function, counts) for counts in numbers]
    buffer = vary(buffer, self.plan.mesh.axis_names)
    table = jnp.asarray([numbers.index(counts) for counts in self.counts])
    return lax.switch(table[lax.axis_index(axes)], branches, buffer, rows)

  def _compute(self, function: Any, counts: tuple[int, ...], buffer: Any, rows: list[Any]) -> Any:
    parts, states, start = [], [], 0
    for index, (count, state) in enumerate(zip(counts, rows, strict=True)):
      if count:
        own = buffer[:, start : start + count * self.parts[index]]
        whole, new = _in_turn(function, self._whole(own, index), slice_rows(state, 0, count))
        parts.append(self._parts(whole, index))
        state = jax.tree.map(lambda x, y, n=count: jnp.concatenate([x, y[n:]]), new, state)
        start += own.shape[1]
      states.append(state)
    return jnp.concatenate([*parts, buffer[:, start:]], axis=1), states

  def scatter(self, buffer: jax.Array) -> dict[tuple[int, int], jax.Array]:
    """Return this device's part of the result of each matrix, flat, by leaf and layer."""
    found = {}
    if self.across:
      buffer = lax.all_to_all(buffer, self.across, 0, 0)
    if self.others:
      buffer = lax.all_gather(buffer, self.others)
    split = {*self.across, *self.layers}
    alike = tuple(a for a in self.plan.mesh.axis_names if a not in split)
    buffer = same_everywhere(buffer, alike).reshape(-1, self.length)
    for owner, owned in enumerate(self.owned):
      start = 0
      for size, own in zip(self.parts, owned, strict=True):
        for matrix in own:
          found[matrix] = buffer[owner, start : start + size]
          start += size
    return found

  def _whole(self, parts: jax.Array, index: int) -> jax.Array:
    """Put matrices together from the parts of all senders: [senders, elements] -> [k, in, out]."""
    dims, order = self._dims(self.classes[index])
    return parts.reshape(dims).transpose(order).reshape(-1, *self.classes[index].matrix)

  def _parts(self, whole: jax.Array, index: int) -> jax.Array:
    """Split matrices into the parts of all senders; the inverse of `_whole`."""
    dims, order = self._dims(self.classes[index])
    x = whole.reshape([dims[i] for i in order])
    return x.transpose(np.argsort(order)).reshape(self.senders, -1)

  def _dims(self, kind: _Class) -> tuple[list[int], list[int]]:
    """Return dims [senders' axes, k, local dims] and their order as [k, axes and dim, ...]."""
    across, plan = self.across, self.plan
    dims, order = [*(plan.sizes[a] for a in across), -1], [len(across)]
    for n, axes in zip(kind.dims, kind.split, strict=True):
      order += [*map(across.index, axes), len(dims)]
      dims.append(n // plan.size(axes))
    return dims, order


def _with_groups(mesh: Mesh, split: set[str], leaves: Sequence[Leaf]) -> Mesh:
  """Return the mesh in groups that each compute all matrices, if it has too many devices.

  If the devices are more than the matrices, an exchange of all of them would be mostly padding.
  An axis along which devices hold the same parts is then split into groups.
  """
  owners = math.prod(mesh.shape[a] for a in mesh.axis_names if a in split)
  most = max(sum(leaf.count for leaf in leaves) // owners, 1)  # owners of the same parts
  sizes: dict[str, int] = {}
  for axis, size in reversed(mesh.shape.items()):
    inside = size
    if axis not in split:
      inside = max(n for n in range(1, min(most, size) + 1) if size % n == 0)
      most //= inside
    sizes |= {axis: inside} | ({axis + _GROUPS: size // inside} if inside < size else {})
  names = [*reversed(sizes)]
  grid = mesh.devices.reshape([sizes[a] for a in names])
  return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _spec(layout: Layout, leaf: Leaf) -> list[Axes]:
  """Return the axes that split each dim of a leaf, as in the optimizer state."""
  if layout.shapes is None:
    return [()] * len(leaf.shape)
  shapes = jax.tree.leaves_with_path(layout.shapes)
  pairs = zip(shapes, jax.tree.leaves(layout.opt_specs), strict=True)
  specs = {
    spec
    for (path, x), spec in pairs
    if x.shape == leaf.shape and f"/{path_name(path)}".endswith(f"/{leaf.name}")
  }
  if len(specs) != 1:
    problem = f"of the shape {leaf.shape} is not one parameter of the layout"
    fix = "call map_matrices and init_matrices with trees like the parameters"
    raise invalid("matrix", repr(leaf.name), problem, fix)
  sizes = layout.mesh.shape
  entries = [tuple(a for a in names(entry or ()) if sizes[a] > 1) for entry in specs.pop()]
  return entries + [()] * (len(leaf.shape) - len(entries))


def _in_turn(function: Callable[..., Any], matrices: jax.Array, rows: Any) -> Any:
  """Apply a function to so many matrices at a time that memory is enough for its values."""
  count = max(_MOST_AT_A_TIME // math.prod(matrices.shape[1:]), 1)
  if count >= len(matrices):
    return function(matrices, rows)

  def one(operands: Any):
    return jax.tree.map(lambda x: x[0], function(*jax.tree.map(lambda x: x[None], operands)))

  return lax.map(one, (matrices, rows))
