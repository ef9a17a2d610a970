"""When the time of a Slurm job ends, and a request to stop some time before."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping

from jaxscale.cluster.detect.scontrol import run_scontrol
from jaxscale.files import whole_number

_MOST_OF_A_JOB = 0.25  # else a job of a minute would stop before it began


def end_time(env: Mapping[str, str] = os.environ) -> float | None:
  """When the job ends, in seconds since 1970; None: no limit, or none is known.

  SLURM_JOB_END_TIME says what was true at the job's start (sbatch(1), "output
  environment variables"; Slurm 22.05 does not set it yet); where it is not set,
  `scontrol` is asked. On a large run only one process should ask.
  """
  given = whole_number(env.get("SLURM_JOB_END_TIME", ""))
  return asked_end_time(env) if given is None else float(given)


def asked_end_time(env: Mapping[str, str] = os.environ) -> float | None:
  """What `scontrol show job` says, which knows of later changes; None: nothing."""
  job = env.get("SLURM_JOB_ID")
  shown = run_scontrol("show", "job", job) if job else None
  return None if shown is None else parse_end_time(shown)


def parse_end_time(shown: str) -> float | None:
  """The end of the job that `scontrol show job` shows, in the local time zone.

  Example:
    >>> parse_end_time("StartTime=Unknown EndTime=Unknown Deadline=N/A")
    >>> end = parse_end_time("   StartTime=… EndTime=2026-03-01T12:00:00 Deadline=N/A")
    >>> time.strftime("%H:%M", time.localtime(end))
    '12:00'
  """
  found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown)
  with contextlib.suppress(ValueError, OverflowError):  # no such day
    return time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) if found else None
  return None


def before_end(
  ask: Callable[[str], None], before_s: float, *, end=end_time, again=asked_end_time
) -> threading.Event:
  """Call `ask` some time before the job's end, from a thread.

  The end is asked for once more when it is near, as it may have been moved
  (`scontrol update TimeLimit=`); where nobody knows, the first answer counts.

  Args:
    ask: asks all processes to stop, for the cause that it gets.
    before_s: seconds before the end: for the step, a save and the way out; of a
      short job at most a quarter of what is left of it.
    end: called for when the job ends, in seconds since 1970; None: unknown.
    again: the same, asked later.

  Returns:
    An event that, once set, ends the thread.
  """
  ended = threading.Event()

  def wait() -> None:
    at, began = end(), time.time()
    while at is not None:
      margin = min(before_s, max(0.0, _MOST_OF_A_JOB * (at - began)))
      if ended.wait(max(0.0, at - margin - time.time())):
        return
      later = again()
      if later is None or later <= at:
        ask(f"walltime: {at - time.time():.0f} s are left")
        return
      at = later

  threading.Thread(target=wait, name="walltime", daemon=True).start()
  return ended
