"""The record of a run: `metrics.jsonl`, TensorBoard's event files, and trackers.

A disk that is full or away costs lines, never the run: what could not be written is
kept and tried again with the next line.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxscale.errors import unwritable
from jaxscale.files import open_to_append, replace_text
from jaxscale.metrics.log import logger
from jaxscale.metrics.reading import read_metrics
from jaxscale.metrics.tracking import BackgroundTracker, Line, TrackerSource

# Lines that wait for a disk: two weeks of one every 10 s, some 40 MB.
_MOST_WAITING = 120_000


class _Appender:
  """Appends to a file; what a disk does not take is kept and tried again."""

  def __init__(self, path: Path):
    self._path, self._complained = path, False
    self._descriptor = open_to_append(path)
    self._waiting: list[bytes] = []

  def append(self, record: bytes = b"") -> None:
    if record and len(self._waiting) < _MOST_WAITING:
      self._waiting.append(record)
    try:
      while self._waiting:
        written = os.write(self._descriptor, self._waiting[0])
        rest = self._waiting[0][written:]
        self._waiting[:1] = [rest] if rest else []
    except OSError as e:
      if not self._complained:
        self._complained = True
        waits = "training continues, its lines wait for the disk"
        logger.warning(f"{self._path}: {e.strerror}; {waits}")
    else:
      self._complained = False

  def close(self) -> None:
    self.append()
    with contextlib.suppress(OSError):  # of lines that NFS had only promised to write
      os.close(self._descriptor)


class MetricWriter:
  """Appends metrics to `workdir/metrics.jsonl`, to event files, and to trackers."""

  def __init__(
    self,
    workdir: Path,
    *,
    start: int = 0,
    tensorboard: bool = True,
    trackers: Iterable[TrackerSource] = (),
    may_write: Callable[[], bool] = lambda: True,
  ):
    """Continue the record after step `start`, dropping what came later.

    A run that was killed may have logged steps beyond its last checkpoint;
    they will be done, and logged, again.

    Args:
      workdir: where the files are.
      start: the step that the run resumes from.
      tensorboard: also write event files, into `workdir/tensorboard`.
      trackers: get each line as well, in threads of their own.
      may_write: called before each line; nothing is written where it is false.

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
    self._start = start
    self._events: _Appender | None = None
    self._may_write = may_write
    logged = {name: line["step"] for line in kept for name in line}
    self._trackers = [BackgroundTracker(t, path, logged) for t in trackers]

  def write(self, step: int, metrics: dict[str, float]) -> None:
    """One line: the step, the metrics, and seconds since the epoch."""
    if not self._may_write():
      return
    now = round(time.time(), 3)
    self._lines.append(json.dumps({"step": step, **metrics, "time": now}).encode() + b"\n")
    for tracker in self._trackers:
      tracker.put(Line(step, now, metrics))
    if self._tensorboard_dir is not None:
      self._write_events(self._tensorboard_dir, step, metrics, now)

  def close(self, outcome: str = "done") -> None:
    """Try once more to write what waits, close the files, and let trackers finish.

    Args:
      outcome: for them: "done", "interrupted" or "failed".
    """
    for file in filter(None, (self._lines, self._events)):
      file.close()
    for tracker in self._trackers:
      tracker.end(outcome)
    for tracker in self._trackers:
      tracker.wait()

  def _write_events(
    self, directory: Path, step: int, metrics: dict[str, float], now: float
  ) -> None:
    # Here and not at the top: it takes 0.25 s, and the first step comes first.
    from tensorboardX.proto import event_pb2
    from tensorboardX.summary import scalar

    # Not its SummaryWriter: that writes from a thread, which a full disk ends, and
    # whoever adds to the queue of a thread that has ended waits for ever.
    event: Any = event_pb2  # protobuf makes its classes when it is imported
    records = [
      event.Event(wall_time=now, step=step, summary=scalar(name, value))
      for name, value in metrics.items()
    ]
    if self._events is None:
      try:
        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}"
        self._events = _Appender(directory / name)
      except OSError as e:
        self._tensorboard_dir = None
        logger.warning(f"{directory}: {e.strerror}; training continues without TensorBoard")
        return
      version = event.Event(wall_time=now, file_version="brain.Event:2")
      # TensorBoard forgets what a run that was killed, or another one, logged later.
      log = event.SessionLog(status=event.SessionLog.START)
      begin = event.Event(wall_time=now, step=self._start + 1, session_log=log)
      records = [version, begin, *records]
    self._events.append(b"".join(map(_framed, records)))


def _framed(event: Any) -> bytes:
  """An event as a record of TFRecord: length, its CRC, the event, its CRC."""
  from tensorboardX.record_writer import masked_crc32c

  content = event.SerializeToString()
  length = struct.pack("<Q", len(content))
  return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (length, content))
