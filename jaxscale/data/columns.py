"""Datasets of tables: rows by index of named variables, which are stored in chunks.

array_files.py, arrow_files.py and grain_data.py open a `Table`; `table_splits` makes the datasets
for training and validation of it.

A row that cannot be read never stops a run, by the rules of encoded.py: in training the next
readable row replaces it, and in validation it is a blank example of class -1. After a row of a
damaged chunk, the next row is the first one of the next chunk.
"""

from __future__ import annotations

import functools
import itertools
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxscale.config.plain import to_plain
from jaxscale.config.validation import UnsetError, nearest
from jaxscale.data import arrays, dataset, faults, pipeline
from jaxscale.data.dataset import NO_CLASS, Batch, Dataset, Spec, batch_shapes
from jaxscale.data.statistics import kept_statistics
from jaxscale.errors import ConfigError, invalid, message_of
from jaxscale.metrics.text import few, plural

_MIXED = 8  # chunks whose rows are shuffled together
_NUM_DRAWS = 2  # the draws that make the key of an example's generator
_STANDARD = {"x": "image", "y": "label"}  # names of variables that mean an image and a label
_SCANNED = 1 << 16  # labels per read in the search for the largest
_NOMINAL = 1 << 20  # bytes of a chunk of rows that are not stored in chunks
_NO_NUMBERS = "has text, records, missing values (null) or lists of different lengths"
_CONVERT = "convert it in a transform, or leave it out"

