"""Rows of JSONL and Parquet files, of which damaged ones are skipped, counted and reported."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxscale.config.validation import nearest
from jaxscale.data.faults import raise_if_system_error
from jaxscale.errors import ConfigError, invalid, message_of
from jaxscale.files import parse_json
from jaxscale.metrics.text import few, plural

ENDINGS = ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"
_LONGEST = 64 << 20  # bytes of a line; longer ones are damaged
_AT_ONCE = 256  # rows of a Parquet file that are decoded at a time
_SHARE = 0.01  # of the rows of a file that may be damaged
_EARLY = 100  # damaged rows after which a file with a majority of them is rejected

T = TypeVar("T")
Row = Callable[[], Any]  # Returns a row, or raises ValueError if it is damaged.


class EmptyError(ValueError):
  """Error for a row with an empty text, of which a file may have any number."""


def read_rows(
  path: Path,
  columns: Sequence[str],
  convert: Callable[[dict[str, Any], str], T],
  notes: list[str],
  field: str,
) -> Iterator[T]:
  """Yield the converted rows of a file in order.

  A line that is not a JSON object in UTF-8 is damaged, and so is a row that `convert` rejects.

  Args:
    path: the file, with one of `ENDINGS`.
    columns: the columns to read from Parquet; the file must have one of them.
    convert: a function of a row and its name, such as "a.jsonl:7", for messages. It raises
      ValueError for a damaged row.
    notes: a list to which a line about the damaged rows is added.
    field: the name of the setting of the column, for messages.

  Raises:
    ConfigError: the file cannot be read, or more than 1 % of its rows are damaged, without
      those whose text is empty.
  """
  damaged: list[str] = []
  number = num_empty = 0

  def check(is_end: bool) -> None:
    most = max(_SHARE * number, number > 1) if is_end else max(number / 2, _EARLY)
    if len(damaged) - num_empty > most:
      so_far = "" if is_end else "the first "
      problem = f"has {len(damaged):,} damaged rows among {so_far}{number:,}: {few(damaged, 3)}"
      raise invalid(str(path), ..., problem, f"fix the file, or set {field}")

  try:
    rows = _parquet(path, columns, field) if path.suffix.lower() == ".parquet" else _lines(path)
    for number, row in rows:
      where = f"{path.name}:{number}"
      try:
        if not isinstance(fields := row(), dict):
          raise ValueError("not a JSON object")
        value = convert(fields, where)
      except ConfigError:
        raise
      except ValueError as e:
        damaged.append(f"{where} ({message_of(e):.80})")
        num_empty += isinstance(e, EmptyError)
        check(is_end=False)
        continue
      yield value
  except (OSError, ImportError) as e:
    raise_if_system_error(e, str(path))
    problem, fix = f"cannot be read: {message_of(e)}", "copy or decompress it again"
    raise invalid(str(path), ..., problem, fix) from None
  check(is_end=True)
  if damaged:
    skipped = plural(len(damaged), f"{'damaged or empty ' * (num_empty > 0) or 'damaged '}row")
    notes.append(f"{path}: skipping {skipped} of {number:,}: {few(damaged, 3)}")


def text_of(field: str) -> Callable[[dict[str, Any], str], bytes]:
  """Return the `convert` of rows with a text in a field."""

  def convert(row: dict[str, Any], where: str) -> bytes:
    del where
    if field not in row:
      raise ValueError(f"has no {field!r}, but {few(map(repr, row)) or 'nothing'}")
    if not isinstance(text := row[field], str | bytes):
      raise ValueError(f"{field!r} is {text!r:.20}, not a string")
    if not text:
      raise EmptyError(f"{field!r} is empty")
    return text.encode() if isinstance(text, str) else text.decode().encode()

  return convert


def _lines(path: Path) -> Iterator[tuple[int, Row]]:
  """Yield the number and the row of each line that is not blank."""
  import pyarrow  # It takes 0.1 s, and reads .gz and .zst.

  with io.BufferedReader(pyarrow.input_stream(str(path), compression="detect")) as file:
    for number in itertools.count(1):
      if not (line := file.readline(_LONGEST)):
        return
      is_long = len(line) == _LONGEST and line[-1:] != b"\n"
      size = len(line)
      while is_long and (rest := file.readline(1 << 20)) and rest[-1:] != b"\n":
        if (size := size + len(rest)) > 4 * _LONGEST:  # Few compressed bytes could last for days.
          raise OSError(None, f"line {number} does not end")
      if line.strip():
        yield number, functools.partial(_parsed, None if is_long else line)


def _parsed(line: bytes | None) -> Any:
  if line is None:
    raise ValueError(f"longer than {_LONGEST >> 20} MiB")
  return parse_json(line.removeprefix(b"\xef\xbb\xbf"))


def _parquet(path: Path, columns: Sequence[str], field: str) -> Iterator[tuple[int, Row]]:
  """Yield the number and the row of each row, from 1."""
  import pyarrow
  from pyarrow import parquet

  try:
    with parquet.ParquetFile(path) as file:
      names = file.schema_arrow.names
      if not (present := [name for name in columns if name in names]):
        problem = f"is not a column of {path}, {nearest(columns[0], names)}"
        raise invalid(field, columns[0], problem, f"it has {few(names, 8)}")
      number = 0
      for batch in file.iter_batches(_AT_ONCE, columns=present):
        for i in range(len(batch)):
          number += 1
          yield number, functools.partial(_row_of, batch, i)
  except (pyarrow.ArrowException, UnicodeDecodeError) as e:  # the latter of names
    raise OSError(None, f"not an intact Parquet file ({message_of(e)})") from None


def _row_of(batch: Any, index: int) -> dict[str, Any]:
  return {name: batch[name][index].as_py() for name in batch.schema.names}
