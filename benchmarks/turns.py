"""Processes that live through a benchmark and work in turns, asked line by line.

A child calls `serve`, its parent has a `Side` of each. What a child prints in addition
to its answers, as its libraries do, is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARK = "@answer "
_KILL_S = 10.0


class SideError(Exception):
  """Error for a process that ended or took too long; one line states the reason."""


def serve(answers: Mapping[str, Callable[..., Any]], ready: Any = None) -> None:
  """Answer requests until the parent closes the pipe.

  Args:
    answers: the functions that answer requests, by name.
    ready: the first answer, for which the parent waits.
  """
  _answer(ready)
  for line in sys.stdin:
    name, *args = json.loads(line)
    _answer(answers[name](*args))


def _answer(value: Any) -> None:
  print(f"\n{MARK}{json.dumps(value)}", flush=True)


def seconds_of(step: Callable[[], Any], wait: Callable[[], Any], count: int) -> Any:
  """Return [processor seconds, wall seconds] per step.

  Args:
    step: a function that starts one step.
    wait: a function that waits for all started steps.
    count: the number of steps.
  """
  wall, clock = time.perf_counter(), time.process_time()
  for _ in range(count):
    step()
  wait()
  return (time.process_time() - clock) / count, (time.perf_counter() - wall) / count


class Side:
  """A child process that answers requests.

  Attributes:
    ready: the first answer, after `wait_ready`.
    pid: the number of the process.
  """

  def __init__(self, command: Sequence[str], **options: Any):
    """Start the process; the options are those of `subprocess.Popen`."""
    self.ready: Any = None
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
    self._pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    self._process = subprocess.Popen(command, stderr=self._errors, **self._pipes, **options)
    self.pid, self._text = self._process.pid, b""

  def wait_ready(self, timeout_s: float) -> Any:
    """Return the first answer."""
    self.ready = self.answer(timeout_s)
    return self.ready

  def ask(self, name: str, *args: Any, timeout_s: float) -> Any:
    """Return the answer to a request.

    Raises:
      SideError: the process has ended, or the time is over.
    """
    self.send(name, *args)
    return self.answer(timeout_s)

  def send(self, name: str, *args: Any) -> None:
    """Send a request, whose answer `answer` returns."""
    assert self._process.stdin
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write(f"{json.dumps([name, *args])}\n".encode())
      self._process.stdin.flush()

  def answer(self, timeout_s: float) -> Any:
    """Return the next answer."""
    assert self._process.stdout
    deadline, pipe = time.monotonic() + timeout_s, self._process.stdout.fileno()
    while True:
      line, newline, rest = self._text.partition(b"\n")
      if newline:
        self._text = rest
        if line.startswith(MARK.encode()):
          return json.loads(line[len(MARK) :])
        continue
      left = deadline - time.monotonic()
      if left <= 0 or not select.select([pipe], [], [], left)[0]:
        raise SideError(f"not done after {timeout_s:.0f} s")
      if not (read := os.read(pipe, 1 << 16)):
        raise SideError(self._reason())
      self._text += read

  def _reason(self) -> str:
    """Return the reason for the process's end: the line of its error."""
    code = self._process.wait()
    self._errors.seek(0)
    lines = [x.strip() for x in self._errors.read().decode(errors="replace").split("\n")]
    lines = [x for x in lines if x]
    wanted = ("Error", "Exception", "RESOURCE_EXHAUSTED", "out of memory")
    errors = [x for x in lines if any(word in x for word in wanted)]
    return (errors or lines or [f"ended with code {code}"])[-1][:300]

  def close(self) -> None:
    """Close the process's pipes, and kill it if it does not end."""
    for pipe in (self._process.stdin, self._process.stdout):
      assert pipe
      with contextlib.suppress(OSError):
        pipe.close()
    try:
      self._process.wait(_KILL_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._errors.close()
