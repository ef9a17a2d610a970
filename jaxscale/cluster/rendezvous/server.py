"""Process 0's part when the processes of a run meet: it waits for all, and judges.

It hears everybody, tells everybody the same, and knows nothing of JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from jaxscale.cluster import wire
from jaxscale.cluster.detect.launched import Launch
from jaxscale.cluster.rendezvous import network
from jaxscale.cluster.rendezvous.handshake import (
  Introduction,
  disagreements,
  few,
  numbers,
  read,
  twice,
  where,
)
from jaxscale.errors import ConfigError

HELLO_BYTES = 1 << 16  # an introduction is about 600 bytes; no stranger needs more
HELLO_S = 10.0  # seconds a stranger may say nothing
SETTLE_S = 1.0  # after the first thing wrong, the same of others may be on its way
BACK_S = 3.0  # a process that was there and has gone may try again
LINGER_S = 10.0  # how long those who come late are told what is wrong
NEWS_S = 10.0  # seconds between two lines about whom we wait for


_LOOK_S = 0.1  # seconds between two looks at whether something is wrong
_WELCOME = float("inf")  # until when somebody may stay who has said who he is


@dataclasses.dataclass
class _Room:
  """Who is here."""

  launch: Launch
  selector: selectors.BaseSelector
  met: dict[int, Introduction]
  guests: dict[int, socket.socket] = dataclasses.field(default_factory=dict)
  gone: dict[int, float] = dataclasses.field(default_factory=dict)
  wrong: list[str] = dataclasses.field(default_factory=list)  # for good
  came: set[str] = dataclasses.field(default_factory=set)  # all who spoke our words
  silent: deque[tuple[float, socket.socket]] = dataclasses.field(default_factory=deque)
  verdict: str = ""


def call(
  launch: Launch,
  own: Introduction,
  listener: socket.socket,
  timeout_s: float,
  ready: Callable[[], int] = lambda: 0,
  note: str = "",
) -> tuple[list[str], dict[int, socket.socket]]:
  """Wait for all other processes, and let them go, or tell them what is wrong.

  Args:
    own: the introduction of this process, rank 0.
    listener: where the others come; closed before this returns.
    timeout_s: seconds after which those who are missing are given up.
    ready: called when all is well; the port of JAX's coordinator. May raise a
      ConfigError, which all get to hear.
    note: what to add to the line about those who have not come.

  Returns:
    The hosts by rank, and the connections by rank, without 0.

  Raises:
    ConfigError: the line that every process got.
  """
  listener.setblocking(False)
  with selectors.DefaultSelector() as selector, listener:
    room = _Room(launch, selector, {0: own})
    room.came.add(own.me)
    try:
      _allow_files(launch.num_processes)
    except ConfigError as e:
      room.wrong.append(str(e))
    selector.register(listener, selectors.EVENT_READ, None)
    try:
      _wait(room, listener, timeout_s, note)
      hosts = [room.met[rank].node for rank in range(launch.num_processes)]
      # Nobody has been told to go yet: whatever goes wrong is everybody's.
      try:
        port = ready()
      except ConfigError as e:
        _tell(room, str(e))
        raise
      _let_go(room, port, hosts)
      return hosts, room.guests
    except BaseException:
      _close(room.guests.values())
      raise
    finally:
      others = [k.fileobj for k in selector.get_map().values() if k.data]
      _close(s for s in others if s not in room.guests.values())  # type: ignore[misc]


def _let_go(room: _Room, port: int, hosts: list[str]) -> None:
  """Tell all that all are here."""
  go = wire.encode({"go": port, "hosts": hosts})
  for rank, sock in room.guests.items():
    try:
      wire.send_line(sock, go, timeout=10)
    except OSError as e:  # who has been told finds the links closed
      raise ConfigError(
        f"process {rank} ({hosts[rank]}) has gone just before the start ({e}); see its "
        "last lines"
      ) from e


def _wait(room: _Room, listener: socket.socket, timeout_s: float, note: str) -> None:
  """Until all are here and agree."""
  began = news = look = time.monotonic()
  wrong_since = None
  total = room.launch.num_processes
  while True:
    _serve(room, listener, _LOOK_S)
    now = time.monotonic()
    if now < look and len(room.guests) < total - 1:
      continue  # thousands may be coming: not all of this after each
    look = now + _LOOK_S
    missing = [r for r in range(1, total) if r not in room.guests]
    wrong = _wrong(room, now)
    if not wrong and not missing and not room.verdict:
      return
    if wrong or room.verdict:  # once told, it stays
      wrong_since = wrong_since or now
      all_came = len(room.came) >= total
      if not room.verdict and (all_came or now - wrong_since > SETTLE_S):
        _tell(room, "; ".join(wrong[:3]))
      if room.verdict and (all_came or now - wrong_since > LINGER_S):
        raise ConfigError(room.verdict)
    elif now - began > timeout_s:
      verb = "has" if len(missing) == 1 else "have"
      _tell(
        room,
        f"{_absent(room, missing)} {verb} not come within {timeout_s:g} s; look for "
        f"their last lines, and start all in one step{note}",
      )
      raise ConfigError(room.verdict)
    elif now - news > NEWS_S:
      news = now
      print(f"waiting for {_absent(room, missing)}", file=sys.stderr)


def _absent(room: _Room, missing: list[int]) -> str:
  """Who is missing, and the hosts to look at, as far as the launcher lists them."""
  nodes, total = room.launch.nodes, room.launch.num_processes
  if len(nodes) == total:  # one on each, in this order
    return f"{where(missing, nodes)} of {total}"
  came = {who.node.partition(".")[0] for who in room.met.values()}
  silent = [node for node in nodes if node.partition(".")[0] not in came]
  hosts = f" (nobody from {few(silent)})" if silent else ""
  return f"{numbers(missing)} of {total}{hosts}"


def _wrong(room: _Room, now: float) -> list[str]:
  """All that is wrong with what is known so far."""
  addresses = {}
  for rank, sock in room.guests.items():
    with contextlib.suppress(OSError):
      addresses[rank] = network.plain_address(sock.getpeername()[0])
      if room.met[rank].place != room.met[0].place:
        addresses.setdefault(0, network.plain_address(sock.getsockname()[0]))
  left = [
    f"{numbers([rank])} ({room.met[rank].node}, pid {room.met[rank].pid}) came and "
    "has gone; see its last lines"
    for rank, since in room.gone.items()
    if now - since > BACK_S
  ]
  return room.wrong + disagreements(room.met, addresses) + left


def _serve(room: _Room, listener: socket.socket, timeout: float) -> None:
  """Take what has come within the timeout."""
  for key, _ in room.selector.select(timeout):
    if key.data is None:
      _admit(room, listener)
      continue
    sock, (receiver, until) = key.fileobj, key.data
    assert isinstance(sock, socket.socket)
    try:
      messages = receiver.drain()
      if messages and until != _WELCOME:
        _hear(room, sock, messages[0])
    except (OSError, EOFError, ValueError):
      _drop(room, sock)


def _admit(room: _Room, listener: socket.socket) -> None:
  """Let in all who knock, and turn out who has said nothing for too long."""
  now = time.monotonic()
  with contextlib.suppress(OSError):  # nobody else, gone again, or out of files
    while True:
      sock, _ = listener.accept()
      network.tune(sock)
      stranger = (wire.Receiver(sock, HELLO_BYTES), now + HELLO_S)
      room.selector.register(sock, selectors.EVENT_READ, stranger)
      room.silent.append((now + HELLO_S, sock))
  while room.silent and room.silent[0][0] < now:
    _, sock = room.silent.popleft()
    key = room.selector.get_map().get(sock) if sock.fileno() >= 0 else None
    if key and key.data[1] != _WELCOME:
      _drop(room, sock)


def _hear(room: _Room, sock: socket.socket, message: Any) -> None:
  """Somebody has said the first thing."""
  if not isinstance(message, dict):
    raise ValueError("no message of ours")
  who = read(message.get("who"))
  if message.get("meeting") != room.launch.job or who is None:
    wire.send(sock, {"other": room.launch.job}, timeout=1)
    return _drop(room, sock)
  room.came.add(who.me)
  wire.send(sock, {"welcome": room.launch.job}, timeout=1)
  room.selector.modify(sock, selectors.EVENT_READ, (wire.Receiver(sock), _WELCOME))
  there = room.met.get(who.rank)
  if room.verdict:
    wire.send(sock, {"error": room.verdict}, timeout=1)
  elif there and there.me != who.me and who.rank not in room.gone:
    room.wrong.append(twice(there, who))
  elif not 0 <= who.rank < room.launch.num_processes:
    room.wrong.append(
      f"process {who.rank} ({who.node}): there are only {room.launch.num_processes} "
      f"for process 0 ({room.met[0].node}); start all in one step"
    )
  else:
    before = room.guests.pop(who.rank, None)
    room.met[who.rank], room.guests[who.rank] = who, sock
    room.gone.pop(who.rank, None)
    if before:
      _drop(room, before)


def _drop(room: _Room, sock: socket.socket) -> None:
  """Close a connection; whoever was on it may come back."""
  room.selector.unregister(sock)
  sock.close()
  for rank in [r for r, s in room.guests.items() if s is sock]:
    del room.guests[rank]
    room.gone[rank] = time.monotonic()


def _tell(room: _Room, verdict: str) -> None:
  """Tell what is wrong to all who are here, and to whoever comes."""
  room.verdict = verdict
  for key in list(room.selector.get_map().values()):
    if key.data and key.data[1] == _WELCOME:
      with contextlib.suppress(OSError):
        assert isinstance(key.fileobj, socket.socket)
        wire.send(key.fileobj, {"error": verdict}, timeout=1)


def _close(sockets: Iterable[socket.socket]) -> None:
  for sock in sockets:
    sock.close()


def _allow_files(num_processes: int) -> None:
  """Room for two connections to each process, ours and that of JAX's coordinator.

  The soft limit is often 1,024 (systemd's DefaultLimitNOFILE=1024:524288,
  systemd-system.conf(5)); up to the hard one a process may raise it (getrlimit(2)).
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  need = 2 * num_processes + 256  # and libraries, checkpoints, logs
  wanted = 2 * need + 512  # data take half of what there is (data/tfrecord.py)
  if soft == resource.RLIM_INFINITY or soft >= wanted:
    return
  most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
  with contextlib.suppress(OSError, ValueError):  # as where a system has a lower one
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))
    soft = max(most, soft)
  if soft < need:
    raise ConfigError(
      f"ulimit -n: {soft} files at most on {network.node_name()}, but process 0 needs "
      f"{need} for {num_processes} processes; raise the hard limit there (ulimit -Hn, "
      "LimitNOFILE of slurmd)"
    )
