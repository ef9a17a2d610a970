"""Signals that ask a run to stop, heard wherever the main thread is.

Python runs a handler only between two of the main thread's instructions, so never
while it waits in a collective. Its C handler, though, writes the signal's number
into a descriptor at once (`signal.set_wakeup_fd`), and a thread reads it there.

XLA's preemption notifier replaces the handler of SIGTERM when
`jax.distributed.initialize` begins it, and swallows every SIGTERM from then on;
with `jax_enable_preemption_service` off it is not begun (jax/_src/distributed.py).
`forbid_notifier` turns it off without importing JAX.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from jaxscale.cluster.watch import stacks
from jaxscale.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

# SIGTERM: scancel, a requeue, a preemption, the end of the walltime. SIGUSR1 and
# SIGUSR2: what `sbatch --signal` is mostly told to send. SIGINT: Ctrl-C on srun.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)

# `scontrol suspend`, two seconds before its SIGSTOP, and Ctrl-Z on a terminal.
_SUSPENDING = signal.SIGTSTP

GiveUp = Callable[[str, int], None]
_CLOSE = 0  # no signal has this number


def forbid_notifier() -> None:
  """Keep XLA from taking SIGTERM; before `jax.distributed.initialize`."""
  os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "false"
  if "jax" in sys.modules:  # which has read its environment
    import jax

    jax.config.update("jax_enable_preemption_service", False)


class Latch:
  """Catches signals from the moment it is made, and passes them on.

  A signal before `attach`, such as while JAX is imported, is kept until then.

  Attributes:
    reason: the first signal's name ("SIGTERM", "Ctrl-C", …); None: there was none.

  Example:
    >>> from jaxscale.cluster.watch.stop_consensus import Stop
    >>> stop = Stop()
    >>> with Latch(grace_s=None) as latch:
    ...   latch.attach(stop.request)
    ...   signal.raise_signal(signal.SIGUSR1)
    ...   while not (why := stop.poll()):
    ...     time.sleep(0.001)
    >>> why
    'SIGUSR1'
  """

  reason: str | None = None

  def __init__(self, *, grace_s: float | None):
    """Install the handlers. Only in the main thread; elsewhere nothing is caught.

    Args:
      grace_s: seconds from the first SIGTERM, after which the process leaves
        without a save; None: never. Slurm's KillWait, from SIGTERM to SIGKILL, is
        30 s unless a cluster has another (slurm.conf(5)); some of it is for leaving,
        and for saying so. The other signals begin no clock: a batch system that goes
        on to kill sends SIGTERM first.
    """
    self._grace_s = grace_s
    self._lock = threading.Lock()
    self._request: Callable[[str], None] | None = None
    self._give_up: GiveUp = _leave
    self._deadline: float | None = None
    self._interrupts = 0
    self._before: dict[int, object] = {}
    self._pid = os.getpid()
    if threading.current_thread() is threading.main_thread():
      self._install()

  def _install(self) -> None:
    self._reading, self._writing = socket.socketpair()
    self._writing.setblocking(False)
    self._fd_before = signal.set_wakeup_fd(
      self._writing.fileno(), warn_on_full_buffer=False
    )
    for number in (*STOPPING, _SUSPENDING):
      # Without a handler of Python's nothing is written to the descriptor.
      self._before[number] = signal.signal(number, _nothing)
    # A forked child has the same descriptor: a signal to a worker would be ours.
    os.register_at_fork(after_in_child=self._in_child)
    self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
    self._thread.start()

  def __enter__(self) -> Latch:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Give the signals back to whose they were."""
    if not self._before:
      return
    signal.set_wakeup_fd(self._fd_before)
    for number, handler in self._before.items():
      signal.signal(number, handler)  # type: ignore[arg-type]
    self._before = {}
    self._writing.send(bytes([_CLOSE]))
    self._thread.join()
    self._reading.close()
    self._writing.close()

  def attach(
    self, request: Callable[[str], None], give_up: GiveUp | None = None
  ) -> None:
    """Pass signals on from here, first what has come before.

    Args:
      request: asks all processes to stop, such as `Stop.request`.
      give_up: (cause, exit code): leaves at once and says why, such as
        `Watch.fail`; None: this process alone leaves.
    """
    with self._lock:
      self._request = request
      self._give_up = give_up or _leave
      reason = self.reason
    if reason:
      request(reason)

  def saved(self) -> None:
    """All that can be saved is: from here on there is no deadline."""
    with self._lock:
      self._deadline = self._grace_s = None
    if self._before:
      self._writing.send(bytes([signal.SIGCONT]))  # look at the clock again

  def _run(self) -> None:
    """The thread: read numbers, keep the deadline."""
    poll = select.poll()
    poll.register(self._reading, select.POLLIN)
    while True:
      with self._lock:
        deadline = self._deadline
      left = None if deadline is None else max(0.0, deadline - time.monotonic())
      if not poll.poll(None if left is None else left * 1000):
        if self._is_late():
          cause = f"SIGTERM {self._grace_s:.0f} s ago, and it could not save since"
          self._leave_by(cause, EXIT_PREEMPTED)
        continue
      for number in self._reading.recv(64):
        if number == _CLOSE:
          return
        if number in STOPPING:
          self._arrived(number)
        if number == _SUSPENDING:
          # The timer of the last resort runs on while nothing else does.
          stacks.disarm()
          os.kill(self._pid, signal.SIGSTOP)

  def _is_late(self) -> bool:
    with self._lock:
      return self._deadline is not None and time.monotonic() >= self._deadline

  def _arrived(self, number: int) -> None:
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    with self._lock:
      self._interrupts += number == signal.SIGINT
      is_first = self.reason is None
      self.reason = self.reason or name
      if number == signal.SIGTERM and self._deadline is None and self._grace_s:
        self._deadline = time.monotonic() + self._grace_s
      request = self._request
    if self._interrupts > 1:
      self._leave_by("a second Ctrl-C: left without a save", EXIT_INTERRUPTED)
    elif is_first and request:
      request(name)

  def _leave_by(self, cause: str, code: int) -> NoReturn:
    """Leave; however long others take to hear of it, not longer than 2 s."""
    threading.Thread(
      target=lambda: (time.sleep(2.0), os._exit(code)), daemon=True
    ).start()
    self._give_up(cause, code)
    _leave(cause, code)

  def _in_child(self) -> None:
    """A forked process gets Python's own handlers, and its signals for itself."""
    if self._before and os.getpid() != self._pid:
      signal.set_wakeup_fd(-1)
      for number in self._before:
        default = signal.SIG_DFL
        if number == signal.SIGINT:
          default = signal.default_int_handler
        signal.signal(number, default)
      self._before = {}


