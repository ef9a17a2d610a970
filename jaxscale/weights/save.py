"""Save parameters to a file, one array at a time, with any sharding."""

from __future__ import annotations

import errno
import functools
import math
import os
import shutil
from collections.abc import Callable, Mapping
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
from jaxscale.metrics.text import byte_size
from jaxscale.optim.tree_paths import path_name
from jaxscale.weights.names import ARRANGEMENTS, Link, naming_of
from jaxscale.weights.safetensors import write

# Errors that a different path avoids; other errors are the disk's.
_NAMES = "ENOENT ENOTDIR EISDIR EACCES EPERM EROFS ELOOP ENAMETOOLONG EEXIST".split()
_OF_PATHS = [getattr(errno, name) for name in _NAMES]


class UnwrittenError(Exception):
  """Error for a file that could not be written; the message has the cause."""

  exit_code = EXIT_CRASH


class Leaf(NamedTuple):
  """Array that is read only when it is written.

  Attributes:
    shape: the shape of the array.
    dtype: the dtype of the array.
    read: a function of a layer's index, or None for the whole array. All processes call it;
      it returns an array on the host in process 0, and None in the others.
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
  """Write parameters to one file; all processes call it, and process 0 writes.

  Arrays, or layers of stacked arrays, come to the host one after another, so that neither a
  host nor a device holds more than one of them whole.

  Args:
    path: the path of the file; an existing file is replaced when the new one is complete.
    params: a tree of `jax.Array`s with any sharding.
    model_state: a tree of `jax.Array`s, e.g. {"batch_stats": ...}.
    naming: "jaxscale", "timm" (also torchvision's names) or "huggingface".
    num_classes: the number of classes or words without padding; the padding is left out.
    dtype: the dtype for floating-point numbers; None keeps each array's dtype.
    metadata: text about the file, in addition to what the naming's readers expect.

  Raises:
    ConfigError: the naming does not support this model, or the path is invalid.
    UnwrittenError: the disk failed or is full; no partial file remains.

  Example:
    >>> export_safetensors("x.safetensors", {"w": jnp.ones(3)})
    >>> import_safetensors("x.safetensors", {"w": jnp.zeros(3)}).params["w"]
    Array([1., 1., 1.], dtype=float32)
  """
  tree = {"params": params, **(model_state or {})}
  leaves = {path_name(p): _leaf(x) for p, x in jax.tree.leaves_with_path(tree)}
  options: Any = {"naming": naming, "num_classes": num_classes, "dtype": dtype}
  export_leaves(path, leaves, metadata=metadata, **options)


def export_leaves(
  path: str | os.PathLike,
  leaves: Mapping[str, Leaf],
  *,
  naming: str = "jaxscale",
  num_classes: int | None = None,
  dtype: Any = None,
  metadata: Mapping[str, str] | None = None,
) -> int:
  """Write leaves by path, e.g. params/layers/q/kernel, as `export_safetensors` does.

  Returns:
    The size of the arrays in bytes.
  """
  path = Path(path)
  names = naming_of(naming, {name: leaf.shape for name, leaf in leaves.items()})

  def described(links: list[Link]) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and shape of an array in the file."""
    if not links:  # It is a counter.
      return np.dtype(np.int64), ()
    link, leaf = links[0], leaves[links[0].ours]
    shape = list(leaf.shape)
    if (dim := names.classes.get(link.ours)) is not None:
      shape[dim] = min(shape[dim], num_classes or shape[dim])
    is_cast = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return np.dtype(dtype if is_cast else leaf.dtype), link.shape_in_file(tuple(shape))

  def made(name: str) -> np.ndarray | None:
    """Return an array of the file, in process 0."""
    (to_dtype, shape), links = layout[name], arrays[name]
    if not links:
      return np.zeros(shape, to_dtype)
    own_shape = (shape[0] // len(links), *shape[1:]) if len(links) > 1 else shape
    parts = []
    for link in links:
      array = leaves[link.ours].read(link.layer)
      if array is not None:
        if (dim := names.classes.get(link.ours)) is not None:
          array = array[(slice(None),) * dim + (slice(num_classes),)]
        array = ARRANGEMENTS[link.how].theirs(array, own_shape)
        parts.append(array.astype(to_dtype, copy=False))
    return np.concatenate(parts) if len(parts) > 1 else next(iter(parts), None)

  arrays: dict[str, list[Link]] = {name: [] for name in names.counters}
  for link in names.links:
    arrays.setdefault(link.theirs, []).append(link)
  layout = {name: described(links) for name, links in arrays.items()}
  # With larger item sizes first, each array begins at a multiple of its item size.
  layout = dict(sorted(layout.items(), key=lambda item: -item[1][0].itemsize))
  size = sum(math.prod(shape) * d.itemsize for d, shape in layout.values())
  turns, failed = (made(name) for name in layout), None
  if cluster.is_leader():
    try:
      write(path, layout, turns, {**names.metadata, **(metadata or {})})
    except OSError as e:
      failed = [e.strerror or str(e), None]
      if e.errno not in _OF_PATHS:
        folder = next(p for p in path.absolute().parents if p.exists())
        free = byte_size(shutil.disk_usage(folder).free)
        failed[1] = f"{byte_size(size)} needed, {free} free in {folder}"
  for _ in turns:  # All processes gather together, also if the disk of process 0 failed.
    pass
  if failed := cluster.from_leader(failed):
    problem, room = failed
    if room is None:
      raise ConfigError(f"{path}: {problem}; give a path that can be written")
    raise UnwrittenError(f"{path}: could not be written: {problem} ({room})")
  return size


def _leaf(x: Any) -> Leaf:
  """Return the leaf of an array on devices."""

  def read(layer: int | None) -> np.ndarray | None:
    # Copy each time, as an array keeps the host's copy of its value.
    is_far = not x.is_fully_addressable
    y = _copy(x.sharding, layer is not None, is_far)(x, np.int32(layer or 0))
    if not cluster.is_leader():
      return None
    return np.asarray(y.addressable_data(0) if is_far else y)

  return Leaf(x.shape, np.dtype(x.dtype), read)


@functools.cache
def _copy(sharding: Any, is_layer: bool, is_far: bool) -> Callable[..., jax.Array]:
  """Return a function that returns x, or a layer of it.

  Args:
    sharding: the sharding of x.
    is_layer: True to return a layer.
    is_far: True if parts are in other processes; the result is then whole on every device.
  """
  is_named = isinstance(sharding, NamedSharding)
  whole = NamedSharding(sharding.mesh, P()) if is_named and is_far else None

  def take(x, layer):
    in_dim = lax.dynamic_index_in_dim
    return in_dim(x, layer, keepdims=False) if is_layer else jnp.copy(x)

  spec = sharding.spec if is_named else P()
  if not is_layer or not spec or spec[0] is None:
    return jax.jit(take, out_shardings=whole)
  first = spec[0]

  def from_its_holder(x, layer):
    """Return a layer that one device holds: its bits from that device, zeros from the others."""
    mine = layer - lax.axis_index(first) * len(x)
    rows = take(x, jnp.clip(mine, 0, len(x) - 1))
    bits = lax.bitcast_convert_type(rows, f"uint{8 * x.dtype.itemsize}")
    bits = jnp.where((mine >= 0) & (mine < len(x)), bits, jnp.zeros_like(bits))
    return lax.bitcast_convert_type(lax.psum(bits, first), x.dtype)

  specs = {"in_specs": (spec, P()), "out_specs": P(*spec[1:])}
  mapped = jax.shard_map(from_its_holder, mesh=sharding.mesh, **specs, check_vma=True)
  return jax.jit(mapped, out_shardings=whole)
