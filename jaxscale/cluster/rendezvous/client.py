"""All processes of a run find each other, before JAX is asked for anything.

What goes wrong inside `jax.distributed.initialize` ends in a C++ abort that names
neither rank nor host, minutes later. So the processes connect first over plain TCP:
process 0 listens on a port that all derive from the run's secret and name, the
others find it there, and each sends who it is and what it runs (handshake.py).
Process 0 answers "go", with the address of JAX's coordinator, or one line with what is
wrong (server.py); every process ends with that line. The links stay open: `watch` is
built on them.

Both ends prove first that they have the run's secret (`cluster.secret`): strangers on
the network are counted and ignored, wherever they listen or connect.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import re
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale.cluster import wire
from jaxscale.cluster.detect.launch import LOOPBACK, Launch
from jaxscale.cluster.rendezvous import network, server
from jaxscale.cluster.rendezvous.acceptor import Acceptor
from jaxscale.cluster.rendezvous.handshake import Hello, make_hello
from jaxscale.cluster.secret import VARIABLE, Greeting, find_secret, run_key
from jaxscale.cluster.wire import Link
from jaxscale.errors import ConfigError

CONNECT_S = 2.0  # seconds for a connection
ANSWER_S = 10.0  # and for an answer on it: process 0 may be busy with thousands
TAKEN_S = 10.0  # seconds for which a port may be used by another program
GRACE_S = 15.0  # after the time-out: process 0 is the first to report it

# What there was on a port instead of process 0.
_REFUSED, _DROPPED, _NO_ROUTE = "refused", "no answer", "no route"
_UNUSED = {_REFUSED, _DROPPED, _NO_ROUTE}
_TAKEN = "used by another program, or by a run with another secret"
_SILENT = "used by another program, silent"


class _Place(NamedTuple):
  """Where process 0 listens, and in which run."""

  launch: Launch
  host: str
  addresses: list[str]
  ports: list[int]
  key: bytes


class _Go(NamedTuple):
  """Process 0's answer when all are there."""

  coordinator: str  # unix:PATH, or the port
  hosts: list[str]  # by rank


class ProcessGroup(NamedTuple):
  """All processes of a run: where each is, and the connections between them."""

  process_id: int
  num_processes: int
  hosts: list[str]  # by rank
  coordinator: str  # address:port for JAX, as seen from here, or unix:PATH
  links: dict[int, Link]  # to all others in process 0, to 0 in the others
  key: bytes = b""  # which only processes of this run have
  reserved: socket.socket | None = None  # keeps the coordinator's port for process 0


def rendezvous(
  launch: Launch,
  *,
  timeout_s: float = 60.0,
  digests: Mapping[str, str] | None = None,
  on_cpu: bool | None = None,
  error: str = "",
  secret: bytes | None = None,
) -> ProcessGroup:
  """Connect to the other processes of this run; each of them calls this.

  Args:
    launch: who this process is. Process 0 listens on `launch.port`, or else on a
      port that follows from the secret and `launch.job`.
    timeout_s: seconds to wait for the others. They start Python at the same
      time; a cold file system, or an image to pull, takes longer.
    digests: what has to be equal everywhere, by name: "config", "code".
    on_cpu: whether collectives will be gloo's, which listens at the host's own
      name. By default: whether JAX_PLATFORMS says so.
    error: why this process cannot take part, such as a GPU that is missing.
    secret: what all processes of the run have, and nobody else. By default:
      `secret.find_secret`.

  Raises:
    ConfigError: one line, the same in all processes that can get it: which process
      is missing, is there twice, or differs, and how.

  Example:
    >>> rendezvous(Launch("single", 0, 1, None, 0, 1, "alone")).links
    {}
  """
  if on_cpu is None:
    on_cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
  if launch.num_processes == 1:
    return ProcessGroup(0, 1, [network.node_name()], "", {})
  own = make_hello(launch, digests or {}, on_cpu, error)
  if launch.kind == "kubernetes" and not (secret or os.environ.get(VARIABLE)):
    fix = "give all pods of the Job the same one, from a Secret: at least 32 random characters"
    raise ConfigError(f"{VARIABLE}: not set; {fix}")
  key = run_key(secret or find_secret(), launch.job)
  ports = [launch.port] if launch.port else network.ports_of(key.hex())
  # A pod's name is known once the pod is ready.
  patience_s = timeout_s if launch.kind == "kubernetes" else min(5.0, timeout_s)
  host = launch.host or LOOPBACK
  place = _Place(launch, host, network.resolve(host, patience_s), ports, key)
  group = (_connect if launch.process_id else _listen)(own, place, timeout_s)
  # A forked worker that outlives this process must not keep it alive for others.
  os.register_at_fork(after_in_child=lambda: server.close_all(group.links.values()))
  return group


