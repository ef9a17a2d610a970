"""Format numbers, lists and tables for a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any

from jaxscale.errors import printable

Rows = Iterable[Sequence[str]]  # cells of a table
NOTHING = "–"  # a cell without a value
_CELL = "text-align: {}; white-space: nowrap; font-variant-numeric: tabular-nums"


def table(head: Sequence[str], rows: Rows, left: Collection[int] = (0,)) -> str:
  """Format aligned columns, with two spaces between them.

  Args:
    head: the titles of the columns; empty prints none.
    rows: the cells as text.
    left: the indices of left-aligned columns, for words; others are right-aligned, for
      numbers.

  Example:
    >>> print(table(["run", "step"], [["a", "7"], ["long", "1,000"]]))
    run    step
    a         7
    long  1,000
  """
  lines = [[*map(printable, line)] for line in ([head] if head else []) + [*rows]]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i in left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )


def html_table(head: Sequence[str], rows: Rows, left: Collection[int] = (0,)) -> str:
  """Format a table as HTML for a notebook; every cell is escaped."""

  def line(cells: Sequence[str], tag: str) -> str:
    texts = (
      f'<{tag} style="{_CELL.format("left" if i in left else "right")}">{escape(cell)}</{tag}>'
      for i, cell in enumerate(cells)
    )
    return f"<tr>{''.join(texts)}</tr>"

  body = "".join(line(row, "td") for row in rows)
  return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


def cell(value: float | str | None, form: str = "") -> str:
  """Format a value, or return a dash for None.

  Example:
    >>> cell(0.5, ".1%"), cell(None, ".1%")
    ('50.0%', '–')
  """
  return NOTHING if value is None else format(value, form)


def columns(text: str) -> dict[str, tuple[str, str]]:
  """Return (key, format) of a table's columns by title.

  Args:
    text: entries "TITLE: KEY FORMAT", separated by semicolons or line breaks.

  Example:
    >>> columns("step: step ,; loss: train/loss .4f; note: note")
    {'step': ('step', ','), 'loss': ('train/loss', '.4f'), 'note': ('note', '')}
  """
  parsed = (x.strip().partition(": ") for x in text.replace("\n", ";").split(";"))
  rows = {title: key.partition(" ") for title, _, key in parsed if title}
  return {title: (key, form) for title, (key, _, form) in rows.items()}


def byte_size(number: float) -> str:
  """Format a number of bytes in decimal units.

  Example:
    >>> byte_size(2.5e9), byte_size(12.34e6), byte_size(800)
    ('2.5 GB', '12.3 MB', '800 bytes')
  """
  for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
    if abs(number) >= size:
      return f"{number / size:,.1f} {unit}"
  return f"{number:.0f} bytes"


def short_time(seconds: float) -> str:
  """Format seconds in a suitable unit; `duration` is for hours and minutes.

  Example:
    >>> short_time(2e-5), short_time(0.0034), short_time(12.34)
    ('20 us', '3.4 ms', '12.3 s')
  """
  if seconds < 1e-3:
    return f"{seconds * 1e6:.0f} us"
  return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def duration(seconds: float) -> str:
  """Format seconds as 0:07, 12:30 or 3:05:00."""
  minutes, s = divmod(round(seconds), 60)
  hours, m = divmod(minutes, 60)
  return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def listed(words: Iterable[object], last: str = "and") -> str:
  """Join words for a sentence.

  Example:
    >>> listed(["a", "b", "c"]), listed([8, 16], "or"), listed(["a"])
    ('a, b and c', '8 or 16', 'a')
  """
  *most, final = [str(word) for word in words] or [""]
  return f"{', '.join(most)} {last} {final}" if most else final


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
  """Return the values of each key, in their order.

  Example:
    >>> grouped([("odd", 1), ("even", 2), ("odd", 3)])
    {'odd': [1, 3], 'even': [2]}
  """
  groups: dict[Any, list[Any]] = {}
  for key, value in pairs:
    groups.setdefault(key, []).append(value)
  return groups


def few(words: Iterable[object], most: int = 4, more: str = "more") -> str:
  """Join the first of many words, and the number of those left out.

  Example:
    >>> few(["n1", "n2", "n3"], most=2), few(["n1", "n2"], most=2)
    ('n1, n2 and 1 more', 'n1 and n2')
  """
  words = list(words)
  hidden = len(words) - most
  if hidden <= 0:
    return listed(words)
  return f"{', '.join(map(str, words[:most]))} and {hidden} {more}"


def plural(count: int, noun: str) -> str:
  """Format a count with its noun.

  Example:
    >>> plural(1, "device"), plural(1024, "device")
    ('1 device', '1,024 devices')
  """
  return f"{count:,} {noun}{'s' * (count != 1)}"
