"""Which process is at fault: pure functions of what each has last reported.

A process that hangs makes all others wait for it inside a collective, so those
that stand still longest are mostly victims. Every process goes through the same
places in the same order (`ACTIVITIES` of step 1, of step 2, …): the one that is
furthest behind is who the others wait for. In the same way a slow process slows
all of them, and its own step takes no longer than theirs; what shows it is the
time that its host needs before each step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.errors import EXIT_CRASH, EXIT_HANG

# In the order in which a step goes through them, and which of `Timeouts` is the limit.
# "step" is where a process may wait for others; "input" is all that its host does
# before it; "inspecting" is before a check of replicas, or of a step with NaN or Inf,
# and "preparing" before the first evaluation: both may compile, as may a "hook" of the
# user's. "outside" is what a program does by itself after a run. In "leaving" the
# leader may write and plot, and the others wait for it.
_LIMITS = """starting:startup compiling:compile input:hang step:hang inspecting:compile
  checking:hang preparing:compile evaluating:hang hook:compile saving:save outside:startup
  leaving:save"""
_PAIRS = (pair.split(":") for pair in _LIMITS.split())
ACTIVITIES = {activity: f"{limit}_timeout_s" for activity, limit in _PAIRS}
_ORDER = {activity: order for order, activity in enumerate(ACTIVITIES)}

# The longest a step may take, in mean steps of this run: a model whose step
# takes a minute must not be called hung by a limit that was meant for others.
_MEAN_STEPS = 10.0
# A process is slow if its host's seconds exceed the median by this many robust
# standard deviations (AXLearn's watchdog takes 3 as well) …
_DEVIATIONS = 3.0
# … of which one is 1.4826 median absolute deviations, where they are normal.
_SIGMA = 1.4826
# … and by a part of a step that somebody would notice.
_SLOW_SHARE = 0.1
_SHOWN = 8  # ranks in one line


def describe_place(step: int, activity: str) -> str:
  """A place in words.

  Example:
    >>> describe_place(17, "input")
    'in step 17 (input)'
  """
  if step == 0:
    return f"before the first step ({activity})"
  return f"in step {step}" + ("" if activity == "step" else f" ({activity})")


@dataclasses.dataclass(slots=True)
class ProcessState:
  """What is known of a process. Times are the reader's monotonic seconds.

  Attributes:
    last_heard: when its last message came, which one of its threads sends.
    step: the step it works on, from 1.
    activity: one of `ACTIVITIES`.
    count: of the batches, or the like, in this activity.
    since: when it entered its place.
    host_s: all that its host spent before steps.
    steps: how many steps that was for.
    mean_s: of its steps so far; 0 before the second.
    has_left: it has closed its watch.
    steps_before_compile: its steps before the last compilation.
    last_alive: when anything came of it, also of its child process (`beats`).
    callback: the function of the model that JAX has called on its host and that has
      not returned for a while; "": there is none.
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
    """Order of processes by how far they are.

    Of two in one step, the one whose callback does not return is who the other waits
    for in a collective.
    """
    order = _ORDER.get(self.activity, 0)
    return self.step, order, self.count, not self.callback

  @property
  def where(self) -> str:
    """The same in words."""
    return describe_place(self.step, self.activity)


class Fault(NamedTuple):
  """What ends a run.

  Attributes:
    kind: "alone" (a process has left because it heard nothing of process 0), "died",
      "failed", "left", "consequence", "silent" or "hang".
    rank: the culprit; None where nobody is.
    cause: what happened to it, after "process 3 on n4 ".
    code: the exit code of all.
    is_user_error: the cause is `errors.user_message`, no stacks are needed.
  """

  kind: str
  rank: int | None
  cause: str
  code: int = EXIT_CRASH
  is_user_error: bool = False


def fault_code(code: int) -> int:
  """The exit code of a fault, which never ends as a success does.

  Example:
    >>> [fault_code(c) for c in (86, 0, -9, 10**12)]
    [86, 1, 1, 1]
  """
  return code if 0 < code < 256 else EXIT_CRASH


_States = Mapping[int, ProcessState]  # by rank


def limit_s(state: ProcessState, timeouts: Timeouts) -> float:
  """How long a process may stay where it is."""
  name = ACTIVITIES.get(state.activity, "hang_timeout_s")
  if name != "hang_timeout_s":
    return getattr(timeouts, name)
  if state.steps - state.steps_before_compile < 2:
    return timeouts.compile_timeout_s
  return max(timeouts.hang_timeout_s, _MEAN_STEPS * state.mean_s)


def for_size(timeouts: Timeouts, num_processes: int) -> Timeouts:
  """The time-outs for a run of this size: process 0 gets 1,000 heartbeats a second.

  One costs it 13 µs (measured with 4,096), in which its training thread may not run.

  Example:
    >>> for_size(Timeouts(), 4096).heartbeat_interval_s
    4.096
  """
  interval_s = max(timeouts.heartbeat_interval_s, num_processes / 1000)
  interval_s = min(interval_s, timeouts.heartbeat_timeout_s / 5)
  return dataclasses.replace(timeouts, heartbeat_interval_s=interval_s)


