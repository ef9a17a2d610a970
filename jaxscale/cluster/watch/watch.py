"""Every process's side of the watch: where it is, told once a second.

The main thread only notes where it is (`Watch.at`, below a microsecond). A thread
tells process 0's hub, listens, and leaves when the hub says that the run is over,
or when the hub itself is gone. None of this waits for JAX, or for a collective.
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
from typing import NoReturn

from jaxscale.cluster.watch import stacks
from jaxscale.cluster.watch.fault_detection import (
  Limits,
  for_size,
  silence_limit_s,
  where,
)
from jaxscale.cluster.watch.monitor import Hub
from jaxscale.cluster.watch.stop_consensus import Stop
from jaxscale.cluster.wire import Receiver, encode, is_readable
from jaxscale.errors import EXIT_CRASH, EXIT_HANG, said

# What is said of a peer that is gone, by Gloo, NCCL and gRPC.
_OF_PEERS = re.compile(
  r"Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|[Cc]onnection (reset|closed|refused)"
  r"|Broken pipe|Socket closed"
)
_OWN = re.compile("RESOURCE_EXHAUSTED|OUT_OF_MEMORY")

# The verdict after `fail`: settling and telling take up to three seconds.
_VERDICT_S = 5.0


class Watch:
  """What a process notes about itself, and the link that tells it.

  Make it with `start`.

  Attributes:
    stop: the agreement on where to stop.
    is_watched: whether a hub listens: there are others, or it was asked for.
  """

  def __init__(
    self,
    rank: int,
    hosts: Sequence[str],
    link: socket.socket | None,
    limits: Limits,
    folder: Path | None,
  ):
    self._rank, self._hosts, self._link = rank, hosts, link
    self._limits, self._folder = limits, folder
    self._place = (0, "starting", 0, time.monotonic())  # one object: read at once
    self._host = (0.0, 0)
    self._sending = threading.Lock()
    self._ended = threading.Event()
    self._is_closing = False
    self._threads: list[threading.Thread] = []
    self.stop = Stop(self._ask if link else None)
    self.is_watched = link is not None

  def at(self, step: int, activity: str) -> None:
    """Note where the main thread is, as it goes there.

    "input" is all that the host does before a step, "step" where it starts one
    and reads what others have finished.

    Args:
      step: the one that is being worked on, from 1.
      activity: one of `verdict.ACTIVITIES`. The same again: the next of several, such as
        batches of an evaluation.
    """
    now = time.monotonic()
    step_before, before, count, since = self._place
    if activity == before and step == step_before:
      self._place = (step, activity, count + 1, now)
      return
    if before == "input" and activity == "step":
      seconds, steps = self._host
      self._host = (seconds + now - since, steps + 1)
    self._place = (step, activity, 0, now)

  def fail(
    self,
    cause: str,
    code: int = EXIT_CRASH,
    follows: bool = False,
    is_said: bool = False,
  ) -> None:
    """Tell the others that this process cannot go on; with others, never returns.

    Args:
      cause: what happened, for the end of a line.
      code: the exit code of all.
      follows: it may come from the fault of another process, as an error of
        communication does.
      is_said: the cause says enough, as `exits.said` has it: no stacks are written,
        and where all say the same, it is of nobody in particular.
    """
    if self._link is None or self._ended.is_set():
      return
    here = where(*self._place[:2])
    message = {"fail": cause, "code": code, "follows": follows, "where": here}
    if self._send(message | {"said": is_said}):
      time.sleep(_VERDICT_S)  # the link's thread leaves before
    name = f"process {self._rank} on {self._hosts[self._rank]}"
    self._leave(code, f"error: {name} failed {here}: {cause}", speak=True)

  def close(self) -> None:
    """Say goodbye, and wait until all others have.

    A process that closes while others train on is a fault, and one that dies now
    is still named.
    """
    if self._link is None or self._is_closing:
      return
    self._is_closing = True
    self.at(self._place[0], "leaving")
    self._send(self._beat())  # where it left
    self._send({"bye": self.stop.passed()})
    for thread in self._threads:
      thread.join()  # they know the limits

  def _ask(self, reason: str) -> None:
    self._send({"ask": reason})

  def _beat(self) -> dict[str, object]:
    step, activity, count, since = self._place
    seconds = round(time.monotonic() - since, 4)
    host, steps = self._host
    return {"beat": [step, activity, count, seconds, round(host, 6), steps]}

  def _send(self, message: object) -> bool:
    """Whether it was sent; whose end is gone will be found by the link's thread."""
    assert self._link is not None
    with self._sending, contextlib.suppress(OSError):
      self._link.sendall(encode(message))
      return True
    return False

  def _run(self) -> None:
    """The link's thread: tell, listen, leave."""
    assert self._link is not None
    receiver, limits = Receiver(self._link), self._limits
    heard = before = time.monotonic()
    following = before
    while True:
      now = time.monotonic()
      if now - before > limits.heartbeat_timeout_s / 2:
        heard += now - before  # stopped and continued: nobody's silence
      before = now
      # Process 0 may be starting for as long as this one is not training yet.
      is_early = self._place[1] in ("starting", "compiling")
      silence = silence_limit_s("starting" if is_early else "step", limits)
      if now - heard > silence:
        silent = f" for {silence:.0f} s (stopped, or its host cut off)"
        self._alone("is silent", EXIT_HANG, silent)
      if now >= following:
        following = now + limits.heartbeat_interval_s
        self._send(self._beat())
        # A process whose GIL is held sends nothing. Before this ends it, the hub
        # has called it silent.
        stacks.arm(1.5 * silence + 3 * limits.heartbeat_interval_s)
      if not is_readable(self._link, following - now):
        continue
      heard = time.monotonic()
      try:
        messages = receiver.drain()
      except (EOFError, ValueError):
        self._alone("died", EXIT_CRASH, " (killed, out of memory, or aborted?)")
      if any(self._hear(message) for message in messages):
        return

  def _hear(self, message: dict[str, object]) -> bool:
    """Do what the hub says; whether it was the last word."""
    if "where" in message:
      self._send({"here": self.stop.hold()})
    elif "stop" in message:
      self.stop.decided(*message["stop"])  # type: ignore[misc]
    elif "fault" in message:
      # The hub prints the line; here it heads the stacks.
      folder = self._folder if message["stacks"] else None
      code, line = message["code"], message["fault"]
      stacks.leave(code, folder, self._rank, line)  # type: ignore[arg-type]
    elif "bye" in message:
      self._ended.set()
      stacks.disarm()
      assert self._link is not None
      self._link.close()
      return True
    return False

  def _alone(self, what: str, code: int, why: str) -> NoReturn:
    """The hub is gone, so every process says so itself."""
    hub = f"error: process 0 on {self._hosts[0]} {what}"
    self._leave(code, f"{hub}, seen {where(*self._place[:2])}{why}", speak=True)

  def _leave(self, code: int, line: str, *, speak: bool = False) -> NoReturn:
    line += _ending(self._folder) if speak else ""
    if speak:
      stacks.say(line)
    stacks.leave(code, self._folder, self._rank, line)

  def _when_main_ends(self) -> None:
    """Say how the main thread ended, if it has not said so itself.

    In a thread that the interpreter waits for before it runs exit handlers, of
    which JAX's would wait for the others first.
    """
    threading.main_thread().join()
    if self._is_closing:
      return
    raised = getattr(sys, "last_value", None)
    if isinstance(raised, BaseException):
      self.fail(*cause_of(raised), is_said=said(raised) is not None)
    self.close()


