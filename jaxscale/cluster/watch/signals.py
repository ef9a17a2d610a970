"""Signals that ask a run to save and stop, received even while the main thread is busy.

A signal passes through four modules from the handler to the exit code:

1. This module maps signals to requests, and requests to exit codes. The C handler writes
   the signal's number to a descriptor. The thread of `SignalHandlers` reads it and makes a
   `StopRequest`, "preemption" (exit code 85) or "interrupt" (130). A closed standard output
   takes the same path: Python ignores SIGPIPE, so `errors.Output` reports it instead of the
   system.
2. watch/stop_consensus.py: all processes agree on the step after which they stop, and
   `watch.stop.poll()` returns the request there in every process. watch.py and monitor.py
   only carry the messages.
3. run/run.py: after every step `Run.should_stop` polls. On a request the last hook saves
   and the loop ends.
4. run/session.py: `report_stop` prints the saved step, has the job requeued after a
   preemption, and returns `StopRequest.exit_code`, with which the command exits; 93 if the
   job was requeued too often.

The thread of `SignalHandlers` ends the process by itself if no save succeeds within
`grace_s` of SIGTERM, or after a second Ctrl-C.

Python runs a handler only between two instructions of the main thread, so never while the
main thread waits in a collective. The descriptor (`signal.set_wakeup_fd`) is written at
once. XLA's preemption notifier, which `rendezvous.join` turns off, would replace the handler
of SIGTERM and swallow every SIGTERM from then on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, NoReturn, cast

from jaxscale.cluster.watch import stacks
from jaxscale.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Output


class StopRequest(NamedTuple):
  """A request that the run saves and stops.

  Attributes:
    cause: the reason, such as "SIGTERM", "Ctrl-C" or "walltime: 59 s are left"; after
      the consensus also the process that asked: "SIGTERM at process 2 on n3".
    kind: the kind of the request, which decides the exit code and whether the job is
      requeued (after a preemption).
  """

  cause: str
  kind: Literal["preemption", "interrupt"] = "preemption"

  @property
  def exit_code(self) -> int:
    """Exit code of the run once it has saved: 85, or 130 for an interrupt."""
    return EXIT_PREEMPTED if self.kind == "preemption" else EXIT_INTERRUPTED

  def __str__(self) -> str:
    return self.cause


# SIGTERM: scancel, a requeue, a preemption, or the time limit. SIGUSR1 and SIGUSR2: the
# usual signals of `sbatch --signal`. SIGINT: Ctrl-C on srun. SIGHUP: the terminal was
# closed or its connection lost; under `nohup` it stays ignored.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
# Errors of standard output whose reader, a pipe or a terminal, is gone.
_CLOSED = (errno.EPIPE, errno.EIO)
# `scontrol suspend`, two seconds before its SIGSTOP, and Ctrl-Z on a terminal.
_SUSPENDING = signal.SIGTSTP
_CLOSE = 0  # no signal has this number
_INTERRUPT = StopRequest("Ctrl-C", "interrupt")
_REQUESTS: dict[int, StopRequest] = {
  signal.SIGINT: _INTERRUPT,
  signal.SIGHUP: StopRequest("SIGHUP (the terminal is closed)"),
  signal.SIGPIPE: StopRequest("standard output is closed"),
}


def leave(cause: str, code: int) -> NoReturn:
  """End only this process at once, with one line."""
  stacks.print_line(f"error: {cause}")
  stacks.flush()
  os._exit(code)


def leave_before_start(request: StopRequest) -> NoReturn:
  """End a process that was asked to stop before its first step."""
  leave(f"{request} before any step was done; nothing to save", request.exit_code)


class SignalHandlers:
  """Receive signals and pass them on to a function.

  A signal before `attach`, such as during JAX's import, is kept until then.

  Attributes:
    request: the request of the first signal; None if there was none.

  Example:
    >>> from jaxscale.cluster.watch.stop_consensus import StopConsensus
    >>> stop = StopConsensus()
    >>> with contextlib.closing(SignalHandlers(grace_s=None)) as handlers:
    ...   handlers.attach(stop.request)
    ...   signal.raise_signal(signal.SIGUSR1)
    ...   while not (request := stop.poll()):
    ...     time.sleep(0.001)
    >>> request.cause
    'SIGUSR1'
  """

  request: StopRequest | None = None

  def __init__(self, *, grace_s: float | None):
    """Install the handlers in the main thread; in other threads nothing is received.

    Args:
      grace_s: the seconds from the first SIGTERM to an exit without a save; None sets no
        limit. Other signals have no limit, since a batch system sends SIGTERM before it
        kills.
    """
    self._grace_s = grace_s
    self._lock = threading.Lock()
    self._ask: Callable[[StopRequest], None] | None = None
    self._fail: Callable[[str, int], None] = leave
    self._deadline: float | None = None
    self._interrupts = 0
    self._has_complained = False
    self._before: dict[int, object] = {}
    self._pid = os.getpid()
    if threading.current_thread() is not threading.main_thread():
      return
    self._reading, self._writing = socket.socketpair()
    self._writing.setblocking(False)
    descriptor = self._writing.fileno()
    self._fd_before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    for number in (*STOPPING, _SUSPENDING):
      if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
        continue
      # Python writes to the descriptor only for signals with a Python handler.
      self._before[number] = signal.signal(number, lambda number, frame: None)
    # A forked child shares the descriptor, so a signal to a worker would stop this run.
    os.register_at_fork(after_in_child=self._reset_in_child)
    self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
    self._thread.start()
    self._stdout: Any = sys.stdout
    if not isinstance(sys.stdout, Output):  # a program that does not use `errors.leave`
      sys.stdout = cast(Any, Output(sys.stdout))
    self._output = cast(Any, sys.stdout)
    self._output.on_error = self._output_failed

  def close(self) -> None:
    """Restore the earlier handlers."""
    if not self._before:
      return
    signal.set_wakeup_fd(self._fd_before)
    for number, handler in self._before.items():
      signal.signal(number, handler)  # type: ignore[arg-type]
    self._before = {}
    self._output.on_error = None
    if sys.stdout is self._output:  # else other code has replaced it
      sys.stdout = self._stdout
    self._writing.send(bytes([_CLOSE]))
    self._thread.join()
    self._reading.close()
    self._writing.close()

  def attach(
    self, ask: Callable[[StopRequest], None], fail: Callable[[str, int], None] = leave
  ) -> None:
    """Pass signals on, including one that was received before.

    Args:
      ask: a function that asks all processes to stop, such as `StopConsensus.request`.
      fail: a function (cause, exit code) that ends the run at once, such as `Watch.fail`;
        by default it ends only this process.
    """
    with self._lock:
      self._ask, self._fail = ask, fail
    if self.request:
      ask(self.request)

  def mark_saved(self) -> None:
    """Drop the deadline after SIGTERM, since everything is saved."""
    with self._lock:
      self._deadline = self._grace_s = None
    if self._before:
      self._writing.send(bytes([signal.SIGCONT]))  # wakes the thread up for the new deadline

  def _run(self) -> None:
    """Run the thread: read numbers and keep the deadline."""
    poll = select.poll()
    poll.register(self._reading, select.POLLIN)
    while True:
      with self._lock:
        deadline, grace_s = self._deadline, self._grace_s
      left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
      if not poll.poll(None if left_s is None else left_s * 1000):
        if self._deadline is not None:  # `mark_saved` may have come at this moment
          cause = f"no save within {grace_s:.0f} s of SIGTERM; exiting without one"
          self._end(cause, EXIT_PREEMPTED)
        continue
      for number in self._reading.recv(64):
        if number == _CLOSE:
          return
        if number in STOPPING or number == signal.SIGPIPE:
          self._receive(number)
        if number == _SUSPENDING:
          # faulthandler's timer would end the suspended process.
          stacks.disarm()
          os.kill(self._pid, signal.SIGSTOP)

  def _receive(self, number: int) -> None:
    request = _REQUESTS.get(number) or StopRequest(signal.Signals(number).name)
    with self._lock:
      self._interrupts += request is _INTERRUPT
      is_first = self.request is None
      self.request = self.request or request
      if number == signal.SIGTERM and self._deadline is None and self._grace_s:
        self._deadline = time.monotonic() + self._grace_s
      ask = self._ask
    if self._interrupts > 1:
      self._end("second Ctrl-C: exiting without a save", EXIT_INTERRUPTED)
    elif is_first and ask:
      ask(request)

  def _output_failed(self, error: OSError) -> None:
    """Handle a failed write to stdout, in any thread, which may hold any lock."""
    if error.errno in _CLOSED:
      self._output.move()  # to stderr, so that the command to resume is still printed
      self._writing.send(bytes([signal.SIGPIPE]))
    elif not self._has_complained:  # a full disk must not end the run
      self._has_complained = True
      text = f"standard output: {error.strerror}; the run continues without these lines"
      stacks.print_line(text)

  def _end(self, cause: str, code: int) -> NoReturn:
    """Leave within 2 s, even if the others cannot be informed in this time."""
    threading.Timer(2.0, os._exit, [code]).start()
    self._fail(cause, code)
    leave(cause, code)

  def _reset_in_child(self) -> None:
    """Give a forked process Python's own handlers, so that its signals stay its own."""
    if self._before and os.getpid() != self._pid:
      signal.set_wakeup_fd(-1)
      for number in self._before:
        signal.signal(number, signal.SIG_DFL)
      signal.signal(signal.SIGINT, signal.default_int_handler)
      self._before = {}


@contextlib.contextmanager
def first_interrupt(ask: Callable[[StopRequest], None]) -> Iterator[None]:
  """Make the first Ctrl-C ask to stop; the second one raises KeyboardInterrupt.

  This is for a notebook, whose kernel must outlive a run. It works in the main thread
  only; in other threads every Ctrl-C raises KeyboardInterrupt in the main thread.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = signal.getsignal(signal.SIGINT)

  def handle(*_: object) -> None:
    signal.signal(signal.SIGINT, before)
    print("\nCtrl-C: saving after this step; press it again to stop at once", flush=True)
    # A thread is needed because the main thread may hold the lock that `ask` takes.
    threading.Thread(target=ask, args=(_INTERRUPT,)).start()

  signal.signal(signal.SIGINT, handle)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)