def leave_last(group: ProcessGroup, timeout_s: float = 10.0) -> None:
  """Let process 0 leave after the others: JAX's coordinator ends with it.

  A process that still writes its last line then is aborted in C++, 0.04 s later
  (measured, jax 0.10.2). Nothing is read: a watch may use the links.

  Args:
    timeout_s: seconds after which process 0 leaves all the same.
  """
  if group.process_id != 0:
    return
  here = {link.fileno() for link in group.links.values()} - {-1}
  poll = select.poll()
  for file in here:
    poll.register(file, select.POLLRDHUP)
  deadline = time.monotonic() + timeout_s
  while here and (left := deadline - time.monotonic()) > 0:
    for file, _ in poll.poll(left * 1000):
      poll.unregister(file)
      here.discard(file)


def _listen(own: Hello, place: _Place, timeout_s: float) -> ProcessGroup:
  """Process 0's way."""
  launch, host, addresses, ports, key = place
  note = ""
  if not any(map(network.is_own, addresses)):  # a Service of Kubernetes is fine
    note = f"; they look for process 0 on {host}, but {addresses[0]} is not this host's"
  # A port that was given may be free again in a moment.
  patience_s = 0 if len(ports) > 1 else TAKEN_S / 2
  near = network.addresses_to_listen_on(host, addresses)
  try:
    bind = functools.partial(network.bind_port, ports, near, listen=True)
    found, listeners = network.retry(bind, patience_s, pause_s=0.2)
  except OSError as e:
    why = f"port {network.describe_taken(ports)}: {e.strerror}"
    fix = "set JAXSCALE_COORDINATOR=HOST:PORT with a free one"
    raise ConfigError(f"process 0 ({own.node}): {why}; {fix}") from e
  if taken := ports[: ports.index(found)]:
    taken_ports = network.describe_taken(taken)
    print(f"ports passed over, which others use: {taken_ports}", file=sys.stderr)
  port, reserved = 0, None
  candidates = network.ports_of(f"{key.hex()}/coordinator")
  try:
    port, (reserved,) = network.bind_port(candidates, [], listen=False)
  except OSError as e:  # all are to know it
    among = f"among {', '.join(map(str, candidates))} ({e.strerror})"
    own = own._replace(error=f"no free port for JAX's coordinator {among}")
  place_it = functools.partial(_place_coordinator, port)
  try:
    with Acceptor(listeners, key, launch.num_processes) as acceptor:
      hosts, links, coordinator = server.serve(launch, own, acceptor, timeout_s, place_it, note)
  except BaseException:
    if reserved:
      reserved.close()
    raise
  if coordinator.isdigit():  # where the others have reached this process
    (address,) = network.own_address(links.values()) or ["::"]
    coordinator = network.join_address(address, port)
  return ProcessGroup(0, launch.num_processes, hosts, coordinator, links, key, reserved)


def _place_coordinator(port: int, hellos: Mapping[int, Hello]) -> str:
  """The port of JAX's coordinator, or a socket that only this user's processes reach.

  JAX's coordinator asks nobody who they are. Where all processes see the same files, it
  listens in a directory that is closed to other users.
  """
  # gRPC takes no other characters as they are; unix(7) has room for 107.
  if re.fullmatch(r"[A-Za-z0-9/._-]{1,80}", tempfile.gettempdir()) and (
    len({hello.files for hello in hellos.values()}) == 1
  ):
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
      folder = tempfile.mkdtemp(prefix="jaxscale-")
      atexit.register(_remove, folder, os.getpid())
      path = f"{folder}/coordinator"
      probe.bind(path)  # not every file system has sockets
      os.unlink(path)
      return f"unix:{path}"
  return str(port)


def _remove(folder: str, process: int) -> None:
  if os.getpid() == process:  # not of a forked worker that ends
    shutil.rmtree(folder, ignore_errors=True)


def _connect(own: Hello, place: _Place, timeout_s: float) -> ProcessGroup:
  """The way of all others."""
  link = _find_process_0(own, place, timeout_s)
  try:
    link.send(own, timeout=ANSWER_S)
    answer = wire.typed(dict[str, Any], link.receive(timeout_s + GRACE_S))
    if "error" in answer:
      raise ConfigError(wire.typed(str, answer["error"]))
    coordinator, hosts = wire.parse(_Go, answer.get("go"))
    is_port = coordinator.isdigit() and int(coordinator) < 1 << 16
    if len(hosts) != own.num_processes or not (is_port or coordinator.startswith("unix:/")):
      raise ValueError("no start of this run")
  except BaseException as e:
    link.close()
    if not isinstance(e, OSError | EOFError | ValueError) or isinstance(e, ConfigError):
      raise
    why = f"process 0 on {place.host} left before all had connected ({e}); see its last lines"
    raise ConfigError(f"process {own.rank} ({own.node}): {why}") from e
  if coordinator.isdigit():
    # By the address that has worked, whatever the name resolves to elsewhere.
    seen = network.peer_address(link) or place.addresses[0]
    coordinator = network.join_address(seen, int(coordinator))
  return ProcessGroup(own.rank, own.num_processes, hosts, coordinator, {0: link}, place.key)


