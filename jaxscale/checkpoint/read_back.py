"""Compare the arrays of a checkpoint with the disk before the checkpoint is committed.

Each process reads back, from the merged checkpoint, the shards that it has summed for the
checksums, and compares the bytes with those on the host. All shards together are the whole
arrays. This finds arrays and chunks that are missing, truncated, swapped or wrong. The bytes
come from the page cache: a medium that loses data after confirming the write is noticed only
when the checkpoint is restored.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.checkpoint.checksum import DamagedError, Shards
from jaxscale.files import check_regular


def compare(state: Path, names: list[str], shards: list[Shards]) -> None:
  """Compare this process's shards with the disk.

  Args:
    state: the folder that Orbax has written, merged.
    names: the names of all leaves in the manifest.
    shards: the shards, from `checksum.own_shards`.

  Raises:
    DamagedError: an array is missing, or the disk has different content.
  """
  # One chunk at a time, as each takes memory besides the array that is read.
  limits = {f"{resource}_concurrency": {"limit": 1} for resource in ("file_io", "data_copy")}
  arrays = list(open_leaves(state, names, limits).values())
  for group in shards:
    for i, data in zip(group.leaves, group.data, strict=True):
      try:
        array = arrays[i].result()
        stored = array[group.index].read().result()
      except (ValueError, LookupError) as e:
        raise DamagedError(f"{names[i]} cannot be read: {str(e).splitlines()[0][:120]}") from e
      if (array.shape, stored.dtype) != (group.shape, data.dtype) or _bits(stored) != _bits(data):
        problem = "the disk failed, or devices hold different values"
        raise DamagedError(f"{names[i]} differs between the disk and memory: {problem}")


def _bits(array: np.ndarray) -> memoryview:
  """Return the bits of an array, whose comparison takes no memory."""
  return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").data


def open_leaves(state: Path, names: Iterable[str], context: Any = None) -> dict[str, Any]:
  """Open arrays in a folder of Orbax; return futures by the names in the manifest.

  Args:
    state: the folder.
    names: the names.
    context: the limits of TensorStore's resources, as JSON; None sets none.
  """
  import tensorstore as ts

  # A cache of the index; without it, every chunk would read the index again.
  context = ts.Context({"cache_pool#index": {"total_bytes_limit": 2**24}} | (context or {}))
  store = _store(state) | {"cache_pool": "cache_pool#index"}
  # Orbax joins the parts of a name by points.
  specs = {n: {"driver": "zarr", "kvstore": store, "path": n.replace("/", ".")} for n in names}
  return {name: ts.open(spec, context=context) for name, spec in specs.items()}


def open_untrusted(state: Path, names: Iterable[str]) -> dict[str, Any]:
  """Open arrays in a folder that another user may have written.

  Arrays are saved uncompressed, so none can be larger than the files. Until November 2026 they were
  compressed, which is accepted in folders of this user.

  Raises:
    OSError: a file is a pipe or a device.
    ValueError: an array is larger than the files.
    Exception: an array cannot be opened.
  """
  check_regular([state])
  size = sum(path.stat().st_size for path in state.rglob("*"))
  is_own = state.stat().st_uid == os.geteuid()
  arrays = {name: future.result() for name, future in open_leaves(state, names).items()}
  for name, array in arrays.items():
    if array.codec.to_json()["compressor"]:
      if not is_own:
        raise ValueError(f"{name} is compressed, and its folder belongs to another user")
      continue
    shapes = array.shape, array.chunk_layout.read_chunk.shape or ()
    if max(map(math.prod, shapes)) * array.dtype.numpy_dtype.itemsize > size:
      raise ValueError(f"{name} is {list(array.shape)}, larger than the files")
  return arrays


def check_index(folder: Path) -> None:
  """Read the index of what one process has written, which names the chunks.

  Raises:
    DamagedError: the index cannot be read.
  """
  import tensorstore as ts

  try:
    ts.KvStore.open(_store(folder)).result().list().result()
  except (ValueError, LookupError) as e:
    raise DamagedError(f"the index cannot be read: {str(e).splitlines()[0][:120]}") from e


def _store(folder: Path) -> dict[str, Any]:
  return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
