"""Heartbeats from a child process, sent as long as its parent is not suspended.

Loading a library or compiling can hold the Python GIL for minutes, during which no thread
of the process sends anything. Only another process can show that it is not suspended.
This file runs as a script without site-packages, which takes about 10 ms to start. It
writes an empty line to each link (see `wire.Link`) and ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any


def start(files: Sequence[int], interval_s: float) -> Callable[[], None]:
  """Start the child process; return a function that ends it.

  Args:
    files: the descriptors of connected sockets, which the child inherits.
    interval_s: the seconds between two empty lines on each socket.
  """
  import signal
  import subprocess

  command = [sys.executable, "-I", "-S", __file__, str(interval_s), *map(str, files)]
  # The child inherits this mask and so ignores signals to all processes of a job.
  before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
  try:
    options: Any = {"stdin": subprocess.PIPE, "bufsize": 0, "cwd": "/", "pass_fds": files}
    options |= dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    child = subprocess.Popen(command, start_new_session=True, **options)
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
  pipe = child.stdin
  assert pipe is not None
  # The pipe closes when this process ends for any reason. A forked worker that outlives
  # this process must not keep the pipe open.
  os.register_at_fork(after_in_child=pipe.close)

  def stop() -> None:
    child.kill()
    child.wait()
    pipe.close()

  return stop


def _is_stopped(pid: int) -> bool:
  """Return whether a process is stopped by a signal or a debugger (proc(5))."""
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] in "tT"
  except OSError:
    return False


def _main(interval_s: float, *files: int) -> None:
  parent, poll = os.getppid(), select.poll()
  links = [socket.socket(fileno=file) for file in files]
  poll.register(sys.stdin.fileno(), select.POLLHUP)
  while not poll.poll(interval_s * 1000):
    if not _is_stopped(parent):
      for link in links:
        with contextlib.suppress(OSError):
          link.send(b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


if __name__ == "__main__":
  _main(float(sys.argv[1]), *map(int, sys.argv[2:]))
