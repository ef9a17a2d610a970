"""Every process's side of the watch: it sends where it is, once a second.

The main thread only notes where it is (`Watch.at`, below a microsecond). A thread
sends that to process 0's monitor, listens, and leaves when the monitor says that the
run is over, or when the monitor itself is gone. None of this waits for JAX, or for a
collective.
"""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch import beats, fault_detection, stacks
from jaxscale.cluster.watch.fault_detection import describe_place
from jaxscale.cluster.watch.monitor import FaultNotice, Monitor
from jaxscale.cluster.watch.stop_consensus import StopConsensus, StopRequest
from jaxscale.cluster.wire import Link, is_ready, parse, typed
from jaxscale.errors import EXIT_CRASH, EXIT_HANG, user_message

# What Gloo, NCCL and gRPC report of a peer that is gone.
_OF_PEERS = re.compile(
  r"Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|[Cc]onnection (reset|closed|refused)"
  r"|Broken pipe|Socket closed"
)
_OWN = re.compile("RESOURCE_EXHAUSTED|OUT_OF_MEMORY")
# The monitor's decision after `fail`: settling and sending take up to three seconds.
_DECISION_S = 5.0


class Failure(NamedTuple):
  """Why a process cannot continue.

  Attributes:
    cause: for the end of a line.
    code: the exit code of all processes.
    is_consequence: it may come from the fault of another process, as an error of
      communication does.
    is_user_error: the cause is `errors.user_message`: no stacks are written, and where
      all processes report the same, no process is named.
  """

  cause: str
  code: int = EXIT_CRASH
  is_consequence: bool = False
  is_user_error: bool = False


def failure_of(error: BaseException) -> Failure:
  """What an error that ended the main thread means.

  Example:
    >>> failure_of(ValueError("no such class"))[:3]
    ('ValueError: no such class', 1, False)
  """
  if message := user_message(error):
    return Failure(message.line, message.code, is_user_error=True)
  first, name = (str(error).splitlines() or [""])[0], type(error).__name__
  if isinstance(error, SystemExit) and isinstance(error.code, int):
    return Failure(f"{name}: {first}", error.code)
  # XLA's errors are of jaxlib's one type or, on CPU, of ValueError (measured). A
  # device whose memory is full is nobody else's fault.
  from_xla = name in ("JaxRuntimeError", "XlaRuntimeError")
  follows = (from_xla or bool(_OF_PEERS.search(first))) and not _OWN.search(first)
  return Failure(f"{name}: {first}".removesuffix(": "), EXIT_CRASH, follows)


class Spent(NamedTuple):
  """What the main thread has done so far.

  Attributes:
    step: that it works on.
    activity: that it is in.
    seconds: in each activity, this one until now.
    time: now, on the monotonic clock.
  """

  step: int
  activity: str
  seconds: dict[str, float]
  time: float


