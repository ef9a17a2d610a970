"""Process 0's side of the watch: a thread that hears everybody and judges.

It has one socket a process (its own process too, so that all are alike) and never
waits for any of them. What is decided is in `verdict` and `agreement`; here is who
is told.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.cluster.watch import fault_detection
from jaxscale.cluster.watch.fault_detection import Fault, Limits, Seen
from jaxscale.cluster.watch.stop_consensus import Agreement
from jaxscale.cluster.wire import Receiver, encode

# A killed process's neighbours raise 20 ms after it (gloo, measured): what comes
# within this time is looked at together, to name the one that was first.
_SETTLE_S = 0.3
# What is wrong for all, such as a setting, all say, as fast as each of them is.
_SETTLE_SAID_S = 2.0
# Then the others write their stacks, before the end of this process makes JAX's
# coordinator vanish and XLA abort them.
_LAST_WORDS_S = 0.6
_SAID_AGAIN_S = 600.0  # that a process is still slow


class Hub:
  """Hears heartbeats, names faults, agrees on a stop.

  `run` is the thread's. It returns once all have said goodbye, and calls
  `on_fault` once the others have been told of a fault.
  """

  def __init__(
    self,
    links: Mapping[int, socket.socket],
    hosts: Sequence[str],
    limits: Limits,
    *,
    say: Callable[[str], None],
    on_fault: Callable[[str, int, bool], None],
    ending: str = "",
  ):
    """A hub that has heard nobody yet.

    Args:
      links: rank -> socket, for every process.
      hosts: of every process.
      limits: what is too long.
      say: shows a line.
      on_fault: (line, exit code, whether stacks are of use); the others have been
        told.
      ending: of a fault's line, such as where stacks are.
    """
    self._links, self._hosts, self._limits = links, hosts, limits
    self._say, self._on_fault, self._ending = say, on_fault, ending
    now = time.monotonic()
    self._ranks = {rank: Seen(heard=now, since=now) for rank in links}
    self._first_step: dict[int, tuple[float, int]] = {}
    self._spoke: set[int] = set()  # those that listen for us
    self._closed: set[int] = set()
    self._suspects: list[Fault] = []
    self._said: dict[str, set[int]] = {}  # what processes say, and which
    self._settled = 0.0
    self._agreement = Agreement(len(links))
    self._window = now, {rank: (0.0, 0) for rank in links}
    self._slow: tuple[float, frozenset[int]] = 0.0, frozenset()
    self._selector = selectors.DefaultSelector()
    for rank, link in links.items():
      link.setblocking(False)
      self._selector.register(link, selectors.EVENT_READ, (rank, Receiver(link)))

  def run(self) -> None:
    """Hear and judge until all have left, or a fault ends it."""
    look, speak = (
      self._limits.heartbeat_interval_s,
      self._limits.heartbeat_timeout_s / 4,
    )
    before = judged = spoken = time.monotonic()
    while len(self._closed) < len(self._links):
      # While a fault settles it is only a moment that is waited.
      self._hear(_SETTLE_S / 6 if self._suspects else min(0.5, look / 2))
      now = time.monotonic()
      if now - before > self._limits.heartbeat_timeout_s / 2:
        # Nobody is to blame for a time in which this process itself was stopped,
        # such as by `scontrol suspend`; first the others are heard again.
        judged = now + self._limits.heartbeat_timeout_s / 2
      before = now
      if self._suspects:
        if now >= self._settled or self._all_say() is not None:
          self._end(fault_detection.choose(self._suspects))
          return
      elif now - judged >= look:
        judged = now
        self._judge(now)
      if now - spoken >= speak:
        spoken = now
        self._tell(self._spoke, {"beat": 1})
      if all(seen.left for seen in self._ranks.values()):
        self._tell(self._ranks, {"bye": 1})
        self._wait_for_closed(_LAST_WORDS_S)
        for link in self._links.values():
          link.close()
        self._selector.close()
        return

  def _hear(self, timeout: float) -> None:
    for key, _ in self._selector.select(timeout):
      rank, receiver = key.data
      try:
        messages = receiver.drain()
      except EOFError:
        self._close(rank)
        continue
      except ValueError:
        self._suspect(Fault("failed", rank, "sends what is no message"))
        self._close(rank)
        continue
      for message in messages:
        self._read(rank, message, time.monotonic())

  def _read(self, rank: int, message: dict[str, Any], now: float) -> None:
    seen = self._ranks[rank]
    seen.heard = now
    if rank not in self._spoke:
      self._spoke.add(rank)
      if self._agreement.is_asking:
        self._tell([rank], {"where": 1})
    if "beat" in message:
      self._beat(rank, seen, message["beat"], now)
    elif "ask" in message:
      if self._agreement.ask(f"{message['ask']} at {self._name(rank)}"):
        self._tell(self._spoke, {"where": 1})
    elif "here" in message:
      self._answer(rank, message["here"])
    elif "fail" in message:
      kind, cause = "follows" if message["follows"] else "failed", message["fail"]
      is_said = message["said"]
      if is_said:
        self._said.setdefault(cause, set()).add(rank)
      else:
        cause = f"failed {message['where']}: {cause}"
      self._suspect(Fault(kind, rank, cause, message["code"], is_said))
    elif "bye" in message:
      seen.left = True
      self._answer(rank, message["bye"])

  def _beat(self, rank: int, seen: Seen, beat: list[Any], now: float) -> None:
    seen.step, seen.activity, seen.count, seconds, seen.host_s, seen.steps = beat
    seen.since = now - seconds
    if seen.activity == "compiling":  # another phase, whose steps take another time
      seen.known, seen.mean_s = seen.steps, 0.0
      self._first_step.pop(rank, None)
    if seen.steps and rank not in self._first_step:
      self._first_step[rank] = now, seen.steps
    elif seen.steps:
      began, first = self._first_step[rank]
      if seen.steps > first:
        seen.mean_s = (seen.since - began) / (seen.steps - first)

  def _answer(self, rank: int, count: int) -> None:
    decided = self._agreement.answer(rank, count)
    if decided:
      point, reason = decided
      self._say(f"{reason}: all stop together, and save")
      self._tell(self._spoke, {"stop": [point, reason]})

  def _close(self, rank: int) -> None:
    if rank in self._closed:
      return
    self._closed.add(rank)
    self._selector.unregister(self._links[rank])
    seen = self._ranks[rank]
    if not seen.left:
      cause = f"died, last seen {seen.where} (killed, out of memory, or aborted?)"
      self._suspect(Fault("died", rank, cause))

  def _suspect(self, fault: Fault) -> None:
    if not self._suspects:
      wait = _SETTLE_SAID_S if fault.is_said else _SETTLE_S
      self._settled = time.monotonic() + wait
    self._suspects.append(fault)

  def _judge(self, now: float) -> None:
    silent = fault_detection.find_silent(self._ranks, now, self._limits)
    found = [
      *silent,
      fault_detection.find_left(self._ranks),
      None if silent else fault_detection.find_hang(self._ranks, now, self._limits),
    ]
    for fault in filter(None, found):
      self._suspect(fault)
    if now - self._window[0] >= self._limits.slow_window_s:
      self._judge_speed(now)

  def _judge_speed(self, now: float) -> None:
    """Name those that were slow over a window that is over."""
    began, before = self._window
    self._window = now, {r: (s.host_s, s.steps) for r, s in self._ranks.items()}
    host_s, steps = {}, []
    for rank, seen in self._ranks.items():
      seconds, first = before[rank]
      if seen.steps - first < 2:
        return  # a step takes longer than the window, or it was no window of steps
      host_s[rank] = (seen.host_s - seconds) / (seen.steps - first)
      steps.append(seen.steps - first)
    slow = fault_detection.find_slow(host_s, (now - began) / min(steps))
    said, before_slow = self._slow
    if slow and (frozenset(slow) != before_slow or now - said > _SAID_AGAIN_S):
      self._slow = now, frozenset(slow)
      self._say(self._describe_slow(slow, host_s))
    elif not slow:
      self._slow = said, frozenset()

  def _describe_slow(self, slow: dict[int, float], host_s: dict[int, float]) -> str:
    worst = max(slow, key=lambda rank: slow[rank])
    usual = sorted(host_s.values())[(len(host_s) - 1) // 2]
    more = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    return (
      f"{self._name(worst)}{more} is slow at step {self._ranks[worst].step}: "
      f"{slow[worst] * 1e3:.0f} ms of its host before each step, where others need "
      f"{usual * 1e3:.0f} ms, and all wait for it"
    )

  def _name(self, rank: int) -> str:
    return f"process {rank} on {self._hosts[rank]}"

  def _tell(self, ranks: Any, message: Any) -> None:
    """Send to these; who does not take it is judged by its own silence."""
    data = encode(message)
    for rank in ranks:
      if rank not in self._closed:
        with contextlib.suppress(OSError):
          self._links[rank].send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

  def _end(self, fault: Fault) -> None:
    """Tell the others, let them leave, and leave."""
    if fault.is_said:
      who = "" if self._all_say() else f"{self._name(fault.rank or 0)}: "
      line = f"error: {who}{fault.cause}"
    else:
      who = "" if fault.rank is None else self._name(fault.rank) + " "
      line = f"error: {who}{fault.cause}{self._ending}"
    others = [rank for rank in self._ranks if rank != 0]
    stacks = not fault.is_said
    self._tell(others, {"fault": line, "code": fault.code, "stacks": stacks})
    self._say(line)
    self._wait_for_closed(_LAST_WORDS_S)
    self._on_fault(line, fault.code, stacks)

  def _all_say(self) -> str | None:
    """What every process says is wrong, if they agree."""
    everybody = len(self._ranks)
    return next((c for c, who in self._said.items() if len(who) == everybody), None)

  def _wait_for_closed(self, seconds: float) -> None:
    """Until all others have closed their end, so that none is cut off."""
    until = time.monotonic() + seconds
    for key in list(self._selector.get_map().values()):
      if key.data[0] == 0:
        self._selector.unregister(key.fileobj)
    while self._selector.get_map() and (left := until - time.monotonic()) > 0:
      for key, _ in self._selector.select(left):
        try:
          key.data[1].drain()
        except (EOFError, ValueError):
          self._selector.unregister(key.fileobj)
