"""`:::MLLOG` lines, the format that MLPerf's checkers and summaries read.

One line an event: `:::MLLOG ` and a JSON object of namespace, time_ms,
event_type, key, value and metadata. The format and the keys are those of
mlperf-logging 4.1.68 (mllog/mllog.py, mllog/constants.py and, for what ResNet
must say, compliance_checker/training_4.0.0, the last round that had it). The
lines are written here and not by that package: they are one `json.dumps`, and it
brings pandas and SciPy along. The tests hold them to its compliance checker.

This file has the format; `mllog_run.py` what a run says in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TOKEN = ":::MLLOG "
_POINT, _START, _END = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"
_PACKAGE = Path(__file__).parent.parent.parent


class MLLog:
  """Appends events to a file, each written out as it happens.

  Example:
    >>> with MLLog(workdir / "mllog.txt") as log:        # doctest: +SKIP
    ...   log.start("eval_start", epoch_num=4)
    ...   log.event("eval_accuracy", 0.761, epoch_num=4)
    ...   log.end("eval_stop", epoch_num=4)
  """

  def __init__(self, path: str | os.PathLike | None, *, start: int = 0):
    """Begin a log, or go on with one.

    Args:
      path: the file; None writes nothing, for processes other than the leader.
      start: the step that the run goes on from. At 0 the file begins anew; else
        what it says from the first event of a later `step_num` on, that it
        stopped, and a block that it did not end, is dropped: it will happen again.
    """
    self._file = None
    if path is None:
      return
    path = Path(path)
    kept = _until(read_mllog(path), start) if start else []
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text("".join(_encode(line) for line in kept))
    os.replace(scratch, path)
    self._file = path.open("a")

  def event(self, key: str, value: Any = None, **metadata: Any) -> None:
    """Something that has no duration.

    Args:
      key: what, e.g. "global_batch_size".
      value: JSON, or a NumPy or JAX scalar.
      metadata: beside it, e.g. epoch_num; `time_ms` replaces the present, in
        milliseconds since the epoch.
    """
    self._write(_POINT, key, value, metadata)

  def start(self, key: str, value: Any = None, **metadata: Any) -> None:
    """An interval begins; MLPerf's keys for it end in `_start`."""
    self._write(_START, key, value, metadata)

  def end(self, key: str, value: Any = None, **metadata: Any) -> None:
    """An interval ends; MLPerf's keys for it end in `_stop`."""
    self._write(_END, key, value, metadata)

  def close(self) -> None:
    """Close the file."""
    if self._file is not None:
      self._file.close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def _write(self, event_type, key, value, metadata):
    if self._file is None:
      return
    time_ms = metadata.pop("time_ms", None)
    line = {
      "namespace": "",
      "time_ms": int(time.time() * 1e3 if time_ms is None else time_ms),
      "event_type": event_type,
      "key": key,
      "value": value,
      "metadata": {**_caller(), **metadata},
    }
    self._file.write(_encode(line))
    self._file.flush()


def read_mllog(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The events of a log; other output between, or a line cut short, is left out."""
  events = []
  if Path(path).exists():
    for line in Path(path).read_text().splitlines():
      _, token, text = line.partition(TOKEN)
      try:
        events += [json.loads(text)] if token else []
      except json.JSONDecodeError:
        continue
  return events


def _encode(line: dict[str, Any]) -> str:
  # Scalars of NumPy and JAX know their Python value.
  return TOKEN + json.dumps(line, default=lambda x: x.tolist()) + "\n"


def _until(events: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
  """The events of the first `start` steps, without a block that is not ended there."""
  kept = []
  for event in events:
    if event["metadata"].get("step_num", 0) > start:
      break
    if event["key"] != "run_stop":
      kept.append(event)
  keys = [event["key"] for event in kept]
  if "block_start" in keys:
    last = len(keys) - 1 - keys[::-1].index("block_start")
    if "block_stop" not in keys[last:]:
      del kept[last]
  return kept


def _caller() -> dict[str, Any]:
  """File and line of whoever called this module or `mllog_run.py`."""
  here = str(Path(__file__).with_suffix(""))
  frame = sys._getframe(1)
  while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
    frame = frame.f_back
  path = Path(frame.f_code.co_filename)
  inside = path.is_relative_to(_PACKAGE)
  name = str(path.relative_to(_PACKAGE)) if inside else path.name
  return {"file": name, "lineno": frame.f_lineno}
