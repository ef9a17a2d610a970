"""How all processes stop after the same step, when one of them is told to.

Every process asks `poll` at the same sequence of points. One that is told to stop
tells the hub; the hub asks everybody how many points it has passed, and from that
answer on each is held at its next one; the largest count is the point that nobody
has passed, and there all stop. The answers come from threads that do not wait for
any collective, so this takes milliseconds wherever the processes are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class LeftOff(Exception):
  """Work that changes nothing was left off, as all are asked to stop."""


class Stop:
  """Whether, and where, all stop: what one process knows.

  Attributes:
    reason: why, once `poll` has said so; None before.

  Example:
    >>> stop = Stop()
    >>> stop.poll()
    >>> stop.request("SIGTERM")
    >>> stop.poll()
    'SIGTERM'
  """

  reason: str | None = None

  def __init__(self, ask: Callable[[str], None] | None = None):
    """A wish to stop that has not been made yet.

    Args:
      ask: tells the hub of a request; None: this process is alone.
    """
    self._ask = ask
    self._changed = threading.Condition(threading.Lock())
    self._passed = 0  # points
    self._held = False
    self._at: int | None = None  # the point at which all stop
    self._because = ""

  def request(self, reason: str) -> None:
    """Ask all processes to stop; from any thread, at any time, once or often."""
    if self._ask:
      self._ask(reason)
    else:
      self.decided(self._passed, reason)

  def poll(self) -> str | None:
    """Why to stop here, or None to go on.

    Every process calls it at the same points, in its main thread: after a step, a
    batch of an evaluation, before the first step. It waits only while a request is
    being agreed on. After it has said why it says so again.
    """
    with self._changed:
      while self._held:
        self._changed.wait()
      if self._at is not None and self._passed >= self._at:
        self.reason = self._because
        return self.reason
      self._passed += 1
      return None

  def hold(self) -> int:
    """Let nobody pass another point; how many are passed. For the link."""
    with self._changed:
      self._held = self._at is None
      return self._passed

  def passed(self) -> int:
    """How many points are passed."""
    with self._changed:
      return self._passed

  def decided(self, point: int, reason: str) -> None:
    """All stop at this point; the first decision counts. For the link."""
    with self._changed:
      if self._at is None:
        self._at, self._because = point, reason
      self._held = False
      self._changed.notify_all()


class Agreement:
  """The hub's side: from a request to the point where all stop.

  Example:
    >>> agreement = Agreement(2)
    >>> agreement.ask("SIGTERM"), agreement.ask("SIGUSR1")
    (True, False)
    >>> agreement.answer(0, 17)
    >>> agreement.answer(1, 15)
    (17, 'SIGTERM')
  """

  def __init__(self, num_processes: int):
    self._num = num_processes
    self._reason: str | None = None
    self._counts: dict[int, int] = {}
    self._is_decided = False

  @property
  def is_asking(self) -> bool:
    """Whether somebody wants to stop and not all have answered."""
    return self._reason is not None and not self._is_decided

  def ask(self, reason: str) -> bool:
    """A process wants to stop; whether it is the first, and all must be asked."""
    if self._reason is not None:
      return False
    self._reason = reason
    return True

  def answer(self, rank: int, count: int) -> tuple[int, str] | None:
    """A process has passed so many points and waits, or will pass no more.

    Returns:
      The point where all stop and why, when this was the last answer.
    """
    self._counts[rank] = count
    if not self.is_asking or len(self._counts) < self._num:
      return None
    assert self._reason is not None
    self._is_decided = True
    return max(self._counts.values()), self._reason