T = TypeVar("T")
Chosen = Mapping[str, str | Sequence[str]]
Transform = Callable[[dict[str, Any], np.random.Generator | None], dict[str, Any] | None]


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
    chunk_bytes: the bytes of the largest chunk in memory.
    cache_bytes: the bytes of the cache of chunks; None if rows are read without their chunk.
    is_selective: whether reading fewer variables takes less time.
    scales: the scale, the offset and the fill value of variables that are stored packed.
    class_names: the names of the classes of variables that have them.
  """

  name: str
  specs: Mapping[str, Spec]
  starts: np.ndarray
  read: Callable[[np.ndarray], dict[str, np.ndarray]]
  identity: Callable[[], Mapping[str, Any]] = dict
  chunk_bytes: int = 0
  cache_bytes: int | None = None
  is_selective: bool = True
  scales: Mapping[str, tuple[float, float, float]] = MappingProxyType({})
  class_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})

  @property
  def num_rows(self) -> int:
    """The number of rows."""
    return int(self.starts[-1])


# Opens the named variables of a source, or all for None.
Open = Callable[[Sequence[str] | None], Table]


class Columns(NamedTuple):
  """Rules that make examples of rows; `source_settings._Table` describes each in full.

  Attributes:
    owner: the name of the settings class, for messages.
    columns: the variable of each array of a batch, or several that are stacked as channels;
      None takes all variables.
    transform: the user's function of an example and its generator, or None.
    eval_share: the fraction of the rows for validation without a source of their own.
    shuffle: "examples" or "chunks".
    num_classes: the number of classes or outputs; None derives it.
    mean: the mean of the images, see `DatasetInfo`.
    std: the standard deviation of the images.
    statistics: whether mean and std are computed.
  """

  owner: str
  columns: Chosen | None
  transform: Transform | None
  eval_share: float
  shuffle: str
  num_classes: int | None
  mean: tuple[float, ...]
  std: tuple[float, ...]
  statistics: bool


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

  Variables that are packed by the CF conventions (1.11, §8.1) are unpacked.

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
  scales, specs, sizes, lengths = {}, {}, {}, {}
  for n, (shape, dtype, length, _, attributes) in variables.items():
    if not {"scale_factor", "add_offset"}.isdisjoint(attributes):
      parts = {"scale_factor": 1.0, "add_offset": 0.0, "_FillValue": np.nan}
      scales[n] = tuple(float(np.ravel(attributes.get(k, x))[0]) for k, x in parts.items())
    kind = "object" if dtype.kind == "V" else str(dtype)  # Records have no name of a dtype.
    specs[n] = shape[1:], "float32" if n in scales else kind
    sizes[n] = max(int(np.prod(shape[1:])) * dtype.itemsize, 1)
    lengths[n] = min(length or max(_NOMINAL // sizes[n], 1), shape[0])
  length = lengths[max(sizes, key=lambda n: sizes[n])]
  most = sum(sizes[n] * lengths[n] for n in sizes)

  def read(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {n: variable.read(rows) for n, variable in variables.items()}

  starts = even_starts(next(iter(counts.values())), length)
  return Table(name, specs, starts, read, chunk_bytes=most, scales=scales)


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
    if (table.specs, table.scales) != (first.specs, first.scales):
      problem = f"has {dict(table.specs)}, but {first.name} has {dict(first.specs)}"
      raise invalid(table.name, ..., problem, "give files of the same variables")
  if len(tables) == 1:
    return first
  starts = [table.starts[:-1] + end for table, end in zip(tables, ends, strict=False)]
  starts = np.append(np.concatenate(starts), ends[-1])
  read = functools.partial(by_chunk, starts=ends, read=lambda i, rows: tables[i].read(rows))
  largest = max(table.chunk_bytes for table in tables)
  return first._replace(starts=starts, read=read, chunk_bytes=largest)


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
  return dataset.array_identity(*texts)


class _Loader:
  """Loader of the examples of a span of rows.

  Attributes:
    table: the table.
    columns: the rules that make an example of a row.
    span: the rows.
    info: the description of the examples.
    damaged: the examples that could not be read.
  """

  def __init__(self, table: Table, columns: Columns, span: range):
    self.table, self.columns, self.span = table, columns, span
    self.damaged = dataset.DamagedExamples()
    self._unreadable: set[int] = set()  # Rows whose chunk cannot be read.
    self._shapes: Any = None  # The shapes of a transformed example.
    self.info = self._described()

  def load(self, indices: np.ndarray, draws: np.ndarray | None) -> Batch:
    rows = np.asarray(indices) + self.span.start
    stored = self._stored(rows) if self._unreadable.isdisjoint(rows.tolist()) else None
    if stored is not None and self.columns.transform is None:
      return self._cast(stored)
    examples = []
    for i, row in enumerate(rows.tolist()):
      example = {n: x[i] for n, x in stored.items()} if stored is not None else self._one(row)
      own = None if draws is None else draws[i]
      examples.append(self._transformed(row, example, own) or self._substitute(row, own))
    return self._cast({name: np.stack([x[name] for x in examples]) for name in examples[0]})

  def images(self, indices: np.ndarray) -> np.ndarray:
    """Return the images of readable examples, without augmentation."""
    draws = None if self.columns.transform else np.empty((len(indices), 0))
    images = self.load(indices, draws)["image"]
    return images[~np.isin(indices, self.damaged.indices)]

  def _stored(self, rows: np.ndarray) -> dict[str, np.ndarray] | None:
    """Return the arrays of rows in any order, by their names in a batch; None if one is damaged."""
    unique, inverse = np.unique(rows, return_inverse=True)
    try:
      values = self.table.read(unique)
    except ConfigError:
      raise
    except Exception as e:  # Each format raises its own error for damaged bytes.
      faults.raise_if_system_error(e, self._name(int(rows[0])))
      return None
    for name, (scale, offset, fill) in self.table.scales.items():
      unpacked = (values[name] * scale + offset).astype(np.float32)
      values[name] = np.where(values[name] == fill, np.float32(np.nan), unpacked)
    is_ordered = len(unique) == len(rows) and (np.diff(rows) > 0).all()
    batch = {}
    for name, variables in (self.columns.columns or {}).items():
      if isinstance(variables, str):
        array = values[variables]
      else:
        array = np.stack([values[v] for v in variables], axis=-1)
      batch[name] = array if is_ordered else array[inverse]
    return batch

  def _one(self, row: int) -> dict[str, Any] | None:
    """Return the stored example of one row; None if it cannot be read."""
    stored = None if row in self._unreadable else self._stored(np.array([row]))
    if stored is None:
      self._unreadable.add(row)
      return None
    return {name: array[0] for name, array in stored.items()}

  def _transformed(self, row: int, example: Any, draws: np.ndarray | None) -> dict[str, Any] | None:
    """Apply the user's transform; None if it returns none."""
    function, rng = self.columns.transform, None
    if function is None or example is None:
      return example
    if draws is not None:  # A draw has 53 bits, see `augment.uniform`.
      rng = np.random.Generator(np.random.Philox(key=(draws * 2.0**53).astype(np.uint64)))
    try:
      if (example := function(example, rng)) is None:
        return None
      shapes = {name: np.shape(value) for name, value in example.items()}
    except Exception as e:
      frame = traceback.extract_tb(e.__traceback__)[-1]
      problem = f"failed on {self._name(row)} with {type(e).__name__}: {message_of(e)}"
      fix = "return a dict of arrays, or None for an example that cannot be used"
      raise invalid(f"{frame.filename}:{frame.lineno}: transform", ..., problem, fix) from e
    self._shapes = self._shapes or shapes
    if shapes != self._shapes:
      problem = f"returned {shapes} for {self._name(row)}, but {self._shapes} for the first example"
      raise invalid("transform", ..., problem, "return the same names and shapes for all")
    return example

  def _substitute(self, row: int, draws: np.ndarray | None) -> dict[str, Any]:
    """Return the example in place of a damaged one: a blank one, or the next readable one."""
    self.damaged.add(row - self.span.start, self._name(row))
    if draws is not None:
      return self._next(row, draws)
    if self.info.label_shape != () or self.info.label_dtype != "int32":
      problem = "cannot be read, and only a class can count as wrong"
      raise invalid(self._name(row), ..., problem, "repair or remove this validation example")
    shapes = batch_shapes(self.info, 1).items()
    blank = {name: np.zeros(shape[1:], dtype) for name, (shape, dtype) in shapes}
    return blank | {"label": np.int32(NO_CLASS)}

  def _next(self, row: int, draws: np.ndarray | None) -> dict[str, Any]:
    start, starts = self.span.start, self.table.starts

    def after(index: int) -> int:
      row = index + start
      end = starts[np.searchsorted(starts, row, "right")] if row in self._unreadable else row + 1
      return int(end) - start

    def read(index: int) -> dict[str, Any] | None:
      return self._transformed(index + start, self._one(index + start), draws)

    name = functools.partial(self._name, row)
    return faults.next_readable(self.table.name, row - start, len(self.span), read, after, name)

  def _cast(self, batch: Batch) -> Batch:
    for name, (_, dtype) in batch_shapes(self.info, 1).items():
      field = f"{self.columns.owner}: {name}"
      if batch[name].dtype == object:  # In this chunk; the first one has numbers.
        raise invalid(field, ..., _NO_NUMBERS, _CONVERT)
      batch[name] = arrays.cast(field, batch[name], dtype)
    return batch

  def _name(self, row: int) -> str:
    return f"{self.table.name} row {row:,}"

  def _described(self) -> dataset.DatasetInfo:
    """Describe the examples; those of a transform by the first one."""
    columns, specs, start = self.columns, {}, self.span.start
    if columns.transform is not None:
      first = self._transformed(start, self._one(start), None) or self._next(start, None)
      specs = {name: (np.shape(x), str(np.asarray(x).dtype)) for name, x in first.items()}
    for name, variables in (columns.columns or {}).items() if not specs else ():
      stored = [self.table.specs[v] for v in _listed(variables)]
      shape = stored[0][0] + (() if isinstance(variables, str) else (len(stored),))
      specs[name] = shape, str(np.result_type(*(dtype for _, dtype in stored)))
      if len(shapes := {shape for shape, _ in stored}) > 1:
        field, problem = f"columns[{name!r}]", f"has the shapes {sorted(shapes)}"
        raise invalid(field, variables, problem, "stack variables of one shape")
    for name, (_, dtype) in specs.items():
      if np.dtype(dtype).kind not in "uifb":
        problem = _NO_NUMBERS if dtype == "object" else f"has the dtype {dtype}"
        raise invalid(f"{columns.owner}: {name}", ..., problem, _CONVERT)
    info = arrays.named_info(columns.owner, specs, mean=columns.mean, std=columns.std)
    channels = info.image_shape[-1] if info.image_shape else 1
    arrays.check_scaling(f"{columns.owner}.", columns.mean, columns.std, channels)
    outputs = 0 if info.label_dtype == "int32" else (info.label_shape or (1,))[-1]
    return info._replace(num_classes=columns.num_classes or outputs)


