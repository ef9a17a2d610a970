"""Activity record of a run, `activity.jsonl`: seconds spent in each activity.

A thread of process 0 appends a line from time to time, and training never waits for the
thread. Each line has the totals since the start of the process, so the next line makes up
for a line that was lost to a full disk or damaged. A run that is killed loses the time
since its last line: 1 s, or 1 % of the time that it has run, and at most a minute.
`run.goodput` reads the record.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxscale import cluster
from jaxscale.cluster import schedulers
from jaxscale.cluster.watch.watch import Watch
from jaxscale.files import open_to_append
from jaxscale.run.goodput import FILE, Activity, goodput, read_activities

_SHORTEST_S, _LONGEST_S, _SHARE = 1.0, 60.0, 0.01  # the time between two lines
_WAIT_S = 1.0  # A disk may block the other thread.
_WITHIN_A_STEP = ("starting", "compiling", "input", "step")


class ActivityRecord:
  """Writer of the activity record of this start of a run; only process 0 writes."""

  def __init__(self, workdir: Path, watch: Watch, may_write: Callable[[], bool]):
    """Open the record.

    Args:
      workdir: the run's workdir.
      watch: the watch that times the main thread. The first run in a process also counts
        the time since the process started.
      may_write: called before each line; while it returns False, nothing is written.
    """
    first = watch.spent()
    is_first = first.seconds.keys() == {"starting"}
    self._before = {} if is_first else first.seconds
    self._since_1970 = time.time() - first.time
    self._start = first.time - (first.seconds["starting"] if is_first else 0.0)
    self._workdir, self._watch, self._may_write = workdir, watch, may_write
    self._resumed: list[int] = []
    self._queued: tuple[float, float] | None = None
    self._is_done = False
    self._must_end_line = True  # An earlier writer may have been killed within a line.
    self._lock = threading.Lock()
    self._is_on, self._ended = cluster.is_leader(), threading.Event()
    self._thread = threading.Thread(target=self._run, name="activity", daemon=True)

  def __enter__(self):
    if self._is_on:
      self._thread.start()
    return self

  def __exit__(self, *_):
    if self._is_on:
      self._ended.set()
      self._thread.join(_WAIT_S)  # The disk may block the thread.
      self._append(self.now())

  def resumes(self, step: int) -> None:
    """Record that training starts after `step`; later steps of earlier starts are lost."""
    if self._is_on:
      self._append(self.now())  # The time until now belongs to the attempt before.
      self._resumed = [*self._resumed, step]

  def finish(self) -> None:
    """Record that the run is done; time after this start does not count."""
    self._is_done = True

  def now(self) -> Activity:
    """Return what this process has done so far."""
    spent, before = self._watch.spent(), self._before
    seconds = {name: s - before.get(name, 0.0) for name, s in spent.seconds.items()}
    seconds = {name: round(s, 3) for name, s in seconds.items() if s > 0}
    start, now = (round(t + self._since_1970, 3) for t in (self._start, spent.time))
    step = spent.step + (spent.activity not in _WITHIN_A_STEP)
    return Activity(start, now, step, self._resumed, seconds, self._queued, self._is_done)

  def summary(self) -> dict[str, Any]:
    """Return the goodput of all starts for summary.json; empty in all but process 0."""
    if not self._is_on:
      return {}
    times = goodput(read_activities(self._workdir, self.now()))
    return times.summary() if times else {}

  def _run(self) -> None:
    """Append lines until the record is closed."""
    self._append(self.now())
    if cluster.is_job():
      self._queued = schedulers.ask(lambda scheduler: scheduler.queue_times(os.environ))
    while not self._ended.wait(self._pause_s()):
      self._append(self.now())

  def _pause_s(self) -> float:
    """Return the seconds until the next line."""
    lived = self._watch.spent().time - self._start
    return min(max(_SHARE * lived, _SHORTEST_S), _LONGEST_S)

  def _append(self, activity: Activity) -> None:
    """Append a line; after a failure, the next line has the same totals."""
    if not self._may_write():
      return
    # Only one thread writes at a time, but neither waits for long, as a disk may hang.
    is_alone = self._lock.acquire(timeout=_WAIT_S)
    try:
      self._write(json.dumps(activity._asdict()).encode() + b"\n")
    finally:
      if is_alone:
        self._lock.release()

  def _write(self, line: bytes) -> None:
    must_end_line, self._must_end_line = self._must_end_line, True
    with (
      contextlib.suppress(OSError),
      open(open_to_append(self._workdir / FILE), "ab", buffering=0) as file,
    ):
      if must_end_line and os.fstat(file.fileno()).st_size:
        line = b"\n" + line
      self._must_end_line = file.write(line) != len(line)
