"""Write the metrics of a run to `metrics.jsonl`, TensorBoard's event files, and trackers.

A disk that is full or unavailable costs lines, never the run. Lines that could not be written
are kept in memory and retried with the next line.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxscale.errors import unwritable
from jaxscale.files import open_to_append, replace_text
from jaxscale.metrics import event_file
from jaxscale.metrics.log import logger
from jaxscale.metrics.reading import read_metrics
from jaxscale.metrics.tracking import BackgroundTracker, TrackerSource

# Bytes in memory for an unavailable disk: two weeks of a line every 10 s.
_MOST_WAITING = 40_000_000


class _Appender:
  """Writer that appends to a file; what the disk does not accept is kept and retried."""

  def __init__(self, path: Path):
    self._path, self._complained = path, False
    self._descriptor, self._waiting = open_to_append(path), bytearray()

  def append(self, record: bytes = b"") -> None:
    if len(self._waiting) < _MOST_WAITING:
      self._waiting += record
    try:
      while self._waiting:
        del self._waiting[: os.write(self._descriptor, self._waiting)]
    except OSError as e:
      if not self._complained:
        self._complained = True
        waits = "training continues, and its lines wait in memory"
        logger.warning(f"{self._path}: {e.strerror}; {waits}")
    else:
      self._complained = False

  def close(self) -> None:
    self.append()
    with contextlib.suppress(OSError):  # NFS may report failed writes only on closing.
      os.close(self._descriptor)


class MetricWriter:
  """Writer of metrics to `workdir/metrics.jsonl`, event files and trackers."""

  def __init__(
    self,
    workdir: Path,
    *,
    start: int = 0,
    tensorboard: bool = True,
    trackers: Iterable[TrackerSource] = (),
    may_write: Callable[[], bool] = lambda: True,
  ):
    """Resume the record after step `start`; drop later lines.

    A run that was killed may have logged steps after its last checkpoint. These will be done
    and logged again.

    Args:
      workdir: the directory of the files.
      start: the step that the run resumes from.
      tensorboard: True also writes event files to `workdir/tensorboard`.
      trackers: the trackers that get each line, in threads of their own.
      may_write: called before each line; while it returns False, nothing is written.

    Raises:
      ConfigError: the files cannot be written at all.
    """
    path = workdir / "metrics.jsonl"
    kept = [line for line in read_metrics(path) if line["step"] <= start]
    try:
      text = "".join(json.dumps(line) + "\n" for line in kept)
      replace_text(path, text, durable=True)
      self._lines = _Appender(path)
    except OSError as e:
      raise unwritable(workdir, e) from None
    self._tensorboard_dir = workdir / "tensorboard" if tensorboard else None
    self._start, self._may_write = start, may_write
    self._events: _Appender | None = None
    logged = {name: line["step"] for line in kept for name in line}
    self._trackers = [BackgroundTracker(t, path, logged) for t in trackers]

  def write(self, step: int, metrics: dict[str, float]) -> None:
    """Write one line: the step, the metrics, and seconds since 1970."""
    if not self._may_write():
      return
    now = round(time.time(), 3)
    line = {"step": step, **metrics, "time": now}
    self._lines.append(json.dumps(line).encode() + b"\n")
    for tracker in self._trackers:
      tracker.put(line)
    if self._tensorboard_dir is not None:
      self._write_events(self._tensorboard_dir, step, metrics, now)

  def close(self, outcome: str = "done") -> None:
    """Retry lines that wait, close the files, and let trackers finish.

    Args:
      outcome: the outcome for trackers: "done", "interrupted" or "failed".
    """
    for file in filter(None, (self._lines, self._events)):
      file.close()
    for tracker in self._trackers:
      tracker.end(outcome)
    for tracker in self._trackers:
      tracker.wait()

  def _write_events(self, folder: Path, step: int, metrics: dict[str, float], now: float) -> None:
    # TensorBoard's SummaryWriter writes from a thread, which ends on a full disk; adding to the
    # queue of an ended thread would wait forever.
    records = event_file.scalars(now, step, metrics)
    if self._events is None:
      try:
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}"
        self._events = _Appender(folder / name)
      except OSError as e:
        self._tensorboard_dir = None
        logger.warning(f"{folder}: {e.strerror}; training continues without TensorBoard")
        return
      records = event_file.header(now, self._start + 1) + records
    self._events.append(records)
