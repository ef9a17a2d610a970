"""Device meshes, and the distribution of a batch's rows over devices.

The axes, slowest links first, are `replica` over nodes or slices, `data` over the devices
within one, and optionally `bn` over neighbours of `data` that share BatchNorm statistics.
Layouts that split a model add `fsdp`, which splits the batch and the state, `stage`,
which splits the list of layers, and `model`, which splits each layer or the tokens of a
sequence. A mesh omits these three if they have one device. An *axis* belongs to a mesh, a
*dim* to an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.errors import ConfigError

AXES = ("replica", "data")
BN_AXIS = "bn"  # a factor of `data`, only in meshes that need it
MODEL_AXES = ("stage", "model")  # axes along which all devices have the same rows


class MeshShape(NamedTuple):
  """Number of devices along each axis.

  Attributes:
    replica: number of groups of devices, joined by slow links.
    data: number of devices per group that process different rows.
    fsdp: number of devices that split a batch and the state.
    stage: number of pipeline stages.
    model: number of devices that split a layer or a sequence.
  """

  replica: int = 1
  data: int = -1
  fsdp: int = 1
  stage: int = 1
  model: int = 1

  @property
  def row_blocks(self) -> int:
    """Number of parts into which the rows of a batch are split."""
    return self.replica * self.data * self.fsdp


def mesh_shape(num_devices: int, **sizes: int) -> MeshShape:
  """Return the sizes of all axes; one of them may be given as -1 for the rest.

  Args:
    num_devices: number of devices of all processes.
    sizes: sizes of axes by name; by default all devices are along `data`.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.

  Example:
    >>> mesh_shape(8, replica=2)
    MeshShape(replica=2, data=4, fsdp=1, stage=1, model=1)
  """
  asked = MeshShape(**sizes)
  product = math.prod(n for n in asked if n != -1)
  rest = num_devices // max(product, 1)
  shape = MeshShape(*(rest if n == -1 else n for n in asked))
  if min(shape) < 1 or math.prod(shape) != num_devices:
    given_sizes = {"replica": asked.replica, "data": asked.data}
    given_sizes |= {name: n for name, n in asked._asdict().items() if n != 1}
    text = ", ".join(f"Mesh.{name}={n}" for name, n in given_sizes.items())
    text += f" must multiply to the {num_devices} devices; "
    raise ConfigError(f"{text}use -1 for one of them to take the rest")
  return shape


def make_mesh(*, bn_devices: int = 1, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
  """Create a mesh with the axes `replica` and `data`, and other axes larger than 1.

  Args:
    bn_devices: number of neighbours that share BatchNorm statistics, from
      `batch_norm_span`. More than 1 splits `data` into (data / bn_devices, bn_devices),
      of which the second axis is named `bn`.
    devices: the devices to use; None means all devices of all processes.
    sizes: sizes of the axes by name, as for `mesh_shape`; by default all devices are
      along `data`.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices, or
      `bn_devices` does not divide `data`.

  Example:
    >>> dict(make_mesh(data=1, devices=jax.devices()[:1]).shape)
    {'replica': 1, 'data': 1}
  """
  shape = mesh_shape(jax.device_count() if devices is None else len(devices), **sizes)
  axis_sizes = {a: n for a, n in shape._asdict().items() if a in AXES or n > 1}
  grid, axes, field = _grid(axis_sizes, devices), (*axis_sizes,), f"bn_devices={bn_devices}"
  if bn_devices < 1 or shape.data % bn_devices:
    problem = f"does not divide the data axis of {shape.data} devices; give a divisor"
    raise ConfigError(f"{field} {problem}")
  if bn_devices > 1 and shape.fsdp > 1:
    problem = f"does not work with Mesh.fsdp={shape.fsdp}; share BatchNorm statistics over all "
    problem += "devices or none (bn_span='global' or 'device')"
    raise ConfigError(f"{field} {problem}")
  if bn_devices > 1:
    # Devices are in the order of the mesh without `bn`, so that each holds the same rows.
    grid = grid.reshape(shape.replica, -1, bn_devices, *grid.shape[2:])
    axes = (*AXES, BN_AXIS, *axes[2:])
  # JAX's default is explicit axes, but the partitioning by jit, on which the update relies,
  # needs automatic axes.
  return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def _grid(sizes: dict[str, int], devices: Sequence[Any] | None) -> np.ndarray:
  """Arrange devices in a grid, with TPU slices along the slowest axes.

  Args:
    sizes: sizes of the axes, slowest first.
    devices: the devices; None means all devices of all processes.

  Raises:
    ConfigError: the slowest axes do not multiply to the number of slices.
  """
  devices = jax.devices() if devices is None else list(devices)
  slices = len({getattr(d, "slice_index", None) for d in devices})
  between, left = [], slices
  for size in sizes.values():
    between.append(math.gcd(size, left))
    left //= between[-1]
    if between[-1] < size:  # faster axes are within a slice
      break
  if left > 1:
    axis = list(sizes)[len(between) - 1]
    problem = f"does not match the {slices} slices of the devices"
    raise ConfigError(f"Mesh.{axis}={sizes[axis]} {problem}; give Mesh.replica={slices}")
  between += [1] * (len(sizes) - len(between))
  within = [n // k for n, k in zip(sizes.values(), between, strict=True)]

  def make(**options):
    if slices == 1:
      return mesh_utils.create_device_mesh([*sizes.values()], devices, **options)
    return mesh_utils.create_hybrid_device_mesh(within, between, devices, **options)

  try:
    return make()
  except NotImplementedError:  # an axis does not match dimensions of the torus
    return make(allow_split_physical_axes=True)


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
  """Return the axes that split the rows of a batch.

  Example:
    >>> batch_axes(make_mesh(data=1, devices=jax.devices()[:1]))
    ('replica', 'data')
  """
  return tuple(axis for axis in mesh.axis_names if axis not in MODEL_AXES)


def row_blocks(mesh: Mesh) -> int:
  """Return the number of parts into which the rows of a batch are split."""
  return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


class BatchNormSpan(NamedTuple):
  """Devices and rows that share BatchNorm statistics.

  Attributes:
    bn_devices: size of the axis `bn`, for `make_mesh`; 1: no such axis.
    axis_name: mesh axes over which models average statistics; None means no averaging.
    group_size: number of rows of a device that share statistics, for the models; None means
      all rows of its micro-batch.
  """

  bn_devices: int = 1
  axis_name: tuple[str, ...] | None = None
  group_size: int | None = None


def batch_norm_span(
  span: int | Literal["device", "global"], device_rows: int, *, replica: int, data: int
) -> BatchNormSpan:
  """Return the devices and rows that share BatchNorm statistics for a span of examples.

  If the span is smaller than a device's micro-batch, rows are normalised in groups of
  `span`; if it is larger, devices share statistics. Neighbours hold consecutive rows, so
  that group i is the rows [i * span, (i + 1) * span) of the batch on any number of
  devices. With gradient accumulation, statistics are shared within a micro-batch of all
  devices. Spans up to a device's micro-batch then still contain the same examples; larger
  spans only contain as many.

  Args:
    span: number of examples that share statistics, "device" for a device's micro-batch,
      or "global" for the micro-batches of all devices.
    device_rows: number of examples in a device's micro-batch.
    replica: size of the axis `replica`, from `mesh_shape`.
    data: size of the axis `data`.

  Raises:
    ConfigError: the span neither divides a device's micro-batch, nor is a multiple of it
      by a divisor of `data`, nor covers all devices.

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
    problem = f"is out of range, as the micro-batches of all devices have {all_rows} examples"
    expected = f'a number from 2 to {all_rows}, "device" or "global"'
    raise ConfigError(f"bn_span={span!r} {problem}; give {expected}")
  if span < device_rows:
    if device_rows % span:
      nearest = _nearest_divisor(device_rows, span, least=2)
      expected = '"device"' if nearest == device_rows else nearest
      problem = f"does not divide the {device_rows} examples of a device's micro-batch"
      raise ConfigError(f"bn_span={span} {problem}; give {expected}")
    return BatchNormSpan(group_size=span)
  sharing = span // device_rows
  if span % device_rows or data % sharing:
    expected = device_rows * _nearest_divisor(data, span / device_rows, 2 // device_rows)
    problem = f"is not a device's micro-batch of {device_rows} examples times a divisor "
    problem += f"of Mesh.data={data}; give {expected}"
    raise ConfigError(f"bn_span={span} {problem}")
  if sharing == data:
    return BatchNormSpan(axis_name=("data",))
  return BatchNormSpan(bn_devices=sharing, axis_name=(BN_AXIS,))


def _nearest_divisor(number: int, target: float, least: int = 1) -> int:
  """Return the divisor of `number` that is nearest to `target` by ratio.

  It is at least `least`, unless 1 is the only divisor.
  """
  divisors = [n for n in range(max(least, 1), number + 1) if number % n == 0] or [1]
  return min(divisors, key=lambda n: max(n / target, target / n))


def submesh(mesh: Mesh, devices: Sequence[Any]) -> Mesh:
  """Return a mesh of some of the devices with the same axis names.

  The devices are along `data`, or as many as possible along `bn`, so that functions for
  the one mesh run on the other. The mesh must not have `fsdp`, `stage` or `model`.

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
  """Return the sharding that replicates an array on every device."""
  return NamedSharding(mesh, P())


def on_cpu(mesh: Mesh) -> bool:
  """Return whether the devices of a mesh are CPUs."""
  return mesh.devices.flat[0].platform == "cpu"


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Return the sharding of a batch: rows (dim 0) are split along `batch_axes`."""
  return NamedSharding(mesh, P(batch_axes(mesh)))


def host_shard(mesh: Mesh) -> tuple[int, int]:
  """Return the index of the block of rows that this process loads, and their number.

  Blocks are of equal size. Processes whose devices differ only along `stage` and `model`
  load the same block.

  Raises:
    ValueError: the rows of this process are not contiguous in the mesh, or processes have
      different numbers of rows.
  """
  owners = np.array([d.process_index for d in mesh.devices.flat])
  owners = owners.reshape(row_blocks(mesh), -1)
  held = {int(p): np.flatnonzero((owners == p).any(axis=1)) for p in np.unique(owners)}
  here = f"process {jax.process_index()}"
  mine = held.get(jax.process_index(), np.arange(0))
  if not np.array_equal(mine, np.arange(len(mine)) + (mine[0] if len(mine) else 0)):
    advice = "which are not contiguous; order the devices by process"
    raise ValueError(f"{here} owns the mesh positions {mine.tolist()}, {advice}")
  if any(len(rows) != len(mine) for rows in held.values()) or mine[0] % len(mine):
    has = f"has {len(mine)} of {len(owners)} blocks of rows over {len(held)} processes"
    raise ValueError(f"{here} {has}; give every process the same number")
  return int(mine[0]) // len(mine), len(owners) // len(mine)


def array_from_parts(
  abstract: Any, read: Callable[[tuple[tuple[int, int], ...]], np.ndarray]
) -> jax.Array:
  """Put an array on the devices of this process, part after part.

  `jax.make_array_from_callback` would hold all parts on the host at once, and keep them there
  until Python's next garbage collection.

  Args:
    abstract: the shape, dtype and sharding.
    read: a function from (start, stop) for every dim to this part of the array.

  Example:
    >>> where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    >>> like = jax.ShapeDtypeStruct((3,), "float32", sharding=where)
    >>> array_from_parts(like, lambda ranges: np.arange(*ranges[0], dtype="float32"))
    Array([0., 1., 2.], dtype=float32)
  """
  shape, sharding = abstract.shape, abstract.sharding
  owners: dict[Any, list[Any]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    ranges = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
    where = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    owners.setdefault(ranges, []).append(where)
  parts = []
  for ranges, places in owners.items():
    part = read(ranges)
    parts += [jax.device_put(part, place) for place in places]
    jax.block_until_ready(parts)  # The host holds only one part at a time.
  return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=abstract.dtype)
