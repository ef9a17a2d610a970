"""Open Parquet and Arrow IPC (Feather) files by pyarrow, and datasets of Hugging Face.

A chunk is a row group or a record batch. Arrays of a list column must have one length; they may
be lists of lists, and tensors of Arrow's type `fixed_shape_tensor`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.dataset import Spec
from jaxscale.data.directory import paths_identity
from jaxscale.data.npy_files import check_unpacked
from jaxscale.data.tables import Table, by_chunk, cached, chosen_names, even_starts, spread_identity
from jaxscale.errors import ConfigError, invalid, message_of
from jaxscale.files import TruncatedError, open_regular, read_json, refuse_pointer, require_json

_RECORD_BATCH = 1000  # rows of a record batch, as `datasets` writes them
SUFFIXES = ".parquet", ".arrow", ".feather", ".ipc"


class _File(NamedTuple):
  """Opened file: schema, columns, rows of each chunk, and a function that reads a chunk.

  `check` raises OSError if a file that is mapped into memory became shorter; arrays may be views
  of it, so it is called before each use of a chunk.
  """

  schema: Any
  names: list[str]
  lengths: list[int]
  read: Callable[[int, Sequence[str]], Any]
  check: Callable[[], None] = lambda: None


def open_arrow(
  name: str, paths: Sequence[Path], names: Sequence[str] | None, cache_bytes: int
) -> Table:
  """Open the rows of files, one file after another.

  Args:
    name: the name for messages.
    paths: the files.
    names: the columns; None opens all.
    cache_bytes: the limit of decoded chunks in memory.

  Raises:
    ConfigError: a file is of another format, a column is missing, the files differ in their
      columns, or there is no row.
  """
  files = [_opened(path) for path in paths]
  schema = files[0].schema
  known = {field.name: field.type for field in schema}
  names = chosen_names(name, names, known)
  for path, file in zip(paths, files, strict=True):
    for column in names:
      kind = file.schema.field(column).type if column in file.names else "nothing"
      if kind != known[column]:
        problem = f"has {kind} in column {column!r}, but {paths[0]} has {known[column]}"
        raise invalid(str(path), ..., problem, "give files of the same columns")
  chunks = [(i, j) for i, file in enumerate(files) for j, rows in enumerate(file.lengths) if rows]
  starts = np.cumsum([0, *(files[i].lengths[j] for i, j in chunks)])
  if not chunks:
    raise invalid(name, ..., "has no rows", "check the path")

  def read_chunk(number: int) -> Any:
    i, j = chunks[number]
    return files[i].read(j, names)

  def arrays_of(number: int) -> dict[str, Any]:
    table = read_chunk(number)
    return {n: column_array(table.column(n), specs[n]) for n in names}

  try:
    first = read_chunk(0)
    specs = _specs(first, names)
  except Exception as e:  # pyarrow raises any exception on damaged bytes.
    problem = f"has damaged first rows ({message_of(e):.200})"
    raise invalid("path", name, problem, "write it again") from None
  largest = int(np.diff(starts).max() / max(first.num_rows, 1) * first.nbytes)
  chunk = cached(arrays_of, cache_bytes // max(largest, 1))

  def read(number: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    files[chunks[number][0]].check()
    return {n: rows_of(array, rows) for n, array in chunk(number).items()}

  every = functools.partial(by_chunk, starts=starts, read=read)
  identity = functools.partial(paths_identity, paths)
  return Table(name, specs, starts, every, identity)


def open_hugging_face(dataset: Any, names: Sequence[str] | None) -> Table:
  """Open a `datasets.Dataset`, or the folder of one without the package; nothing is downloaded.

  Args:
    dataset: the object or the path of the folder.
    names: the columns; None opens all.

  Raises:
    ConfigError: it is neither, has no index, or holds several splits; or a column is missing.
  """
  if isinstance(dataset, str):
    return _open_folder(Path(dataset), names)
  fix = "give a datasets.Dataset, such as load_dataset(…, split='train')"
  if not hasattr(dataset, "format"):  # Streams have none, and neither has a dict of splits.
    raise invalid("dataset", type(dataset).__name__, "has no rows by index", fix)
  if dataset.format["type"] == "custom":
    raise invalid("dataset", ..., "has a transform (set_transform)", "give it as `transform`")
  names = chosen_names("the dataset", names, dataset.features)
  tables = dataset.select_columns(names).with_format("arrow")

  def read(rows: np.ndarray) -> dict[str, np.ndarray]:
    part, every = tables[rows.tolist()].combine_chunks(), np.arange(len(rows))
    return {n: rows_of(column_array(part.column(n), specs[n]), every) for n in names}

  specs = _specs(tables[: min(len(dataset), _RECORD_BATCH)].combine_chunks(), names)
  starts = even_starts(len(dataset), _RECORD_BATCH)
  table = Table("HuggingFace", specs, starts, read, lambda: spread_identity(table))
  return table._replace(class_names=_class_names(dataset.features))


def _open_folder(folder: Path, names: Sequence[str] | None) -> Table:
  fix = "give the folder of one split that Dataset.save_to_disk wrote"
  state = require_json(folder / "state.json", {"_data_files": [{"filename": str}]}, fix)
  if state.get("_indices_data_files"):
    fix = "save it again, with a newer version of datasets"
    raise invalid("dataset", str(folder), "has an index of its rows in a file", fix)
  files = [folder / Path(file["filename"]).name for file in state["_data_files"]]
  table = open_arrow(str(folder), files, names, 1 << 40)
  info = read_json(folder / "dataset_info.json", {"features": {}})
  return table._replace(class_names=_class_names(info.get("features", {})))


def _class_names(features: Any) -> dict[str, tuple[str, ...]]:
  """Return the names of classes by column, of features or of their JSON."""
  fields = {
    n: x if isinstance(x, dict) else {"_type": type(x).__name__} | getattr(x, "__dict__", {})
    for n, x in features.items()
  }
  known = {n: x.get("names") for n, x in fields.items() if x.get("_type") == "ClassLabel"}
  return {n: tuple(map(str, x)) for n, x in known.items() if isinstance(x, list | tuple)}


def _opened(path: Path) -> _File:
  import pyarrow as pa
  from pyarrow import parquet

  try:
    with open_regular(path) as file:
      magic, size = refuse_pointer(path, file.read(24))[:6], os.fstat(file.fileno()).st_size
    if magic[:4] == b"PAR1":
      metadata = parquet.read_metadata(path)
      groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
      lengths = [group.num_rows for group in groups]
      for group in groups:
        check_unpacked(size, group.total_byte_size + 8 * group.num_rows)

      def read(number: int, names: Sequence[str]) -> Any:
        # A reader of its own for each thread; the footer is not read again.
        file = parquet.ParquetFile(path, metadata=metadata)
        return file.read_row_group(number, [*names], use_threads=False).combine_chunks()

      schema = metadata.schema.to_arrow_schema()
      return _File(schema, [*schema.names], lengths, read)
    if magic == b"ARROW1":
      reader = pa.ipc.open_file(pa.memory_map(str(path)))
      batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    elif magic[:4] == b"\xff\xff\xff\xff":
      reader = pa.ipc.open_stream(pa.memory_map(str(path)))
      batches = [*reader]
    else:
      fix = f"give files in Parquet or Arrow IPC format ({', '.join(SUFFIXES)})"
      raise invalid("path", str(path), "has another format", fix)
    names = [*reader.schema.names]  # Here a name that is not UTF-8 is an error of the file.
  except ConfigError:
    raise
  except Exception as e:
    problem = f"cannot be opened ({e!s:.200})".replace("\n", " ")
    raise invalid("path", str(path), problem, "write it again") from None

  def check() -> None:
    with contextlib.suppress(FileNotFoundError):  # A deleted file keeps its content.
      if os.stat(path).st_size < size:  # Reading it would be a SIGBUS.
        raise TruncatedError(str(path))

  lengths = [len(batch) for batch in batches]
  return _File(reader.schema, names, lengths, lambda i, _: batches[i], check)


def _specs(table: Any, names: Sequence[str]) -> dict[str, Spec]:
  """Return the shape and the dtype of a row of each column, as the rows of a chunk have them."""
  arrays = {n: column_array(table.column(n), None) for n in names}
  numbers = {n: x for n, x in arrays.items() if isinstance(x, np.ndarray)}
  return dict.fromkeys(names, ((), "object")) | {
    n: (x.shape[1:], str(x.dtype)) for n, x in numbers.items()
  }


def column_array(column: Any, spec: Spec | None) -> Any:
  """Return a column as a NumPy array; as an Arrow array if it has no numbers of one shape.

  Rows of lists have a type that does not depend on the rows that are read with them: an Arrow
  array is also returned for numbers of another shape or dtype than `spec`.
  """
  array = column.chunk(0) if hasattr(column, "chunks") else column
  numbers = _numbers(array)
  is_same = numbers is not None and spec in (None, (numbers.shape[1:], str(numbers.dtype)))
  return numbers if is_same else array


def rows_of(array: Any, rows: np.ndarray) -> np.ndarray:
  """Return rows of a `column_array`; those of an Arrow array as objects."""
  if isinstance(array, np.ndarray):
    return array[rows]
  return np.fromiter(array.take(rows).to_pylist(), object, len(rows))


def _numbers(array: Any) -> np.ndarray | None:
  """Return numbers, or lists of one length, without a copy where Arrow allows it; else None."""
  from pyarrow import BaseExtensionType, types

  kind = array.type
  if isinstance(kind, BaseExtensionType):
    values, shape = _numbers(array.storage), getattr(kind, "shape", None)
    return values if shape is None or values is None else values.reshape(len(array), *shape)
  if array.null_count:
    return None
  if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
    if not types.is_fixed_size_list(kind) and len(np.unique(np.diff(array.offsets))) != 1:
      return None
    inner = _numbers(array.flatten())
    return None if inner is None else inner.reshape(len(array), -1, *inner.shape[1:])
  if types.is_fixed_size_binary(kind):
    values = np.frombuffer(array.buffers()[1], np.uint8).reshape(-1, kind.byte_width)
    return values[array.offset : array.offset + len(array)]
  return array.to_numpy(zero_copy_only=False) if types.is_primitive(kind) else None
