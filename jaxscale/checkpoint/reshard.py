"""Reshard a checkpoint of other devices or another layout: what to load, how to convert it.

Two parts of a `TrainState` depend on the number of devices and the layout. The state of
matrices (`optim.MatrixState`) has a row per matrix: each device reads the rows of the
matrices that it owns now. `exchange_state` has one entry per device. If the exchange
defines how N entries become N' entries (`Exchange.resize`), the entries are loaded as they
were saved, ceil(N / N') per device with zeros after the last one, verified, and converted
on the devices. No device holds more than its share.

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
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxscale.checkpoint import checksum
from jaxscale.metrics.text import plural
from jaxscale.optim.matrices import saved_rows
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.layout_exchange import Split
from jaxscale.training.types import TrainState, WorkerState

# A function of (exchange state with a leading dim of N devices, N') -> state for N' devices.
Resize = Callable[[Any, int], Any]
_EXCHANGE = "exchange_state/"


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
  convert: Any  # Callable[[Any], Any] | None
  problem: str = ""

  def to_load(self, abstract: TrainState) -> TrainState:
    """Return the saved state padded to fit on the devices, with zeros after the last entry."""
    rows = self.new * math.ceil(self.old / self.new)
    where = jax.tree.leaves(abstract.exchange_state)[0].sharding

    def padded(x):
      return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=where)

    return abstract._replace(exchange_state=jax.tree.map(padded, self.saved.exchange_state))

  def apply(self, state: TrainState, abstract: TrainState) -> TrainState:
    """Convert the loaded state to this run's state; every process calls it."""

    def convert(padded):
      return self.convert(jax.tree.map(lambda x: x[: self.old], padded))

    shardings = jax.tree.map(lambda x: x.sharding, abstract.exchange_state)
    converted = jax.jit(convert, out_shardings=shardings)(state.exchange_state)
    return state._replace(exchange_state=jax.block_until_ready(converted))

  def summary(self) -> str:
    """Return one line for the log."""
    devices = f"from {plural(self.old, 'device')} to {self.new} in this layout"
    kept = "the sum of pending gradients is kept up to rounding, so none is lost, "
    kept += "but from this step on the run is not bit-identical"
    return f"the exchange state was converted {devices}: {kept}"


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
  requested = abstract.exchange_state
  names = checksum.describe(requested)
  arrays = {
    n.removeprefix(_EXCHANGE): jax.ShapeDtypeStruct(tuple(x["shape"]), x["dtype"])
    for n, x in manifest["leaves"].items()
    if n.startswith(_EXCHANGE)
  }
  counts = [{x.shape[:1] for x in xs} for xs in (arrays.values(), jax.tree.leaves(requested))]
  if any(len(count) != 1 or () in count for count in counts):
    return None  # One of them has no entries per device.
  (old,), (new,) = (count.pop() for count in counts)
  old_split = Split(**manifest["split"]) if manifest.get("split") else None
  has_same_parts = _parts(old_split) == _parts(new_split)
  if not has_same_parts:
    saved = unflatten_dict(arrays, sep="/")
    convert = functools.partial(_counts, resize, old_split, new_split, new, requested)
  elif arrays.keys() != names.keys() or (old, old_split) == (new, new_split):
    return None
  else:
    saved = jax.tree.unflatten(jax.tree.structure(requested), [arrays[n] for n in names])
    convert = functools.partial(_resized, resize, old_split, new_split, new)
  state, is_local = abstract._replace(exchange_state=saved), isinstance(requested, WorkerState)
  if resize is not None and not is_local:
    if _fits(convert, saved, requested):
      return Reshard(old, new, state, convert)
    if has_same_parts:
      return None  # Shapes differ, which is reported leaf by leaf.
  devices = plural(old, "device")
  problem, advice = f"saved on {devices}, but this run has {new}: ", f"resume with {devices}"
  if not has_same_parts:
    problem = "saved under another layout, whose parts of gradients no device has now"
    advice = "resume with the mesh and layout it was saved with"
  elif is_local:  # The `resize` of any exchange of means would average the workers.
    problem += "each worker has its own parameters, so the number of workers cannot change"
  else:
    problem += "the exchange does not define how its state is resized (Exchange.resize)"
  problem += f"; {advice}, or use another --workdir to start anew"
  return Reshard(old, new, state, None, problem)


def dealt_before(
  manifest: Mapping[str, Any], requested: TrainState
) -> tuple[checksum.Rows, TrainState]:
  """Find the arrays whose rows belong to other matrices in a checkpoint.

  Args:
    manifest: as for `find_reshard`, with the names of the matrices of all rows.
    requested: the requested state.

  Returns:
    For each such array, by name: the saved row of each row, or -1 for none; and the requested
    state with the number of rows that was saved.
  """
  saved, counts, rows = manifest.get("rows", {}), {}, {}
  leaves = checksum.describe(requested)
  for path, names in saved_rows(requested).items():
    before = saved.get(path, names)
    if before != names and {*before, ""} == {*names, ""}:
      places = {name: i for i, name in enumerate(before) if name}
      moved = [leaf for leaf in leaves if f"{leaf}/".startswith(f"{path}/")]
      counts |= dict.fromkeys(moved, len(before))
      rows |= dict.fromkeys(moved, tuple(places.get(name, -1) for name in names))

  def as_saved(path: Any, x: Any):
    count = counts.get(path_name(path))
    return x if count is None else jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)

  return rows, jax.tree.map_with_path(as_saved, requested)


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


def _resized(resize, old_split, new_split, new: int, state: Any) -> Any:
  """Convert entries of the same parts to a different number of devices, part by part."""
  if new_split is None:
    return resize(state, new)
  axes, over = list(new_split.mesh), new_split.over
  indices, last = [axes.index(a) for a in over], range(len(axes) - len(over), len(axes))
  old, averaged = (tuple(s.mesh[a] for a in over) for s in (old_split, new_split))
  others = [n for a, n in new_split.mesh.items() if a not in over]

  def by_part(x: jax.Array):  # [parts, devices that have each, …]
    grid = x.reshape(*old_split.mesh.values(), *x.shape[1:])
    return jnp.moveaxis(grid, indices, last).reshape(-1, math.prod(old), *x.shape[1:])

  def by_device(x: jax.Array):
    grid = x.reshape(*others, *averaged, *x.shape[2:])
    return jnp.moveaxis(grid, last, indices).reshape(new, *x.shape[2:])

  resize_all = jax.vmap(lambda part: resize(part, math.prod(averaged)))
  parts = {group: resize_all(jax.tree.map(by_part, part)) for group, part in state.items()}
  return jax.tree.map(by_device, parts)


def _counts(resize, old_split, new_split, new: int, requested: Any, state: Any) -> Any:
  """Convert a state of one number per device, such as a count of steps: it suits any parts.

  Raises:
    ValueError: the state has arrays of gradients.
  """
  flat: Any = flatten_dict(state, sep="/")
  if any(x.ndim > 1 for x in flat.values()):
    raise ValueError("the state has parts of gradients")
  first = {n.partition("/")[2] if old_split else n: x for n, x in flat.items()}
  converted = resize(unflatten_dict(first, sep="/"), new)
  return dict.fromkeys(requested, converted) if new_split else converted


def _fits(convert: Callable[[Any], Any], saved: Any, requested: Any) -> bool:
  """Return whether a saved exchange state can be converted to the requested one."""
  try:
    converted = jax.eval_shape(convert, saved)
  except (KeyError, TypeError, ValueError):
    return False  # The exchange cannot have made these tensors.
  return checksum.describe(converted) == checksum.describe(requested)
