"""Consensus on a stop: all processes stop after the same step when one is asked to.

Every process calls `poll` at the same sequence of points. A process that is asked to stop
sends the request to the monitor in process 0. The monitor asks every process how many
points it has passed, and from its answer on each process waits at its next point. All
processes stop at the largest count, a point that no process has passed. The answers come
from threads that wait for no collective, so the consensus takes milliseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from jaxscale.cluster.watch.signals import StopRequest


class StopRequested(Exception):
  """Raised in work that changes no state, such as an evaluation, to stop the run."""


class StopConsensus:
  """The part of one process in the consensus on a stop.

  Attributes:
    agreed: the request that stops the run, once `poll` has returned it; None before.
    passed: the number of points that this process has passed.

  Example:
    >>> stop = StopConsensus()
    >>> stop.poll()
    >>> stop.request(StopRequest("SIGTERM"))
    >>> stop.poll().exit_code
    85
  """

  agreed: StopRequest | None = None

  def __init__(self, ask: Callable[[StopRequest], None] | None = None):
    """Start without a request.

    Args:
      ask: a function that sends a request to the monitor; None if this process is the
        only one.
    """
    self._ask = ask
    self._changed = threading.Condition(threading.Lock())
    self.passed = 0
    self._held = False
    self._decision: tuple[int, StopRequest] | None = None  # the point where all processes stop

  def request(self, request: StopRequest) -> None:
    """Ask all processes to stop; may be called repeatedly and from any thread."""
    if self._ask:
      self._ask(request)
    else:
      self.decide(self.passed, request)

  def poll(self) -> StopRequest | None:
    """Return the request to stop at this point, or None to continue.

    Every process calls `poll` at the same points in its main thread: before the first
    step, after each step and after each batch of an evaluation. The call waits only
    during a consensus. After the first request, each call returns that request.
    """
    with self._changed:
      while self._held:
        self._changed.wait()
      if self._decision and self.passed >= self._decision[0]:
        self.agreed = self._decision[1]
      else:
        self.passed += 1
      return self.agreed

  def hold(self) -> int:
    """Hold the main thread at its next point; return the points passed so far.

    Only the watch's thread may call this.
    """
    with self._changed:
      self._held = self._decision is None
      return self.passed

  def decide(self, point: int, request: StopRequest) -> None:
    """Set the point where this process stops; the first decision counts.

    Only the watch's thread may call this.
    """
    with self._changed:
      self._decision = self._decision or (point, request)
      self._held = False
      self._changed.notify_all()


class StopCoordinator:
  """The part of the monitor in the consensus on a stop.

  Example:
    >>> coordinator = StopCoordinator(2)
    >>> coordinator.ask(StopRequest("SIGTERM")), coordinator.ask(StopRequest("SIGUSR1"))
    (True, False)
    >>> coordinator.answer(0, 17)
    >>> coordinator.answer(1, 15)
    17
  """

  request: StopRequest | None = None

  def __init__(self, num_processes: int):
    self._num = num_processes
    self._counts: dict[int, int] = {}
    self._is_decided = False

  @property
  def is_asking(self) -> bool:
    """True while a request waits for the answers of some processes."""
    return self.request is not None and not self._is_decided

  def ask(self, request: StopRequest) -> bool:
    """Accept a request to stop; return True if it is the first one.

    The caller then asks every process for its number of points.
    """
    is_first = self.request is None
    self.request = self.request or request
    return is_first

  def answer(self, rank: int, count: int) -> int | None:
    """Record the number of points that a process has passed; it passes no more by itself.

    Returns:
      The point where all processes stop, if this was the last answer; else None.
    """
    self._counts[rank] = count
    if not self.is_asking or len(self._counts) < self._num:
      return None
    self._is_decided = True
    return max(self._counts.values())
