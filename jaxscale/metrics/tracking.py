"""Trackers: metrics for other programs, from threads that no run waits for.

A tracker may be slow, hang, raise or lose its network without stopping or slowing the run: lines
wait in memory, 40 MB for two weeks of a line every 10 s. A tracker that is opened again is caught
up from metrics.jsonl, which has every line.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.errors import abandon, message_of
from jaxscale.metrics.log import logger
from jaxscale.metrics.reading import read_metrics

_RETRY_S = 60.0  # until a failed tracker is opened again
# The time for a run that stops: Slurm kills it soon (`Timeouts.grace_s`).
_INTERRUPTED_FLUSH_S = 5.0


class Tracker(NamedTuple):
  """Receiver of a run's metrics; `config.Tracker.build` returns it.

  The functions are called in the tracker's own thread; they may take long and may raise.

  Attributes:
    log: a function of a step, the time (seconds since 1970) and values by name. The same step
      may come again with other names.
    finish: a function of the outcome: "done", "interrupted" (to be resumed) or "failed".
    known: a function of a metric's name that returns the last step that the tracker has, or
      -1; later lines of metrics.jsonl are logged first. None means that it has all earlier lines.
    note: a line to print at the end, such as the command that uploads.
  """

  log: Callable[[int, float, dict[str, float]], None]
  finish: Callable[[str], None]
  known: Callable[[str], int] | None = None
  note: str = ""


class TrackerSource(NamedTuple):
  """Way to open a tracker, again after each failure.

  Attributes:
    name: the name for messages.
    open: a function that opens the tracker. Its argument is a function that shows a line to
      the user. Opening may hang and may raise.
    flush_s: the seconds that the end of a run waits for the tracker.
  """

  name: str
  open: Callable[[Callable[[str], None]], Tracker]
  flush_s: float


Line = Mapping[str, Any]  # of metrics.jsonl: "step", "time" and values by name
# One tracker opens at a time: `ast.parse` of CPython 3.11, which imports of trackers call, fails
# in two threads at once ("AST constructor recursion depth mismatch"). One that hangs keeps the
# others waiting only so long.
_opens = threading.Lock()
_TURN_S = 10.0


class BackgroundTracker:
  """Daemon thread that passes lines to a tracker; it starts with the first line."""

  def __init__(self, source: TrackerSource, record: Path, logged: Mapping[str, int]):
    """Set up a tracker without opening it.

    Args:
      source: the source of the tracker.
      record: metrics.jsonl, to which a line is written before `put` gets it.
      logged: the last step by name in the record before this start.
    """
    self._source, self._record, self._logged = source, record, logged
    self._lines: queue.SimpleQueue[Line | str] = queue.SimpleQueue()
    self._sent: dict[str, int] = {}  # the last step by name
    self._failing: tuple[int | str, ...] = ()
    self._has_complained = self._is_finished = False
    self._ends, self._flush_s = threading.Event(), source.flush_s
    self._thread = threading.Thread(target=self._run, name=f"tracker {source.name}", daemon=True)

  def put(self, line: Line) -> None:
    """Queue a line and return at once."""
    if self._thread.ident is None:
      self._thread.start()
    self._lines.put(line)

  def end(self, outcome: str) -> None:
    """Begin to finish; `wait` waits for the end."""
    if outcome != "done":
      self._flush_s = min(self._flush_s, _INTERRUPTED_FLUSH_S)
    self._deadline = time.monotonic() + self._flush_s
    self._ends.set()
    self._lines.put(outcome)

  def wait(self) -> None:
    """Wait until the tracker has finished, at most `flush_s`."""
    if self._thread.ident is None:
      return
    self._thread.join(max(self._deadline - time.monotonic(), 0))
    if not self._is_finished:
      late = f" in {self._flush_s:g} s" if self._thread.is_alive() else ""
      if late:
        self._has_complained = True  # This is its last line.
        abandon(self._thread)
      logger.warning(f"{self._source.name} did not finish{late}; {self._record} has all lines")

  def _complain(self, what: str) -> None:
    if not self._has_complained:
      self._has_complained = True
      text = f"{self._source.name}: {what}; training continues, and metrics.jsonl has all lines"
      logger.warning(text)

  def _run(self) -> None:
    while not self._is_finished:
      try:
        with contextlib.ExitStack() as stack:
          if _opens.acquire(timeout=_TURN_S):
            stack.callback(_opens.release)
          tracker = self._source.open(logger.warning)
        self._follow(tracker)
        self._is_finished = True
        if tracker.note:
          logger.warning(tracker.note)
      except BaseException as e:  # Also exceptions that would end a process.
        self._complain(f"{type(e).__name__}: {message_of(e)}"[:300])
        if self._ends.wait(_RETRY_S):
          return

  def _follow(self, tracker: Tracker) -> None:
    """Pass the record and then line after line to the tracker, until the end."""
    known = tracker.known or (lambda name: self._logged.get(name, -1))
    for line in read_metrics(self._record):
      self._hand_over(tracker, line, known)
    while not isinstance(line := self._lines.get(), str):
      self._hand_over(tracker, line, known)
    tracker.finish(line)

  def _hand_over(self, tracker: Tracker, line: Line, known: Callable[[str], int]):
    """Log what the tracker lacks of a line; skip what fails twice."""
    step: int = line["step"]
    lacks = {
      name: value
      for name, value in line.items()
      if name not in ("step", "time") and step > max(self._sent.get(name, -1), known(name))
    }
    if not lacks:
      return
    try:
      tracker.log(step, line["time"], lacks)
    except Exception:
      this = step, *lacks  # Without values, as NaN does not equal itself.
      if this != self._failing:
        self._failing = this
        raise
    self._sent.update(dict.fromkeys(lacks, step))
