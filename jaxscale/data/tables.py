"""Tables: rows by index of named variables, which are stored in chunks.

array_files.py, arrow_files.py and grain_data.py open a `Table`; columns.py makes examples of its
rows, and table_splits.py the datasets for training and validation.
"""

from __future__ import annotations

import base64
import functools
import itertools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxscale.config.validation import nearest
from jaxscale.data.dataset import Spec, array_identity
from jaxscale.errors import invalid
from jaxscale.metrics.text import few

# Attributes of packed variables, and their defaults.
PACKED = {"scale_factor": 1.0, "add_offset": 0.0}
_NOMINAL = 1 << 20  # bytes of a chunk of rows that are not stored in chunks

T = TypeVar("T")


class Table(NamedTuple):
  """Rows of named variables in any storage.

  Attributes:
    name: the name for messages, such as the path.
    specs: the shape and the dtype of a row of each variable; the dtype "object" marks values
      that are not arrays of one shape, which only a transform can take.
    starts: the first row of each chunk and, last, the number of rows, int64 [chunks + 1].
    read: a function of rows, int64 [n] in ascending order, that returns the arrays [n, ...]
      of all variables. Any thread may call it. It raises an exception for damaged rows.
    identity: a function that returns the identity of the contents.
    is_selective: whether reading fewer variables takes less time.
    class_names: the names of the classes of variables that have them.
  """

  name: str
  specs: Mapping[str, Spec]
  starts: np.ndarray
  read: Callable[[np.ndarray], dict[str, np.ndarray]]
  identity: Callable[[], Mapping[str, Any]] = dict
  is_selective: bool = True
  class_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})

  @property
  def num_rows(self) -> int:
    """The number of rows."""
    return int(self.starts[-1])


# Opens the named variables of a source, or all for None.
Open = Callable[[Sequence[str] | None], Table]