def table_splits(openers: Sequence[Open], columns: Columns) -> tuple[Dataset, Dataset]:
  """Create the datasets for training and validation of tables.

  Args:
    openers: the functions that open the table for training and, unless validation takes the
      last rows of that, the table for validation.
    columns: the rules that make examples of rows.

  Raises:
    ConfigError: a source cannot be read, or lacks a variable or rows; or training and
      validation examples differ.
  """
  owner, (table, columns, notes) = columns.owner, _opened(openers[0], columns)
  tables = [table, *(_opened(opener, columns)[0] for opener in openers[1:])]
  spans = [range(table.num_rows) for table in tables]
  if len(tables) == 1:
    kept = arrays.num_train(f"{owner}.eval_share", table.num_rows, columns.eval_share)
    openers, tables = [*openers] * 2, tables * 2
    spans = [range(kept), range(kept, table.num_rows)]
    line = f"{owner}: validation uses the last {len(spans[1]):,} of {table.num_rows:,} rows"
    notes.append(f"{line}; store rows in random order, or set a source for validation")
  loaders = [_Loader(t, columns, span) for t, span in zip(tables, spans, strict=True)]
  pair, info = [_dataset(loader) for loader in loaders], loaders[0].info
  if (info.label_shape, info.label_dtype, columns.num_classes) == ((), "int32", None):
    names = table.class_names.get(str((columns.columns or {}).get("label")), ())
    count = len(names) or max(map(_num_classes, openers, loaders))
    more = {"num_classes": count, "class_names": names}
    pair = [part._replace(info=part.info._replace(**more)) for part in pair]
  pair = arrays.same_examples(f"{owner}: validation", *pair)
  if columns.statistics:
    key = [to_plain(columns.columns), to_plain(columns.transform)]
    mean, std = kept_statistics(pair[0], loaders[0].images, key)
    pair = [part._replace(info=part.info._replace(mean=mean, std=std)) for part in pair]
  notes += _chunk_notes(table, columns)
  return pair[0]._replace(notes=tuple(notes)), pair[1]


