"""How fast every pair of hosts talks: plain TCP, in rounds of disjoint pairs.

What is measured is one TCP stream of Python on the addresses of the meeting,
not what NCCL or RDMA reach: it finds the link, port or node that is slower than
its like, which is what makes a whole job slow.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from typing import NamedTuple

_FIRST = 1 << 16  # bytes of the first burst
_ACK = b"."
_NUMBER, _SIZE = struct.Struct("!d"), struct.Struct("!Q")


class Speed(NamedTuple):
  """What a pair of processes measured.

  Attributes:
    first: the lower rank.
    second: the higher rank.
    round_trip_s: of one byte, the median.
    there: bytes/s from the first to the second.
    back: bytes/s from the second to the first.
    error: why it was not measured; then the numbers are 0.
  """

  first: int
  second: int
  round_trip_s: float = 0.0
  there: float = 0.0
  back: float = 0.0
  error: str = ""

  @property
  def slower(self) -> float:
    """Bytes/s of the slower direction."""
    return min(self.there, self.back)


def rounds(members: list[int]) -> list[list[tuple[int, int]]]:
  """Every pair once, in as few rounds as can be, nobody twice in a round.

  One member stands still and the others go round it (the circle method of
  tournaments): N - 1 rounds for an even N, N for an odd one.

  Example:
    >>> rounds([0, 1, 2, 3])
    [[(0, 3), (1, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 3)]]
  """
  still = [*members, *([-1] if len(members) % 2 else [])]
  found = []
  for _ in range(len(still) - 1):
    half = len(still) // 2
    pairs = zip(still[:half], reversed(still[half:]), strict=True)
    met = [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
    found.append(sorted(met))
    still = [still[0], *still[2:], still[1]]
  return found


def lead(sock: socket.socket, *, seconds: float, most_bytes: int) -> list[float]:
  """Measure a connection whose other end calls `follow`.

  Args:
    sock: connected, with a timeout.
    seconds: about what a direction takes, at most.
    most_bytes: to send at once, each way.

  Returns:
    [seconds of a round trip, bytes/s from the other end, bytes/s to it].

  Raises:
    OSError: the connection does not hold.
  """
  trips = []
  for _ in range(20):
    began = time.perf_counter()
    sock.sendall(_ACK)
    exactly(sock, 1)
    trips.append(time.perf_counter() - began)
  trip = statistics.median(trips)
  sock.sendall(_NUMBER.pack(trip))
  to_it = _pour(sock, seconds, most_bytes, trip)
  _drain(sock)
  (from_it,) = _NUMBER.unpack(exactly(sock, _NUMBER.size))
  return [trip, from_it, to_it]


def follow(sock: socket.socket, *, seconds: float, most_bytes: int) -> None:
  """The other end of `lead`."""
  for _ in range(20):
    sock.sendall(exactly(sock, 1))
  (trip,) = _NUMBER.unpack(exactly(sock, _NUMBER.size))
  _drain(sock)
  sock.sendall(_NUMBER.pack(_pour(sock, seconds, most_bytes, trip)))


def _pour(sock: socket.socket, seconds: float, most_bytes: int, trip: float) -> float:
  """Send more and more, each acknowledged, until it takes long; bytes/s at the end.

  Twice as much each time: however slow the link is, it takes about `seconds`, and
  however fast it is, TCP's window has opened when the last burst goes.
  """
  block = bytes(_FIRST)
  size, took = _FIRST, 0.0
  while True:
    began = time.perf_counter()
    sock.sendall(_SIZE.pack(size))
    for _ in range(size // _FIRST):
      sock.sendall(block)
    exactly(sock, 1)
    took = time.perf_counter() - began
    if took > seconds / 2 or 2 * size > most_bytes:
      break
    size *= 2
  sock.sendall(_SIZE.pack(0))
  return size / max(took - trip, 1e-9)


def _drain(sock: socket.socket) -> None:
  """Receive what `_pour` sends."""
  buffer = memoryview(bytearray(_FIRST))
  while left := _SIZE.unpack(exactly(sock, _SIZE.size))[0]:
    while left:
      if not (got := sock.recv_into(buffer, min(left, _FIRST))):
        raise ConnectionError("the other end closed the connection")
      left -= got
    sock.sendall(_ACK)


def exactly(sock: socket.socket, size: int) -> bytes:
  """As many bytes as that, or `ConnectionError`."""
  found = b""
  while len(found) < size:
    if not (more := sock.recv(size - len(found))):
      raise ConnectionError("the other end closed the connection")
    found += more
  return found
