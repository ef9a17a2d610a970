"""Measurements by the tests of faults, for the table in docs/reliability.md.

JAXSCALE_FAULT_TABLE=/tmp/faults.jsonl python -m pytest tests
python tests/support/fault_table.py /tmp/faults.jsonl
"""

import json
import os
import re
import sys
from pathlib import Path


def measured(fault, seconds, code, line, lost: int | str = "nothing"):
  """Add a row, if JAXSCALE_FAULT_TABLE is set.

  Args:
    fault: the fault.
    seconds: the time from the fault to the end of all processes; None if nothing ended.
    code: the exit code of the run, or of srun.
    line: the line that a user reads.
    lost: the number of steps that were done and not saved, or words.
  """
  if path := os.environ.get("JAXSCALE_FAULT_TABLE"):
    row = {"fault": fault, "seconds": seconds, "lost": lost, "code": code, "line": line}
    with open(path, "a") as file:
      file.write(json.dumps(row) + "\n")


def table(rows):
  """Return the rows as Markdown; the last row of each fault counts."""
  lines = ["| fault | seconds to the end | lost | exit code | message |"]
  lines.append("|---|---|---|---|---|")
  for row in {row["fault"]: row for row in rows}.values():
    seconds = "–" if row["seconds"] is None else f"{row['seconds']:.1f}"
    lost = f"{row['lost']} steps" if isinstance(row["lost"], int) else row["lost"]
    # Places of a test's own say nothing, and a | would end the cell.
    message = re.sub(r"/\S*/(?=[\w.-]+)", "…/", row["line"]).replace("|", "/").strip()
    lines.append(f"| {row['fault']} | {seconds} | {lost} | {row['code']} | {message} |")
  return "\n".join(lines)


if __name__ == "__main__":
  print(table(map(json.loads, Path(sys.argv[1]).read_text().splitlines())))
