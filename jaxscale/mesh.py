"""The devices as a named grid, and who holds which rows of a batch.

Axes, slowest link first: `replica` joins nodes or slices, `data` the devices
within one, and `bn`, where there is one, those neighbours of `data` that share
BatchNorm statistics. An *axis* is of the mesh, a *dim* of an array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.settings import ConfigError

AXES = ("replica", "data")
BN_AXIS = "bn"  # a factor of `data`, only in meshes that need it


def mesh_shape(
  num_devices: int, *, replica: int = 1, data: int = -1
) -> tuple[int, int]:
  """The sizes of `replica` and `data`, of which one can be -1: what is left.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.

  Example:
    >>> mesh_shape(8, replica=2)
    (2, 4)
  """
  given = math.prod(n for n in (replica, data) if n != -1)
  rest = num_devices // max(given, 1)
  shape = (rest if replica == -1 else replica, rest if data == -1 else data)
  if min(shape) < 1 or math.prod(shape) != num_devices:
    raise ConfigError(
      f"Mesh.replica={replica}, Mesh.data={data}: they must multiply to the "
      f"{num_devices} devices there are; -1 stands for the rest"
    )
  return shape


def make_mesh(
  *,
  replica: int = 1,
  data: int = -1,
  bn_devices: int = 1,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """A mesh with the axes `replica` and `data`, and `bn` where it is asked for.

  Args:
    replica: groups of devices joined by the slow links; -1: what is left.
    data: devices in a group; -1: what is left.
    bn_devices: neighbours that share BatchNorm statistics, as
      `batch_norm_span` gives it. More than 1 splits `data` into
      (data / bn_devices, bn_devices); the last axis is then named `bn`.
    devices: which devices to use; None: all of every process.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices, or
      `bn_devices` does not divide `data`.

  Example:
    >>> make_mesh(data=1, devices=jax.devices()[:1]).shape
    OrderedDict({'replica': 1, 'data': 1})
  """
  num_devices = jax.device_count() if devices is None else len(devices)
  shape = mesh_shape(num_devices, replica=replica, data=data)
  # Explicit axes are the default of `jax.make_mesh`; jit's own partitioning,
  # which the optimizer stage relies on, needs Auto ones.
  types = (AxisType.Auto,) * len(AXES)
  mesh = jax.make_mesh(shape, AXES, types, devices=devices)
  if bn_devices == 1:
    return mesh
  if bn_devices < 1 or shape[1] % bn_devices:
    raise ConfigError(
      f"bn_devices={bn_devices}: does not divide the data axis of {shape[1]} "
      "devices, give a divisor"
    )
  # The order of the devices is that of the mesh without `bn`, so that each
  # holds the same rows.
  grid = mesh.devices.reshape(shape[0], -1, bn_devices)
  return Mesh(grid, (*AXES, BN_AXIS), axis_types=(*types, AxisType.Auto))


class BatchNormSpan(NamedTuple):
  """Who shares BatchNorm statistics with whom.

  Attributes:
    bn_devices: devices of the axis `bn`, for `make_mesh`; 1: no such axis.
    axis_name: mesh axes to average statistics over, for the models; None: none.
    group_size: rows of a device that share statistics, for the models; None:
      all of them.
  """

  bn_devices: int = 1
  axis_name: tuple[str, ...] | None = None
  group_size: int | None = None


def batch_norm_span(
  span: int | Literal["device", "global"],
  device_rows: int,
  *,
  replica: int,
  data: int,
) -> BatchNormSpan:
  """How devices share BatchNorm statistics over a given number of examples.

  Below a device's micro-batch, rows are normalised in groups of `span`; above
  it, devices share. Neighbours hold consecutive rows, so group i is the rows
  [i * span, (i + 1) * span) of the batch on any number of devices. Devices that
  accumulate share what they hold at the same time: the groups have the same
  examples as without as long as the span is within a micro-batch, and only as
  many above it.

  Args:
    span: examples that share statistics, "device" for a device's micro-batch
      or "global" for those of all devices.
    device_rows: examples of a device's micro-batch.
    replica: size of that axis, as `mesh_shape` gives it.
    data: size of that axis.

  Raises:
    ConfigError: the span neither divides a device's micro-batch nor is a
      multiple of it by a number of devices that divides `data`, or by all.

  Example:
    >>> batch_norm_span(64, 16, replica=1, data=8)
    BatchNormSpan(bn_devices=4, axis_name=('bn',), group_size=None)
    >>> batch_norm_span(64, 256, replica=1, data=8).group_size
    64
  """
  all_rows = device_rows * replica * data
  if span == "device" or span == device_rows:
    return BatchNormSpan()
  if span == "global" or span == all_rows:
    return BatchNormSpan(axis_name=AXES)
  if isinstance(span, str) or not 1 <= span <= all_rows:
    raise ConfigError(
      f"bn_span={span!r}: the micro-batches of all devices have {all_rows} examples, "
      f'give a number from 2 to {all_rows}, "device" or "global"'
    )
  if span < device_rows:
    if device_rows % span:
      raise ConfigError(
        f"bn_span={span}: does not divide the {device_rows} examples of a device's "
        f"micro-batch, give {_divisor_span(device_rows, span)}"
      )
    return BatchNormSpan(group_size=span)
  sharing = span // device_rows
  if span % device_rows or data % sharing:
    wanted = device_rows * _nearest_divisor(data, span / device_rows, 2 // device_rows)
    raise ConfigError(
      f"bn_span={span}: is not {device_rows}, the examples of a device's "
      f"micro-batch, times a divisor of the data axis of {data}; give {wanted}"
    )
  if sharing == data:
    return BatchNormSpan(axis_name=("data",))
  return BatchNormSpan(bn_devices=sharing, axis_name=(BN_AXIS,))


def _divisor_span(device_rows: int, span: int) -> str:
  """The nearest span of 2 examples or more that divides a device's rows."""
  nearest = _nearest_divisor(device_rows, span, least=2)
  return '"device"' if nearest == device_rows else str(nearest)


def _nearest_divisor(number: int, wanted: float, least: int = 1) -> int:
  """The divisor of `number` with the smallest ratio to `wanted`, either way.

  Not below `least`, but for 1 where that is the only one.
  """
  divisors = [n for n in range(max(least, 1), number + 1) if number % n == 0] or [1]
  return min(divisors, key=lambda n: max(n / wanted, wanted / n))


def submesh(mesh: Mesh, devices: Sequence[Any]) -> Mesh:
  """Some of the devices alone, under the names of the mesh's axes.

  They are all along `data`, or as many as can be along `bn`, so that what is
  written for the one mesh runs on the other.

  Example:
    >>> mesh = make_mesh(replica=2, bn_devices=4)              # doctest: +SKIP
    >>> submesh(mesh, jax.local_devices()).shape               # doctest: +SKIP
    OrderedDict({'replica': 1, 'data': 1, 'bn': 2})
  """
  sizes = dict.fromkeys(mesh.axis_names, 1)
  if BN_AXIS in sizes:
    sizes[BN_AXIS] = math.gcd(mesh.shape[BN_AXIS], len(devices))
  sizes["data"] = len(devices) // sizes.get(BN_AXIS, 1)
  grid = np.array(devices).reshape(*sizes.values())
  return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


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
