"""A request to stop before the time limit of a job."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from jaxscale.cluster.schedulers import ask as ask_scheduler

_MOST_OF_A_JOB = 0.25  # otherwise a job of one minute would stop at its start


def before_end(
  ask: Callable[[str], None],
  before_s: float,
  end_time=lambda is_near: ask_scheduler(lambda s: s.end_time(os.environ, is_near)),
) -> threading.Event:
  """Call `ask` from a thread some time before the job ends.

  Near the end, the thread gets the end once more, as it may have moved (`scontrol update
  TimeLimit=`). Without a second answer the first one counts.

  Args:
    ask: a function that asks all processes to stop for the given cause.
    before_s: the seconds before the end, for the step, a save and the exit. In a short job
      they are at most a quarter of the remaining time.
    end_time: a function that returns the end in seconds since 1970, or None if it is unknown;
      its argument is True near the end.

  Returns:
    An event that ends the thread when it is set.
  """
  ended = threading.Event()

  def wait() -> None:
    at, began = end_time(False), time.time()
    while at is not None:
      margin = min(before_s, max(0.0, _MOST_OF_A_JOB * (at - began)))
      if ended.wait(max(0.0, at - margin - time.time())):
        return
      later = end_time(True)
      if later is None or later <= at:
        ask(f"walltime: {max(0.0, at - time.time()):.0f} s are left")
        return
      at = later

  threading.Thread(target=wait, name="walltime", daemon=True).start()
  return ended
