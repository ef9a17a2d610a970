"""docs/plan.md: its tables are those of the backtest's results, and add up."""

import json
import statistics

import pytest

from support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
ROWS = json.loads((RESULTS / "backtest.json").read_text())["rows"]
PAGE = (ROOT / "docs" / "plan.md").read_text()


def test_the_tables_are_of_the_results(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
  from backtest_table import tables

  for part, table in tables(ROWS).items():
    missing = [line for line in table.splitlines() if line not in PAGE]
    assert not missing, f"{part}: python benchmarks/backtest.py --table"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_errors_are_of_the_figures(row):
  if "rate" in row:
    assert row["rate_error"] == pytest.approx(row["planned_rate"] / row["rate"] - 1)
    assert row["in_range"] == (row["slowest"] <= row["rate"] <= row["fastest"])
    assert row["slowest"] <= row["planned_rate"] <= row["fastest"]
  if "efficiency" in row:
    off = row["planned_efficiency"] - row["efficiency"]
    assert row["efficiency_error"] == pytest.approx(off)
  assert row["step_ms"] == pytest.approx(sum(row["parts_ms"].values()))


def test_the_first_plan_of_the_second_round():
  rows = json.loads((RESULTS / "backtest_first_planned.json").read_text())["rows"]
  held = [r for r in rows if r["use"] == "held-out" and "efficiency_error" in r]
  median = 100 * statistics.median(abs(r["efficiency_error"]) for r in held)
  says = f"were off by {median:.1f} points in the median ({len(held)} rows)"
  assert says in PAGE
  now = {r["name"]: r["use"] for r in ROWS if r["round"] == 2}
  assert {r["name"]: r["use"] for r in rows} == now
