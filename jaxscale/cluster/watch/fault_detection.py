"""Whose fault it is: pure functions of what every process last said of itself.

A process that hangs makes all others wait for it inside a collective, so those
that stand still longest are mostly victims. Every process goes through the same
places in the same order (`ACTIVITIES` of step 1, of step 2, …): the one that is
furthest behind is who the others wait for. In the same way a slow process slows
all of them, and its own step takes no longer than theirs; what tells it is the
time that its host needs before each step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxscale.errors import EXIT_CRASH, EXIT_HANG

# In the order in which a step goes through them. "step" is where a process may
# wait for others; "input" is all that its host does before it; "preparing" is what
# is done for the first time after a step, and may compile; "outside" is what a program
# does by itself after a run.
ACTIVITIES = (
  "starting", "compiling", "input", "step", "preparing", "evaluating", "saving",
  "outside", "leaving",
)  # fmt: skip
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """How long a process may be silent or stand still, in seconds.

  The first three make the promise that all ends within 60 s; the others are for
  what takes long in health (the values that NVIDIA's resiliency extension
  recommends for Megatron are 600 for the start and 420 for a checkpoint).

  Attributes:
    heartbeat_interval_s: between two heartbeats.
    heartbeat_timeout_s: without a heartbeat: the process is stopped, or its host gone. (Not
      before the first compilation: loading libraries holds the GIL, and from a
      file system that a thousand processes ask at once it may take minutes.)
    hang_timeout_s: in one place between steps or in a step, or in ten mean steps of this
      run, whichever is longer.
    starting_s: before the first compilation, standing still or silent, and after a
      run; inf: there is no limit, but to silence the default.
    compiling_s: in a compilation, and up to the end of the first step, where
      devices connect and kernels are chosen.
    saving_s: in a save.
    slow_window_s: over which slow processes are looked for.
  """

  heartbeat_interval_s: float = 1.0
  heartbeat_timeout_s: float = 30.0
  hang_timeout_s: float = 50.0
  starting_s: float = 600.0
  compiling_s: float = 3600.0
  saving_s: float = 600.0
  slow_window_s: float = 30.0


def where(step: int, activity: str) -> str:
  """A place in words.

  Example:
    >>> where(17, "input")
    'in step 17 (input)'
  """
  if step == 0:
    return f"before the first step ({activity})"
  return f"in step {step}" + ("" if activity == "step" else f" ({activity})")


@dataclasses.dataclass(slots=True)
class Seen:
  """What is known of a process. Times are the reader's monotonic seconds.

  Attributes:
    heard: when it last said something.
    step: the step it works on, from 1.
    activity: one of `ACTIVITIES`.
    count: how often it said so in this activity, such as for batches.
    since: since when it is there.
    host_s: all that its host spent before steps.
    steps: how many steps that was for.
    mean_s: of its steps so far; 0 before the second.
    left: it said goodbye.
    known: its steps before the last compilation.
  """

  heard: float
  step: int = 0
  activity: str = "starting"
  count: int = 0
  since: float = 0.0
  host_s: float = 0.0
  steps: int = 0
  mean_s: float = 0.0
  left: bool = False
  known: int = 0

  @property
  def place(self) -> tuple[int, int, int]:
    """What orders processes by how far they are."""
    return self.step, _ORDER.get(self.activity, 0), self.count

  @property
  def where(self) -> str:
    """The same in words."""
    return where(self.step, self.activity)


class Fault(NamedTuple):
  """What ends a run.

  Attributes:
    kind: "died", "failed", "left", "follows", "silent" or "hang".
    rank: the culprit; None where nobody is.
    cause: what happened to it, after "process 3 on n4 ".
    code: the exit code of all.
    is_said: the cause says all that a person needs (`exits.said`): no stacks.
  """

  kind: str
  rank: int | None
  cause: str
  code: int = EXIT_CRASH
  is_said: bool = False


def limit_s(seen: Seen, limits: Limits) -> float:
  """How long a process may stay where it is."""
  if seen.activity in ("starting", "outside"):
    return limits.starting_s
  if seen.activity in ("compiling", "preparing"):
    return limits.compiling_s
  if seen.activity == "saving":
    return limits.saving_s
  if seen.activity == "leaving":
    # The leader may write and plot, and the others wait for it.
    return limits.saving_s
  if seen.steps - seen.known < 2:
    return limits.compiling_s
  return max(limits.hang_timeout_s, _MEAN_STEPS * seen.mean_s)


def for_size(limits: Limits, num_processes: int) -> Limits:
  """The limits for a run of this size, whose hub hears no more than it should.

  A heartbeat costs process 0 13 µs (measured with 4,096), in
  which its training thread may not run; so it gets at most a thousand a second.

  Example:
    >>> for_size(Limits(), 4096).heartbeat_interval_s
    4.096
  """
  enough = max(limits.heartbeat_interval_s, num_processes / 1000)
  return dataclasses.replace(
    limits, heartbeat_interval_s=min(enough, limits.heartbeat_timeout_s / 5)
  )


def silence_limit_s(activity: str, limits: Limits) -> float:
  """How long a process in this activity may be silent."""
  if activity not in ("starting", "compiling"):  # libraries are loaded in these
    return limits.heartbeat_timeout_s
  longer = limits.starting_s
  return max(
    limits.heartbeat_timeout_s, longer if math.isfinite(longer) else Limits.starting_s
  )


def find_silent(ranks: Mapping[int, Seen], now: float, limits: Limits) -> list[Fault]:
  """Those that have not been heard for too long."""
  return [
    Fault(
      "silent",
      rank,
      f"is silent for {now - seen.heard:.0f} s, last {seen.where} (stopped, or its "
      "host is gone)",
      EXIT_HANG,
    )
    for rank, seen in ranks.items()
    if now - seen.heard > silence_limit_s(seen.activity, limits)
  ]


def find_hang(ranks: Mapping[int, Seen], now: float, limits: Limits) -> Fault | None:
  """A run that stands still, and who is to blame.

  Nobody is as long as those that are furthest behind may still be where they are,
  however long others wait for them.

  Args:
    ranks: every process.
    now: on the clock of `Seen`.
    limits: how long is too long.
  """
  going = {rank: seen for rank, seen in ranks.items() if not seen.left}
  if not any(now - s.since > limit_s(s, limits) for s in going.values()):
    return None
  last = min(seen.place for seen in going.values())
  behind = {rank: seen for rank, seen in going.items() if seen.place == last}
  if any(now - s.since <= limit_s(s, limits) for s in behind.values()):
    return None
  rank, seen = next(iter(behind.items()))
  still = f"{now - seen.since:.0f} s"
  waiting = len(going) - len(behind)
  left = [rank for rank, seen in ranks.items() if seen.left]
  if left and not waiting and seen.activity in ("step", "evaluating"):
    return Fault("left", left[0], _left(ranks[left[0]]))
  if waiting or len(ranks) == 1:
    cause = f"hangs {seen.where} for {still}"
    if (quiet := now - seen.heard) > 5 * limits.heartbeat_interval_s:
      cause += f", silent for {quiet:.0f} s"
    if len(behind) > 1:
      cause += f", as do {len(behind) - 1} more ({_some([*behind][1:])})"
    if waiting:
      cause += f"; {waiting} other{'s wait' if waiting > 1 else ' waits'} for it"
    return Fault("hang", rank, cause, EXIT_HANG)
  return Fault(
    "hang",
    None,
    f"all {len(going)} processes hang {seen.where} for {still}: the network, or a "
    "device",
    EXIT_HANG,
  )


def find_left(ranks: Mapping[int, Seen]) -> Fault | None:
  """A process that has ended while others are at steps that it never made."""
  left = [(rank, seen) for rank, seen in ranks.items() if seen.left]
  if not left:
    return None
  rank, seen = min(left, key=lambda item: item[1].step)
  if any(other.step > seen.step for other in ranks.values()):
    return Fault("left", rank, _left(seen))
  return None


def _left(seen: Seen) -> str:
  return f"left after step {seen.step} while others go on"


def _some(ranks: Sequence[int], most: int = 8) -> str:
  shown = ", ".join(map(str, ranks[:most]))
  return shown + (", …" if len(ranks) > most else "")


def choose(faults: Sequence[Fault]) -> Fault:
  """The one that explains the others, of faults that came at almost one time.

  A process that is killed makes its neighbours raise, and may make others stand
  still; one that raises makes nobody die. Of one kind, the first was first.
  """
  order = ("died", "failed", "left", "follows", "silent", "hang")
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
