"""Goodput: the share of a run's time spent on training, and where the rest went.

`activity.jsonl` in the workdir (run/activity.py) records what process 0 of each start did,
and for how long. With the times at which jobs were queued, it divides the time from the
first submission to the last line into:

    training    steps that counted
    lost        steps that a later start repeated from an older checkpoint, and their
                input
    input       waiting for data
    compile     waiting for XLA: before the first step, where a phase begins (with the
                trials of batch sizes and the step report), and before the first
                evaluation
    evaluation  evaluating
    saving      the pause of training for a save, not the writing in the background
    start-up    from the start of the job (or of the process, if that is not known) to
                the first step, without compile
    queue       waiting for nodes, as far as Slurm or a job's events record it
    down        from the end of a process to the next start, without queue
    other       comparing replicas, examining NaN or Inf, the summary and plots

Goodput is training as a share of all categories but the queue, which Google's "ML
Productivity Goodput" (arXiv:2502.06982) measures separately. Steps after the newest
checkpoint count as training until a restart repeats them. Time after the end of a run
that is done does not count.

The categories are those of Google's ml-goodput-measurement (`BadputType` in
https://github.com/AI-Hypercomputer/ml-goodput-measurement), for which axlearn records
events (axlearn/common/measurement.py), with evaluation and the queue added.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.files import mismatch, read_json_lines
from jaxscale.metrics import text

FILE = "activity.jsonl"
_NAMES = "training lost input compile evaluation saving start-up queue down other"
CATEGORIES: tuple[str, ...] = tuple(_NAMES.split())
# Categories of the watch's activities; all other activities are "other".
_CATEGORY = {"step": "training", "input": "input", "compiling": "compile", "preparing": "compile"}
_CATEGORY |= {"evaluating": "evaluation", "saving": "saving", "starting": "start-up"}
Wait = tuple[float, float]  # the times when a job was queued and when it got its nodes
_OF_STEPS = ("step", "input")
_LATEST = 2.0**40  # seconds; a larger value in a record is damaged
_SHAPE = {"start": float, "time": float, "step": int, "resumed": [int]}
_SHAPE |= {"seconds": {str: float}, "queued": (None, [float]), "done": bool}


class Activity(NamedTuple):
  """Activities of one process up to a time; one line of `activity.jsonl`.

  Attributes:
    start: the start of the process, in seconds since 1970.
    time: the time up to which the line counts, in seconds since 1970.
    step: the step in progress, or the next one.
    resumed: the steps after which the process began to train; several after a roll back.
    seconds: the seconds in each activity since the start; their sum is `time - start`.
    queued: the wait of the process's job; None if it is not known.
    done: True if the whole run is done.
  """

  start: float
  time: float
  step: int
  resumed: Sequence[int]
  seconds: dict[str, float]
  queued: Wait | None = None
  done: bool = False


class Goodput(NamedTuple):
  """Time of a run by category.

  Attributes:
    seconds: the seconds in each of `CATEGORIES`.
  """

  seconds: dict[str, float]

  @property
  def wall_s(self) -> float:
    """The sum of all categories in seconds."""
    return sum(self.seconds.values())

  @property
  def share(self) -> float | None:
    """Training as a share of all categories but the queue; None if those have no time."""
    held_s = self.wall_s - self.seconds["queue"]
    return self.seconds["training"] / held_s if held_s > 0 else None

  def summary(self) -> dict[str, Any]:
    """Return the values for summary.json."""
    share = None if self.share is None else round(self.share, 4)
    seconds = {name: round(s, 3) for name, s in self.seconds.items()}
    return {"goodput": share, "goodput_seconds": seconds}

  def __str__(self) -> str:
    queue_s = self.seconds["queue"]
    parts = [f"training {text.duration(self.seconds['training'])}"]
    for name, s in sorted(self.seconds.items(), key=lambda item: -item[1]):
      if name not in ("training", "queue") and s >= 0.5:
        parts.append(f"{name} {text.duration(s)}")
    held = f"{text.duration(self.wall_s - queue_s)}: {', '.join(parts)}"
    queue = f"; queue {text.duration(queue_s)}" if queue_s >= 0.5 else ""
    return f"goodput {text.cell(self.share, '.0%')} of {held}{queue}"


def read_activities(workdir: Path, *more: Activity) -> list[Activity]:
  """Return the activities recorded in a workdir, without damaged lines, and then `more`.

  Lines keep the order in which they were written. If the first line of a start is older
  than the line before, its clock was set back, and the start counts from that line on.
  """
  activities: list[Activity] = []
  for line in read_json_lines(workdir / FILE, None, _SHAPE):
    queued, times = line["queued"], (line["start"], line["time"])
    seconds = *line["seconds"].values(), times[1] - times[0]
    if all(map(is_time, (*times, *seconds, *(queued or ())))):
      line["queued"] = (queued[0], queued[1]) if queued and len(queued) == 2 else None
      activities.append(Activity(**{name: line[name] for name in _SHAPE}))
  shifts: dict[float, float] = {}
  latest = 0.0
  shifted = []
  for activity in [*activities, *more]:
    start, now = activity.start, activity.time
    shift = shifts.setdefault(start, latest - start if now < latest else 0.0)
    latest = max(latest, now + shift)
    shifted.append(activity._replace(start=start + shift, time=now + shift))
  return shifted


def is_time(value: Any) -> bool:
  """Return whether a value from JSON can be a time or a duration in seconds."""
  return mismatch(value, float) is None and 0 <= value < _LATEST


def goodput(
  activities: Iterable[Activity], waits: Iterable[Wait] = (), until: float = 0.0
) -> Goodput | None:
  """Divide the time of a run into categories.

  Args:
    activities: the activities of all starts, in any order.
    waits: additional waits of jobs, in seconds since 1970; they may overlap with each
      other and with those of the activities.
    until: the end of the last job, in seconds since 1970; 0 if it is not known.

  Returns:
    The time by category, or None if no start is recorded.

  Example:
    >>> first = Activity(0.0, 9.0, 5, [0], {"starting": 4.0, "step": 5.0})
    >>> again = Activity(12.0, 19.0, 6, [2], {"starting": 3.0, "step": 4.0}, (10, 11))
    >>> found = goodput([first, again])
    >>> {name: s for name, s in found.seconds.items() if s}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'training': 6.0, 'lost': 3.0, 'start-up': 8.0, 'queue': 1.0, 'down': 1.0}
  """
  ordered = sorted(activities, key=lambda a: (a.start, a.time))
  starts = [list(group) for _, group in itertools.groupby(ordered, lambda a: a.start)]
  if not starts:
    return None
  all_waits = [*filter(None, (lines[-1].queued for lines in starts)), *waits]
  end, was_done = min(starts[0][0].start, *(queued for queued, _ in all_waits), math.inf), False
  parts, segments = [], []
  for lines, later in itertools.zip_longest(starts, starts[1:]):
    if not was_done:
      parts.append(_gap(end, lines[0].start, all_waits, before_start=True))
    # If two processes overlap, the later one owns the workdir.
    cut = later[0].start if later else math.inf
    segments += _segments(lines, cut)
    end, was_done = min(lines[-1].time, cut), lines[-1].done
  if until > end and not was_done:
    parts.append(_gap(end, until, all_waits))
  parts += _without_lost(segments)
  return Goodput({name: sum(part.get(name, 0.0) for part in parts) for name in CATEGORIES})


def _gap(
  begin: float, end: float, waits: Sequence[Wait], *, before_start: bool = False
) -> dict[str, float]:
  """Divide a time without a process; `before_start`: a process starts at the end of it."""
  inside = [started for _, started in waits if begin < started <= end]
  ready = max(inside, default=end) if before_start else end
  queue_s, covered = 0.0, begin
  for queued, started in sorted(waits):
    queue_s += max(min(started, ready) - max(queued, covered), 0.0)
    covered = max(covered, min(started, ready))
  return {"queue": queue_s, "start-up": end - ready, "down": ready - begin - queue_s}


class _Segment(NamedTuple):
  """Activity of a process between two lines.

  Attributes:
    attempt: the start of the process, and how many times it had begun to train.
    resumed: the step after which the attempt began; None if training has not started.
    first: the step in progress at the beginning.
    last: the step in progress at the end.
    seconds: the seconds by activity.
  """

  attempt: tuple[float, int]
  resumed: int | None
  first: int
  last: int
  seconds: dict[str, float]


def _segments(lines: Sequence[Activity], cut: float) -> Iterator[_Segment]:
  """Yield the segments of one start, up to the time `cut`."""
  start = lines[0].start
  before = Activity(start, start, 0, (), {})
  for line in lines:
    end = min(line.time, cut)
    length = end - before.time
    if length < 0:
      return
    seconds = {n: max(s - before.seconds.get(n, 0.0), 0.0) for n, s in line.seconds.items()}
    # The sum differs from the length by rounding, and by more if a line is damaged.
    recorded = sum(seconds.values())
    exact = {name: s * (length / recorded) for name, s in seconds.items() if recorded > 0}
    resumed = line.resumed[-1] if line.resumed else None
    is_same = len(line.resumed) == len(before.resumed)
    first = before.step if is_same else line.resumed[-1] + 1 if line.resumed else 0
    attempt = start, len(line.resumed)
    yield _Segment(attempt, resumed, first, max(line.step, first), exact or {"": length})
    before = line


def _without_lost(segments: Sequence[_Segment]) -> Iterator[dict[str, float]]:
  """Yield each segment's seconds by category.

  Later attempts decide which steps counted. All steps between two lines count as equally
  long.
  """
  limit, newer = math.inf, None
  for segment in reversed(segments):
    if newer and newer.attempt != segment.attempt and newer.resumed is not None:
      limit = min(limit, newer.resumed)
    newer = segment
    steps = segment.last + 1 - segment.first
    kept = min(max((limit + 1 - segment.first) / steps, 0.0), 1.0)
    part = collections.defaultdict(float)
    for activity, seconds in segment.seconds.items():
      counted = seconds * kept if activity in _OF_STEPS else seconds
      part[_CATEGORY.get(activity, "other")] += counted
      part["lost"] += seconds - counted
    yield part
