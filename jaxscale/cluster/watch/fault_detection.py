"""Fault detection: pure functions that identify the failed, hung or slow process.

A process that hangs makes all others wait for it inside a collective, so the processes
that have made no progress for longest are mostly victims. Every process passes through
the same positions in the same order (`ACTIVITIES` of step 1, of step 2, …), so the
others wait for the one that is furthest behind. A slow process slows all others in the
same way, and its step takes as long as theirs. It differs in the time that its host
needs before each step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.errors import EXIT_CRASH, EXIT_HANG

# Activities in the order of a step, each with the field of `Timeouts` that limits it. In
# "step" a process may wait for others; "input" is the host's work before the step.
# "inspecting" precedes a check of replicas or of a step with NaN or Inf, and "preparing"
# the first evaluation: both may compile, as may a user's "hook". "outside" is code that a
# program runs after the run. In "leaving" process 0 may write and plot while the others
# wait for it.
_LIMITS = """starting:startup compiling:compile input:hang step:hang inspecting:compile
  checking:hang preparing:compile evaluating:hang hook:compile saving:save outside:startup
  leaving:save"""
_PAIRS = (pair.split(":") for pair in _LIMITS.split())
ACTIVITIES = {activity: f"{limit}_timeout_s" for activity, limit in _PAIRS}
_ORDER = {activity: order for order, activity in enumerate(ACTIVITIES)}

# Longest duration of a step, in mean steps of this run: a model whose step takes a
# minute must not be reported as hung by a limit for faster models.
_MEAN_STEPS = 10.0
# A process is slow if its host's seconds exceed the median by this many robust
# standard deviations (AXLearn's watchdog uses 3 as well) and by this share of a step,
# below which nobody would notice.
_DEVIATIONS = 3.0
_SLOW_SHARE = 0.1
# A standard deviation of a normal distribution in median absolute deviations.
_SIGMA = 1.4826
_SHOWN = 8  # ranks in one line


def describe_position(step: int, activity: str) -> str:
  """Describe the position of a process in a run.

  Example:
    >>> describe_position(17, "input")
    'in step 17 (input)'
  """
  if step == 0:
    return f"before the first step ({activity})"
  return f"in step {step}" + ("" if activity == "step" else f" ({activity})")


@dataclasses.dataclass(slots=True)
class ProcessState:
  """The last reported state of a process; times are the reader's monotonic seconds.

  Attributes:
    last_heard: the time of its last message, which a thread of the process sends.
    step: the step it works on, from 1.
    activity: one of `ACTIVITIES`.
    count: the number of batches, or similar units, done in this activity.
    since: the time at which it entered this activity.
    host_s: the seconds that its host has spent before steps, in total.
    steps: the number of steps that `host_s` covers.
    mean_s: the mean seconds of its steps so far; 0 before the second step.
    has_left: True once it has closed its watch.
    steps_before_compile: the number of its steps before the last compilation.
    last_alive: the time of the last sign of life, also from its child process (`beats`).
    callback: the function of the model that JAX has called on its host and that has not
      returned for a while; "" if there is none.
  """

  last_heard: float
  step: int = 0
  activity: str = "starting"
  count: int = 0
  since: float = 0.0
  host_s: float = 0.0
  steps: int = 0
  mean_s: float = 0.0
  has_left: bool = False
  steps_before_compile: int = 0
  last_alive: float = 0.0
  callback: str = ""

  @property
  def position(self) -> tuple[int, int, int, bool]:
    """Sort key of the progress of a process.

    Of two processes in the same step, the one whose callback does not return is behind:
    the other waits for it in a collective.
    """
    order = _ORDER.get(self.activity, 0)
    return self.step, order, self.count, not self.callback

  @property
  def where(self) -> str:
    """Description of the position of the process."""
    return describe_position(self.step, self.activity)


class Fault(NamedTuple):
  """A fault that ends a run.

  Attributes:
    kind: "alone" (a process exited because it heard nothing from process 0), "died",
      "failed", "left", "consequence", "silent" or "hang".
    rank: the rank of the failed process; None if no single process is to blame.
    cause: the description that follows "process 3 on n4 " in the log.
    code: the exit code of all processes.
    is_user_error: True if the cause is a `errors.user_message`, which needs no stacks.
  """

  kind: str
  rank: int | None
  cause: str
  code: int = EXIT_CRASH
  is_user_error: bool = False


def fault_code(code: int) -> int:
  """Return the exit code of a fault, which is never that of a success.

  Example:
    >>> [fault_code(c) for c in (86, 0, -9, 10**12)]
    [86, 1, 1, 1]
  """
  return code if 0 < code < 256 else EXIT_CRASH


_States = Mapping[int, ProcessState]  # by rank


def limit_s(state: ProcessState, timeouts: Timeouts) -> float:
  """Return the seconds for which a process may stay in its activity."""
  name = ACTIVITIES.get(state.activity, "hang_timeout_s")
  if name != "hang_timeout_s":
    return getattr(timeouts, name)
  if state.steps - state.steps_before_compile < 2:
    return timeouts.compile_timeout_s
  return max(timeouts.hang_timeout_s, _MEAN_STEPS * state.mean_s)


def for_size(timeouts: Timeouts, num_processes: int) -> Timeouts:
  """Adapt the timeouts so that process 0 gets at most 1,000 heartbeats per second.

  A heartbeat costs process 0 13 µs (measured with 4,096 processes), during which its
  training thread may not run.

  Example:
    >>> for_size(Timeouts(), 4096).heartbeat_interval_s
    4.096
  """
  interval_s = max(timeouts.heartbeat_interval_s, num_processes / 1000)
  interval_s = min(interval_s, timeouts.heartbeat_timeout_s / 5)
  return dataclasses.replace(timeouts, heartbeat_interval_s=interval_s)


def silence_limit_s(activity: str, timeouts: Timeouts) -> float:
  """Return the seconds for which a process in this activity may send no heartbeat."""
  if activity not in ("starting", "compiling"):  # libraries are loaded in these
    return timeouts.heartbeat_timeout_s
  longer = timeouts.startup_timeout_s
  longer = longer if math.isfinite(longer) else Timeouts.startup_timeout_s
  return max(timeouts.heartbeat_timeout_s, longer)


def find_silent(ranks: _States, now: float, timeouts: Timeouts) -> list[Fault]:
  """Return a fault for each process without a heartbeat for too long."""
  silent = []
  for rank, state in ranks.items():
    allowed_s = silence_limit_s(state.activity, timeouts)
    if reason := silence(now, state.last_heard, state.last_alive, allowed_s, timeouts):
      for_s = f"for {now - state.last_heard:.0f} s"
      cause = f"has sent no heartbeat {for_s}, last seen {state.where} ({reason})"
      silent.append(Fault("silent", rank, cause, EXIT_HANG))
  return silent


def silence(now: float, heard: float, alive: float, allowed_s: float, timeouts: Timeouts) -> str:
  """Return why a process has been silent for too long; "" if it has not.

  Args:
    now: the present time, on the clock of `ProcessState`.
    heard: the time of its last message.
    alive: the time of the last message of its child process (`beats`).
    allowed_s: the limit from `silence_limit_s`.
    timeouts: the limits on silence.
  """
  quiet_s = now - max(heard, alive)
  if quiet_s <= timeouts.heartbeat_timeout_s and now - heard <= allowed_s:
    return ""
  # After the network is cut, the last message may come from the process or its child.
  if quiet_s > timeouts.heartbeat_timeout_s / 2:
    return "suspended, or its host is down or unreachable"
  return "it runs, but some code holds the Python GIL"


def find_blocker(ranks: _States, reporter: int, now: float, timeouts: Timeouts) -> int | None:
  """Return the process that keeps another from saving; None if none stands out.

  Args:
    ranks: the state of every process.
    reporter: the rank of the process that could not save.
    now: the present time, on the clock of `ProcessState`.
    timeouts: the interval of heartbeats.
  """
  others = [rank for rank in ranks if rank != reporter and not ranks[rank].has_left]
  oldest = min(others, key=lambda rank: ranks[rank].last_heard, default=reporter)
  if now - ranks[oldest].last_heard > 5 * timeouts.heartbeat_interval_s:
    return oldest
  last = min(others, key=lambda rank: ranks[rank].position, default=reporter)
  return last if ranks[last].position < ranks[reporter].position else None


def find_hang(ranks: _States, now: float, timeouts: Timeouts) -> Fault | None:
  """Return the fault of a run that makes no progress; None if there is none.

  There is no fault while the processes that are furthest behind are within their limits,
  however long others wait for them.

  Args:
    ranks: the state of every process.
    now: the present time, on the clock of `ProcessState`.
    timeouts: the limits of each activity.
  """
  going = {rank: state for rank, state in ranks.items() if not state.has_left}
  if not any(now - s.since > limit_s(s, timeouts) for s in going.values()):
    return None
  last = min(state.position for state in going.values())
  behind = {rank: state for rank, state in going.items() if state.position == last}
  if any(now - s.since <= limit_s(s, timeouts) for s in behind.values()):
    return None
  rank, state = next(iter(behind.items()))
  still_s = f"{now - state.since:.0f} s"
  waiting = len(going) - len(behind)
  left = [rank for rank, state in ranks.items() if state.has_left]
  if left and not waiting and state.activity in ("step", "evaluating"):
    return _left(left[0], ranks[left[0]])
  if not waiting and len(ranks) > 1:
    everyone = f"all {len(going)} processes hang {state.where} for {still_s}"
    reason = state.callback or "check the network, the devices and the model's host code"
    return Fault("hang", None, f"{everyone}: {reason}", EXIT_HANG)
  cause = f"hangs {state.where} for {still_s}"
  if state.callback:
    cause += f" in {state.callback}"
  if (quiet_s := now - state.last_heard) > 5 * timeouts.heartbeat_interval_s:
    cause += f", no heartbeat for {quiet_s:.0f} s"
  if others := [str(rank) for rank in behind][1:]:
    shown = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
    cause += f", as do {len(others)} more ({shown})"
  if waiting:
    cause += f"; {waiting} other{'s wait' if waiting > 1 else ' waits'} for it"
  return Fault("hang", rank, cause, EXIT_HANG)


def find_left(ranks: _States) -> Fault | None:
  """Return the fault of a process that exited before others finished; None if none did."""
  left = [(state.step, rank) for rank, state in ranks.items() if state.has_left]
  step, rank = min(left, default=(math.inf, 0))
  is_behind = any(state.step > step for state in ranks.values())
  return _left(rank, ranks[rank]) if is_behind else None


def _left(rank: int, state: ProcessState) -> Fault:
  return Fault("left", rank, f"exited after step {state.step} while others continue")


def root_cause(faults: Sequence[Fault]) -> Fault:
  """Return the fault that explains the others, of faults reported almost at once.

  A killed process makes its neighbours raise errors and may make others hang; an error
  kills no other process. Of several faults of one kind, the first one counts.
  """
  order = ("alone", "died", "failed", "left", "consequence", "silent", "hang")
  return min(faults, key=lambda fault: order.index(fault.kind))


def find_slow(host_s: Mapping[int, float], step_s: float) -> dict[int, float]:
  """Return the processes whose host is so slow before a step that all others wait.

  The median is the lower one, for the seconds and for their deviations, so that the
  slower of two processes is compared with the faster one.

  Args:
    host_s: the mean seconds before a step by rank, over some steps.
    step_s: the mean seconds from one step to the next.

  Returns:
    The seconds of each slow process by rank.

  Example:
    >>> find_slow({0: 0.003, 1: 0.004, 2: 0.4, 3: 0.003}, step_s=0.44)
    {2: 0.4}
  """
  if len(host_s) < 2:
    return {}
  middle = statistics.median_low(host_s.values())
  spread = statistics.median_low([abs(s - middle) for s in host_s.values()])
  bound = middle + max(_DEVIATIONS * _SIGMA * spread, _SLOW_SHARE * step_s)
  return {rank: seconds for rank, seconds in host_s.items() if seconds > bound}