def silence_limit_s(activity: str, timeouts: Timeouts) -> float:
  """Seconds for which no thread of a process in this activity needs to run."""
  if activity not in ("starting", "compiling"):  # libraries are loaded in these
    return timeouts.heartbeat_timeout_s
  longer = timeouts.startup_timeout_s
  longer = longer if math.isfinite(longer) else Timeouts.startup_timeout_s
  return max(timeouts.heartbeat_timeout_s, longer)


def find_silent(ranks: _States, now: float, timeouts: Timeouts) -> list[Fault]:
  """Processes without a heartbeat for too long."""
  silent = []
  for rank, state in ranks.items():
    allowed_s = silence_limit_s(state.activity, timeouts)
    if reason := silence(now, state.last_heard, state.last_alive, allowed_s, timeouts):
      for_s = f"for {now - state.last_heard:.0f} s"
      cause = f"is silent {for_s}, last {state.where} ({reason})"
      silent.append(Fault("silent", rank, cause, EXIT_HANG))
  return silent


def silence(now: float, heard: float, alive: float, allowed_s: float, timeouts: Timeouts) -> str:
  """Reason why a process has been silent for too long; "": it has not.

  Args:
    now: on the clock of `ProcessState`, as the next two.
    heard: when its last message came.
    alive: when its child process (`beats`) was heard.
    allowed_s: `silence_limit_s`.
    timeouts: how long is too long.
  """
  quiet_s = now - max(heard, alive)
  if quiet_s <= timeouts.heartbeat_timeout_s and now - heard <= allowed_s:
    return ""
  # What a cut link brought last may have been of either.
  if quiet_s > timeouts.heartbeat_timeout_s / 2:
    return "stopped, or its host is gone or cut off"
  return "it runs, but some code keeps Python's lock"


def find_blocker(ranks: _States, reporter: int, now: float, timeouts: Timeouts) -> int | None:
  """Return the process that keeps another from reaching its save, if one stands out.

  Args:
    ranks: every process.
    reporter: which could not save.
    now: on the clock of `ProcessState`.
    timeouts: how often processes send.
  """
  others = [rank for rank in ranks if rank != reporter and not ranks[rank].has_left]
  oldest = min(others, key=lambda rank: ranks[rank].last_heard, default=reporter)
  if now - ranks[oldest].last_heard > 5 * timeouts.heartbeat_interval_s:
    return oldest
  last = min(others, key=lambda rank: ranks[rank].position, default=reporter)
  return last if ranks[last].position < ranks[reporter].position else None


def find_hang(ranks: _States, now: float, timeouts: Timeouts) -> Fault | None:
  """A run that stands still, and who is to blame.

  Nobody is as long as those that are furthest behind may still be where they are,
  however long others wait for them.

  Args:
    ranks: every process.
    now: on the clock of `ProcessState`.
    timeouts: how long is too long.
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
    reason = state.callback or "the network, a device, or code of the model"
    return Fault("hang", None, f"{everyone}: {reason}", EXIT_HANG)
  cause = f"hangs {state.where} for {still_s}"
  if state.callback:
    cause += f" in {state.callback}"
  if (quiet_s := now - state.last_heard) > 5 * timeouts.heartbeat_interval_s:
    cause += f", silent for {quiet_s:.0f} s"
  if others := [str(rank) for rank in behind][1:]:
    shown = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
    cause += f", as do {len(others)} more ({shown})"
  if waiting:
    cause += f"; {waiting} other{'s wait' if waiting > 1 else ' waits'} for it"
  return Fault("hang", rank, cause, EXIT_HANG)


def find_left(ranks: _States) -> Fault | None:
  """A process that has ended while others are at steps that it never made."""
  left = [(state.step, rank) for rank, state in ranks.items() if state.has_left]
  step, rank = min(left, default=(math.inf, 0))
  is_behind = any(state.step > step for state in ranks.values())
  return _left(rank, ranks[rank]) if is_behind else None


def _left(rank: int, state: ProcessState) -> Fault:
  return Fault("left", rank, f"left after step {state.step} while others continue")


def root_cause(faults: Sequence[Fault]) -> Fault:
  """The one that explains the others, of faults that came at almost one time.

  A process that is killed makes its neighbours raise, and may make others stand
  still; one that raises makes nobody die. Of one kind, the first was first.
  """
  order = ("alone", "died", "failed", "left", "consequence", "silent", "hang")
  return min(faults, key=lambda fault: order.index(fault.kind))


def find_slow(host_s: Mapping[int, float], step_s: float) -> dict[int, float]:
  """Processes whose host needs so long before a step that all wait for it.

  The median is the lower one and so is that of the deviations: of two processes
  it is the faster that the other is compared with.

  Args:
    host_s: rank -> mean seconds before a step, over some steps.
    step_s: mean seconds from one step to the next.

  Returns:
    rank -> its seconds, for those that are slow.

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