def whole_table(opener: Open, columns: Columns, optional: Iterable[str]) -> Dataset:
  """Create a dataset of all rows of a table, without the `optional` arrays that it lacks."""
  table, columns, _ = _opened(opener, columns, optional)
  return _dataset(_Loader(table, columns, range(table.num_rows)))


def _opened(
  opener: Open, columns: Columns, optional: Iterable[str] = ()
) -> tuple[Table, Columns, list[str]]:
  """Open the variables that examples need; return the rules for these, and notes."""
  chosen, notes = columns.columns, []
  if chosen is None or optional:
    specs = opener(None).specs
    other = [n for n, (_, dtype) in specs.items() if np.dtype(dtype).kind not in "uifb"]
    if chosen is None and columns.transform is None and other:
      notes = [f"{columns.owner}: skipping {few(other)}, not numbers; a transform can convert them"]
      specs = {n: spec for n, spec in specs.items() if n not in other}
    chosen = chosen or {_STANDARD.get(name, name): name for name in specs}
    lacking = {n for n in optional if n in chosen and not {*_listed(chosen[n])} <= specs.keys()}
    chosen = {name: variables for name, variables in chosen.items() if name not in lacking}
  table = opener([*dict.fromkeys(v for variables in chosen.values() for v in _listed(variables))])
  if not table.num_rows:
    raise invalid(table.name, ..., "has no rows", "check the path")
  return table, columns._replace(columns=chosen), notes


