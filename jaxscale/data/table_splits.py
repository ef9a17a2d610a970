"""Datasets for training and validation of tables, and the order of training by chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.config.plain import to_plain
from jaxscale.config.validation import UnsetError
from jaxscale.data import arrays, pipeline
from jaxscale.data.columns import Columns, Loader, listed
from jaxscale.data.dataset import Dataset
from jaxscale.data.statistics import kept_statistics
from jaxscale.data.tables import Open, Table
from jaxscale.errors import invalid
from jaxscale.metrics.text import few

_MIXED = 8  # chunks whose rows are shuffled together
_NUM_DRAWS = 2  # the draws that make the key of an example's generator
_STANDARD = {"x": "image", "y": "label"}  # names of variables that mean an image and a label
_SCANNED = 1 << 16  # labels per read in the search for the largest


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
  loaders = [Loader(t, columns, span) for t, span in zip(tables, spans, strict=True)]
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
  return pair[0]._replace(notes=tuple(notes)), pair[1]


def whole_table(opener: Open, columns: Columns, optional: Iterable[str]) -> Dataset:
  """Create a dataset of all rows of a table, without the `optional` arrays that it lacks."""
  table, columns, _ = _opened(opener, columns, optional)
  return _dataset(Loader(table, columns, range(table.num_rows)))


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
    lacking = {n for n in optional if n in chosen and not {*listed(chosen[n])} <= specs.keys()}
    chosen = {name: variables for name, variables in chosen.items() if name not in lacking}
  if not chosen:
    fix = "name them in columns, and convert them in a transform"
    raise invalid(opener(None).name, ..., "has no variables that are numbers", fix)
  table = opener([*dict.fromkeys(v for variables in chosen.values() for v in listed(variables))])
  if not table.num_rows:
    raise invalid(table.name, ..., "has no rows", "check the path")
  return table, columns._replace(columns=chosen), notes


def _dataset(loader: Loader) -> Dataset:
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
    >>> from jaxscale.data.tables import even_starts
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


def _num_classes(opener: Open, loader: Loader) -> int:
  """Return one more than the largest label, which is read from its variable alone."""
  columns, variable = loader.columns, (loader.columns.columns or {}).get("label")
  if columns.transform or not loader.table.is_selective or not isinstance(variable, str):
    raise UnsetError(f"{columns.owner}.num_classes is not set; give the number of classes")
  labels = Loader(opener([variable]), columns._replace(columns={"label": variable}), loader.span)
  parts = np.split(np.arange(len(loader.span)), range(_SCANNED, len(loader.span), _SCANNED))
  largest = [labels.load(part, np.empty((len(part), 0)))["label"].max() for part in parts]
  return int(max(largest)) + 1
