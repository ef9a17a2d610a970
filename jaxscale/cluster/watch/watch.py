"""Watch of one process: it sends the position of the process once per second.

The main thread only records its position (`Watch.at`, below a microsecond). A thread
sends it to the monitor in process 0 and listens. The thread ends the process when the
monitor reports a fault or when the monitor itself is gone. It never waits for JAX or for
a collective.
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

from jaxscale.cluster.group import PeerError
from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch import beats, fault_detection, stacks
from jaxscale.cluster.watch.fault_detection import describe_position
from jaxscale.cluster.watch.monitor import Failure, FaultNotice, Monitor
from jaxscale.cluster.watch.signals import StopRequest
from jaxscale.cluster.watch.stop_consensus import StopConsensus
from jaxscale.cluster.wire import Link, is_ready, parse, typed
from jaxscale.errors import EXIT_CRASH, EXIT_HANG, user_message

# Errors of Gloo, NCCL and gRPC about a peer that is gone.
_OF_PEERS = re.compile(
  r"Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|[Cc]onnection (reset|closed|refused)"
  r"|Broken pipe|Socket closed"
)
_OWN = re.compile("RESOURCE_EXHAUSTED|OUT_OF_MEMORY")
# Seconds for the monitor's decision after `fail`, which takes up to three seconds.
_DECISION_S = 5.0


def failure_of(error: BaseException) -> Failure:
  """Convert the error that ended the main thread to a `Failure`.

  Example:
    >>> failure_of(ValueError("no such class"))[:3]
    ('ValueError: no such class', 1, False)
  """
  if message := user_message(error):
    is_lost = isinstance(error, PeerError) and error.is_lost
    return Failure(message.line, message.code, is_lost, not is_lost)
  first, name = (str(error).splitlines() or [""])[0], type(error).__name__
  if isinstance(error, SystemExit) and isinstance(error.code, int):
    return Failure(f"{name}: {first}", error.code)
  # XLA raises one type of jaxlib or, on CPUs, ValueError (measured). Full device memory
  # is not the consequence of another process's fault.
  from_xla = name in ("JaxRuntimeError", "XlaRuntimeError")
  follows = (from_xla or bool(_OF_PEERS.search(first))) and not _OWN.search(first)
  return Failure(f"{name}: {first}".removesuffix(": "), EXIT_CRASH, follows)


class Spent(NamedTuple):
  """The time that the main thread has spent in each activity.

  Attributes:
    step: the step that it works on.
    activity: the present activity.
    seconds: the seconds in each activity, including the present one.
    time: the present time on the monotonic clock.
  """

  step: int
  activity: str
  seconds: dict[str, float]
  time: float


class Watch:
  """The position of this process and the link that sends it to the monitor.

  `start` makes a watch.

  Attributes:
    stop: the consensus on the point where all processes stop.
    is_watched: True if a monitor listens.
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
    # One object, so that other threads read it atomically: step, activity, number of
    # earlier calls with the same two, start, and earlier seconds in this activity.
    self._position = (0, "starting", 0, time.monotonic(), age_s)
    self._seconds: dict[str, float] = {}  # in each activity, until its last end
    self._host = (0.0, 0)
    self._sending = threading.Lock()
    self._ended = threading.Event()
    self._is_closing = False
    self._threads: list[threading.Thread] = []
    self._stop_beats: Callable[[], None] = lambda: None
    self.stop = StopConsensus(self._ask if link else None)
    self.is_watched = link is not None

  def at(self, step: int, activity: str) -> None:
    """Record that the main thread begins an activity.

    "input" covers all work of the host before a step. In "step" the host starts a step
    and reads the metrics of finished ones.

    Args:
      step: the step that the thread works on, from 1.
      activity: one of `fault_detection.ACTIVITIES`. Another call with the same activity
        begins the next of several units, such as batches of an evaluation.
    """
    now = time.monotonic()
    step_before, before, count, since, seconds = self._position
    self._seconds[before] = seconds + now - since
    count = count + 1 if activity == before and step == step_before else 0
    self._position = (step, activity, count, now, self._seconds.get(activity, 0.0))
    if before == "input" and activity == "step":
      self._host = (self._host[0] + now - since, self._host[1] + 1)

  def spent(self) -> Spent:
    """Return the time in each activity until now; any thread may call this."""
    while True:
      position, seconds = self._position, self._seconds.copy()
      if position is self._position:  # else the main thread has just begun another activity
        break
    step, activity, _, since, before = position
    now = time.monotonic()
    seconds[activity] = before + now - since
    return Spent(step, activity, seconds, now)

  def fail(self, cause: str, code: int = EXIT_CRASH, *others: Any) -> None:
    """Report a `Failure` to all processes; with a monitor, this never returns.

    The arguments are the fields of `Failure`, of which `where` is replaced.
    """
    if self._link is None or self._ended.is_set():
      return
    code = fault_detection.fault_code(code)
    where = describe_position(*self._position[:2])
    if self._send({"fail": Failure(cause, code, *others)._replace(where=where)}):
      time.sleep(_DECISION_S)  # the watch's thread ends the process earlier
    name = f"process {self._rank} on {self._hosts[self._rank]}"
    self._leave(code, f"{name} failed {where}: {cause}")

  def close(self) -> None:
    """Wait until all other processes close their watch, and leave.

    A process that closes while others continue to train is a fault. A process that dies
    during this wait is still reported.
    """
    if self._link is None or self._is_closing:
      return
    self._is_closing = True
    self.at(self._position[0], "leaving")
    self._send(self._heartbeat())  # the last position
    self._send({"bye": self.stop.passed})
    for thread in self._threads:
      thread.join()  # the threads apply the timeouts

  def _ask(self, request: StopRequest) -> None:
    self._send({"ask": request})

  def _heartbeat(self) -> dict[str, Any]:
    step, activity, count, since, _ = self._position
    seconds = round(time.monotonic() - since, 4)
    host, steps = self._host
    is_late = seconds > self._timeouts.hang_timeout_s / 2
    callback = stacks.find_callback() if is_late else ""
    return {"beat": [step, activity, count, seconds, round(host, 6), steps, callback]}

  def _send(self, message: object) -> bool:
    """Send a message; return whether it was sent.

    The watch's thread detects a closed connection.
    """
    assert self._link is not None
    with self._sending, contextlib.suppress(OSError):
      self._link.send(message, timeout=1.0)
      return True
    return False

  def _run(self) -> None:
    """Run the watch's thread: send, listen, leave."""
    assert self._link is not None
    timeouts = self._timeouts
    heard = before = next_beat = time.monotonic()
    while True:
      now = time.monotonic()
      if (gap_s := now - before) > timeouts.heartbeat_timeout_s / 2:
        heard += gap_s  # this process was suspended, so the silence is its own
        self._link.heard += gap_s
      before = now
      # Until this process trains, process 0 may still be starting.
      is_early = self._position[1] in ("starting", "compiling")
      activity = "starting" if is_early else "step"
      allowed_s = fault_detection.silence_limit_s(activity, timeouts)
      alive = self._link.heard
      if reason := fault_detection.silence(now, heard, alive, allowed_s, timeouts):
        # If process 0 resumes, it reports why this process has exited.
        self._send({"alone": round(now - heard, 1)})
        what = f"has sent nothing for {now - heard:.0f} s ({reason})"
        self._leave_without_monitor(what, EXIT_HANG)
      if now >= next_beat:
        next_beat = now + timeouts.heartbeat_interval_s
        self._send(self._heartbeat())
        # While the GIL is held, this thread sends nothing. The monitor reports that
        # before this timer ends the process.
        stacks.arm(1.5 * allowed_s + 3 * timeouts.heartbeat_interval_s)
      if not is_ready(self._link, next_beat):
        continue
      try:
        messages = self._link.drain()
        heard = time.monotonic() if messages else heard
        if any(map(self._handle, messages)):
          return
      except EOFError:
        self._leave_without_monitor("died (killed, out of memory, or aborted?)", EXIT_CRASH)
      except ValueError as e:
        self._leave_without_monitor(f"sent an invalid message ({e})", EXIT_CRASH)

  def _handle(self, message: Any) -> bool:
    """Obey a message of the monitor; return True if it was the last one."""
    message = typed(dict[str, Any], message)
    if "hold" in message:
      self._send({"held": self.stop.hold()})
    elif "stop" in message:
      point, *request = typed(list[Any], message["stop"])
      self.stop.decide(typed(int, point), parse(StopRequest, request))
    elif "fault" in message:
      # The monitor prints the line; this process writes it above its stacks.
      fault = parse(FaultNotice, message["fault"])
      folder = self._folder if fault.with_stacks else None
      code = fault_detection.fault_code(fault.code)
      stacks.leave(code, folder, self._rank, fault.line)
    elif "bye" in message:
      self._ended.set()
      stacks.disarm()
      assert self._link is not None
      self._stop_beats()  # the child also holds the link open
      self._link.close()
      return True
    return False

  def _leave_without_monitor(self, what: str, code: int) -> NoReturn:
    """Report that process 0 is gone, as every process does, and leave."""
    position = describe_position(*self._position[:2])
    self._leave(code, f"process 0 on {self._hosts[0]} {what}, noticed {position}")

  def _leave(self, code: int, cause: str) -> NoReturn:
    line = f"error: {cause}{stacks.note(self._folder)}"
    stacks.print_line(line)
    stacks.leave(code, self._folder, self._rank, line)

  def _when_main_ends(self) -> None:
    """Report the end of the main thread, unless the main thread has done so itself.

    This runs in a thread that the interpreter waits for before it runs exit handlers.
    JAX's exit handler would first wait for the other processes.
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
  """Start the watch, after the rendezvous and before the first use of JAX.

  Args:
    links: in process 0 the links to all others by rank, in the others {0: link}. The
      watch closes them.
    rank: the rank of this process.
    hosts: the host of every process, by rank.
    timeouts: the limits; None uses the defaults.
    folder: the folder for stacks, created at the first fault; None writes none.
    watch_alone: whether a run of one process is also watched for hangs.
    age_s: the seconds that this process has already spent "starting".

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
  """Run the monitor's thread; an error in it ends the run, which needs a monitor."""
  try:
    monitor.run()
  except Exception:
    line = f"error: the monitor in process 0 failed\n{traceback.format_exc()}"
    stacks.print_line(line)
    stacks.leave(EXIT_CRASH, folder, 0, line)
