"""A checkpoint of another number of devices: what to load, and what to make of it.

All of a `TrainState` is the same on every number of devices but `exchange_state`,
which has an entry a device. Where the exchange can say what becomes of N entries
on N' devices (`Exchange.resize`), they are loaded as they were saved, ceil(N / N')
of them a device with zeros behind the last, checked, and resized on the devices:
none holds more than its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxscale import checksum
from jaxscale.settings import ConfigError
from jaxscale.state import TrainState

# (exchange state with a leading dim of N devices, N') -> the same for N' devices
Resize = Callable[[Any, int], Any]


class OtherCount(NamedTuple):
  """A checkpoint that was saved on another number of devices.

  Attributes:
    there: devices that it was saved on, N.
    here: devices that there are, N'.
    saved: shapes and dtypes of its state; shardings but for the exchange's.
    resize: how the exchange's state is carried over; None: it cannot be.
  """

  there: int
  here: int
  saved: TrainState
  resize: Resize | None


def other_count(
  leaves: dict[str, Any], abstract: TrainState, resize: Resize | None
) -> OtherCount | None:
  """What a checkpoint's manifest says of another number of devices.

  Args:
    leaves: shape and dtype of every leaf saved, by path (checksum.py).
    abstract: the state asked for.
    resize: `Exchange.resize` of the exchange that goes on.

  Returns:
    None where it was saved on as many, keeps nothing a device, or where more than
    the number of devices is different.
  """
  own = TrainState(*[()] * len(TrainState._fields))
  own = own._replace(exchange_state=abstract.exchange_state)
  wanted = checksum.describe(own)
  if any(name not in leaves for name in wanted):
    return None
  shapes = [tuple(leaves[name]["shape"]) for name in wanted]
  counts = {shape[:1] for shape in shapes}
  heres = {tuple(leaf["shape"][:1]) for leaf in wanted.values()}
  if len(counts) != 1 or len(heres) != 1 or counts == heres or () in counts | heres:
    return None
  (there,), (here,) = counts.pop(), heres.pop()
  saved = abstract._replace(
    exchange_state=jax.tree.unflatten(
      jax.tree.structure(abstract.exchange_state),
      [
        jax.ShapeDtypeStruct(shape, leaves[name]["dtype"])
        for name, shape in zip(wanted, shapes, strict=True)
      ],
    )
  )
  if _fits(resize, saved.exchange_state, here, abstract.exchange_state):
    return OtherCount(there, here, saved, resize)
  rests = [tuple(leaf["shape"][1:]) for leaf in wanted.values()]
  same_rest = rests == [shape[1:] for shape in shapes]
  if same_rest or _is_local(abstract.exchange_state):
    return OtherCount(there, here, saved, None)
  return None


def _fits(resize: Resize | None, saved: Any, here: int, wanted: Any) -> bool:
  """Whether a saved exchange state becomes the one asked for."""
  if resize is None or _is_local(saved):
    return False
  try:
    made = jax.eval_shape(lambda state: resize(state, here), saved)
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


def refusal(path: Path, other: OtherCount) -> ConfigError:
  """Why a checkpoint of another number of devices is of no use, and what is."""
  why = (
    "each worker has parameters and momentum of its own, which no other number of "
    "workers can go on from"
    if _is_local(other.saved.exchange_state)
    else "its exchange does not say how to carry its state over (Exchange.resize)"
  )
  there = _devices(other.there)
  return ConfigError(
    f"{path}: saved on {there}, here are {other.here}: {why}; go on with {there}, or "
    "use another --workdir to start anew"
  )


def to_load(other: OtherCount, abstract: TrainState) -> TrainState:
  """The saved state as it fits on the devices: zeros behind the last entry."""
  rows = other.here * math.ceil(other.there / other.here)

  def spread(saved, wanted):
    shape = rows, *saved.shape[1:]
    return jax.ShapeDtypeStruct(shape, saved.dtype, sharding=wanted.sharding)

  spread_out = jax.tree.map(spread, other.saved.exchange_state, abstract.exchange_state)
  return abstract._replace(exchange_state=spread_out)


def resized_state(
  other: OtherCount, state: TrainState, abstract: TrainState
) -> TrainState:
  """The state asked for, from what `to_load` described; every process calls it."""
  resize, here = other.resize, other.here
  assert resize is not None

  def resized(rows):
    return resize(jax.tree.map(lambda x: x[: other.there], rows), here)

  shardings = jax.tree.map(lambda x: x.sharding, abstract.exchange_state)
  made = jax.jit(resized, out_shardings=shardings)(state.exchange_state)
  return state._replace(exchange_state=jax.block_until_ready(made))


def story(other: OtherCount) -> str:
  """What a run says of it."""
  return (
    f"the exchange's state was carried over from {_devices(other.there)} to "
    f"{other.here}: no pending gradient is lost, its sum is kept to rounding, but "
    "from here the run is not the same bit for bit"
  )


def _devices(count: int) -> str:
  return f"{count} device{'s' if count > 1 else ''}"
