"""Open arrays in files: zarr stores by tensorstore, HDF5 and netCDF4 by h5py, and NumPy's files.

Several stores or files of one pattern are read one after another. A source of one array calls it
"x". As zarr defines, a chunk without a file has the fill value of its array.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.data.directory import matching_paths, paths_identity
from jaxscale.data.npy_files import StoredArray, arrays_of, check_unpacked, stored_array
from jaxscale.data.tables import (
  PACKED,
  Table,
  Variable,
  by_chunk,
  cached,
  concatenated,
  even_starts,
  of_variables,
)
from jaxscale.errors import ConfigError, invalid
from jaxscale.files import check_regular, read_json, require_json

HDF5_SUFFIXES = ".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4"

_MOST_CHUNKS = 1 << 20

Names = Sequence[str] | None


def open_zarr(path: str, names: Names, cache_bytes: int) -> Table:
  """Open zarr stores, version 2 or 3: arrays, or groups whose arrays are the variables.

  Args:
    path: the folder of an array or of a group, or a pattern of folders.
    names: the arrays, such as "temperature" or "inner/temperature"; None opens all.
    cache_bytes: the limit of decoded chunks in memory.

  Raises:
    ConfigError: a folder is no zarr store, or an array is missing or cannot be opened.
  """
  import tensorstore as ts

  context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})

  def variable(folder: Path) -> Variable | None:
    is_new = (folder / "zarr.json").is_file()
    if not is_new and not (folder / ".zarray").is_file():
      return None
    node = require_json(folder / ("zarr.json" if is_new else ".zarray"), {}, "write it again")
    if node.get("node_type", "array") != "array":
      return None
    spec = {"driver": "zarr3" if is_new else "zarr", "recheck_cached_data": False}
    spec |= {"kvstore": {"driver": "file", "path": str(folder)}}
    store = ts.open(spec, read=True, context=context).result()
    attributes = node.get("attributes") if is_new else read_json(folder / ".zattrs")
    if not is_new and not PACKED.keys().isdisjoint(attributes):
      # xarray writes the _FillValue of zarr 2 there.
      attributes = {"_FillValue": node.get("fill_value")} | attributes
    check = _chunk_check(folder, store, node, cache_bytes // 8)
    chunk: Any = store.chunk_layout.read_chunk.shape
    length, dtype = chunk[0] if chunk else 0, store.dtype.numpy_dtype

    read = functools.partial(_read_rows, store, length, dtype, check)
    return Variable(store.shape, dtype, length, read, attributes or {})

  def variables(store: Path) -> dict[str, Variable]:
    if (root := variable(store)) is not None:
      return {"x": root}
    inner = {*(x.name for x in store.iterdir() if x.is_dir()), *(names or ())}
    found = {name: variable(store / name) for name in sorted(inner)}
    return {name: x for name, x in found.items() if x is not None}

  return _table(path, matching_paths(path, [], is_one=True), names, variables, "a zarr store")


def _chunk_check(
  folder: Path, store: Any, node: Mapping[str, Any], small: int
) -> Callable[[np.ndarray], None]:
  """Return a function that checks the files of rows before tensorstore opens them.

  It would wait for a pipe, and read a file of any size. A compressed chunk is never much larger
  than its content, and if it is much smaller, its content may have up to `small` bytes.
  """
  how = node.get("chunk_key_encoding", {"name": "v2", "configuration": node})
  start = "" if how["name"] == "v2" else "c"
  options = how.get("configuration", {})
  point = options.get("separator") or options.get("dimension_separator") or "./"[len(start)]
  length, *sizes = store.chunk_layout.write_chunk.shape or [1]
  size = length * math.prod(sizes) * store.dtype.numpy_dtype.itemsize
  others = [range(-(-n // x)) for n, x in zip(store.shape[1:], sizes, strict=True)]
  if math.prod(map(len, others)) > _MOST_CHUNKS:
    raise ValueError(f"a row is in more than {_MOST_CHUNKS:,} chunks")

  def check(rows: np.ndarray) -> None:
    for index in itertools.product(np.unique(rows // length).tolist(), *others):
      file = folder / point.join([*start, *map(str, index)])
      with contextlib.suppress(FileNotFoundError):  # It has the fill value.
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > 2 * size + (1 << 20):
          raise OSError(None, "is not a chunk", str(file))
        check_unpacked(status.st_size, size, small)

  return check


def _read_rows(
  store: Any, length: int, dtype: np.dtype, check: Callable[[np.ndarray], None], rows: np.ndarray
) -> np.ndarray:
  """Read ascending rows of a zarr array with `length` rows in a chunk; all chunks at a time."""
  check(rows)
  parts = np.split(rows, np.flatnonzero(np.diff(rows // length)) + 1)
  # Tensorstore copies a slice five times faster than an index array. Between sparse rows the
  # slice would need more memory than the batch.
  spans = [slice(x[0], x[-1] + 1) if x[-1] - x[0] < 4 * len(x) else x for x in parts]
  futures = [store[span].read() for span in spans]
  values, end = np.empty((len(rows), *store.shape[1:]), dtype), 0
  for part, future in zip(parts, futures, strict=True):
    read, start, end = future.result(), end, end + len(part)
    inner = np.arange(len(part)) if len(read) == len(part) else part - part[0]
    np.take(read, inner, 0, values[start:end], "clip")
  return values


def open_hdf5(path: str, names: Names, cache_bytes: int) -> Table:
  """Open HDF5 or netCDF4 files, whose datasets are the variables.

  Args:
    path: a file, a folder of files or a pattern; "FILE::GROUP" takes a group of each file.
    names: the variables, such as "temperature" or "inner/temperature"; None opens all.
    cache_bytes: the limit of decoded chunks in memory.

  Raises:
    ConfigError: h5py is not installed, a file is not HDF5, or a variable is missing.
  """
  try:
    import h5py
  except ImportError:
    fix = "install it (pip install 'jaxscale[science]')"
    raise invalid("path", path, "needs the package h5py", fix) from None
  where, _, group = path.partition("::")

  def variable(file: Path, node: Any, share: int) -> Variable:
    if node.external:
      raise ValueError(f"{node.name} is stored in other files")
    for source in node.virtual_sources() if node.is_virtual else ():
      check_regular([file.parent / source.file_name])  # "." means this file.
    length, offset = node.chunks[0] if node.chunks else 0, node.id.get_offset()
    if offset is not None and node.dtype.kind in "uifb":  # Contiguous and not compressed.
      # A link may lead to a dataset in another file.
      stored = StoredArray(Path(node.file.filename), node.dtype, node.shape, offset)
      return Variable(node.shape, node.dtype, length, stored.__getitem__, node.attrs)
    rows = length or max(len(node), 1)
    row_bytes = int(np.prod(node.shape[1:])) * node.dtype.itemsize
    chunk = cached(lambda i: node[i * rows : (i + 1) * rows], share // max(rows * row_bytes, 1))
    read = functools.partial(
      by_chunk, starts=even_starts(len(node), rows), read=lambda i, x: {"": chunk(i)[x]}
    )
    return Variable(node.shape, node.dtype, length, lambda x: read(x)[""], node.attrs)

  def variables(file: Path) -> dict[str, Variable]:
    # Locks fail on file systems that are mounted read-only.
    inner: Any = h5py.File(file, "r", locking=False)[group or "/"]
    if not isinstance(inner, h5py.Group):
      raise ValueError(f"{group} is not a group; name it in columns")
    for link in (inner.get(name, getlink=True) for name in names or inner):
      if isinstance(link, h5py.ExternalLink):  # HDF5 would wait for a pipe.
        check_regular([file.parent / link.filename])
    nodes = {str(name): inner[name] for name in names or inner if name in inner}
    nodes = {n: x for n, x in nodes.items() if isinstance(x, h5py.Dataset) and x.ndim}
    return {n: variable(file, x, cache_bytes // len(nodes)) for n, x in nodes.items()}

  return _table(path, matching_paths(where, HDF5_SUFFIXES), names, variables, "HDF5 or netCDF4")


def open_numpy(path: str, names: Names) -> Table:
  """Open a .npy file (memory-mapped), an .npz file (in memory), or a folder of .npy files.

  Args:
    path: the file or folder, or a pattern of several.
    names: the arrays: those of the .npz file, or the files of the folder without ".npy"; None
      opens all.

  Raises:
    ConfigError: a file cannot be read, or an array is missing.
  """

  def variables(file: Path) -> dict[str, Variable]:
    arrays = {x.stem: stored_array(x) for x in sorted(file.glob("*.npy"))}
    arrays = arrays if file.is_dir() else arrays_of(file, names)
    return {n: Variable(x.shape, x.dtype, 0, x.__getitem__) for n, x in arrays.items()}

  return _table(path, matching_paths(path, [], is_one=True), names, variables, ".npy or .npz")


def _table(
  name: str,
  paths: Sequence[Path],
  names: Names,
  variables: Callable[[Path], Mapping[str, Variable]],
  expected: str,
) -> Table:
  """Return the table of the variables of several files."""
  tables = []
  for path in paths:
    try:
      if not path.is_dir():
        check_regular([path])
      tables.append(of_variables(str(path), variables(path), names))
    except ConfigError:
      raise
    except Exception as e:  # Each library raises its own for damaged bytes.
      problem = " ".join(f"cannot be opened ({e!s:.200})".split())
      raise invalid("path", str(path), problem, f"give {expected}") from None
  identity = functools.partial(paths_identity, paths)
  return concatenated(tables)._replace(name=name, identity=identity)
