"""Parameters into a file, one array at a time, from wherever their parts are."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import cluster
from jaxscale.errors import EXIT_CRASH, ConfigError
from jaxscale.tree_paths import path_name
from jaxscale.weights.arrange import ARRANGEMENTS
from jaxscale.weights.names import Link, Naming, naming_of, shape_in_file
from jaxscale.weights.safetensors import write


class UnwrittenError(Exception):
  """A file could not be written; the message says why."""

  exit_code = EXIT_CRASH


class Leaf(NamedTuple):
  """An array that is read when its turn comes.

  Attributes:
    shape: of the array.
    dtype: likewise.
    read: a layer's number, or None for the whole -> that, on the host of process
      0; None elsewhere. All processes call it.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[int | None], np.ndarray | None]


def export_safetensors(
  path: str | os.PathLike,
  params: Any,
  model_state: Any = None,
  *,
  naming: str = "jaxscale",
  num_classes: int | None = None,
  dtype: Any = None,
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Write parameters into one file; all processes call it, process 0 writes.

  Arrays, or layers of them where they are stacked, come to the host one after
  another, so that no host and no device holds more than one of them whole.

  Args:
    path: of the file; one that is there is replaced when the new one is whole.
    params: of `jax.Array`s, sharded in any way.
    model_state: likewise, e.g. {"batch_stats": ...}.
    naming: "jaxscale", "timm" (also torchvision's) or "huggingface".
    num_classes: how many classes, or words, are no padding; the rest is left out.
    dtype: to which floating-point numbers are cast; None: as they are.
    metadata: text about the file, beside what the naming's readers look for.

  Raises:
    ConfigError: the naming has no names for this model, or the path cannot be.
    UnwrittenError: the disk failed or is full; nothing is left behind.

  Example:
    >>> export_safetensors("/tmp/x.safetensors", {"w": jnp.ones(3)})
    >>> import_safetensors("/tmp/x.safetensors", {"w": jnp.zeros(3)}).params["w"]
    Array([1., 1., 1.], dtype=float32)
  """
  tree = {"params": params, **(model_state or {})}
  leaves = {
    path_name(where): _leaf(x)
    for where, x in jax.tree_util.tree_leaves_with_path(tree)
  }  # fmt: skip
  export_leaves(
    path, leaves, naming=naming, num_classes=num_classes, dtype=dtype,
    metadata=metadata,
  )  # fmt: skip


def export_leaves(
  path: str | os.PathLike,
  leaves: Mapping[str, Leaf],
  *,
  naming: str = "jaxscale",
  num_classes: int | None = None,
  dtype: Any = None,
  metadata: Mapping[str, str] | None = None,
) -> int:
  """`export_safetensors` of leaves by path.

  Args:
    path: as there, and so are all others but this one:
    leaves: by path, e.g. params/layers/q/kernel.
    naming: see there.
    num_classes: likewise.
    dtype: likewise.
    metadata: likewise.

  Returns:
    The bytes of the arrays.

  Raises:
    ConfigError: the naming has no names for this model, or the path cannot be.
    UnwrittenError: the disk failed or is full; nothing is left behind.
  """
  path = Path(path)
  names = naming_of(naming, {name: leaf.shape for name, leaf in leaves.items()})
  arrays: dict[str, list[Link]] = {name: [] for name in names.counters}
  for link in names.links:
    arrays.setdefault(link.theirs, []).append(link)
  made = {
    name: _described(links, leaves, names, num_classes, dtype)
    for name, links in arrays.items()
  }
  # Each array lies at a multiple of its item's size if larger items come first.
  order = sorted(arrays, key=lambda name: -made[name][0].itemsize)
  size = sum(int(np.prod(shape)) * d.itemsize for d, shape in made.values())

  def in_turn() -> Iterator[Any]:
    for name in order:
      yield _made(arrays[name], leaves, names, num_classes, *made[name])

  turns, failed = in_turn(), None
  if cluster.is_leader():
    said = {**names.metadata, **(metadata or {})}
    try:
      write(path, {name: made[name] for name in order}, turns, said)
    except OSError as e:
      failed = [e.strerror or str(e), _room(path, size)]
  for _ in turns:  # process 0 too, where its disk failed: all gather together
    pass
  if failed := cluster.from_leader(failed):
    why, room = failed
    if room is None:
      raise ConfigError(f"{path}: {why}; give a path that can be written")
    raise UnwrittenError(f"{path}: could not be written: {why} ({room})")
  return size


def _room(path: Path, size: int) -> str | None:
  """How much there is for a file; None: it could not be there at all."""
  if not os.access(path.parent, os.W_OK):
    return None
  free = shutil.disk_usage(path.parent).free
  return f"{size / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free in {path.parent}"


def _described(
  links: list[Link],
  leaves: Mapping[str, Leaf],
  names: Naming,
  num_classes: int | None,
  dtype: Any,
) -> tuple[np.dtype, tuple[int, ...]]:
  """Type and shape of an array in the file."""
  if not links:
    return np.dtype(np.int64), ()
  link, leaf = links[0], leaves[links[0].ours]
  shape = list(leaf.shape)
  dim = names.classes.get(link.ours)
  if dim is not None and num_classes is not None:
    shape[dim] = min(shape[dim], num_classes)
  is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
  kind = np.dtype(dtype) if dtype is not None and is_float else np.dtype(leaf.dtype)
  return kind, shape_in_file(link, tuple(shape))


def _made(
  links: list[Link],
  leaves: Mapping[str, Leaf],
  names: Naming,
  num_classes: int | None,
  dtype: np.dtype,
  shape: tuple[int, ...],
) -> np.ndarray | None:
  """An array of the file in process 0."""
  parts = []
  for link in links:
    array = leaves[link.ours].read(link.layer)
    if array is None:
      continue
    dim = names.classes.get(link.ours)
    if dim is not None and num_classes is not None:
      array = array[(slice(None),) * dim + (slice(num_classes),)]
    one = (shape[0] // len(links), *shape[1:]) if len(links) > 1 else shape
    parts.append(ARRANGEMENTS[link.how].theirs(array, one).astype(dtype, copy=False))
  if not links:
    return np.zeros(shape, dtype)
  if len(parts) > 1:
    return np.concatenate(parts)
  return parts[0] if parts else None


def _leaf(x: Any) -> Leaf:
  """Of an array on devices."""

  def read(layer: int | None) -> np.ndarray | None:
    # A copy each time: what is brought to the host stays with its array.
    is_far = not x.is_fully_addressable
    y = _copy(x.sharding, layer is not None, is_far)(x, np.int32(layer or 0))
    if not cluster.is_leader():
      return None
    return np.asarray(y.addressable_data(0) if is_far else y)

  return Leaf(x.shape, np.dtype(x.dtype), read)


@functools.cache
def _copy(sharding: Any, is_layer: bool, is_far: bool) -> Callable[..., jax.Array]:
  """(x, layer) -> x, or that layer of it.

  Args:
    sharding: of x.
    is_layer: whether it is to be a layer.
    is_far: parts are in other processes: the result is whole on every device.
  """
  is_named = isinstance(sharding, NamedSharding)
  whole = NamedSharding(sharding.mesh, P()) if is_named and is_far else None

  def take(x, layer):
    if not is_layer:
      return jnp.copy(x)
    return lax.dynamic_index_in_dim(x, layer, keepdims=False)

  spec = sharding.spec if is_named else P()
  if not is_layer or not spec or spec[0] is None:
    return jax.jit(take, out_shardings=whole)
  first = spec[0]

  def from_its_holder(x, layer):
    """Layers are spread over devices: bits of it from one, zeros from the rest."""
    mine = layer - lax.axis_index(first) * len(x)
    found = take(x, jnp.clip(mine, 0, len(x) - 1))
    bits = lax.bitcast_convert_type(found, f"uint{8 * x.dtype.itemsize}")
    bits = jnp.where((mine >= 0) & (mine < len(x)), bits, jnp.zeros_like(bits))
    return lax.bitcast_convert_type(lax.psum(bits, first), x.dtype)

  mapped = jax.shard_map(
    from_its_holder, mesh=sharding.mesh, in_specs=(spec, P()),
    out_specs=P(*spec[1:]), check_vma=True,
  )  # fmt: skip
  return jax.jit(mapped, out_shardings=whole)
