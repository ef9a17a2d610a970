"""Monitor of a run: a thread of process 0 that gets all heartbeats and finds faults.

The monitor has one socket per process, including its own process, and never waits for
any of them. `fault_detection` and `stop_consensus` decide; the monitor informs the other
processes.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch import fault_detection, stacks
from jaxscale.cluster.watch.fault_detection import Fault, ProcessState
from jaxscale.cluster.watch.signals import StopRequest
from jaxscale.cluster.watch.stop_consensus import StopCoordinator
from jaxscale.cluster.wire import Link, encode, parse, typed
from jaxscale.errors import EXIT_CRASH, EXIT_HANG, EXIT_PREEMPTED

# The neighbours of a killed process raise errors 20 ms later (gloo, measured). Faults
# within this time are compared, so that the first one is reported.
_SETTLE_S = 0.3
# Processes report an error that all have, such as an invalid setting, at different times.
_SETTLE_USER_ERROR_S = 2.0
# The others write their stacks in this time. Afterwards JAX's coordinator ends with this
# process, and XLA aborts the others.
_LAST_MESSAGES_S = 0.6
_SLOW_AGAIN_S = 600.0  # until the same slow process is logged again


class Heartbeat(NamedTuple):
  """The position of a process in the run.

  Attributes:
    step: the step it works on, from 1.
    activity: one of `ACTIVITIES`.
    count: the number of batches, or similar units, done in the activity.
    seconds: the seconds since it entered the activity.
    host_s: the seconds that its host has spent before steps, in total.
    steps: the number of steps that `host_s` covers.
    callback: the field of the same name in `ProcessState`.
  """

  step: int
  activity: str
  count: int
  seconds: float
  host_s: float
  steps: int
  callback: str = ""


class Failure(NamedTuple):
  """The reason why a process cannot continue.

  Attributes:
    cause: the end of the line that is logged.
    code: the exit code of all processes.
    is_consequence: True if a fault of another process may be the cause, as for an error
      of communication.
    is_user_error: True if the cause is a `errors.user_message`. No stacks are written, and
      if all processes report the same cause, the line identifies no process.
    where: the position of the process in the run, which `Watch.fail` adds.
  """

  cause: str
  code: int = EXIT_CRASH
  is_consequence: bool = False
  is_user_error: bool = False
  where: str = ""


class FaultNotice(NamedTuple):
  """The message about a fault that the monitor sends to all other processes."""

  line: str
  code: int
  with_stacks: bool


class Monitor:
  """Receive heartbeats, report faults and coordinate a stop.

  The monitor's thread calls `run`, which returns once all processes have left. After a
  fault it informs the others and calls `leave`.
  """

  def __init__(
    self,
    links: Mapping[int, Link],
    hosts: Sequence[str],
    timeouts: Timeouts,
    folder: Path | None = None,
    log: Callable[[str], None] = stacks.print_line,
    leave: Callable[[int, Path | None, int, str], None] = stacks.leave,
  ):
    """Start without any heartbeat.

    Args:
      links: the link to every process, by rank.
      hosts: the host of every process, by rank.
      timeouts: the limits of silence and of each activity.
      folder: the folder for stacks; None writes none.
      log: a function that prints a line.
      leave: a function that ends this process, like `stacks.leave`.
    """
    self._links, self._hosts, self._timeouts = links, hosts, timeouts
    self._folder, self._log, self._leave = folder, log, leave
    now = time.monotonic()
    self._states = {rank: ProcessState(last_heard=now, since=now) for rank in links}
    self._first_step: dict[int, tuple[float, int]] = {}
    self._ready: set[int] = set()  # processes that have sent a message and so listen
    self._closed: set[int] = set()
    self._faults: list[Fault] = []  # while they settle, in the order of their reports
    self._settled_at = 0.0
    self._user_errors: dict[str, set[int]] = {}  # message -> who reported it
    self._stop = StopCoordinator(len(links))
    self._window = now, {rank: (0.0, 0) for rank in links}
    # The time of the last check; after this process was suspended, that of the next one.
    self._checked, self._stood_still_s = now, 0.0
    self._awake_at = now  # of the last call of `_awake`
    self._slow: tuple[float, frozenset[int]] = 0.0, frozenset()
    self._selector = selectors.DefaultSelector()
    for rank, link in links.items():
      self._selector.register(link, selectors.EVENT_READ, rank)

  def run(self) -> None:
    """Receive and check until all processes have left or a fault ends the run."""
    interval_s = self._timeouts.heartbeat_interval_s
    sent = self._awake_at = time.monotonic()
    while len(self._closed) < len(self._links):
      wait_s = _SETTLE_S / 6 if self._faults else min(0.5, interval_s / 2)
      ready = self._selector.select(wait_s)
      now = self._awake()
      self._receive(ready)
      if self._faults:
        if now >= self._settled_at or self._is_common_error():
          self._end(fault_detection.root_cause(self._faults))
          return
      elif now - self._checked >= interval_s:
        self._checked, self._stood_still_s = now, 0.0
        self._check(now)
      if now - sent >= interval_s:
        sent = now
        self._send(self._ready, {"beat": 1})
      if all(state.has_left for state in self._states.values()):
        self._send(self._states, {"bye": 1})
        self._wait_for_closed(_LAST_MESSAGES_S)
        for link in self._links.values():
          link.close()
        self._selector.close()
        return

  def _awake(self) -> float:
    """Return the time, and note whether this process stood still since the last call.

    While it was suspended, such as by `scontrol suspend`, it received nothing. The others
    must get time to send again before they are checked.
    """
    now, before = time.monotonic(), self._awake_at
    self._awake_at = now
    if now - before > self._timeouts.heartbeat_timeout_s / 2:
      self._stood_still_s = now - before
      self._checked = now + self._timeouts.heartbeat_timeout_s / 2
    return now

  def _receive(self, ready: Iterable[tuple[selectors.SelectorKey, int]]) -> None:
    for key, _ in ready:
      rank = key.data
      try:
        for message in self._links[rank].drain():
          self._handle(rank, message, self._awake())
        self._states[rank].last_alive = self._links[rank].heard
      except (EOFError, ValueError) as e:
        if isinstance(e, ValueError):
          cause = f"sent an invalid message ({e})"
          self._add_fault(Fault("failed", rank, cause))
        self._close(rank, is_gone=isinstance(e, EOFError))

  def _handle(self, rank: int, message: Any, now: float) -> None:
    message = typed(dict[str, Any], message)
    state = self._states[rank]
    state.last_heard = now
    if rank not in self._ready:
      self._ready.add(rank)
      if self._stop.is_asking:
        self._send([rank], {"hold": 1})
    if "beat" in message:
      self._update(rank, state, parse(Heartbeat, message["beat"]), now)
    elif "ask" in message:
      cause, kind = parse(StopRequest, message["ask"])
      if self._stop.ask(StopRequest(f"{cause} at {self._name(rank)}", kind)):
        self._send(self._ready, {"hold": 1})
    elif "held" in message:
      self._answer(rank, message["held"])
    elif "fail" in message:
      failure = parse(Failure, message["fail"])
      cause = failure.cause
      if failure.is_user_error:
        self._user_errors.setdefault(cause, set()).add(rank)
      else:
        cause = f"failed {failure.where}: {cause}"
        if failure.code == EXIT_PREEMPTED:
          cause += self._describe_blocker(rank, now)
      kind = "consequence" if failure.is_consequence else "failed"
      code = fault_detection.fault_code(failure.code)
      self._add_fault(Fault(kind, rank, cause, code, failure.is_user_error))
    elif "alone" in message:
      self._add_alone(rank, typed(float, message["alone"]))
    elif "bye" in message:
      state.has_left = True
      self._answer(rank, message["bye"])

  def _update(self, rank: int, state: ProcessState, beat: Heartbeat, now: float) -> None:
    """Update the state of a process from its heartbeat."""
    state.step, state.activity, state.count = beat.step, beat.activity, beat.count
    state.host_s, state.steps, state.callback = beat.host_s, beat.steps, beat.callback
    state.since = now - beat.seconds
    if state.activity == "compiling":  # a new phase, with a different step time
      state.steps_before_compile, state.mean_s = state.steps, 0.0
      self._first_step.pop(rank, None)
    if state.steps:
      began, first = self._first_step.setdefault(rank, (now, state.steps))
      if state.steps > first:
        state.mean_s = (state.since - began) / (state.steps - first)

  def _answer(self, rank: int, count: Any) -> None:
    point = self._stop.answer(rank, typed(int, count))
    if point is not None and (request := self._stop.request):
      self._log(f"{request}: all processes save and stop after the same step")
      self._send(self._ready, {"stop": [point, *request]})

  def _close(self, rank: int, *, is_gone: bool) -> None:
    self._awake()
    self._closed.add(rank)
    self._selector.unregister(self._links[rank])
    state = self._states[rank]
    if is_gone and not state.has_left:
      cause = f"died, last seen {state.where} (killed, out of memory, or aborted?)"
      if self._stood_still_s:
        cause += f" while process 0 did not run for {self._stood_still_s:.0f} s"
      self._add_fault(Fault("died", rank, cause))

  def _add_alone(self, rank: int, silent_s: float) -> None:
    """Record that a process exited because it heard nothing from this one."""
    culprit = rank
    cause = f"exited: it heard nothing from process 0 for {silent_s:.0f} s (process 0 "
    cause += "was suspended, or the network between the two failed)"
    if self._stood_still_s:
      culprit, still_s = 0, f"{self._stood_still_s:.0f} s"
      cause = f"did not run for {still_s} (suspended?); {self._name(rank)} exited"
    self._add_fault(Fault("alone", culprit, cause, EXIT_HANG))

  def _describe_blocker(self, reporter: int, now: float) -> str:
    """Return the end of a log line: the process that kept another from saving."""
    states = self._states
    rank = fault_detection.find_blocker(states, reporter, now, self._timeouts)
    if rank is None:
      return ""
    state, name = states[rank], self._name(rank)
    silent_s, for_s = now - state.last_heard, now - state.since
    if silent_s > 5 * self._timeouts.heartbeat_interval_s:
      return f"; {name} has sent no heartbeat for {silent_s:.0f} s, last seen {state.where}"
    return f"; it waits for {name}, {state.where} for {for_s:.0f} s"

  def _add_fault(self, fault: Fault) -> None:
    if not self._faults:
      settle_s = _SETTLE_USER_ERROR_S if fault.is_user_error else _SETTLE_S
      self._settled_at = time.monotonic() + settle_s
    self._faults.append(fault)

  def _check(self, now: float) -> None:
    silent = fault_detection.find_silent(self._states, now, self._timeouts)
    left = fault_detection.find_left(self._states)
    hang = fault_detection.find_hang(self._states, now, self._timeouts)
    for fault in (*silent, left, None if silent else hang):
      if fault:
        self._add_fault(fault)
    if now - self._window[0] >= self._timeouts.slow_window_s:
      self._check_speed(now)

  def _check_speed(self, now: float) -> None:
    """Log the processes that were slow in the window that has just ended."""
    began, before = self._window
    self._window = now, {r: (s.host_s, s.steps) for r, s in self._states.items()}
    steps = {r: s.steps - before[r][1] for r, s in self._states.items()}
    if min(steps.values()) < 2:
      return  # the window has too few steps
    host_s = {r: (s.host_s - before[r][0]) / steps[r] for r, s in self._states.items()}
    slow = fault_detection.find_slow(host_s, (now - began) / min(steps.values()))
    logged, slow_before = self._slow
    if slow and (frozenset(slow) != slow_before or now - logged > _SLOW_AGAIN_S):
      logged = now
      worst = max(slow, key=lambda rank: slow[rank])
      usual = sorted(host_s.values())[(len(host_s) - 1) // 2]
      more = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
      own, others = (f"{s * 1e3:.0f} ms" for s in (slow[worst], usual))
      times = f"its host needs {own} before each step, the median {others}; all others wait for it"
      self._log(f"{self._name(worst)}{more} is slow at step {self._states[worst].step}: {times}")
    self._slow = logged, frozenset(slow)

  def _name(self, rank: int) -> str:
    return f"process {rank} on {self._hosts[rank]}"

  def _send(self, ranks: Iterable[int], message: Any) -> None:
    """Send a message; a process that cannot receive is found by its missing heartbeats."""
    data = encode(message)
    for rank in ranks:
      if rank not in self._closed:
        with contextlib.suppress(OSError):
          self._links[rank].send(data, timeout=0)

  def _end(self, fault: Fault) -> None:
    """Report a fault to the others, wait until they have left, and leave."""
    name = "" if fault.rank is None else self._name(fault.rank)
    folder, who = self._folder, f"{name} " if name else ""
    if fault.is_user_error:
      folder, who = None, "" if self._is_common_error() else f"{name}: "
    line = f"error: {who}{fault.cause}{stacks.note(folder)}"
    others = [rank for rank in self._states if rank != 0]
    self._send(others, {"fault": FaultNotice(line, fault.code, not fault.is_user_error)})
    self._log(line)
    self._wait_for_closed(_LAST_MESSAGES_S)
    self._leave(fault.code, folder, 0, line)

  def _is_common_error(self) -> bool:
    """Return whether every process has reported the same user error."""
    return any(len(who) == len(self._states) for who in self._user_errors.values())

  def _wait_for_closed(self, seconds: float) -> None:
    """Wait until all others have closed their links, so that none is interrupted."""
    until = time.monotonic() + seconds
    if 0 not in self._closed:
      self._selector.unregister(self._links[0])
    while self._selector.get_map() and (left := until - time.monotonic()) > 0:
      for key, _ in self._selector.select(left):
        try:
          self._links[key.data].drain()
        except (EOFError, ValueError):
          self._selector.unregister(key.fileobj)
