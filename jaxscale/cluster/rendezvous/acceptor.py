"""Accept the connections of a run's other processes and refuse all others.

A program without the run's secret learns nothing and is only counted. The acceptor waits
for no single connection, closes connections that do not prove the secret in time, and
bounds the number of open ones.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from jaxscale.cluster import secret
from jaxscale.cluster.rendezvous import network
from jaxscale.cluster.wire import MAX_BYTES, Link

FIRST_BYTES = 1 << 16  # longest first message; a hello has about 600 bytes
PROOF_S = 10.0  # seconds until a connection must have sent its first message
_AT_ONCE = 16  # connections that are accepted before others are served
_SHOWN = 4  # addresses of refused connections in one line


class Acceptor(contextlib.AbstractContextManager["Acceptor"]):
  """Accept connections on open listeners.

  The acceptor is a context manager, which closes the listeners and all connections
  without a proof.

  Attributes:
    refused: the number of refused connections by address.
  """

  def __init__(self, listeners: Sequence[socket.socket], key: bytes, expected: int):
    """Register the listeners.

    Args:
      listeners: listening sockets, which the acceptor closes.
      key: the key from `secret.run_key`.
      expected: the number of processes, all of which may connect at the same moment.
    """
    self._listeners, self._key = listeners, key
    self._most = expected + 128
    self._selector = selectors.DefaultSelector()
    self._strangers: dict[Link, tuple[float, str]] = {}  # until when, and address
    self.refused: Counter[str] = Counter()
    for listener in listeners:
      listener.setblocking(False)
      self._selector.register(listener, selectors.EVENT_READ)

  def __exit__(self, *_: object) -> None:
    for key in list(self._selector.get_map().values()):
      cast("Any", key.fileobj).close()
    self._selector.close()

  def fileno(self) -> int:
    """Return the descriptor for `select`, which is ready when `accept` has work."""
    return cast("selectors.EpollSelector", self._selector).fileno()

  def accept(self, timeout: float = 0.0) -> list[tuple[Link, Any]]:
    """Return the links whose other end has proved the key, each with its first message.

    Args:
      timeout: the seconds to wait for an event.
    """
    came = []
    ready = [event.fileobj for event, _ in self._selector.select(timeout)]
    for link in cast("list[Link]", [f for f in ready if f in self._strangers]):
      try:
        if (message := self._advance(link)) is not None:
          self._forget(link)
          link.max_bytes = MAX_BYTES
          came.append((link, message))
      except (OSError, ValueError):
        self._refuse(link)
      except EOFError:
        # A process of the run tries all addresses and closes all but the first to answer.
        self._refuse(link, is_counted=not link.keys)
    # Open connections are served before new ones, so that a flood keeps none of them out.
    for listener in self._listeners:
      if listener in ready:
        self._accept_from(listener)
    now = time.monotonic()
    while self._strangers and next(iter(self._strangers.values()))[0] < now:
      self._refuse(next(iter(self._strangers)))  # the oldest one
    return came

  def describe_refused(self) -> str:
    """Return a log line about refused connections; "" if there were none."""
    if not self.refused:
      return ""
    most = self.refused.most_common(_SHOWN)
    shown = ", ".join(f"{count} from {address}" for address, count in most)
    more = len(self.refused) - len(most)
    others = f" and from {more} more addresses" if more else ""
    return f"refused connections without this run's secret: {shown}{others}"

  def _accept_from(self, listener: socket.socket) -> None:
    """Accept some new connections; if too many are open, refuse the oldest one."""
    try:
      for _ in range(_AT_ONCE):
        sock, address = listener.accept()
        network.tune(sock)
        link = Link(sock, max_bytes=secret.GREETING_BYTES)
        until = time.monotonic() + PROOF_S
        self._strangers[link] = until, network.plain_address(str(address[0]))
        self._selector.register(link, selectors.EVENT_READ)
        if len(self._strangers) > self._most:
          self._refuse(next(iter(self._strangers)))
    except OSError as e:  # no more connections, closed again, or out of descriptors
      if e.errno in (errno.EMFILE, errno.ENFILE):
        time.sleep(0.01)
        if self._strangers:
          self._refuse(next(iter(self._strangers)))

  def _advance(self, link: Link) -> Any:
    """Answer a greeting; return the first sealed message, or None before it comes."""
    message = link.next()
    if message is None or link.keys:
      return message
    secret.welcome(link, self._key, message)
    link.max_bytes = FIRST_BYTES
    return None

  def _forget(self, link: Link) -> str:
    """Stop to watch a connection for its proof; return its address."""
    self._selector.unregister(link)
    return self._strangers.pop(link)[1]

  def _refuse(self, link: Link, *, is_counted: bool = True) -> None:
    address = self._forget(link)
    if is_counted and (address in self.refused or len(self.refused) < 1000):
      self.refused[address] += 1
    link.close()