def _listed(variables: str | Sequence[str]) -> Sequence[str]:
  return [variables] if isinstance(variables, str) else variables


def _dataset(loader: _Loader) -> Dataset:
  """Create the dataset of a loader's examples."""
  table, span = loader.table, loader.span
  num_draws = 0 if loader.columns.transform is None else _NUM_DRAWS

  def identity() -> Mapping[str, Any]:
    rows = {} if len(span) == table.num_rows else {"rows": [span.start, span.stop]}
    return {**table.identity(), **rows}

  made = Dataset(loader.info, len(span), loader.load, num_draws, loader.damaged, identity=identity)
  if loader.columns.shuffle == "chunks":
    starts = np.unique(np.clip(table.starts, span.start, span.stop)) - span.start
    order = functools.partial(pipeline.epochs, made, permutation=chunk_order(starts))
    return made._replace(order=order)
  return made


def chunk_order(starts: np.ndarray) -> Callable[[int, int, int], np.ndarray]:
  """Return the order of an epoch by chunks, a function of (num_examples, seed, epoch).

  The chunks are shuffled, and then the rows of each 8 successive chunks together. So a
  batch reads few chunks, and each chunk is read once per epoch.

  Args:
    starts: the first row of each chunk and, last, the number of rows.

  Example:
    >>> order = chunk_order(even_starts(64, 2))(64, 0, 0)
    >>> sorted(order.tolist()) == list(range(64)), len({row // 2 for row in order[:16].tolist()})
    (True, 8)
  """
  lengths = np.diff(starts)
  chunk_of = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)

  def permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    # Chunks use the epochs -1, -2, … of the same generator, so that their keys are not those
    # of rows.
    place = np.argsort(pipeline.shuffled(len(lengths), seed, ~epoch))
    rows = pipeline.shuffled(num_examples, seed, epoch)
    return rows[np.argsort(place[chunk_of[rows]] // _MIXED, kind="stable")]

  return permutation


def _num_classes(opener: Open, loader: _Loader) -> int:
  """Return one more than the largest label, which is read from its variable alone."""
  columns, variable = loader.columns, (loader.columns.columns or {}).get("label")
  if columns.transform or not loader.table.is_selective or not isinstance(variable, str):
    raise UnsetError(f"{columns.owner}.num_classes is not set; give the number of classes")
  labels = _Loader(opener([variable]), columns._replace(columns={"label": variable}), loader.span)
  parts = np.split(np.arange(len(loader.span)), range(_SCANNED, len(loader.span), _SCANNED))
  largest = [labels.load(part, np.empty((len(part), 0)))["label"].max() for part in parts]
  return int(max(largest)) + 1


def _chunk_notes(table: Table, columns: Columns) -> list[str]:
  """Return notes on the order by chunks, and on a cache that is too small for the order."""
  notes, lengths, is_mixed = [], np.diff(table.starts), columns.shuffle == "chunks"
  if is_mixed:
    line = f"{plural(len(lengths), 'chunk')} of up to {plural(int(lengths.max()), 'row')}"
    notes.append(f"{columns.owner}: shuffling {line}, and the rows of {_MIXED} chunks at a time")
  needed = table.chunk_bytes * (min(len(lengths), 2 * _MIXED) if is_mixed else len(lengths))
  if table.cache_bytes is not None and lengths.max() > 1 and needed > table.cache_bytes:
    line = f"cache_gb={table.cache_bytes / 1e9:g} is too small to decode each chunk once per epoch"
    fix = f"set it to {needed / 1e9:.2g}" + ", or shuffle='chunks'" * (not is_mixed)
    notes.append(f"{columns.owner}: {line}; {fix}")
  return notes
