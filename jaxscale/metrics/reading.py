"""Reading what runs wrote, also after a kill, a full disk or somebody's editor.

What is missing or damaged is left out; callers that cannot do without say so.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
  """The object in a JSON file; empty if the file is missing or holds no object.

  Example:
    >>> read_json(Path("no/such/summary.json"))
    {}
  """
  return next(iter(json_objects([readable_text(path)])), {})


def read_json_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
  """The objects in a file with one JSON object per line, as in `metrics.jsonl`.

  A line that was cut short is left out, and so is everything in a missing file.

  Args:
    path: the file.
    last_bytes: read only this many bytes from its end; None: all.
  """
  return json_objects(readable_text(path, last_bytes).splitlines())


def readable_text(path: Path, last_bytes: int | None = None) -> str:
  """A file's text, or its last bytes; empty if it is missing or cannot be read."""
  try:
    with path.open("rb") as file:
      if last_bytes is not None:
        file.seek(max(file.seek(0, 2) - last_bytes, 0))
      return file.read().decode(errors="replace")
  except OSError:
    return ""


def json_objects(texts: Iterable[str]) -> list[dict[str, Any]]:
  """The JSON objects among texts; the rest is left out."""
  found = []
  for text in texts:
    with contextlib.suppress(ValueError, RecursionError):
      found.append(json.loads(text))
  return [value for value in found if isinstance(value, dict)]
