"""The devices as a named grid, and who holds which rows of a batch.

Axes, slowest link first: `replica` joins nodes or slices, `data` the devices
within one, and `bn`, where there is one, those neighbours of `data` that share
BatchNorm statistics. Where a model is spread over devices there are also `fsdp`,
along which a batch and the state are split, `stage`, of which each has some of the
layers, and `model`, along which a layer is split or the tokens of a sequence. Those
three are left out of a mesh where they have one device. An *axis* is of the mesh, a
*dim* of an array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.errors import ConfigError

AXES = ("replica", "data")
BN_AXIS = "bn"  # a factor of `data`, only in meshes that need it
MODEL_AXES = ("stage", "model")  # along which all devices have the same rows


class MeshShape(NamedTuple):
  """Devices along each axis."""

  replica: int = 1
  data: int = -1
  fsdp: int = 1
  stage: int = 1
  model: int = 1

  @property
  def row_blocks(self) -> int:
    """In how many parts the rows of a batch are split."""
    return self.replica * self.data * self.fsdp


def mesh_shape(num_devices: int, **sizes: int) -> MeshShape:
  """The sizes of all axes, of which one can be -1: what is left.

  Args:
    num_devices: over all processes.
    sizes: of axes by name; by default all devices are along `data`.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.

  Example:
    >>> mesh_shape(8, replica=2)
    MeshShape(replica=2, data=4, fsdp=1, stage=1, model=1)
  """
  asked = MeshShape(**sizes)
  given = math.prod(n for n in asked if n != -1)
  rest = num_devices // max(given, 1)
  shape = MeshShape(*(rest if n == -1 else n for n in asked))
  if min(shape) < 1 or math.prod(shape) != num_devices:
    given_sizes = {"replica": asked.replica, "data": asked.data}
    given_sizes |= {name: n for name, n in asked._asdict().items() if n != 1}
    text = ", ".join(f"Mesh.{name}={n}" for name, n in given_sizes.items())
    text += f": they must multiply to the {num_devices} devices there are; "
    raise ConfigError(f"{text}-1 stands for the rest")
  return shape


def make_mesh(
  *,
  replica: int = 1,
  data: int = -1,
  fsdp: int = 1,
  stage: int = 1,
  model: int = 1,
  bn_devices: int = 1,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """A mesh with the axes `replica` and `data`, and others where they are asked for.

  Args:
    replica: groups of devices joined by the slow links; -1: what is left.
    data: devices in a group; -1: what is left.
    fsdp: devices that split a batch and the state; -1: what is left.
    stage: parts of the layers, one after another.
    model: devices that split a layer, or a sequence.
    bn_devices: neighbours that share BatchNorm statistics, as
      `batch_norm_span` gives it. More than 1 splits `data` into
      (data / bn_devices, bn_devices); the second axis is then named `bn`.
    devices: which devices to use; None: all of every process.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices, or
      `bn_devices` does not divide `data`.

  Example:
    >>> dict(make_mesh(data=1, devices=jax.devices()[:1]).shape)
    {'replica': 1, 'data': 1}
  """
  num_devices = jax.device_count() if devices is None else len(devices)
  asked = {"replica": replica, "data": data, "fsdp": fsdp, "stage": stage}
  shape = mesh_shape(num_devices, **asked, model=model)
  sizes = {a: n for a, n in shape._asdict().items() if a in AXES or n > 1}
  grid, axes, field = _grid(sizes, devices), (*sizes,), f"bn_devices={bn_devices}"
  if bn_devices < 1 or shape.data % bn_devices:
    why = f"does not divide the data axis of {shape.data} devices, give a divisor"
    raise ConfigError(f"{field}: {why}")
  if bn_devices > 1 and shape.fsdp > 1:
    why = f"neighbours are along fsdp here, of {shape.fsdp} devices; share BatchNorm "
    why += "statistics over all of them or none (bn_span='global' or 'device')"
    raise ConfigError(f"{field}: {why}")
  if bn_devices > 1:
    # The order of the devices is that of the mesh without `bn`, so that each
    # holds the same rows.
    grid = grid.reshape(shape.replica, -1, bn_devices, *grid.shape[2:])
    axes = (*AXES, BN_AXIS, *axes[2:])
  # Explicit axes are the default of JAX; jit's own partitioning, which the optimizer
  # stage relies on, needs Auto ones.
  return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def _grid(sizes: dict[str, int], devices: Sequence[Any] | None) -> np.ndarray:
  """The devices of a mesh, the slices of a TPU apart along its slowest axes.

  Args:
    sizes: of the axes, the slowest first.
    devices: None: all of every process.

  Raises:
    ConfigError: the slowest axes do not multiply to the number of slices.
  """
  devices = jax.devices() if devices is None else list(devices)
  slices = len({getattr(d, "slice_index", None) for d in devices})
  between, left = [], slices
  for size in sizes.values():
    between.append(math.gcd(size, left))
    left //= between[-1]
    if between[-1] < size:  # what is faster is within a slice
      break
  if left > 1:
    axis = list(sizes)[len(between) - 1]
    why = f"the devices are {slices} slices, and no slower axis joins them"
    raise ConfigError(f"Mesh.{axis}={sizes[axis]}: {why}; give Mesh.replica={slices}")
  between += [1] * (len(sizes) - len(between))
  within = [n // k for n, k in zip(sizes.values(), between, strict=True)]

  def make(**options):
    if slices == 1:
      return mesh_utils.create_device_mesh([*sizes.values()], devices, **options)
    return mesh_utils.create_hybrid_device_mesh(within, between, devices, **options)

  try:
    return make()
  except NotImplementedError:  # an axis is no whole dimension of the torus
    return make(allow_split_physical_axes=True)


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
  """The axes that split the rows of a batch.

  Example:
    >>> batch_axes(make_mesh(data=1, devices=jax.devices()[:1]))
    ('replica', 'data')
  """
  return tuple(axis for axis in mesh.axis_names if axis not in MODEL_AXES)


def row_blocks(mesh: Mesh) -> int:
  """In how many parts the rows of a batch are split."""
  return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


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
  span: int | Literal["device", "global"], device_rows: int, *, replica: int, data: int
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
    why = f"the micro-batches of all devices have {all_rows} examples"
    wanted = f'a number from 2 to {all_rows}, "device" or "global"'
    raise ConfigError(f"bn_span={span!r}: {why}, give {wanted}")
  if span < device_rows:
    if device_rows % span:
      nearest = _nearest_divisor(device_rows, span, least=2)
      wanted = '"device"' if nearest == device_rows else nearest
      why = f"does not divide the {device_rows} examples of a device's micro-batch"
      raise ConfigError(f"bn_span={span}: {why}, give {wanted}")
    return BatchNormSpan(group_size=span)
  sharing = span // device_rows
  if span % device_rows or data % sharing:
    wanted = device_rows * _nearest_divisor(data, span / device_rows, 2 // device_rows)
    why = f"is not {device_rows}, the examples of a device's micro-batch, times a "
    why += f"divisor of the data axis of {data}; give {wanted}"
    raise ConfigError(f"bn_span={span}: {why}")
  if sharing == data:
    return BatchNormSpan(axis_name=("data",))
  return BatchNormSpan(bn_devices=sharing, axis_name=(BN_AXIS,))


def _nearest_divisor(number: int, wanted: float, least: int = 1) -> int:
  """The divisor of `number` with the smallest ratio to `wanted`, either way.

  Not below `least`, but for 1 where that is the only one.
  """
  divisors = [n for n in range(max(least, 1), number + 1) if number % n == 0] or [1]
  return min(divisors, key=lambda n: max(n / wanted, wanted / n))


def submesh(mesh: Mesh, devices: Sequence[Any]) -> Mesh:
  """Some of the devices alone, under the names of the mesh's axes.

  They are all along `data`, or as many as can be along `bn`, so that what is
  written for the one mesh runs on the other. For meshes without `fsdp`, `stage` and
  `model`.

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


