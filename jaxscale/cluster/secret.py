"""The secret of a run, and how two processes prove to each other that they have it.

On a cluster other users' programs run on the same network and nodes, and can connect
to what listens there or listen where a process is looked for. So a process says
nothing of itself, and believes nothing, before the other end has proved that it has
the run's secret:

    client: a random number C
    server: a random number S, and "welcome", sealed
    client: who it is, sealed

What seals (`wire.Link`) is derived from the secret, the run's name, C, S and the port:
nothing of an earlier connection can be used again, nor passed on by a program that
listens at another port. Messages are authenticated, not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.cluster.wire import MAX_BYTES, Keys, Link, is_ready
from jaxscale.errors import ConfigError

VARIABLE = "JAXSCALE_SECRET"
_NONCE = re.compile("[0-9a-f]{32}")
WELCOME = "welcome"
GREETING_BYTES = 64  # the longest line before the other end has proved anything


class Key(bytes):
  """Bytes that no log shows."""

  def __repr__(self) -> str:
    return "<key>"

  __str__ = __repr__


def run_key(secret: bytes, job: str) -> Key:
  """The key of one run, of which all else is derived.

  Args:
    secret: what `find_secret` has found.
    job: the name of the run, `Launch.job`.
  """
  return Key(hmac.digest(secret, f"jaxscale {job}".encode(), "sha256"))


def find_secret(env: Mapping[str, str] = os.environ) -> bytes:
  """The secret that all processes of a run have, and nobody else.

  That of $JAXSCALE_SECRET, which `jaxscale submit` makes for each start of a job. Else
  that of the file ~/.jaxscale/secret, which is made when it is needed first: all hosts
  of a cluster usually share the home directory.

  Raises:
    ConfigError: others can read the file, or it cannot be made.
  """
  if text := env.get(VARIABLE, ""):
    if len(text) < 32:
      raise ConfigError(f"{VARIABLE}: shorter than 32 characters; make it random")
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
  path = Path(os.path.expanduser("~"), ".jaxscale", "secret")
  try:
    with contextlib.suppress(FileNotFoundError):
      return _read(path)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
      file.write(secrets.token_hex(32))
      file.flush()
      os.fsync(file.fileno())
      with contextlib.suppress(FileExistsError):  # of another process: the first counts
        os.link(file.name, path)
    return _read(path)
  except OSError as e:
    fix = f"set {VARIABLE} to the same 64 random hex digits in all processes"
    raise ConfigError(f"{path}: {e.strerror}: no place for the secret of your runs; {fix}") from e


def _read(path: Path) -> bytes:
  """The secret in a file that is this user's alone."""
  file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  with open(file, encoding="ascii", errors="replace") as text:
    about = os.fstat(file)
    is_private = stat.S_ISREG(about.st_mode) and not about.st_mode & 0o077
    if about.st_uid != os.geteuid() or not is_private:
      raise ConfigError(f"{path}: others can read or write it; remove it, or set {VARIABLE}")
    content = text.read(65)
  if not re.fullmatch("[0-9a-f]{64}", content):
    raise ConfigError(f"{path}: damaged; remove it, a new one is made")
  return bytes.fromhex(content)


class Greeting:
  """The client's part on a new connection; nothing in it waits.

  Attributes:
    link: the connection.
  """

  def __init__(self, sock: socket.socket, key: bytes):
    """Send the first message.

    Raises:
      OSError: the other end is gone.
    """
    self.link, self._key = Link(sock, max_bytes=GREETING_BYTES), key
    self._number = secrets.token_hex(16)
    self.link.send(self._number)

  def is_welcome(self) -> bool:
    """Read what has come; whether the server has proved that it has the key.

    Raises:
      EOFError, ValueError: it has not.
    """
    link = self.link
    if not link.keys and (answer := link.next()) is not None:
      port = link.sock.getpeername()[1]
      theirs, ours = _session_keys(self._key, self._number, _number(answer), port)
      link.seal(Keys(send=ours, receive=theirs))
    if not link.keys or (message := link.next()) is None:
      return False
    if message != WELCOME:
      raise ValueError("no welcome")
    link.max_bytes = MAX_BYTES
    return True


def welcome(link: Link, key: bytes, number: Any) -> None:
  """The server answers a client's number; what comes next is sealed.

  Raises:
    ValueError: it is not one.
    OSError: the client is gone, or takes nothing.
  """
  own, port = secrets.token_hex(16), link.sock.getsockname()[1]
  ours, theirs = _session_keys(key, _number(number), own, port)
  link.send_now(own)
  link.seal(Keys(send=ours, receive=theirs))
  link.send_now(WELCOME)


def _number(value: Any) -> str:
  if not isinstance(value, str) or not _NONCE.fullmatch(value):
    raise ValueError("no greeting of ours")
  return value


def _session_keys(key: bytes, client: str, server: str, port: int) -> tuple[bytes, bytes]:
  """What the server seals with, and what the client seals with."""
  about = f" {client} {server} {port}".encode()
  return hmac.digest(key, b"server" + about, "sha256"), hmac.digest(
    key, b"client" + about, "sha256"
  )


def connect(address: tuple[str, int], key: bytes, timeout_s: float) -> Link:
  """A link to a server that has the key.

  Raises:
    OSError: nobody listens, or not within the time.
    EOFError, ValueError: it has not the key.
  """
  until = time.monotonic() + timeout_s
  sock = socket.create_connection(address, timeout_s)
  try:
    sock.settimeout(None)
    greeting = Greeting(sock, key)
    while not greeting.is_welcome():
      if not is_ready(sock, until):
        raise TimeoutError(f"no proof within {timeout_s} s")
  except BaseException:
    sock.close()
    raise
  return greeting.link