class Watch:
  """What a process notes about itself, and the link that sends it.

  Make it with `start`.

  Attributes:
    stop: the consensus on where to stop.
    is_watched: whether a monitor listens: there are others, or it was asked for.
  """

  def __init__(
    self,
    rank: int,
    hosts: Sequence[str],
    link: Link | None,
    timeouts: Timeouts,
    folder: Path | None,
    age_s: float = 0.0,
  ):
    self._rank, self._hosts, self._link = rank, hosts, link
    self._timeouts, self._folder = timeouts, folder
    # One object, read at once: step, activity, count of the same before, since when,
    # and the seconds in this activity until then.
    self._place = (0, "starting", 0, time.monotonic(), age_s)
    self._seconds: dict[str, float] = {}  # in each activity, until it was left
    self._host = (0.0, 0)
    self._sending = threading.Lock()
    self._ended = threading.Event()
    self._is_closing = False
    self._threads: list[threading.Thread] = []
    self._stop_beats: Callable[[], None] = lambda: None
    self.stop = StopConsensus(self._ask if link else None)
    self.is_watched = link is not None

  def at(self, step: int, activity: str) -> None:
    """Note where the main thread is, as it enters it.

    "input" is all that the host does before a step, "step" where it starts one
    and reads the metrics of finished ones.

    Args:
      step: the one that is being worked on, from 1.
      activity: one of `fault_detection.ACTIVITIES`. The same again: the next of
        several, such as batches of an evaluation.
    """
    now = time.monotonic()
    step_before, before, count, since, seconds = self._place
    self._seconds[before] = seconds + now - since
    count = count + 1 if activity == before and step == step_before else 0
    self._place = (step, activity, count, now, self._seconds.get(activity, 0.0))
    if before == "input" and activity == "step":
      self._host = (self._host[0] + now - since, self._host[1] + 1)

  def spent(self) -> Spent:
    """What the main thread has done until now, for any thread."""
    while True:
      place, seconds = self._place, self._seconds.copy()
      if place is self._place:  # else the main thread has just left it
        break
    step, activity, _, since, before = place
    now = time.monotonic()
    seconds[activity] = before + now - since
    return Spent(step, activity, seconds, now)

  def fail(self, cause: str, code: int = EXIT_CRASH, *kind: bool) -> None:
    """Report a `Failure`, of these fields, to all; with a monitor, never returns."""
    if self._link is None or self._ended.is_set():
      return
    code = fault_detection.fault_code(code)
    failure = Failure(cause, code, *kind)
    where = describe_place(*self._place[:2])
    if self._send({"fail": [*failure, where]}):
      time.sleep(_DECISION_S)  # the watch's thread leaves before
    name = f"process {self._rank} on {self._hosts[self._rank]}"
    self._leave(code, f"{name} failed {where}: {cause}")

  def close(self) -> None:
    """Leave in good order, once all others do.

    A process that closes while others continue to train is a fault, and one that dies
    now is still named.
    """
    if self._link is None or self._is_closing:
      return
    self._is_closing = True
    self.at(self._place[0], "leaving")
    self._send(self._heartbeat())  # where it left
    self._send({"bye": self.stop.passed})
    for thread in self._threads:
      thread.join()  # they know the time-outs

  def _ask(self, request: StopRequest) -> None:
    self._send({"ask": request})

  def _heartbeat(self) -> dict[str, Any]:
    step, activity, count, since, _ = self._place
    seconds = round(time.monotonic() - since, 4)
    host, steps = self._host
    is_late = seconds > self._timeouts.hang_timeout_s / 2
    callback = stacks.find_callback() if is_late else ""
    return {"beat": [step, activity, count, seconds, round(host, 6), steps, callback]}

  def _send(self, message: object) -> bool:
    """Whether it was sent; a closed connection is found by the watch's thread."""
    assert self._link is not None
    with self._sending, contextlib.suppress(OSError):
      self._link.send(message, timeout=1.0)
      return True
    return False

  def _run(self) -> None:
    """The watch's thread: send, listen, leave."""
    assert self._link is not None
    timeouts = self._timeouts
    heard = before = next_beat = time.monotonic()
    while True:
      now = time.monotonic()
      if (gap_s := now - before) > timeouts.heartbeat_timeout_s / 2:
        heard += gap_s  # suspended and continued: nobody was silent
        self._link.heard += gap_s
      before = now
      # Process 0 may be starting for as long as this one is not training yet.
      is_early = self._place[1] in ("starting", "compiling")
      activity = "starting" if is_early else "step"
      allowed_s = fault_detection.silence_limit_s(activity, timeouts)
      alive = self._link.heard
      if reason := fault_detection.silence(now, heard, alive, allowed_s, timeouts):
        # When it continues, it is to know why this process has left.
        self._send({"alone": round(now - heard, 1)})
        reason = f" for {now - heard:.0f} s ({reason})"
        self._leave_without_monitor("is silent", EXIT_HANG, reason)
      if now >= next_beat:
        next_beat = now + timeouts.heartbeat_interval_s
        self._send(self._heartbeat())
        # A process whose GIL is held sends nothing. Before this ends it, the monitor
        # has found it silent.
        stacks.arm(1.5 * allowed_s + 3 * timeouts.heartbeat_interval_s)
      if not is_ready(self._link, next_beat):
        continue
      try:
        messages = self._link.drain()
        heard = time.monotonic() if messages else heard
        if any(map(self._handle, messages)):
          return
      except EOFError:
        why = " (killed, out of memory, or aborted?)"
        self._leave_without_monitor("died", EXIT_CRASH, why)
      except ValueError as e:
        self._leave_without_monitor("sends what is not a message", EXIT_CRASH, f" ({e})")

  def _handle(self, message: Any) -> bool:
    """Do what the monitor says; whether it was its last message."""
    message = typed(dict[str, Any], message)
    if "hold" in message:
      self._send({"held": self.stop.hold()})
    elif "stop" in message:
      point, *request = typed(list[Any], message["stop"])
      self.stop.decide(typed(int, point), parse(StopRequest, request))
    elif "fault" in message:
      # The monitor prints the line; here it heads the stacks.
      fault = parse(FaultNotice, message["fault"])
      folder = self._folder if fault.with_stacks else None
      code = fault_detection.fault_code(fault.code)
      stacks.leave(code, folder, self._rank, fault.line)
    elif "bye" in message:
      self._ended.set()
      stacks.disarm()
      assert self._link is not None
      self._stop_beats()  # the child has the link open, too
      self._link.close()
      return True
    return False

  def _leave_without_monitor(self, what: str, code: int, why: str) -> NoReturn:
    """Process 0 is gone, so every process reports it by itself."""
    place = describe_place(*self._place[:2])
    self._leave(code, f"process 0 on {self._hosts[0]} {what}, seen {place}{why}")

  def _leave(self, code: int, cause: str) -> NoReturn:
    line = f"error: {cause}{stacks.note(self._folder)}"
    stacks.print_line(line)
    stacks.leave(code, self._folder, self._rank, line)

  def _when_main_ends(self) -> None:
    """Report how the main thread ended, if it has not done so itself.

    In a thread that the interpreter waits for before it runs exit handlers, of
    which JAX's would wait for the others first.
    """
    threading.main_thread().join()
    if self._is_closing:
      return
    raised = getattr(sys, "last_value", None)
    if isinstance(raised, BaseException):
      self.fail(*failure_of(raised))
    self.close()


