"""Reshard a checkpoint of other devices or another layout: what to load, how to convert it.

Only `exchange_state` in a `TrainState` depends on the number of devices and the layout: it
has one entry per device. If the exchange defines how N entries become N' entries
(`Exchange.resize`), the entries are loaded as they were saved, ceil(N / N') per device with
zeros after the last one, verified, and converted on the devices. No device holds more than
its share.

Under a layout, each device keeps entries for its own parts of the gradients. If the parts
are the same now, the entries of each part are resized among themselves. A count of steps
resumes under any layout. All other cases are errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.checkpoint import checksum
from jaxscale.metrics.text import plural
from jaxscale.parallel.layout_exchange import Split
from jaxscale.training.types import TrainState

# A function of (exchange state with a leading dim of N devices, N') -> state for N' devices.
Resize = Callable[[Any, int], Any]
_EXCHANGE = "exchange_state/"
_Leaves = Mapping[str, dict[str, Any]]  # shape and dtype by path, as in a manifest


class Reshard(NamedTuple):
  """Conversion of a checkpoint's exchange state to this run's.

  Attributes:
    old: the number of devices that it was saved on, N.
    new: the number of devices of this run, N'.
    saved: the shapes and dtypes of the saved state, with shardings except the exchange's.
    convert: a function from the saved exchange state to this run's; None if impossible.
    problem: the reason why it is impossible, and the remedy.
  """

  old: int
  new: int
  saved: TrainState
  convert: Callable[[Any], Any] | None
  problem: str = ""

  def to_load(self, abstract: TrainState) -> TrainState:
    """Return the saved state padded to fit on the devices, with zeros after the last entry."""
    rows = self.new * math.ceil(self.old / self.new)
    where = jax.tree.leaves(abstract.exchange_state)[0].sharding

    def padded(x):
      return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=where)

    own = jax.tree.map(padded, self.saved.exchange_state)
    return abstract._replace(exchange_state=own)

  def apply(self, state: TrainState, abstract: TrainState) -> TrainState:
    """Convert the loaded state to this run's state; every process calls it."""
    assert self.convert is not None
    shardings = jax.tree.map(lambda x: x.sharding, abstract.exchange_state)
    converted = jax.jit(self.convert, out_shardings=shardings)(state.exchange_state)
    return state._replace(exchange_state=jax.block_until_ready(converted))

  def summary(self) -> str:
    """Return one line for the log."""
    devices = f"from {plural(self.old, 'device')} to {self.new}"
    where = devices if self.old != self.new else "to another layout"
    kept = "the sum of pending gradients is kept up to rounding, so none is lost, "
    kept += "but from this step on the run is not bit-identical"
    return f"the exchange state was converted {where}: {kept}"


def find_reshard(
  manifest: Mapping[str, Any], abstract: TrainState, resize: Resize | None, new_split: Split | None
) -> Reshard | None:
  """Find out how to convert a checkpoint to the devices and the layout of this run.

  Args:
    manifest: the shape and dtype of every leaf, by path, and how gradients were split
      (`Split` as a dict).
    abstract: the requested state.
    resize: `Exchange.resize` of this run's exchange.
    new_split: how gradients are split now.

  Returns:
    The conversion, or None if the state needs none, or if more than the devices and the
    layout differs.
  """
  if not jax.tree.leaves(abstract.exchange_state):
    return None
  leaves = manifest["leaves"]
  old_split = Split(**manifest["split"]) if manifest.get("split") else None
  if _parts(old_split) == _parts(new_split):
    return _other_devices(leaves, abstract, resize, old_split, new_split)
  counts = _only_counts(leaves, abstract, resize, old_split, new_split)
  return counts or _other_parts(leaves, abstract, old_split, new_split)


def without_empty(state: TrainState) -> TrainState:
  """Return a state as it is in files, without an exchange state that has no arrays.

  Under layouts such a state is one empty tree for each group of parameters, and Orbax
  distinguishes one empty tree from several.
  """
  has_arrays = jax.tree.leaves(state.exchange_state)
  return state if has_arrays else state._replace(exchange_state=())


