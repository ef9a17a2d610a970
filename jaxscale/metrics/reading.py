"""Read `metrics.jsonl`, also after a kill, a full disk or manual changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jaxscale.files import mismatch
from jaxscale.files import read_json as read_json
from jaxscale.files import read_json_lines as read_json_lines
from jaxscale.files import write_json as write_json


def read_metrics(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
  """Return the lines of a `metrics.jsonl`: "step", "time" and numeric metrics.

  Lines without step or time, and values that are not numbers, are left out. A metric may be
  NaN or infinite, as it was in the run.

  Args:
    path: the path of the file.
    last_bytes: the number of bytes to read from the end; None reads the whole file.
  """
  lines = read_json_lines(path, last_bytes, {"step": int, "time": float})
  return [
    {name: x for name, x in line.items() if mismatch(x, float) is None}
    for line in lines
    if line["step"] >= 0 and math.isfinite(line["time"])
  ]
