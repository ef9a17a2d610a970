"""Tables of docs/plan.md, from benchmarks/results/backtest.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]
ROUNDS = {1: "first", 2: "second"}
USES = ("choose", "held-out")
HEAD = (
  "result",
  "devices",
  "rows",
  "published /s",
  "planned /s (range)",
  "error",
  "efficiency",
  "planned",
  "points",
  "use",
)
SUMMARY_HEAD = (
  "rows",
  "efficiencies",
  "median",
  "worst",
  "rates",
  "median",
  "worst",
  "in the range",
)


def tables(rows: Rows) -> dict[str, str]:
  """Return Markdown tables: every row by round, and the median and worst errors.

  Args:
    rows: the rows of the file.
  """
  found = {
    name: _table(HEAD, [_line(row) for row in rows if row["round"] == number])
    for number, name in ROUNDS.items()
  }
  lines = [_summary_line(name, part) for name, part in summary(rows).items()]
  return found | {"summary": _table(SUMMARY_HEAD, lines)}


def summary(rows: Rows) -> dict[str, dict[str, Any]]:
  """Return the median and worst absolute errors, by use and round.

  Args:
    rows: the rows of the file.
  """
  parts = {
    f"{name} round, {use}": [r for r in rows if (r["round"], r["use"]) == (number, use)]
    for number, name in ROUNDS.items()
    for use in USES
  }
  for use in USES:
    parts[f"both rounds, {use}"] = [r for r in rows if r["use"] == use]
  return {name: _errors(part) for name, part in parts.items() if part}


def _errors(rows: Rows) -> dict[str, Any]:
  found: dict[str, Any] = {}
  for kind in ("efficiency_error", "rate_error"):
    errors = [abs(row[kind]) for row in rows if kind in row]
    if errors:
      median, worst = statistics.median(errors), max(errors)
      found[kind] = {"rows": len(errors), "median": median, "worst": worst}
  ranged = [row["in_range"] for row in rows if "in_range" in row]
  return found | {"in_range": f"{sum(ranged)} of {len(ranged)}"}


def _summary_line(name: str, part: dict[str, Any]) -> list[str]:
  cells = [name]
  for kind, form in (("efficiency_error", "{:.1f}"), ("rate_error", "{:.0f} %")):
    errors = part.get(kind)
    if errors is None:
      cells += ["0", "-", "-"]
    else:
      shown = (form.format(100 * errors[which]) for which in ("median", "worst"))
      cells += [str(errors["rows"]), *shown]
  return [*cells, part["in_range"]]


def _line(row: dict[str, Any]) -> list[str]:
  cells = [row["name"], f"{row['devices']:,} {row['chip']}", f"{row['rows']}"]
  if "rate" in row:
    ends = f"{row['slowest']:,.0f} to {row['fastest']:,.0f}"
    planned = f"{row['planned_rate']:,.0f} ({ends})"
    cells += [f"{row['rate']:,.0f}", planned, f"{row['rate_error']:+.0%}"]
  else:
    cells += ["-", "-", "-"]
  if "efficiency" in row:
    off = f"{100 * row['efficiency_error']:+.1f}"
    planned = f"{row['planned_efficiency']:.1%}"
    cells += [f"{row['efficiency']:.1%}", planned, off]
  else:
    cells += ["-", "-", "-"]
  return [*cells, row["use"]]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  return "\n".join(f"| {' | '.join(x)} |" for x in (head, ["---"] * len(head), *lines))
