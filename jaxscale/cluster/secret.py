"""Secret of a run, and the handshake by which two processes prove that they have it.

On a cluster, programs of other users run on the same network and nodes. They can connect
to the ports of a run, or listen where its processes connect. So a process sends no
information and trusts no message before the other end has proved the run's secret:

    client: a random number C
    server: a random number S, and "welcome", sealed
    client: its description, sealed

The key that seals messages (`wire.Link`) is derived from the secret, the run's name, C, S
and the port. A message can therefore not be replayed on a new connection or relayed by a
program on a different port. Messages are authenticated, not encrypted.
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

from jaxscale.cluster.wire import MAX_BYTES, Keys, Link
from jaxscale.errors import ConfigError

VARIABLE = "JAXSCALE_SECRET"
_NONCE = re.compile("[0-9a-f]{32}")
WELCOME = "welcome"
GREETING_BYTES = 64  # the longest line before the other end has proved the secret


class Key(bytes):
  """Bytes whose repr hides them from logs."""

  def __repr__(self) -> str:
    return "<key>"

  __str__ = __repr__


def run_key(secret: bytes, job: str) -> Key:
  """Derive the key of one run.

  Args:
    secret: the result of `find_secret`.
    job: the name of the run, `Launch.job`.
  """
  return Key(hmac.digest(secret, f"jaxscale {job}".encode(), "sha256"))


def find_secret(env: Mapping[str, str] = os.environ) -> bytes:
  """Return the secret that only the processes of a run know.

  It comes from $JAXSCALE_SECRET, which `jaxscale submit` sets anew for each start of a
  job. Without the variable, it comes from the file ~/.jaxscale/secret, which is created
  on first use; the hosts of a cluster usually share the home directory.

  Raises:
    ConfigError: other users can read the file, or it cannot be created.
  """
  if text := env.get(VARIABLE, ""):
    if len(text) < 32:
      raise ConfigError(f"{VARIABLE}: shorter than 32 characters; use 64 random hex digits")
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
  path = Path(os.path.expanduser("~"), ".jaxscale", "secret")
  try:
    with contextlib.suppress(FileNotFoundError):
      return read_file(path)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
      file.write(secrets.token_hex(32))
      file.flush()
      os.fsync(file.fileno())
      with contextlib.suppress(FileExistsError):  # another process was first
        os.link(file.name, path)
    return read_file(path)
  except OSError as e:
    fix = f"set {VARIABLE} to the same 64 random hex digits in all processes"
    raise ConfigError(f"{path}: cannot store the secret of your runs: {e.strerror}; {fix}") from e


def read_file(path: Path) -> bytes:
  """Read the secret from a file that no other user can read or write.

  Raises:
    ConfigError: other users can read or write the file, or it is damaged.
    OSError: it cannot be opened, e.g. because it is a link.
  """
  file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  with open(file, encoding="ascii", errors="replace") as text:
    about = os.fstat(file)
    is_private = stat.S_ISREG(about.st_mode) and not about.st_mode & 0o077
    if about.st_uid != os.geteuid() or not is_private:
      raise ConfigError(f"{path}: other users can read or write it; remove it, or set {VARIABLE}")
    content = text.read(65)
  if not re.fullmatch("[0-9a-f]{64}", content):
    raise ConfigError(f"{path}: damaged; remove it, and the next run creates a new one")
  return bytes.fromhex(content)


def greet(sock: socket.socket, key: bytes, timeout_s: float) -> Link:
  """Return the link to a server, once the server has proved that it has the key.

  Args:
    sock: a new connection to the server.
    key: the key from `run_key`.
    timeout_s: the seconds that the server may take.

  Raises:
    OSError: the server has closed the connection, or does not answer in time.
    EOFError, ValueError: the server does not have the key.
  """
  until = time.monotonic() + timeout_s
  link, own = Link(sock, max_bytes=GREETING_BYTES), secrets.token_hex(16)
  link.send(own)
  answer = _number(link.receive(timeout_s))
  theirs, ours = _session_keys(key, own, answer, sock.getpeername()[1])
  link.seal(Keys(send=ours, receive=theirs))
  if link.receive(until - time.monotonic()) != WELCOME:
    raise ValueError("the server did not accept the greeting")
  link.max_bytes = MAX_BYTES
  return link


def welcome(link: Link, key: bytes, number: Any) -> None:
  """Answer a client's number as the server; later messages are sealed.

  Raises:
    ValueError: the client has not sent a number.
    OSError: the client has closed the connection or does not receive.
  """
  own, port = secrets.token_hex(16), link.sock.getsockname()[1]
  ours, theirs = _session_keys(key, _number(number), own, port)
  link.send(own, timeout=0)
  link.seal(Keys(send=ours, receive=theirs))
  link.send(WELCOME, timeout=0)


def _number(value: Any) -> str:
  if not isinstance(value, str) or not _NONCE.fullmatch(value):
    raise ValueError("the other process sent an invalid greeting")
  return value


def _session_keys(key: bytes, client: str, server: str, port: int) -> tuple[bytes, bytes]:
  """Derive the keys of the server and of the client for one connection."""
  about = f" {client} {server} {port}".encode()
  of_server, of_client = (hmac.digest(key, who + about, "sha256") for who in (b"server", b"client"))
  return of_server, of_client
