"""Examples of the rows of a table: columns to arrays of a batch, the user's transform, damage.

A row that cannot be read never stops a run, by the rules of encoded.py: in training the next
readable row replaces it, and in validation it is a blank example of class -1. After a row of a
damaged chunk, the next row is the first one of the next chunk.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data import arrays, dataset, faults
from jaxscale.data.dataset import NO_CLASS, Batch, batch_shapes
from jaxscale.data.tables import Table
from jaxscale.errors import ConfigError, invalid, message_of

_NO_NUMBERS = "has text, records, missing values (null) or lists of different lengths"
_CONVERT = "convert it in a transform, or leave it out"

Chosen = Mapping[str, str | Sequence[str]]
Transform = Callable[[dict[str, Any], np.random.Generator | None], dict[str, Any] | None]


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


class Loader:
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
    """Return the examples of indices, as `Dataset.load`."""
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
    arrays = stored if self.columns.transform else self._cast(stored)
    return {name: array[0] for name, array in arrays.items()}

  def _transformed(self, row: int, example: Any, draws: np.ndarray | None) -> dict[str, Any] | None:
    """Apply the user's transform; None if it returns none."""
    function, rng = self.columns.transform, None
    if function is None or example is None:
      return example
    if draws is not None:  # A draw has 53 bits, see `augment.uniform`.
      rng = np.random.Generator(np.random.Philox(key=(draws * 2.0**53).astype(np.uint64)))
    fix = "return a dict of arrays, or None for an example that cannot be used"
    try:
      example = function(example, rng)
      is_dict = isinstance(example, Mapping)
      shapes = {name: np.shape(x) for name, x in example.items()} if is_dict else {}
    except Exception as e:
      frame = traceback.extract_tb(e.__traceback__)[-1]
      problem = f"failed on {self._name(row)} with {type(e).__name__}: {message_of(e)}"
      raise invalid(f"{frame.filename}:{frame.lineno}: transform", ..., problem, fix) from e
    if example is None:
      return None
    if not shapes:
      raise invalid("transform", ..., f"returned {example!r:.60} for {self._name(row)}", fix)
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
      if batch[name].dtype.kind not in "uifb":  # In this chunk; the first one has numbers.
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
      stored = [self.table.specs[v] for v in listed(variables)]
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


def listed(variables: str | Sequence[str]) -> Sequence[str]:
  """Return the variables of an array as a list."""
  return [variables] if isinstance(variables, str) else variables