def with_empty(state: TrainState, abstract: TrainState) -> TrainState:
  """Return a state from files with this run's empty exchange state, if it has one."""
  if jax.tree.leaves(abstract.exchange_state):
    return state
  return state._replace(exchange_state=abstract.exchange_state)


def _parts(split: Split | None) -> Any:
  """Return a value that is equal for splits in which devices have the same parts."""
  if split is None:
    return None
  return [(a, n) for a, n in split.mesh.items() if a not in split.over], split.dims


def _other_devices(leaves: _Leaves, abstract, resize, old_split, new_split) -> Reshard | None:
  """Convert entries of the same parts to a different number of devices."""
  requested = abstract.exchange_state
  leaf_shapes = {f"{_EXCHANGE}{n}": x for n, x in checksum.describe(requested).items()}
  if any(name not in leaves for name in leaf_shapes):
    return None
  shapes = [tuple(leaves[name]["shape"]) for name in leaf_shapes]
  own_shapes = [tuple(leaf["shape"]) for leaf in leaf_shapes.values()]
  olds, news = {s[:1] for s in shapes}, {s[:1] for s in own_shapes}
  is_same = olds == news and old_split == new_split
  if len(olds) != 1 or len(news) != 1 or is_same or () in olds | news:
    return None
  (old,), (new,) = olds.pop(), news.pop()
  dtypes = [leaves[name]["dtype"] for name in leaf_shapes]
  arrays = map(jax.ShapeDtypeStruct, shapes, dtypes)
  saved = jax.tree.unflatten(jax.tree.structure(requested), arrays)
  state = abstract._replace(exchange_state=saved)
  convert = functools.partial(_resized, resize, old_split, old, new_split, new)
  if resize is not None and _fits(convert, saved, requested):
    return Reshard(old, new, state, convert)
  devices = plural(old, "device")
  if _is_local(requested):
    problem = "each worker has its own parameters and momentum, so the number of workers "
    problem += "cannot change"
  elif [s[1:] for s in own_shapes] == [s[1:] for s in shapes]:
    problem = "the exchange does not define how its state is resized (Exchange.resize)"
  else:
    return None
  advice = f"resume with {devices}, or use another --workdir to start anew"
  problem = f"saved on {devices}, but this run has {new}: {problem}; {advice}"
  return Reshard(old, new, state, None, problem)


def _resized(resize, old_split, old: int, new_split, new: int, state: Any) -> Any:
  """Convert the state of `old` devices to `new` devices, part by part."""
  rows = jax.tree.map(lambda x: x[:old], state)
  if old_split is None or new_split is None:
    return resize(rows, new)
  devices = math.prod(new_split.mesh[axis] for axis in new_split.over)
  parts = jax.tree.map(lambda x: _by_parts(x, old_split), rows)
  resize_all = jax.vmap(lambda part: resize(part, devices))
  converted = {group: resize_all(part) for group, part in parts.items()}
  return jax.tree.map(lambda x: _by_devices(x, new_split), converted)


def _order(split: Split) -> list[int]:
  """Return the mesh axes: those along which parts differ, then those averaged over."""
  axes = list(split.mesh)
  rest = [axis for axis in axes if axis not in split.over]
  return [axes.index(axis) for axis in (*rest, *split.over)]


def _by_parts(x: jax.Array, split: Split) -> jax.Array:
  """Reshape [devices of the mesh, …] to [parts, devices that have each, …]."""
  sizes, order = list(split.mesh.values()), _order(split)
  grid = x.reshape(*sizes, *x.shape[1:])
  grid = grid.transpose(*order, *range(len(sizes), grid.ndim))
  devices = math.prod(split.mesh[axis] for axis in split.over)
  return grid.reshape(-1, devices, *x.shape[1:])


