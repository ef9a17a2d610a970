"""Tables of cases in text: one row per line, with cells separated by `|`."""

import ast


def table(text):
  """Return the rows of a text, as lists of strings."""
  return [[cell.strip() for cell in line.split("|")] for line in text.strip("\n").splitlines()]


def columns(*readers):
  """Return a function that makes rows of a text, each cell read by the reader of its column."""

  def read(text):
    return [[r(cell) for r, cell in zip(readers, row, strict=True)] for row in table(text)]

  return read


def assignments(cell):
  """Return texts by name: `a=1 b.c=x`."""
  return dict(word.split("=", 1) for word in cell.split())


def fields(cell):
  """Return Python literals without spaces by name: `a=1 b=None c='x'`."""
  return {name: literal(value) for name, value in assignments(cell).items()}


def literal(cell):
  """Return the value of a Python literal."""
  return ast.literal_eval(cell)


def words(text):
  """Return the words of a text."""
  return text.split()