def start(
  links: Mapping[int, socket.socket],
  rank: int,
  hosts: Sequence[str],
  *,
  limits: Limits | None = None,
  folder: Path | None = None,
  say: Callable[[str], None] = stacks.say,
  watch_alone: bool = False,
) -> Watch:
  """Begin to watch, after the processes have met and before JAX is asked.

  Args:
    links: in process 0 the connected sockets of all others by rank, elsewhere
      {0: socket}; they belong to the watch from here on.
    rank: of this process.
    hosts: of every process.
    limits: what is too long; None: the defaults.
    folder: for stacks, made when there is something to write; None: none.
    say: shows a line that is no fault, such as of a slow process; process 0's.
    watch_alone: a run of one process is watched for hangs too.

  Example:
    >>> watch = start({}, 0, ["localhost"])
    >>> watch.at(1, "step")
    >>> watch.stop.poll()
    >>> watch.close()
  """
  limits = for_size(limits or Limits(), len(hosts))
  link, hub = links.get(0), None
  if rank == 0 and (links or watch_alone):
    link, inner = socket.socketpair()
    hub = Hub(
      {0: inner, **links},
      hosts,
      limits,
      say=say,
      on_fault=functools.partial(_leave_hub, folder),
      ending=_ending(folder),
    )
  watch = Watch(rank, hosts, link, limits, folder)
  if link is None:
    return watch
  link.settimeout(1.0)  # for sending; reading waits for what is there
  targets = {"jaxscale-watch": watch._run, "jaxscale-exit": watch._when_main_ends}
  if hub:
    targets["jaxscale-hub"] = functools.partial(_run_hub, hub, folder)
  for name, target in targets.items():
    is_exit = name == "jaxscale-exit"
    thread = threading.Thread(target=target, name=name, daemon=not is_exit)
    thread.start()
    if not is_exit:
      watch._threads.append(thread)
  return watch


def cause_of(error: BaseException) -> tuple[str, int, bool]:
  """(cause, exit code, whether it may follow from another process's end).

  Args:
    error: what ended the main thread.

  Example:
    >>> cause_of(ValueError("no such class"))
    ('ValueError: no such class', 1, False)
  """
  if told := said(error):
    return told.line, told.code, False
  first = (str(error).splitlines() or [""])[0]
  name = type(error).__name__
  if isinstance(error, SystemExit) and isinstance(error.code, int):
    return f"{name}: {first}", error.code, False
  # XLA's errors are of jaxlib's one type or, on CPU, of ValueError (measured). A
  # device whose memory is full is nobody else's fault.
  from_xla = name in ("JaxRuntimeError", "XlaRuntimeError")
  follows = (from_xla or bool(_OF_PEERS.search(first))) and not _OWN.search(first)
  return f"{name}: {first}".removesuffix(": "), EXIT_CRASH, follows


def _ending(folder: Path | None) -> str:
  return f"; stacks in {folder}" if folder else ""


def _leave_hub(folder: Path | None, line: str, code: int, use: bool) -> NoReturn:
  stacks.leave(code, folder if use else None, 0, line)


def _run_hub(hub: Hub, folder: Path | None) -> None:
  """The hub's thread; a fault of its own must not leave the run without one."""
  try:
    hub.run()
  except Exception:
    line = f"error: the watch in process 0 failed\n{traceback.format_exc()}"
    stacks.say(line)
    stacks.leave(EXIT_CRASH, folder, 0, line)