@contextlib.contextmanager
def first_interrupt(request: Callable[[str], None]) -> Iterator[None]:
  """Inside, the first Ctrl-C asks to stop; the second is Python's, as outside.

  For a notebook, whose kernel has to outlive a run. Only the main thread can have
  this; in another, every Ctrl-C is Python's.
  """
  before = signal.getsignal(signal.SIGINT)

  def ask(*_: object) -> None:
    signal.signal(signal.SIGINT, before)
    print("\nCtrl-C: saving after this step; again to stop at once", flush=True)
    # Not here: the main thread may hold the very lock that it takes.
    threading.Thread(target=request, args=("Ctrl-C",)).start()

  is_main = threading.current_thread() is threading.main_thread()
  if is_main:
    signal.signal(signal.SIGINT, ask)
  try:
    yield
  finally:
    if is_main:
      signal.signal(signal.SIGINT, before)


def leave_at_once(reason: str) -> NoReturn:
  """End a process that was asked to stop before there was anything to save."""
  _leave(f"{reason} before the run began; nothing was to be saved", exit_code(reason))


def exit_code(reason: str) -> int:
  """What a run that was asked to stop, and has saved, exits with.

  Example:
    >>> exit_code("Ctrl-C at process 0 on n1"), exit_code("SIGTERM")
    (130, 85)
  """
  return EXIT_INTERRUPTED if reason.startswith("Ctrl-C") else EXIT_PREEMPTED


def _nothing(number: int, frame: object) -> None:
  """A handler; the descriptor tells the thread."""


def _leave(cause: str, code: int) -> NoReturn:
  stacks.say(f"error: {cause}")
  stacks.flush()
  os._exit(code)
