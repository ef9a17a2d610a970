"""Messages between the processes of a run: one JSON value per line, over TCP.

The rendezvous before JAX and the watch after it use the same sockets.
Nothing here changes a socket's mode, so that one thread may send while another
receives; and what is received is bounded, whoever has connected.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

MAX_BYTES = 1 << 20  # a line: the names of 4,096 hosts are 0.1 MB
_CHUNK = 1 << 16


def encode(message: Any) -> bytes:
  """A message as it is sent.

  Example:
    >>> encode({"beat": [17, "step"]}).rstrip()
    b'{"beat":[17,"step"]}'
  """
  return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def send(sock: socket.socket, message: Any, timeout: float | None = None) -> None:
  """Send one message, whole; only one thread at a time may, on one socket.

  Args:
    sock: a connected stream socket without a timeout of its own (Python would
      wait for that before it asks the kernel).
    message: anything that JSON has, or what `encode` has made of it once for many.
    timeout: seconds until the other end must have taken it; None: for ever.

  Raises:
    OSError: the other end is gone.
    TimeoutError: it has not taken all of it; the connection is of no more use.
  """
  rest = memoryview(message if isinstance(message, bytes) else encode(message))
  until = None if timeout is None else time.monotonic() + timeout
  while rest:
    try:
      rest = rest[sock.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
    except BlockingIOError:
      if not is_ready(sock, until, select.POLLOUT):
        raise TimeoutError(f"not taken within {timeout} s") from None


class Receiver:
  """Reads messages from a socket, and nothing that follows the last one it gave.

  So another receiver, of another module, can continue with the same socket.

  Example:
    >>> here, there = socket.socketpair()
    >>> with here, there:
    ...   send(there, ["beat", 17])
    ...   Receiver(here).receive(timeout=1.0)
    ['beat', 17]
  """

  def __init__(self, sock: socket.socket, max_bytes: int = MAX_BYTES):
    self._sock, self._max_bytes = sock, max_bytes
    self._begun = b""  # a line whose end has not come yet

  def drain(self) -> list[Any]:
    """The messages that are here; what one read of the socket brings.

    Raises:
      EOFError: the other end is gone, and there is no message left.
      ValueError: what came is not a message, or too long.
    """
    return self._read(lambda seen: seen.rfind(b"\n") + 1) or []

  def receive(self, timeout: float | None) -> Any:
    """The next message.

    Args:
      timeout: seconds to wait for it; None: for ever.

    Raises:
      TimeoutError: none came.
      EOFError: the other end is gone.
      ValueError: what came is not a message, or too long.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while not (messages := self._read(lambda seen: seen.find(b"\n") + 1)):
      if messages is None and not is_ready(self._sock, until):
        raise TimeoutError(f"nothing came within {timeout} s")
    return messages[0]

  def _read(self, end_of) -> list[Any] | None:
    """The messages up to `end_of` what is here; None where nothing is."""
    try:
      # Looked at before it is taken: what follows is somebody else's, perhaps.
      seen = self._sock.recv(_CHUNK, socket.MSG_PEEK | socket.MSG_DONTWAIT)
      end = end_of(seen)
      if seen:
        self._begun += self._sock.recv(end or len(seen), socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
      return None
    except OSError as e:
      raise EOFError(str(e)) from None
    if not seen:
      raise EOFError("closed by the other end")
    if len(self._begun) > self._max_bytes + (_CHUNK if end else 0):
      raise ValueError("a line without end")
    if not end:
      return []
    lines, self._begun = self._begun.split(b"\n")[:-1], b""
    try:
      return [json.loads(line) for line in lines]
    except RecursionError as e:  # of a stranger's brackets
      raise ValueError("nested too deep") from e


def is_ready(sock: socket.socket, until: float | None, event=select.POLLIN) -> bool:
  """Wait until something can be read, or sent; whether it can.

  Args:
    sock: any; its own timeout does not count.
    until: on the clock `time.monotonic`; None: for ever.
    event: POLLIN or POLLOUT.
  """
  poll = select.poll()  # not select(), which takes no descriptor above 1023
  poll.register(sock, event)
  left = None if until is None else max(0.0, until - time.monotonic()) * 1000
  return bool(poll.poll(left))
