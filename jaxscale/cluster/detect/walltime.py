"""Times of a Slurm job (queued, started, ends), and a request to stop before its end."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping

from jaxscale.cluster.detect.scontrol import run_scontrol
from jaxscale.files import whole_number

_MOST_OF_A_JOB = 0.25  # otherwise a job of one minute would stop at its start


def end_time(env: Mapping[str, str] = os.environ) -> float | None:
  """Return the end of the job in seconds since 1970; None if unlimited or unknown.

  SLURM_JOB_END_TIME has the end as of the job's start (sbatch(1), "output environment
  variables"; Slurm 22.05 does not set it yet). Without it, `scontrol` is called, which
  only one process of a large run should do.
  """
  stamp = whole_number(env.get("SLURM_JOB_END_TIME", ""))
  return asked_end_time(env) if stamp is None else float(stamp)


def asked_end_time(env: Mapping[str, str] = os.environ) -> float | None:
  """Return the end from `scontrol show job`, which knows of later changes, or None."""
  job = env.get("SLURM_JOB_ID")
  shown = run_scontrol("show", "job", job) if job else None
  return None if shown is None else parse_time(shown, "EndTime")


def asked_queue_times(env: Mapping[str, str] = os.environ) -> tuple[float, float] | None:
  """Return the last times at which the job was queued and at which it started.

  A requeue sets a new SubmitTime (scontrol(1)). The result is None in all steps but the
  first one of a job, since the job has then done other work before.
  """
  job = env.get("SLURM_JOB_ID")
  if job is None or env.get("SLURM_STEP_ID") != "0":
    return None
  shown = run_scontrol("show", "job", job) or ""
  queued, started = (parse_time(shown, name) for name in ("SubmitTime", "StartTime"))
  return None if queued is None or started is None else (queued, started)


def parse_time(shown: str, name: str) -> float | None:
  """Parse a time in the output of `scontrol show job`, in the local time zone.

  Example:
    >>> parse_time("StartTime=Unknown EndTime=Unknown Deadline=N/A", "EndTime")
    >>> shown = "   StartTime=… EndTime=2026-03-01T12:00:00 Deadline=N/A"
    >>> time.strftime("%H:%M", time.localtime(parse_time(shown, "EndTime")))
    '12:00'
  """
  match = re.search(rf"\b{name}=(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown)
  with contextlib.suppress(ValueError, OverflowError):  # the date does not exist
    return time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")) if match else None
  return None


def before_end(
  ask: Callable[[str], None], before_s: float, *, end=end_time, again=asked_end_time
) -> threading.Event:
  """Call `ask` from a thread some time before the job ends.

  Near the end, the thread gets the end once more, as it may have moved (`scontrol update
  TimeLimit=`). Without a second answer the first one counts.

  Args:
    ask: a function that asks all processes to stop for the given cause.
    before_s: the seconds before the end, for the step, a save and the exit. In a short job
      they are at most a quarter of the remaining time.
    end: a function that returns the end in seconds since 1970; None if it is unknown.
    again: a function like `end` that is called near the end.

  Returns:
    An event that ends the thread when it is set.
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