def replicated(mesh: Mesh) -> NamedSharding:
  """Every device holds the whole array."""
  return NamedSharding(mesh, P())


def on_cpu(mesh: Mesh) -> bool:
  """Whether its devices are CPUs."""
  return mesh.devices.flat[0].platform == "cpu"


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows (dim 0) are split along the axes of `batch_axes`."""
  return NamedSharding(mesh, P(batch_axes(mesh)))


def host_shard(mesh: Mesh) -> tuple[int, int]:
  """(index, count): which of `count` equal blocks of rows this process feeds.

  Processes whose devices differ only along `stage` and `model` feed the same block.

  Raises:
    ValueError: the mesh puts this process's rows apart from each other, or
      processes have different numbers of rows.
  """
  owners = np.array([d.process_index for d in mesh.devices.flat])
  owners = owners.reshape(row_blocks(mesh), -1)
  held = {int(p): np.flatnonzero((owners == p).any(axis=1)) for p in np.unique(owners)}
  here = f"process {jax.process_index()}"
  mine = held.get(jax.process_index(), np.arange(0))
  if not np.array_equal(mine, np.arange(len(mine)) + (mine[0] if len(mine) else 0)):
    advice = "they must be neighbours; order the devices by process"
    raise ValueError(f"{here} owns the mesh positions {mine.tolist()}: {advice}")
  if any(len(rows) != len(mine) for rows in held.values()) or mine[0] % len(mine):
    has = f"has {len(mine)} of {len(owners)} blocks of rows over {len(held)} processes"
    raise ValueError(f"{here} {has}: give each process equally many")
  return int(mine[0]) // len(mine), len(owners) // len(mine)
