"""The devices as a named grid, and who holds which rows of a batch.

Axes, slowest link first: `replica` joins nodes or slices, `data` the devices
within one. An *axis* is of the mesh, a *dim* of an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.settings import ConfigError

AXES = ("replica", "data")


def make_mesh(
  *,
  replica: int = 1,
  data: int = -1,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """A mesh with the axes `replica` and `data`.

  Args:
    replica: groups of devices joined by the slow links; -1: what is left.
    data: devices in a group; -1: what is left.
    devices: which devices to use; None: all of every process.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.

  Example:
    >>> make_mesh(data=1, devices=jax.devices()[:1]).shape
    OrderedDict({'replica': 1, 'data': 1})
  """
  num_devices = jax.device_count() if devices is None else len(devices)
  sizes = {"replica": replica, "data": data}
  given = int(np.prod([n for n in sizes.values() if n != -1]))
  shape = tuple(num_devices // given if n == -1 else n for n in sizes.values())
  if int(np.prod(shape)) != num_devices:
    raise ConfigError(
      f"Mesh.replica={replica}, Mesh.data={data}: they must multiply to the "
      f"{num_devices} devices there are; -1 stands for the rest"
    )
  # Explicit axes are the default of `jax.make_mesh`; jit's own partitioning,
  # which the optimizer stage relies on, needs Auto ones.
  types = (AxisType.Auto,) * len(AXES)
  return jax.make_mesh(shape, AXES, types, devices=devices)


def one_at_a_time(function: Any, mesh: Mesh) -> Any:
  """The jitted function; on simulated devices it returns when it is done.

  Several CPU devices of a process share one pool of threads, and their
  collectives wait for each other in it. With a few steps dispatched ahead they
  wait for different ones, until XLA aborts the process after 40 s (measured:
  200 steps of which nothing was read, 8 devices, jax 0.10.2).
  """
  here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  if len(here) == 1 or here[0].platform != "cpu":
    return function

  def call(*args):
    return jax.block_until_ready(function(*args))

  call.lower = getattr(function, "lower", None)  # pyright: ignore
  return call


def replicated(mesh: Mesh) -> NamedSharding:
  """Every device holds the whole array."""
  return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows (dim 0) are spread over all devices."""
  return NamedSharding(mesh, P(mesh.axis_names))


def host_shard(mesh: Mesh) -> tuple[int, int]:
  """(index, count): which of `count` equal blocks of rows this process feeds.

  Raises:
    ValueError: the mesh puts this process's devices apart from each other, or
      processes have different numbers of devices.
  """
  owners = np.array([d.process_index for d in mesh.devices.flat])
  mine = np.flatnonzero(owners == jax.process_index())
  count = len(np.unique(owners))
  if not np.array_equal(mine, np.arange(len(mine)) + (mine[0] if len(mine) else 0)):
    raise ValueError(
      f"process {jax.process_index()} owns the mesh positions {mine.tolist()}: "
      "they must be neighbours; order the devices by process"
    )
  if len(mine) * count != len(owners):
    raise ValueError(
      f"process {jax.process_index()} has {len(mine)} of {len(owners)} devices "
      f"over {count} processes: give each process equally many"
    )
  return int(mine[0]) // len(mine), count
