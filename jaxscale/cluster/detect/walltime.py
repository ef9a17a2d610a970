"""When a Slurm job is queued, starts and ends, and a request to stop before its end."""

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
  return None if shown is None else parse_time(shown, "EndTime")


def asked_queue_times(env: Mapping[str, str] = os.environ) -> tuple[float, float] | None:
  """When the job was queued the last time, and when it got its nodes after that.

  A requeue is a new SubmitTime (scontrol(1)). None is returned in any step but the
  first of a job: what the job did before it is not known.
  """
  job = env.get("SLURM_JOB_ID")
  if job is None or env.get("SLURM_STEP_ID") != "0":
    return None
  shown = run_scontrol("show", "job", job) or ""
  queued, started = (parse_time(shown, name) for name in ("SubmitTime", "StartTime"))
  return None if queued is None or started is None else (queued, started)


def parse_time(shown: str, name: str) -> float | None:
  """A time of the job that `scontrol show job` shows, in the local time zone.

  Example:
    >>> parse_time("StartTime=Unknown EndTime=Unknown Deadline=N/A", "EndTime")
    >>> shown = "   StartTime=… EndTime=2026-03-01T12:00:00 Deadline=N/A"
    >>> time.strftime("%H:%M", time.localtime(parse_time(shown, "EndTime")))
    '12:00'
  """
  found = re.search(rf"\b{name}=(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown)
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
