"""One JSON object a line over a socket: how processes talk before JAX does."""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

MOST_BYTES = 1 << 24  # of one line; what is longer is no message of ours


def send(sock: socket.socket, value: Any) -> None:
  """Send what JSON has; lists come back for tuples.

  Raises:
    OSError: the other end is gone.
  """
  sock.sendall(json.dumps(value, separators=(",", ":")).encode() + b"\n")


class Receiver:
  """The other end's values, one after another.

  Example:
    >>> here, there = socket.socketpair()
    >>> send(there, {"rank": 1})
    >>> Receiver(here).receive(timeout=1.0)
    {'rank': 1}
    >>> here.close(), there.close()
    (None, None)
  """

  def __init__(self, sock: socket.socket):
    self._sock = sock
    self._bytes = bytearray()
    self._poll = select.poll()  # select() itself ends at 1,024 descriptors
    self._poll.register(sock, select.POLLIN)

  def receive(self, timeout: float) -> Any:
    """The next value.

    Args:
      timeout: seconds to wait for it.

    Raises:
      TimeoutError: it did not come.
      ConnectionError: the other end is gone.
      ValueError: what came is no message.
    """
    deadline = time.monotonic() + timeout
    searched = 0
    while (end := self._bytes.find(b"\n", searched)) < 0:
      searched = len(self._bytes)
      if searched > MOST_BYTES:
        raise ValueError(f"a line of more than {MOST_BYTES} bytes")
      left = max(deadline - time.monotonic(), 0.0)
      if not self._poll.poll(left * 1000):
        raise TimeoutError(f"nothing for {timeout:g} s")
      if not (more := self._sock.recv(1 << 16)):
        raise ConnectionError("the other end closed the connection")
      self._bytes += more
    line = bytes(self._bytes[:end])
    del self._bytes[: end + 1]
    return json.loads(line)
