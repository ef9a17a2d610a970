"""Messages between the processes of a run: one JSON value a line, over TCP.

The meeting before JAX and the watch after it speak so, over the same sockets.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

MAX_BYTES = 1 << 20  # a line; what is longer is no message of ours
_CHUNK = 1 << 16


def encode(message: Any) -> bytes:
  r"""A message as it is sent.

  Example:
    >>> encode({"beat": [17, "step"]})
    b'{"beat":[17,"step"]}\n'
  """
  return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def send(sock: socket.socket, message: Any) -> None:
  """Send one message, whole.

  Args:
    sock: a connected stream socket.
    message: anything that JSON has.

  Raises:
    OSError: the other end is gone.
  """
  sock.sendall(encode(message))


class Receiver:
  """Reads messages from a socket, and keeps what is of the next one.

  Example:
    >>> here, there = socket.socketpair()
    >>> with here, there:
    ...   send(there, ["beat", 17])
    ...   Receiver(here).receive(timeout=1.0)
    ['beat', 17]
  """

  def __init__(self, sock: socket.socket):
    self._sock = sock
    self._rest = b""
    self._ready: list[Any] = []

  def drain(self) -> list[Any]:
    """The messages that are here; what one read of the socket brings.

    Raises:
      EOFError: the other end is gone, and there is no message left.
      ValueError: what came is no message.
    """
    if self._ready:
      ready, self._ready = self._ready, []
      return ready
    try:
      chunk = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError, TimeoutError):
      return []
    except OSError as e:
      raise EOFError(str(e)) from None
    if not chunk:
      raise EOFError("closed by the other end")
    *lines, self._rest = (self._rest + chunk).split(b"\n")
    if len(self._rest) > MAX_BYTES:
      raise ValueError("a line without end")
    return [json.loads(line) for line in lines]

  def receive(self, timeout: float | None) -> Any:
    """The next message.

    Args:
      timeout: seconds to wait for it; None: for ever.

    Raises:
      TimeoutError: none came.
      EOFError: the other end is gone.
      ValueError: what came is no message.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while not (messages := self.drain()):
      left = None if until is None else until - time.monotonic()
      if left is not None and left <= 0:
        raise TimeoutError
      if not is_readable(self._sock, left):
        raise TimeoutError
    self._ready = messages[1:]
    return messages[0]


def is_readable(sock: socket.socket, timeout: float | None) -> bool:
  """Wait until something can be read; whether it can.

  Args:
    sock: any; its own timeout does not count.
    timeout: seconds; None: for ever.
  """
  poll = select.poll()  # not select(), which takes no descriptor above 1023
  poll.register(sock, select.POLLIN)
  return bool(poll.poll(None if timeout is None else max(0, timeout) * 1000))
