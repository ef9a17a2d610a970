"""How all processes stop after the same step, when one of them is asked to.

Every process calls `poll` at the same sequence of points. One that is asked to stop
sends the request to process 0's monitor. The monitor asks everybody how many points
it has passed, and from that answer on each is held at its next one. The largest
count is the point that nobody has passed, and there all stop. The answers come from
threads that wait for no collective, so this takes milliseconds wherever the
processes are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxscale.errors import EXIT_OF_STOP


class StopRequest(NamedTuple):
  """Why a run is to save and stop.

  Attributes:
    cause: "SIGTERM", "Ctrl-C", "walltime: 59 s are left", …; once agreed on, also who
      asked: "SIGTERM at process 2 on n3".
    kind: decides the exit code, and whether the job is requeued (after a preemption).
  """

  cause: str
  kind: Literal["preemption", "interrupt"] = "preemption"

  @property
  def exit_code(self) -> int:
    """What the run exits with once it has saved."""
    return EXIT_OF_STOP[self.kind]

  def __str__(self) -> str:
    return self.cause


class StopRequested(Exception):
  """Work that changes nothing was interrupted, because all are asked to stop."""


class StopConsensus:
  """Whether, and where, all stop: the side of one process.

  Attributes:
    agreed: why all stop, once `poll` has returned it; None before.
    passed: how many points are passed.

  Example:
    >>> stop = StopConsensus()
    >>> stop.poll()
    >>> stop.request(StopRequest("SIGTERM"))
    >>> stop.poll().exit_code
    85
  """

  agreed: StopRequest | None = None

  def __init__(self, ask: Callable[[StopRequest], None] | None = None):
    """No request so far.

    Args:
      ask: sends a request to the monitor; None: this process is alone.
    """
    self._ask = ask
    self._changed = threading.Condition(threading.Lock())
    self.passed = 0
    self._held = False
    self._decision: tuple[int, StopRequest] | None = None  # the point where all stop

  def request(self, request: StopRequest) -> None:
    """Ask all processes to stop; from any thread, at any time, once or often."""
    if self._ask:
      self._ask(request)
    else:
      self.decide(self.passed, request)

  def poll(self) -> StopRequest | None:
    """Why to stop here, or None to continue.

    Every process calls it at the same points, in its main thread: after a step, after
    a batch of an evaluation, before the first step. It waits only while a request is
    being agreed on. Once it has returned a request it returns it again.
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
    """Pass no further point; how many are passed. For the watch's thread."""
    with self._changed:
      self._held = self._decision is None
      return self.passed

  def decide(self, point: int, request: StopRequest) -> None:
    """All stop at this point; the first decision counts. For the watch's thread."""
    with self._changed:
      self._decision = self._decision or (point, request)
      self._held = False
      self._changed.notify_all()


class StopCoordinator:
  """The monitor's side: from a request to the point where all stop.

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
    """Whether there is a request that not all have answered."""
    return self.request is not None and not self._is_decided

  def ask(self, request: StopRequest) -> bool:
    """A process asks to stop; whether it is the first, and all must be asked."""
    is_first = self.request is None
    self.request = self.request or request
    return is_first

  def answer(self, rank: int, count: int) -> int | None:
    """A process has passed so many points and waits, or will pass no more.

    Returns:
      The point where all stop, when this was the last answer.
    """
    self._counts[rank] = count
    if not self.is_asking or len(self._counts) < self._num:
      return None
    self._is_decided = True
    return max(self._counts.values())
