"""Reading what runs wrote, also after a kill, a full disk or somebody's editor.

What is missing or damaged is left out; callers that cannot do without say so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
  """The object in a JSON file; empty if the file is missing or holds no object.

  Example:
    >>> read_json(Path("no/such/summary.json"))
    {}
  """
  found = _objects([_text(path)])
  return found[0] if found else {}


def read_json_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
  """The objects in a file with one JSON object per line, as in `metrics.jsonl`.

  A line that was cut short is left out, and so is everything in a missing file.

  Args:
    path: the file.
    last_bytes: read only this many bytes from its end; None: all.
  """
  return _objects(_text(path, last_bytes).splitlines())


def _text(path: Path, last_bytes: int | None = None) -> str:
  try:
    with path.open("rb") as file:
      if last_bytes is not None:
        file.seek(max(file.seek(0, 2) - last_bytes, 0))
      return file.read().decode(errors="replace")
  except OSError:
    return ""


def _objects(texts: list[str]) -> list[dict[str, Any]]:
  found = []
  for text in texts:
    try:
      value = json.loads(text)
    except (ValueError, RecursionError):
      continue
    if isinstance(value, dict):
      found.append(value)
  return found
