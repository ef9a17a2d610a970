"""Tables of docs/parallelism.md, from benchmarks/results/parallel.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

GIB = 2**30


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
  """Return Markdown tables by part of the page.

  Args:
    rows: the rows of the file.
  """
  by_part: dict[str, list[dict[str, Any]]] = {}
  for row in rows:
    by_part.setdefault(row["part"], []).append(row)
  memory = by_part.get("models", []) + by_part.get("init", [])
  first = {r["case"]: r for r in rows}
  kept = [
    first[f"{chips} fsdp 16"] for chips in ("v5e-16", "h100-16") if f"{chips} fsdp 16" in first
  ]
  return {
    "models": _memory(memory),
    "layouts": _layouts(by_part.get("layouts", [])),
    "memory": _memory([*kept, *by_part.get("memory", [])]),
    "flags": _flags(by_part.get("flags", []), first),
  }


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  return "\n".join(f"| {' | '.join(x)} |" for x in (head, ["---"] * len(head), *lines))


def _refusal(row: dict[str, Any]) -> str:
  reported = row.get("error") or row["refusal"] or ""
  if asked := re.search(r"HLO temporaries \(([\d.]+)G\)", reported):
    return f"{asked[1]} GiB of temporaries"
  return reported.replace("|", "/")


def _memory(rows: Sequence[dict[str, Any]]) -> str:
  head = (
    "program",
    "state, batch GiB",
    "temporaries",
    "in all",
    "may take",
    "on the host",
    "sent GB",
    "compile CPU s",
  )
  lines = []
  for row in rows:
    if not row.get("memory"):
      lines.append([row["case"], f"does not compile: {_refusal(row)}", *[""] * 6])
      continue
    m = row["memory"]
    state = m["arguments"] if "init" not in row["case"] else m["outputs"]
    total = m["arguments"] + m["outputs"] - m["aliased"] + m["temporaries"]
    sent = sum(c["wire_mb"] for c in row.get("collectives", ()))
    lines.append(
      [
        row["case"],
        f"{state / GIB:.2f}",
        f"{m['temporaries'] / GIB:.2f}",
        f"{total / GIB:.2f}",
        f"{row['limit'] / GIB:.2f}",
        f"{m['host'] / GIB:.2f}" if m["host"] else "-",
        f"{sent / 1000:.1f}",
        f"{row['compile_cpu_s']:.0f}",
      ]
    )
  return _table(head, lines)


def _layouts(rows: Sequence[dict[str, Any]]) -> str:
  head = (
    "layout",
    "collective",
    "axes",
    "times",
    "sent MB",
    "hidden in part",
    "overlapped compute",
  )
  lines = []
  for row in rows:
    if "collectives" not in row:
      lines.append([row["case"], f"does not compile: {_refusal(row)}", *[""] * 5])
      continue
    everything = sum(c["wire_mb"] for c in row["collectives"])
    some = [c for c in row["collectives"] if c["wire_mb"] >= 0.01 * everything]
    for i, c in enumerate(some):
      lines.append(
        [
          row["case"] if i == 0 else "",
          f"{c['kind']} {', '.join(c['dtypes'])}",
          ", ".join(c["axes"]) if c["axes"] else "?",
          str(c["times"]),
          f"{c['wire_mb']:,.0f}",
          _share(c),
          f"{c['overlap']:.0%}",
        ]
      )
  return _table(head, lines)


def _share(c: dict[str, Any]) -> str:
  return f"{c['hidden_mb'] / c['wire_mb']:.0%}" if c["wire_mb"] else "-"


def _flags(rows: Sequence[dict[str, Any]], first: dict[str, Any]) -> str:
  head = ("program", "sent MB", "hidden in part", "overlapped compute", "temporaries GiB")
  plain = dict.fromkeys(row["case"].rpartition(", ")[0] for row in rows)
  lines = []
  for row in [*(first[case] for case in plain if case in first), *rows]:
    if not row.get("memory"):
      lines.append([row["case"], f"does not compile: {_refusal(row)}", *[""] * 3])
      continue
    found = row["collectives"]
    sent, behind = (sum(c[k] for c in found) for k in ("wire_mb", "hidden_mb"))
    lines.append(
      [
        row["case"],
        f"{sent:,.0f}",
        f"{behind / sent:.0%}",
        f"{sum(c['overlap'] for c in found):.0%}",
        f"{row['memory']['temporaries'] / GIB:.2f}",
      ]
    )
  return _table(head, sorted(lines))
