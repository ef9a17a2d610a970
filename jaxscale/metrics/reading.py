"""Reading `metrics.jsonl`, also after a kill, a full disk or somebody's editor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jaxscale.files import mismatch
from jaxscale.files import read_json as read_json
from jaxscale.files import read_json_lines as read_json_lines
from jaxscale.files import write_json as write_json


def read_metrics(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
  """The lines of a `metrics.jsonl`: "step", "time" and metrics, all of them numbers.

  Lines without step or time are left out, and so is what is not a number. A
  metric may be NaN or infinite, as it was in the run.

  Args:
    path: the file.
    last_bytes: read only this many bytes from its end; None: all.
  """
  found = read_json_lines(path, last_bytes, {"step": int, "time": float})
  return [
    {name: x for name, x in line.items() if mismatch(x, float) is None}
    for line in found
    if line["step"] >= 0 and math.isfinite(line["time"])
  ]