def start(
  links: Mapping[int, Link],
  rank: int,
  hosts: Sequence[str],
  *,
  timeouts: Timeouts | None = None,
  folder: Path | None = None,
  watch_alone: bool = False,
  age_s: float = 0.0,
) -> Watch:
  """Start to watch, after the rendezvous and before JAX is asked for anything.

  Args:
    links: in process 0 those to all others by rank, elsewhere {0: link}; they belong
      to the watch from here on.
    rank: of this process.
    hosts: of every process.
    timeouts: None: the defaults.
    folder: for stacks, made when there is something to write; None: none.
    watch_alone: a run of one process is watched for hangs too.
    age_s: seconds that this process has spent "starting" before.

  Example:
    >>> watch = start({}, 0, ["localhost"])
    >>> watch.at(1, "step")
    >>> watch.stop.poll()
    >>> watch.close()
  """
  timeouts = fault_detection.for_size(timeouts or Timeouts(), len(hosts))
  link, monitor = links.get(0), None
  if rank == 0 and (links or watch_alone):
    link, inner = map(Link, socket.socketpair())
    monitor = Monitor({0: inner, **links}, hosts, timeouts, folder)
  watch = Watch(rank, hosts, link, timeouts, folder, age_s)
  if link is None:
    return watch
  if links:
    files = [each.fileno() for each in links.values()]
    watch._stop_beats = beats.start(files, timeouts.heartbeat_interval_s)
  targets: dict[str, Callable[[], None]] = {"jaxscale-watch": watch._run}
  if monitor:
    targets["jaxscale-monitor"] = functools.partial(_run_monitor, monitor, folder)
  thread = functools.partial(threading.Thread, daemon=True)
  watch._threads = [thread(target=target, name=name) for name, target in targets.items()]
  at_exit = threading.Thread(target=watch._when_main_ends, name="jaxscale-exit")
  for thread in (*watch._threads, at_exit):
    thread.start()
  return watch


def _run_monitor(monitor: Monitor, folder: Path | None) -> None:
  """The monitor's thread; a bug of its own must not leave the run without one."""
  try:
    monitor.run()
  except Exception:
    line = f"error: the watch in process 0 failed\n{traceback.format_exc()}"
    stacks.print_line(line)
    stacks.leave(EXIT_CRASH, folder, 0, line)
