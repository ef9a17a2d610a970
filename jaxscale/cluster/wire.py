"""Messages between the processes of a run: sealed lines of JSON over TCP.

The rendezvous, the watch and the preflight use the same links. This module never changes
a socket's mode, so that one thread may send while another one receives. The size of
received messages is bounded.
"""

from __future__ import annotations

import functools
import hmac
import json
import select
import socket
import time
import types
import typing
from typing import Any, NamedTuple, TypeVar

from jaxscale.errors import printable
from jaxscale.files import parse_json

MAX_BYTES = 1 << 20  # of a line; the names of 4,096 hosts are 0.1 MB
MAX_TEXT = 4096  # characters of one text in a message
_CHUNK = 1 << 16
_MOST = 1 << 53  # of a number: a float represents all integers below; NaN is not less
_TAG_DIGITS = 32  # of the 64 of HMAC-SHA256: 128 bits (RFC 2104, section 5)

T = TypeVar("T")


class Keys(NamedTuple):
  """The keys that seal messages between two processes, one for each direction."""

  send: bytes
  receive: bytes


def encode(message: Any) -> bytes:
  """Encode a message as a line of JSON.

  Example:
    >>> encode({"beat": [17, "step"]}).rstrip()
    b'{"beat":[17,"step"]}'
  """
  return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Link:
  """A connection between two processes that carries messages.

  With keys, a line has a tag and the message. The tag is the HMAC-SHA256 (RFC 2104) of the
  number of earlier messages in this direction and of the message. A message that another
  program has forged, replayed, dropped or changed raises a ValueError.

  The link reads nothing beyond the last message that it returned. An empty line on a
  sealed link is not a message: it shows that the other process runs (`watch/beats.py`).

  Attributes:
    sock: the connected stream socket.
    heard: the time of the last received bytes, on the clock `time.monotonic`.
    keys: the keys; None if messages are not sealed, as inside one process.
    max_bytes: the largest size of a received message.

  Example:
    >>> here, there = map(Link, socket.socketpair())
    >>> here.seal(Keys(b"k", b"l")), there.seal(Keys(b"l", b"k"))
    (None, None)
    >>> here.send(["beat", 17])
    >>> there.receive(timeout=1.0)
    ['beat', 17]
    >>> here.close(), there.close()
    (None, None)
  """

  def __init__(self, sock: socket.socket, keys: Keys | None = None, max_bytes: int = MAX_BYTES):
    self.sock, self.keys, self.max_bytes = sock, keys, max_bytes
    self.heard = time.monotonic()
    self._sent = self._received = 0  # messages
    self._begun = bytearray()  # a line whose end has not arrived yet

  def fileno(self) -> int:
    """Return the descriptor for `select`; -1 once the link is closed."""
    return self.sock.fileno()

  def seal(self, keys: Keys) -> None:
    """Seal all messages from now on."""
    self.keys, self._sent, self._received = keys, 0, 0

  def close(self) -> None:
    """Close the connection, which may already be closed."""
    self.sock.close()

  def send(self, message: Any, timeout: float | None = None) -> None:
    """Send one whole message; only one thread at a time may send.

    Args:
      message: a JSON value, or the result of `encode` for it.
      timeout: the seconds until the other end must have received it; 0 does not wait, and
        None means no limit.

    Raises:
      OSError: the other end has closed the connection.
      TimeoutError: the other end has not received all of it; the link is unusable.
    """
    whole = rest = memoryview(self._seal(message))
    until = None if timeout is None else time.monotonic() + timeout
    while rest:
      try:
        sent = self.sock.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self._sent += rest is whole
        rest = rest[sent:]
      except BlockingIOError:
        if timeout == 0 or not is_ready(self, until, select.POLLOUT):
          raise TimeoutError(f"the message was not received within {timeout} s") from None

  def next(self) -> Any:
    """Return the next message; None if none has arrived.

    Raises:
      EOFError: the other end has closed the connection, and no message is left.
      ValueError: the message is too long or not from the other end.
    """
    messages = self._read(lambda seen: seen.find(b"\n") + 1)
    return messages[0] if messages else None

  def drain(self) -> list[Any]:
    """Return the messages that one read of the socket brings.

    Raises:
      EOFError, ValueError: see `next`.
    """
    return self._read(lambda seen: seen.rfind(b"\n") + 1) or []

  def receive(self, timeout: float | None) -> Any:
    """Wait for the next message.

    Args:
      timeout: the seconds to wait; None means no limit.

    Raises:
      TimeoutError: no message came in time.
      EOFError, ValueError: see `next`.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while not (messages := self._read(lambda seen: seen.find(b"\n") + 1)):
      if messages is None and not is_ready(self, until):
        raise TimeoutError(f"no message arrived within {timeout} s")
    return messages[0]

  def _seal(self, message: Any) -> bytes:
    line = message if isinstance(message, bytes) else encode(message)
    return _tag(self.keys.send, self._sent, line) + line if self.keys else line

  def _open(self, line: bytes) -> Any:
    """Return the message in a line after a check of its tag."""
    if self.keys:
      tag, line = line[:_TAG_DIGITS], line[_TAG_DIGITS:]
      if not hmac.compare_digest(tag, _tag(self.keys.receive, self._received, line)):
        raise ValueError("the message is not from a process of this run")
    self._received += 1
    return parse_json(line)

  def _read(self, end_of) -> list[Any] | None:
    """Return the messages up to `end_of` the received bytes; None if there are none."""
    try:
      # Peek first and leave the bytes after the last message in the socket: a later
      # reader must find the socket ready.
      seen = self.sock.recv(_CHUNK, socket.MSG_PEEK | socket.MSG_DONTWAIT)
      end = end_of(seen)
      if seen:
        self._begun += self.sock.recv(end or len(seen), socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
      return None
    except OSError as e:
      raise EOFError(str(e)) from None
    if not seen:
      raise EOFError("the other end closed the connection")
    self.heard = time.monotonic()
    if not end:
      self._check_size(len(self._begun))
      return []
    *lines, _ = bytes(self._begun).split(b"\n")
    self._begun.clear()
    self._check_size(max(map(len, lines)))
    return [self._open(line + b"\n") for line in lines if line or not self.keys]

  def _check_size(self, size: int) -> None:
    if size > self.max_bytes:
      raise ValueError(f"the message is longer than {self.max_bytes} bytes")


def _tag(key: bytes, count: int, line: bytes) -> bytes:
  digest = hmac.digest(key, count.to_bytes(8) + line, "sha256")
  return digest.hex()[:_TAG_DIGITS].encode()


def is_ready(link: Any, until: float | None, event=select.POLLIN) -> bool:
  """Wait until a link is ready to receive or send; return whether it is.

  Args:
    link: an object with a descriptor; a socket's own timeout is ignored.
    until: the deadline on the clock `time.monotonic`; None means no limit.
    event: POLLIN or POLLOUT.
  """
  poll = select.poll()  # select() accepts no descriptor above 1023
  poll.register(link, event)
  left = None if until is None else max(0.0, until - time.monotonic()) * 1000
  return bool(poll.poll(left))


def parse(kind: type[T], values: Any) -> T:
  """Convert a list in a message to a NamedTuple.

  Strings are made printable. All values are checked, since a process may be damaged or run
  different code.

  Args:
    kind: the NamedTuple.
    values: the list.

  Raises:
    ValueError: the number, the type or the size of the values is wrong.

  Example:
    >>> class Beat(NamedTuple):
    ...   step: int
    ...   activity: str
    >>> parse(Beat, [17, "input"])
    Beat(step=17, activity='input')
  """
  hints = _hints(kind)
  if not isinstance(values, list) or len(values) != len(hints):
    raise ValueError(f"expected {len(hints)} values of {kind.__name__}, received {values!r:.40}")
  return kind(*(typed(hint, v) for hint, v in zip(hints, values, strict=True)))


@functools.cache
def _hints(kind: type) -> tuple[Any, ...]:
  return tuple(typing.get_type_hints(kind).values())


def typed(hint: Any, value: Any) -> Any:
  """Check a value against a type hint and return it, with strings truncated and made printable.

  Args:
    hint: the type hint.
    value: the value.

  Raises:
    ValueError: the type or the size of the value is wrong.
  """
  if hint is Any:
    return value
  if hint in (int, float) and type(value) in (int, hint) and -_MOST < value < _MOST:
    return hint(value)
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in (types.UnionType, typing.Union):
    return None if value is None else typed(args[0], value)  # "T | None"
  if origin is typing.Literal and value in args:
    return value
  if origin is list and isinstance(value, list):
    return [typed(args[0], v) for v in value]
  if origin is dict and isinstance(value, dict) and len(value) <= 64:
    return {typed(str, k): typed(args[1], v) for k, v in value.items()}
  if hint is str and isinstance(value, str):
    return printable(value[:MAX_TEXT])
  if hint is bool and isinstance(value, bool):
    return value
  wanted = hint.__name__ if isinstance(hint, type) else hint
  raise ValueError(f"expected {wanted}, received {value!r:.40}")