def _by_devices(x: jax.Array, split: Split) -> jax.Array:
  """Invert `_by_parts`."""
  sizes, order = list(split.mesh.values()), _order(split)
  grid = x.reshape(*(sizes[i] for i in order), *x.shape[2:])
  grid = grid.transpose(*np.argsort(order), *range(len(sizes), grid.ndim))
  return grid.reshape(-1, *x.shape[2:])


def _only_counts(leaves: _Leaves, abstract, resize, old_split, new_split) -> Reshard | None:
  """Convert a state of one number per device, which is the same for any parts."""
  requested = abstract.exchange_state
  one = requested if new_split is None else next(iter(requested.values()))
  names = {f"{_EXCHANGE}{name}" for name in checksum.describe(one)}
  saved_names = {name for name in leaves if name.startswith(_EXCHANGE)}
  groups = sorted({name.split("/")[1] for name in saved_names}) if old_split is not None else []
  named = {n.replace(_EXCHANGE, f"{_EXCHANGE}{g}/") for g in groups for n in names}
  is_count = all(len(leaves[name]["shape"]) == 1 for name in saved_names)
  if resize is None or not is_count or saved_names != (named or names):
    return None
  old = leaves[min(saved_names)]["shape"][0]
  new = len(jax.tree.leaves(requested)[0])
  saved = jax.tree.map(lambda x: jax.ShapeDtypeStruct((old, *x.shape[1:]), x.dtype), one)
  saved = dict.fromkeys(groups, saved) if old_split is not None else saved

  def convert(state):
    first = state if old_split is None else state[groups[0]]
    converted = resize(jax.tree.map(lambda x: x[:old], first), new)
    return converted if new_split is None else dict.fromkeys(requested, converted)

  if not _fits(convert, saved, requested):
    return None
  return Reshard(old, new, abstract._replace(exchange_state=saved), convert)


def _other_parts(leaves: _Leaves, abstract, old_split, new_split) -> Reshard:
  """Return the error for parts of gradients that no device has now."""
  parts = {n.removeprefix(_EXCHANGE): x for n, x in leaves.items() if n.startswith(_EXCHANGE)}
  saved = {n: jax.ShapeDtypeStruct(x["shape"], x["dtype"]) for n, x in parts.items()}
  meshes, example = [], ""
  for split in (old_split, new_split):
    sizes = ", ".join(f"{a}={n}" for a, n in split.mesh.items()) if split else ""
    meshes.append(f"Mesh {sizes}" if sizes else "devices that average whole gradients")
  dims: list[dict[str, list[str | None]]] = [s.dims if s else {} for s in (old_split, new_split)]
  for name in dims[0] | dims[1]:  # Find the first parameter whose split differs.
    axes = [", ".join(a or "-" for a in d.get(name, [])) for d in dims]
    old, new = (text if text.strip("-, ") else "nothing" for text in axes)
    if old != new:
      example = f" ({name} was split by {old}, and now by {new})"
      break
  problem = f"saved on {meshes[0]}, but this run has {meshes[1]}: the exchange state"
  problem += f" has parts of gradients that no device has now{example}; resume with the mesh "
  problem += "and layout it was saved with, or use another --workdir to start anew"
  return Reshard(0, 0, abstract._replace(exchange_state=saved), None, problem)


def _fits(convert: Callable[[Any], Any], saved: Any, requested: Any) -> bool:
  """Return whether a saved exchange state can be converted to the requested one."""
  if _is_local(saved):
    return False
  try:
    converted = jax.eval_shape(convert, saved)
  except (TypeError, ValueError):
    return False  # The exchange cannot have made these tensors.
  return checksum.describe(converted) == checksum.describe(requested)


def _is_local(exchange_state: Any) -> bool:
  """Return whether an exchange state is that of local SGD: each worker's training state.

  Checked here as well, since the `resize` of any exchange of means would accept it and
  average the workers.
  """
  fields = getattr(exchange_state, "_fields", ())
  return fields == ("params", "model_state", "opt_state", "exchange_state")
