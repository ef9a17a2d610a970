"""Tables for people: aligned text on a terminal, HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

_SHOWN = 20  # rows of a record; the middle of a longer one is left out
NOTHING = "–"
_CELL = "text-align: {}; white-space: nowrap; font-variant-numeric: tabular-nums"


def as_text(
  head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> str:
  """Columns in line, numbers to the right.

  Args:
    head: a title a column.
    rows: cells as text.
    left: columns of words, which begin in line.

  Example:
    >>> print(as_text(["run", "step"], [["a", "7"], ["long", "1,000"]]))
    run    step
    a         7
    long  1,000
  """
  lines = [head, *rows]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) if i in left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )


def as_html(
  head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> str:
  """The same for a notebook; everything in it is escaped."""

  def line(cells: Sequence[str], tag: str) -> str:
    texts = (
      f'<{tag} style="{_CELL.format("left" if i in left else "right")}">'
      f"{escape(cell)}</{tag}>"
      for i, cell in enumerate(cells)
    )
    return f"<tr>{''.join(texts)}</tr>"

  body = "".join(line(row, "td") for row in rows)
  return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


class Record(list[dict[str, Any]]):
  """A list of dicts that is shown as a table: a row each, a column a name.

  Example:
    >>> Record([{"step": 50, "train/loss": 1.05}, {"step": 56, "eval/loss": 0.9}])
    step  train/loss  eval/loss
      50        1.05          –
      56           –        0.9
  """

  def __repr__(self) -> str:
    if not self:
      return "nothing on record yet"
    head, rows = self._cells()
    return as_text(head, rows, ())

  __str__ = __repr__

  def _repr_html_(self) -> str:
    return as_html(*self._cells(), ()) if self else repr(self)

  def _cells(self) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(name for row in self for name in row if name != "time"))
    shown: list[dict[str, Any]] = list(self)
    if len(shown) > _SHOWN:
      half = _SHOWN // 2
      shown = [*shown[:half], dict.fromkeys(names, "…"), *shown[-half:]]
    return names, [[_cell(row.get(name)) for name in names] for row in shown]


def _cell(value: Any) -> str:
  if value is None:
    return NOTHING
  if isinstance(value, float):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
  return str(value)


def result(accuracy: float | None, perplexity: float | None) -> str:
  """How good a model is, in a cell; nothing where it is not known.

  Example:
    >>> result(0.9, None), result(0.5, 3.4567), result(None, None)
    ('90.00%', 'ppl 3.457', '')
  """
  if perplexity is not None:
    return f"ppl {perplexity:.3f}"
  return "" if accuracy is None else f"{accuracy:.2%}"
