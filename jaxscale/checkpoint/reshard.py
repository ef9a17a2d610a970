"""A checkpoint of other devices or another layout: what to load, what to make of it.

All of a `TrainState` is the same on every number of devices and under every layout
but `exchange_state`, which has an entry a device. Where the exchange can say what
becomes of N entries on N' devices (`Exchange.resize`), they are loaded as they were
saved, ceil(N / N') of them a device with zeros behind the last, checked, and resized
on the devices: none holds more than its share.

Under a layout devices keep something of the parts of gradients that they have. Where
the same parts are there, those of each part are resized among themselves; a count of
steps goes on anywhere; all else is refused in one line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale.checkpoint import checksum
from jaxscale.errors import ConfigError
from jaxscale.parallel.layout_exchange import Split
from jaxscale.training.state import TrainState

# (exchange state with a leading dim of N devices, N') -> the same for N' devices
Resize = Callable[[Any, int], Any]
_EXCHANGE = "exchange_state/"


class Other(NamedTuple):
  """A checkpoint whose exchange state is of other devices, or of other parts.

  Attributes:
    there: devices that it was saved on, N.
    here: devices that there are, N'.
    saved: shapes and dtypes of its state; shardings but for the exchange's.
    carry: the exchange's state as saved -> as it is here; None: it cannot be.
    why: it cannot be, and what then.
  """

  there: int
  here: int
  saved: TrainState
  carry: Callable[[Any], Any] | None
  why: str = ""


def other(
  manifest: dict[str, Any],
  abstract: TrainState,
  resize: Resize | None,
  here: Split | None = None,
) -> Other | None:
  """What a checkpoint's manifest says of other devices or another layout.

  Args:
    manifest: what was written of it: shape and dtype of every leaf, by path, and
      how gradients were split (`split_as_json`).
    abstract: the state asked for.
    resize: `Exchange.resize` of the exchange that goes on.
    here: how gradients are split now.

  Returns:
    None where the state is just the one that was saved, or where more than devices
    and layout is different.
  """
  own = abstract.exchange_state
  if not jax.tree.leaves(own):
    return None
  leaves = manifest["leaves"]
  there = manifest.get("split")
  there = None if there is None else Split(**there)
  if _parts(there) == _parts(here):
    return _other_count(leaves, abstract, resize, there, here)
  return _counts_alone(leaves, abstract, resize, there, here) or _other_parts(
    leaves, abstract, there, here
  )


def as_saved(state: TrainState) -> TrainState:
  """A state as files have it: where an exchange keeps nothing, there is nothing.

  Under layouts it keeps nothing of each of several groups of parameters, and Orbax
  tells one empty tree from another.
  """
  if jax.tree.leaves(state.exchange_state):
    return state
  return state._replace(exchange_state=())


def split_as_json(state: TrainState, split: Split | None) -> dict[str, Any]:
  """What the manifest of a state says of how gradients are split."""
  if split is None or not jax.tree.leaves(state.exchange_state):
    return {}
  return {"split": split._asdict()}


def _parts(split: Split | None) -> Any:
  """What must be the same for devices to have the same parts."""
  if split is None:
    return None
  rest = {a: n for a, n in split.mesh.items() if a not in split.over}
  return list(rest.items()), split.dims


def _other_count(leaves, abstract, resize, there, here) -> Other | None:
  """Where devices have the same parts, but maybe others have each."""
  own = _only_exchange(abstract)
  wanted = checksum.describe(own)
  if any(name not in leaves for name in wanted):
    return None
  shapes = [tuple(leaves[name]["shape"]) for name in wanted]
  counts = {shape[:1] for shape in shapes}
  heres = {tuple(leaf["shape"][:1]) for leaf in wanted.values()}
  is_same = counts == heres and there == here
  if len(counts) != 1 or len(heres) != 1 or is_same or () in counts | heres:
    return None
  (old,), (new,) = counts.pop(), heres.pop()
  saved = abstract._replace(
    exchange_state=jax.tree.unflatten(
      jax.tree.structure(abstract.exchange_state),
      [
        jax.ShapeDtypeStruct(shape, leaves[name]["dtype"])
        for name, shape in zip(wanted, shapes, strict=True)
      ],
    )
  )
  carry = functools.partial(_resized, resize, there, old, here, new)
  if resize is not None and _fits(carry, saved.exchange_state, abstract.exchange_state):
    return Other(old, new, saved, carry)
  rests = [tuple(leaf["shape"][1:]) for leaf in wanted.values()]
  same_rest = rests == [shape[1:] for shape in shapes]
  if same_rest or _is_local(abstract.exchange_state):
    return Other(old, new, saved, None, _why_not(abstract.exchange_state, old, new))
  return None


def _resized(resize, there, old: int, here, new: int, state: Any) -> Any:
  """The state of `new` devices, from that of `old`, part by part."""
  rows = jax.tree.map(lambda x: x[:old], state)
  if there is None or here is None:
    return resize(rows, new)
  devices = math.prod(here.mesh[axis] for axis in here.over)
  parts = jax.tree.map(lambda x: _by_parts(x, there), rows)
  made = {
    group: jax.vmap(lambda own: resize(own, devices))(own)
    for group, own in parts.items()
  }
  return jax.tree.map(lambda x: _by_devices(x, here), made)


def _places(split: Split) -> tuple[list[int], list[int]]:
  """Axes of the mesh along which parts are others, and those that are averaged."""
  rest = [i for i, axis in enumerate(split.mesh) if axis not in split.over]
  return rest, [list(split.mesh).index(axis) for axis in split.over]


def _by_parts(x: jax.Array, split: Split) -> jax.Array:
  """[devices of the mesh, …] as [parts, devices that have each, …]."""
  sizes, (rest, over) = list(split.mesh.values()), _places(split)
  grid = x.reshape(*sizes, *x.shape[1:])
  grid = grid.transpose(*rest, *over, *range(len(sizes), grid.ndim))
  return grid.reshape(math.prod(sizes[i] for i in rest), -1, *x.shape[1:])


def _by_devices(x: jax.Array, split: Split) -> jax.Array:
  """The inverse of `_by_parts`."""
  sizes, (rest, over) = list(split.mesh.values()), _places(split)
  order = [*rest, *over]
  grid = x.reshape(*(sizes[i] for i in order), *x.shape[2:])
  back = [order.index(i) for i in range(len(order))]
  grid = grid.transpose(*back, *range(len(sizes), grid.ndim))
  return grid.reshape(-1, *x.shape[2:])


def _counts_alone(leaves, abstract, resize, there, here) -> Other | None:
  """Where all that is kept is a number a device, the same for any parts."""
  own = abstract.exchange_state
  one = own if here is None else next(iter(own.values()))
  wanted = {f"{_EXCHANGE}{name}" for name in checksum.describe(one)}
  found = {name for name in leaves if name.startswith(_EXCHANGE)}
  groups = sorted({name.split("/")[1] for name in found}) if there is not None else []
  named = {n.replace(_EXCHANGE, f"{_EXCHANGE}{g}/") for g in groups for n in wanted}
  is_count = all(len(leaves[name]["shape"]) == 1 for name in found)
  if resize is None or not is_count or found != (named or wanted):
    return None
  old = leaves[min(found)]["shape"][0]
  new = len(jax.tree.leaves(own)[0])

  def rows(x):
    return jax.ShapeDtypeStruct((old, *x.shape[1:]), x.dtype)

  saved = jax.tree.map(rows, one)
  saved = dict.fromkeys(groups, saved) if there is not None else saved

  def carry(state):
    first = state if there is None else state[groups[0]]
    made = resize(jax.tree.map(lambda x: x[:old], first), new)
    return made if here is None else dict.fromkeys(own, made)

  if not _fits(carry, saved, own):
    return None
  return Other(old, new, abstract._replace(exchange_state=saved), carry)


def _other_parts(leaves, abstract, there, here) -> Other:
  """Of parts that devices do not have here."""
  own = {
    name.removeprefix(_EXCHANGE): jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"])
    for name, leaf in leaves.items()
    if name.startswith(_EXCHANGE)
  }
  why = (
    f"saved on {_mesh_words(there)}, here {'is' if here else 'are'} "
    f"{_mesh_words(here)}: what its exchange keeps is of parts of gradients that no "
    f"device has here{_example(there, here)}; go on with the mesh and layout it was "
    "saved with, or use another --workdir to start anew"
  )
  return Other(0, 0, abstract._replace(exchange_state=own), None, why)


def _mesh_words(split: Split | None) -> str:
  if split is None:
    return "devices that average whole gradients"
  return "Mesh " + ", ".join(f"{axis}={n}" for axis, n in split.mesh.items())


def _example(there: Split | None, here: Split | None) -> str:
  """The first parameter that is split otherwise."""
  dims = [split.dims if split else {} for split in (there, here)]
  for name in dims[0] | dims[1]:
    old, new = (_dims_words(d.get(name, [])) for d in dims)
    if old != new:
      return f" (that of {name} is split by {old} there, by {new} here)"
  return ""


def _dims_words(dims: list[str | None]) -> str:
  return ", ".join(a or "-" for a in dims) if any(dims) else "nothing"


def _only_exchange(abstract: TrainState) -> TrainState:
  own = TrainState(*[()] * len(TrainState._fields))
  return own._replace(exchange_state=abstract.exchange_state)


def _fits(carry: Callable[[Any], Any], saved: Any, wanted: Any) -> bool:
  """Whether a saved exchange state becomes the one asked for."""
  if _is_local(saved):
    return False
  try:
    made = jax.eval_shape(carry, saved)
  except (TypeError, ValueError):
    return False  # of tensors that the exchange could not have
  return checksum.describe(made) == checksum.describe(wanted)


def _is_local(exchange_state: Any) -> bool:
  """Whether it is that of local updates (`local_step.Own`): parameters a worker.

  Asked here as well, since any exchange's `resize` that takes means would take the
  workers' means just so.
  """
  fields = getattr(exchange_state, "_fields", ())
  return fields == ("params", "model_state", "opt_state", "exchange_state")


def _why_not(exchange_state: Any, old: int, new: int) -> str:
  """Why what N devices keep is of no use to others, and what is."""
  why = (
    "each worker has parameters and momentum of its own, which no other number of "
    "workers can go on from"
    if _is_local(exchange_state)
    else "its exchange does not say how to carry its state over (Exchange.resize)"
  )
  there = _devices(old)
  return (
    f"saved on {there}, here are {new}: {why}; go on with {there}, or use another "
    "--workdir to start anew"
  )


def refusal(path: Path, found: Other) -> ConfigError:
  """Why a checkpoint of other devices is of no use, and what is."""
  return ConfigError(f"{path}: {found.why}")


def to_load(found: Other, abstract: TrainState) -> TrainState:
  """The saved state as it fits on the devices: zeros behind the last entry."""
  rows = found.here * math.ceil(found.there / found.here)
  where = jax.tree.leaves(abstract.exchange_state)[0].sharding

  def spread(saved):
    return jax.ShapeDtypeStruct((rows, *saved.shape[1:]), saved.dtype, sharding=where)

  return abstract._replace(
    exchange_state=jax.tree.map(spread, found.saved.exchange_state)
  )


def carried_state(found: Other, state: TrainState, abstract: TrainState) -> TrainState:
  """The state asked for, from what `to_load` described; every process calls it."""
  assert found.carry is not None
  shardings = jax.tree.map(lambda x: x.sharding, abstract.exchange_state)
  made = jax.jit(found.carry, out_shardings=shardings)(state.exchange_state)
  return state._replace(exchange_state=jax.block_until_ready(made))


def story(found: Other) -> str:
  """What a run says of it."""
  devices = f"from {_devices(found.there)} to {found.here}"
  return (
    "the exchange's state was carried over "
    f"{devices if found.there != found.here else 'to another layout'}: no pending "
    "gradient is lost, its sum is kept to rounding, but from here the run is not the "
    "same bit for bit"
  )


def _devices(count: int) -> str:
  return f"{count} device{'s' if count > 1 else ''}"
