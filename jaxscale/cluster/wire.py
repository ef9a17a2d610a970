"""Messages between the processes of a run: sealed lines of JSON over TCP.

The rendezvous before JAX, the watch after it and the preflight use the same links.
Nothing here changes a socket's mode, so that one thread may send while another
receives; and what is received is bounded, whoever has connected.
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

MAX_BYTES = 1 << 20  # a line: the names of 4,096 hosts are 0.1 MB
MAX_TEXT = 4096  # characters of one text in a message: a line for people, a name
_CHUNK = 1 << 16
_MOST = 1 << 53  # of a number: a float has all integers below; a NaN is never less
_TAG_DIGITS = 32  # of the 64 of HMAC-SHA256: 128 bits (RFC 2104, section 5)

T = TypeVar("T")


class Keys(NamedTuple):
  """What two processes seal their messages with, one key for each direction."""

  send: bytes
  receive: bytes


def encode(message: Any) -> bytes:
  """A message as a line of JSON.

  Example:
    >>> encode({"beat": [17, "step"]}).rstrip()
    b'{"beat":[17,"step"]}'
  """
  return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Link:
  """A connection between two processes, over which they send messages.

  With keys, a line is a tag and the message: HMAC-SHA256 (RFC 2104) of how many
  messages went before in this direction and of the message. One that another program
  has made, repeated, left out or changed is a ValueError.

  It reads nothing that follows the last message it gave. An empty line on a sealed link
  is no message: it shows that the process at the other end runs (`watch/beats.py`).

  Attributes:
    sock: the connected stream socket.
    heard: when anything came the last time, on the clock `time.monotonic`.
    keys: None: messages are not sealed, as inside one process.
    max_bytes: of one message that is received.

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
    self._begun = b""  # a line whose end has not come yet

  def fileno(self) -> int:
    """For `select`; -1 once it is closed."""
    return self.sock.fileno()

  def seal(self, keys: Keys) -> None:
    """From here on all messages are sealed."""
    self.keys, self._sent, self._received = keys, 0, 0

  def close(self) -> None:
    """Close the connection; no error where it is."""
    self.sock.close()

  def send(self, message: Any, timeout: float | None = None) -> None:
    """Send one message, whole; only one thread at a time may.

    Args:
      message: anything that JSON has, or what `encode` has made of it once for many.
      timeout: seconds until the other end must have taken it; None: for ever.

    Raises:
      OSError: the other end is gone.
      TimeoutError: it has not taken all of it; the connection is of no more use.
    """
    whole = rest = memoryview(self._seal(message))
    until = None if timeout is None else time.monotonic() + timeout
    while rest:
      try:
        sent = self.sock.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self._sent += rest is whole
        rest = rest[sent:]
      except BlockingIOError:
        if not is_ready(self, until, select.POLLOUT):
          raise TimeoutError(f"not taken within {timeout} s") from None

  def send_now(self, message: Any) -> None:
    """Send one message if the other end takes it at once, else leave it out.

    Where there is room for a part of it alone, the other end refuses what follows.

    Raises:
      OSError: it does not, or it is gone.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    self.sock.send(self._seal(message), flags)
    self._sent += 1

  def next(self) -> Any:
    """The next message, None where none is here.

    Raises:
      EOFError: the other end is gone, and there is no message left.
      ValueError: what came is not a message of the other end, or too long.
    """
    messages = self._read(lambda seen: seen.find(b"\n") + 1)
    return messages[0] if messages else None

  def drain(self) -> list[Any]:
    """The messages that are here; what one read of the socket brings.

    Raises:
      EOFError, ValueError: as `next`.
    """
    return self._read(lambda seen: seen.rfind(b"\n") + 1) or []

  def receive(self, timeout: float | None) -> Any:
    """The next message.

    Args:
      timeout: seconds to wait for it; None: for ever.

    Raises:
      TimeoutError: none came.
      EOFError, ValueError: as `next`.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while not (messages := self._read(lambda seen: seen.find(b"\n") + 1)):
      if messages is None and not is_ready(self, until):
        raise TimeoutError(f"nothing came within {timeout} s")
    return messages[0]

  def _seal(self, message: Any) -> bytes:
    line = message if isinstance(message, bytes) else encode(message)
    return _tag(self.keys.send, self._sent, line) + line if self.keys else line

  def _open(self, line: bytes) -> Any:
    """The message in a line, if the other end has made it as its next one."""
    if self.keys:
      tag, line = line[:_TAG_DIGITS], line[_TAG_DIGITS:]
      if not hmac.compare_digest(tag, _tag(self.keys.receive, self._received, line)):
        raise ValueError("a message that no process of this run has sent")
    self._received += 1
    return parse_json(line)

  def _read(self, end_of) -> list[Any] | None:
    """The messages up to `end_of` what is here; None where nothing is."""
    try:
      # Looked at before it is taken: a later reader waits until the socket has more.
      seen = self.sock.recv(_CHUNK, socket.MSG_PEEK | socket.MSG_DONTWAIT)
      end = end_of(seen)
      if seen:
        self._begun += self.sock.recv(end or len(seen), socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
      return None
    except OSError as e:
      raise EOFError(str(e)) from None
    if not seen:
      raise EOFError("closed by the other end")
    self.heard = time.monotonic()
    *lines, rest = self._begun.split(b"\n")
    if max(map(len, [*lines, rest])) > self.max_bytes:
      raise ValueError("a line without end")
    if not end:
      return []
    self._begun = b""
    return [self._open(line + b"\n") for line in lines if line or not self.keys]


def _tag(key: bytes, count: int, line: bytes) -> bytes:
  digest = hmac.digest(key, count.to_bytes(8) + line, "sha256")
  return digest.hex()[:_TAG_DIGITS].encode()


def is_ready(link: Any, until: float | None, event=select.POLLIN) -> bool:
  """Wait until something can be read, or sent; whether it can.

  Args:
    link: anything with a descriptor; a socket's own timeout does not count.
    until: on the clock `time.monotonic`; None: for ever.
    event: POLLIN or POLLOUT.
  """
  poll = select.poll()  # not select(), which takes no descriptor above 1023
  poll.register(link, event)
  left = None if until is None else max(0.0, until - time.monotonic()) * 1000
  return bool(poll.poll(left))


def parse(kind: type[T], values: Any) -> T:
  """A NamedTuple from the list that stands for it in a message.

  Texts are made printable. Nothing is taken on trust: a process may be damaged, or
  run other code.

  Raises:
    ValueError: another number of values, or one of another type or size.

  Example:
    >>> class Beat(NamedTuple):
    ...   step: int
    ...   activity: str
    >>> parse(Beat, [17, "input"])
    Beat(step=17, activity='input')
  """
  hints = _hints(kind)
  if not isinstance(values, list) or len(values) != len(hints):
    raise ValueError(f"no {kind.__name__}")
  return kind(*(typed(hint, v) for hint, v in zip(hints, values, strict=True)))


@functools.cache
def _hints(kind: type) -> tuple[Any, ...]:
  return tuple(typing.get_type_hints(kind).values())


def typed(hint: Any, value: Any) -> Any:
  """The value, if it is what a type hint says; texts are made printable, and cut.

  Raises:
    ValueError: it is of another type or size.
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
  raise ValueError(f"{hint} was expected")