class Variable(NamedTuple):
  """Array on disk.

  Attributes:
    shape: its shape; the first dimension has the rows.
    dtype: its dtype.
    length: the rows of a chunk; 0 if rows are not stored in chunks.
    read: a function of ascending rows, int64 [n], that returns them.
    attributes: its attributes, by name.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  length: int
  read: Callable[[np.ndarray], np.ndarray]
  attributes: Mapping[str, Any] = MappingProxyType({})


def of_variables(
  name: str, variables: Mapping[str, Variable], names: Sequence[str] | None
) -> Table:
  """Return the table of arrays on disk; its chunks are those of the largest variable.

  Variables that are packed by the CF conventions (1.11, §8.1) are unpacked, and missing values
  of floats (§2.5.1) become NaN.

  Args:
    name: the name for messages.
    variables: the arrays.
    names: the arrays to use; None uses all.

  Raises:
    ConfigError: an array is missing, or arrays differ in length.
  """
  # A scalar, such as the projection of a map, has no rows.
  known = {n: v for n, v in variables.items() if v.shape}
  variables = {n: known[n] for n in chosen_names(name, names, known)}
  counts = {n: v.shape[0] for n, v in variables.items()}
  if len({*counts.values()}) != 1:
    listed = few(f"{n} has {count:,}" for n, count in counts.items())
    fix = "choose variables of one length, e.g. columns={'image': …, 'label': …}"
    raise invalid(name, ..., f"has variables of different numbers of rows: {listed}", fix)
  specs, sizes, lengths = {}, {}, {}
  for n, (shape, dtype, length, _, attributes) in variables.items():
    if dtype.kind in "iu" and str(attributes.get("_Unsigned")).lower() == "true":
      raise invalid(f"{name}: {n}", ..., "has _Unsigned=true", "write it with an unsigned dtype")
    kind = "object" if dtype.kind == "V" else str(dtype)  # Records have no name of a dtype.
    specs[n] = shape[1:], kind if PACKED.keys().isdisjoint(attributes) else "float32"
    sizes[n] = max(int(np.prod(shape[1:])) * dtype.itemsize, 1)
    lengths[n] = min(length or max(_NOMINAL // sizes[n], 1), shape[0])
  length = lengths[max(sizes, key=lambda n: sizes[n])]

  def read(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {n: _unpacked(v.read(rows), v.attributes) for n, v in variables.items()}

  starts = even_starts(next(iter(counts.values())), length)
  return Table(name, specs, starts, read)


def _unpacked(values: np.ndarray, attributes: Mapping[str, Any]) -> np.ndarray:
  """Return values in float32 if they are packed, and with NaN for missing floats."""
  is_packed = not PACKED.keys().isdisjoint(attributes)
  fills = _floats(attributes, "_FillValue") + _floats(attributes, "missing_value")
  if not is_packed and (values.dtype.kind != "f" or np.isnan(fills).all()):
    return values
  is_missing = np.any([values == x for x in [*fills, np.nan]], 0)
  if is_packed:
    scale, offset = ([*_floats(attributes, k), x][0] for k, x in PACKED.items())
    values = (values * scale + offset).astype(np.float32)
  return np.where(is_missing, values.dtype.type(np.nan), values)


def _floats(attributes: Mapping[str, Any], name: str) -> list[float]:
  """Return the numbers of an attribute; xarray writes floats to zarr 3 in base64."""
  values = [x for x in np.ravel(attributes.get(name, ())).tolist() if x is not None]
  return [
    struct.unpack("<d", base64.b64decode(x))[0] if str(x).endswith("=") else float(x)
    for x in values
  ]


def cached(read: Callable[[int], T], count: int) -> Callable[[int], T]:
  """Keep the chunks of the last uses; threads that want the same chunk wait for one read.

  Args:
    read: a function of the number of a chunk.
    count: the number of chunks to keep, at least one.

  Example:
    >>> reads = []
    >>> get = cached(lambda number: reads.append(number) or 10 * number, 2)
    >>> [get(number) for number in (1, 1, 2)], reads
    ([10, 10, 20], [1, 2])
  """
  kept = functools.lru_cache(max(count, 1))(read)
  locks = [threading.Lock() for _ in range(64)]

  def get(number: int) -> T:
    with locks[number % len(locks)]:
      return kept(number)

  return get


def by_chunk(
  rows: np.ndarray, starts: np.ndarray, read: Callable[[int, np.ndarray], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
  """Read ascending rows chunk by chunk.

  Args:
    rows: the rows, int64 [n].
    starts: the first row of each chunk and, last, the number of rows.
    read: a function of the number of a chunk and of rows in it, counted from its start.

  Example:
    >>> read = lambda chunk, rows: {"x": 10 * chunk + rows}
    >>> by_chunk(np.array([1, 2, 5]), np.array([0, 3, 6]), read)["x"].tolist()
    [1, 2, 12]
  """
  numbers = np.searchsorted(starts, rows, "right") - 1
  first = np.flatnonzero(np.diff(numbers, prepend=-1))
  inner = rows - starts[numbers]
  spans = itertools.pairwise([*first.tolist(), len(rows)])
  parts = [read(int(numbers[a]), inner[a:b]) for a, b in spans]
  if len(parts) == 1:
    return parts[0]
  return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def even_starts(count: int, length: int) -> np.ndarray:
  """Return the starts of chunks of one length, and the end.

  Example:
    >>> even_starts(10, 4).tolist()
    [0, 4, 8, 10]
  """
  return np.append(np.arange(0, count, max(length, 1)), count)


def concatenated(tables: Sequence[Table]) -> Table:
  """Return the rows of several tables, one after another.

  Raises:
    ConfigError: the tables differ in their variables, shapes or dtypes.
  """
  first, ends = tables[0], np.cumsum([0, *(table.num_rows for table in tables)])
  for table in tables:
    if table.specs != first.specs:
      problem = f"has {dict(table.specs)}, but {first.name} has {dict(first.specs)}"
      raise invalid(table.name, ..., problem, "give files of the same variables")
  if len(tables) == 1:
    return first
  starts = [table.starts[:-1] + end for table, end in zip(tables, ends, strict=False)]
  starts = np.append(np.concatenate(starts), ends[-1])
  read = functools.partial(by_chunk, starts=ends, read=lambda i, rows: tables[i].read(rows))
  return first._replace(starts=starts, read=read)


def chosen_names(where: str, names: Sequence[str] | None, known: Mapping[str, Any]) -> list[str]:
  """Return the names of the variables to read: the chosen ones, or all.

  Raises:
    ConfigError: a variable does not exist, or there is none.
  """
  for name in names or ():
    if name not in known:
      raise invalid("columns", name, f"is not in {where}", nearest(name, known))
  if not known:
    raise invalid(where, ..., "has no variables", "check the path")
  return [*(known if names is None else names)]


def spread_identity(table: Table) -> dict[str, Any]:
  """Return the contents of evenly spread rows, for sources without files."""
  rows = np.unique(np.linspace(0, table.num_rows - 1, 64).astype(np.int64))
  values = table.read(rows).values()
  texts = [np.frombuffer(repr([*v]).encode(), np.uint8) if v.dtype == object else v for v in values]
  return array_identity(*texts)