class _Attempt:
  """A connection that may lead to process 0; nothing in it waits.

  Attributes:
    result: what there is instead, once that is known.
  """

  result = ""
  greeting: Greeting | None

  def __init__(self, place: tuple[str, int], key: bytes):
    """Begin to connect.

    Raises:
      OSError: this host cannot: it has no IPv6, or no more files.
    """
    family, address = network.numeric(*place)
    self._key, self.greeting = key, None
    self._until = time.monotonic() + CONNECT_S
    self.sock = socket.socket(family)
    self.sock.setblocking(False)
    self.sock.connect_ex(address)  # poll() tells how it goes

  def advance(self, poll_events: int) -> bool:
    """Go on as far as can be; whether process 0 has welcomed us.

    Args:
      poll_events: what the socket is ready for.
    """
    try:
      if poll_events and not self.greeting:
        self._greet()
      elif poll_events and self.greeting:
        return self.greeting.is_welcome()
      if time.monotonic() > self._until:
        self.result = self.so_far
    except ConnectionRefusedError:
      self.result = _REFUSED
    except TimeoutError:
      self.result = _DROPPED
    except (OSError, EOFError, ValueError):
      self.result = _TAKEN if self.greeting else _NO_ROUTE
    return False

  @property
  def so_far(self) -> str:
    """The result, if nothing more comes."""
    return _SILENT if self.greeting else _DROPPED

  @property
  def waits_for(self) -> int:
    """The event of poll() that it waits for."""
    return select.POLLIN if self.greeting else select.POLLOUT

  def _greet(self) -> None:
    sock = self.sock
    if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
      raise OSError(error, os.strerror(error))
    # The kernel may give a client the very port it calls (TCP's simultaneous open).
    if sock.getsockname() == sock.getpeername():
      raise ConnectionRefusedError
    network.tune(sock)
    self.greeting = Greeting(sock, self._key)
    self._until = time.monotonic() + ANSWER_S


def _find_process_0(own: Hello, place: _Place, timeout_s: float) -> Link:
  """A link on which process 0 has proved that it has the run's secret.

  All ports are tried at once: whoever listens on one, silent or not, delays nobody.
  """
  places = [(address, port) for port in place.ports for address in place.addresses]
  began, pause, taken_since = time.monotonic(), 0.02, None
  attempts: dict[tuple[str, int], _Attempt] = {}
  results: dict[int, str] = {}
  try:
    while True:
      for where in places:
        if where not in attempts:
          try:
            attempts[where] = _Attempt(where, place.key)
          except OSError:
            results[where[1]] = _NO_ROUTE
      round_end = time.monotonic() + random.uniform(0.5, 1) * pause
      while (left := round_end - time.monotonic()) > 0:
        if link := _advance(attempts, results, left):
          return link
      now = time.monotonic()
      # Where others use every port, process 0 cannot listen: it has reported it.
      is_taken = len(results) == len(place.ports) and not {*results.values()} & _UNUSED
      taken_since = (taken_since or now) if is_taken else None
      if now - began > timeout_s or (taken_since and now - taken_since > TAKEN_S):
        results |= {p[1]: a.so_far for p, a in attempts.items() if p[1] not in results}
        raise ConfigError(_not_found(own, place, results, now - began))
      pause = min(1.0, 1.5 * pause)
  finally:
    server.close_all(attempt.sock for attempt in attempts.values())


def _advance(
  attempts: dict[tuple[str, int], _Attempt], results: dict[int, str], seconds: float
) -> Link | None:
  """Go on with all attempts; the link of one that has succeeded.

  Those that have failed are taken out, and noted in `results` by their ports.
  """
  poll = select.poll()
  for attempt in attempts.values():
    poll.register(attempt.sock, attempt.waits_for)
  ready = dict(poll.poll(seconds * 1000))
  for place, attempt in list(attempts.items()):
    if attempt.advance(ready.get(attempt.sock.fileno(), 0)) and attempt.greeting:
      del attempts[place]
      return attempt.greeting.link
    if attempt.result:
      results[place[1]] = attempt.result
      attempts.pop(place).sock.close()
  return None


def _not_found(own: Hello, place: _Place, results: dict[int, str], for_s: float) -> str:
  """Where process 0 was looked for, what was there, and what that may mean."""
  host, addresses = place.host, place.addresses
  ports: dict[str, list[str]] = {}
  for port, result in results.items():
    ports.setdefault(result, []).append(str(port))
  tried = "; ".join(f"{', '.join(p)} {result}" for result, p in ports.items())
  if not ports.keys() & _UNUSED:
    advice = "set JAXSCALE_COORDINATOR=HOST:PORT with a free port"
  elif _REFUSED in ports:
    advice = "it has not started, has failed (see its last lines), is on another host, "
    advice += f"or has another secret ({VARIABLE}, else ~/.jaxscale/secret)"
  else:
    advice = f"is there a firewall, or no route from {own.node} to {host}?"
  with contextlib.suppress(OSError):
    advice += f" (looked from {network.own_address_seen_by(addresses[0])})"
  where = f"no process 0 on {host} ({', '.join(addresses[:4])}) for {for_s:.0f} s"
  return f"process {own.rank} ({own.node}): {where}, ports {tried}; {advice}"
