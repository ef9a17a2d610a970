"""Rendezvous of a run's processes before `jax.distributed.initialize`.

A failure inside `jax.distributed.initialize` ends minutes later in a C++ abort that
identifies neither rank nor host. So the processes first connect over plain TCP. Process 0
listens on a port that all processes derive from the run's secret and name. The others
connect to it, and each sends a description of itself (handshake.py). Process 0 answers
"go" with the address of JAX's coordinator, or one line that says what is wrong
(server.py); every process ends with that line. The links stay open for `watch`.

Both ends first prove that they have the run's secret (`cluster.secret`). Connections of
other programs are counted and ignored.
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
from jaxscale.cluster.launch import LOOPBACK, Launch
from jaxscale.cluster.rendezvous import network, server
from jaxscale.cluster.rendezvous.acceptor import Acceptor
from jaxscale.cluster.rendezvous.handshake import Hello, make_hello
from jaxscale.cluster.secret import VARIABLE, Greeting, find_secret, run_key
from jaxscale.cluster.wire import Link
from jaxscale.errors import ConfigError

CONNECT_S = 2.0  # seconds for a connection
ANSWER_S = 10.0  # seconds for an answer, as process 0 may be busy with thousands
TAKEN_S = 10.0  # seconds for which other programs may use all ports
GRACE_S = 15.0  # seconds after the timeout, so that process 0 reports it first

# Results of an attempt to find process 0 on a port.
_REFUSED, _DROPPED, _NO_ROUTE = "refused", "no answer", "no route"
_UNUSED = {_REFUSED, _DROPPED, _NO_ROUTE}
_TAKEN = "used by another program, or by a run with a different secret"
_SILENT = "used by another program, silent"


class _Target(NamedTuple):
  """The run, and the addresses and ports where process 0 listens."""

  launch: Launch
  host: str
  addresses: list[str]
  ports: list[int]
  key: bytes


class _Go(NamedTuple):
  """The answer of process 0 when all processes have connected."""

  coordinator: str  # unix:PATH, or the port
  hosts: list[str]  # by rank


class ProcessGroup(NamedTuple):
  """All processes of a run: their hosts and the connections between them."""

  process_id: int
  num_processes: int
  hosts: list[str]  # by rank
  coordinator: str  # address:port for JAX, as seen from this host, or unix:PATH
  links: dict[int, Link]  # to all others in process 0, to process 0 in the others
  key: bytes = b""  # known to the processes of this run only
  reserved: socket.socket | None = None  # keeps the coordinator's port for process 0


def rendezvous(
  launch: Launch,
  *,
  timeout_s: float = 60.0,
  digests: Mapping[str, str] | None = None,
  on_cpu: bool = True,
  error: str = "",
  secret: bytes | None = None,
) -> ProcessGroup:
  """Connect to the other processes of this run; each process calls this.

  Args:
    launch: the rank of this process and the host of process 0. Process 0 listens on
      `launch.port`, or else on a port derived from the secret and `launch.job`.
    timeout_s: the seconds to wait for the other processes. A cold file system or an
      image to pull delays their start.
    digests: digests that must be equal in all processes, by name: "config", "code".
    on_cpu: whether collectives will use gloo, which listens at the address of the host
      name.
    error: the reason why this process cannot take part, such as a missing GPU.
    secret: the secret of the run. None means the result of `secret.find_secret`.

  Raises:
    ConfigError: a process is missing, was started twice, or differs from process 0. The
      line is the same in all processes that can receive it.

  Example:
    >>> rendezvous(Launch("single", 0, 1, None, 0, 1, "alone")).links
    {}
  """
  if launch.num_processes == 1:
    return ProcessGroup(0, 1, [network.node_name()], "", {})
  hello = make_hello(launch, digests or {}, on_cpu, error)
  if launch.kind == "kubernetes" and not (secret or os.environ.get(VARIABLE)):
    fix = "set it in all pods of the Job to the same Secret of at least 32 random characters"
    raise ConfigError(f"{VARIABLE}: not set; {fix}")
  key = run_key(secret or find_secret(), launch.job)
  ports = [launch.port] if launch.port else network.ports_of(key.hex())
  # A pod's name is known once the pod is ready.
  patience_s = timeout_s if launch.kind == "kubernetes" else min(5.0, timeout_s)
  host = launch.host or LOOPBACK
  target = _Target(launch, host, network.resolve(host, patience_s), ports, key)
  group = (_connect if launch.process_id else _listen)(hello, target, timeout_s)
  # A forked worker that outlives this process must not keep it alive for others.
  os.register_at_fork(after_in_child=lambda: server.close_all(group.links.values()))
  return group


def leave_last(group: ProcessGroup, timeout_s: float = 10.0) -> None:
  """Let process 0 leave after the others, since JAX's coordinator ends with it.

  A process that is still writing its last line at that time is aborted in C++ 0.04 s
  later (measured, jax 0.10.2). This function reads nothing, as a watch may use the links.

  Args:
    group: the processes of the run.
    timeout_s: the seconds after which process 0 leaves in any case.
  """
  if group.process_id != 0:
    return
  open_files = {link.fileno() for link in group.links.values()} - {-1}
  poll = select.poll()
  for file in open_files:
    poll.register(file, select.POLLRDHUP)
  deadline = time.monotonic() + timeout_s
  while open_files and (left := deadline - time.monotonic()) > 0:
    for file, _ in poll.poll(left * 1000):
      poll.unregister(file)
      open_files.discard(file)


def _listen(hello: Hello, target: _Target, timeout_s: float) -> ProcessGroup:
  """Run the rendezvous in process 0."""
  launch, host, addresses, ports, key = target
  note = ""
  if not any(map(network.is_own, addresses)):  # a Service of Kubernetes is fine
    note = f"; they look for process 0 on {host}, but {addresses[0]} is not an address of this host"
  # A port from the settings may become free in a moment.
  patience_s = 0 if len(ports) > 1 else TAKEN_S / 2
  near = network.addresses_to_listen_on(host, addresses)
  try:
    bind = functools.partial(network.bind_port, ports, near, listen=True)
    found, listeners = network.retry(bind, patience_s, pause_s=0.2)
  except OSError as e:
    problem = f"port {network.describe_taken(ports)}: {e.strerror}"
    fix = "set JAXSCALE_COORDINATOR=HOST:PORT to a free port"
    raise ConfigError(f"process 0 ({hello.node}): {problem}; {fix}") from e
  if taken := ports[: ports.index(found)]:
    taken_ports = network.describe_taken(taken)
    print(f"skipped ports that other programs use: {taken_ports}", file=sys.stderr)
  port, reserved = 0, None
  candidates = network.ports_of(f"{key.hex()}/coordinator")
  try:
    port, (reserved,) = network.bind_port(candidates, [], listen=False)
  except OSError as e:  # the server sends this error to all processes
    among = f"among {', '.join(map(str, candidates))} ({e.strerror})"
    hello = hello._replace(error=f"no free port for JAX's coordinator {among}")
  place_it = functools.partial(_place_coordinator, port)
  try:
    with Acceptor(listeners, key, launch.num_processes) as acceptor:
      hosts, links, coordinator = server.serve(launch, hello, acceptor, timeout_s, place_it, note)
  except BaseException:
    if reserved:
      reserved.close()
    raise
  if coordinator.isdigit():  # at the address where the others have reached this process
    (address,) = network.own_address(links.values()) or ["::"]
    coordinator = network.join_address(address, port)
  return ProcessGroup(0, launch.num_processes, hosts, coordinator, links, key, reserved)


def _place_coordinator(port: int, hellos: Mapping[int, Hello]) -> str:
  """Return the port of JAX's coordinator, or a socket that only this user can reach.

  JAX's coordinator authenticates nobody. If all processes see the same files, it listens
  on a socket in a directory that is closed to other users.
  """
  # gRPC accepts only these characters without escapes; unix(7) has room for 107.
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
  if os.getpid() == process:  # a forked worker that ends must not remove the folder
    shutil.rmtree(folder, ignore_errors=True)


def _connect(hello: Hello, target: _Target, timeout_s: float) -> ProcessGroup:
  """Run the rendezvous in a process other than 0."""
  link = _find_process_0(hello, target, timeout_s)
  try:
    link.send(hello, timeout=ANSWER_S)
    answer = wire.typed(dict[str, Any], link.receive(timeout_s + GRACE_S))
    if "error" in answer:
      raise ConfigError(wire.typed(str, answer["error"]))
    coordinator, hosts = wire.parse(_Go, answer.get("go"))
    is_port = coordinator.isdigit() and int(coordinator) < 1 << 16
    if len(hosts) != hello.num_processes or not (is_port or coordinator.startswith("unix:/")):
      raise ValueError("it sent an invalid answer")
  except BaseException as e:
    link.close()
    if not isinstance(e, OSError | EOFError | ValueError) or isinstance(e, ConfigError):
      raise
    problem = f"process 0 on {target.host} exited before all had connected ({e}); see its output"
    raise ConfigError(f"process {hello.rank} ({hello.node}): {problem}") from e
  if coordinator.isdigit():
    # The name may resolve to a different address elsewhere; this one has worked.
    seen = network.peer_address(link) or target.addresses[0]
    coordinator = network.join_address(seen, int(coordinator))
  return ProcessGroup(hello.rank, hello.num_processes, hosts, coordinator, {0: link}, target.key)


class _Attempt:
  """A connection that may lead to process 0; no method waits.

  Attributes:
    result: the reason why it does not lead to process 0; "" until that is known.
  """

  result = ""
  greeting: Greeting | None

  def __init__(self, endpoint: tuple[str, int], key: bytes):
    """Begin to connect.

    Raises:
      OSError: this host has no IPv6 or no free file descriptor.
    """
    family, address = network.numeric(*endpoint)
    self._key, self.greeting = key, None
    self._until = time.monotonic() + CONNECT_S
    self.sock = socket.socket(family)
    self.sock.setblocking(False)
    self.sock.connect_ex(address)  # poll() reports the result

  def advance(self, poll_events: int) -> bool:
    """Advance without waiting; return True once process 0 has proved the secret.

    Args:
      poll_events: the events of the socket from poll().
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
    """The result if nothing more arrives."""
    return _SILENT if self.greeting else _DROPPED

  @property
  def waits_for(self) -> int:
    """The event of poll() that the attempt waits for."""
    return select.POLLIN if self.greeting else select.POLLOUT

  def _greet(self) -> None:
    sock = self.sock
    if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
      raise OSError(error, os.strerror(error))
    # The kernel may assign the client the port it connects to (TCP simultaneous open).
    if sock.getsockname() == sock.getpeername():
      raise ConnectionRefusedError
    network.tune(sock)
    self.greeting = Greeting(sock, self._key)
    self._until = time.monotonic() + ANSWER_S


def _find_process_0(hello: Hello, target: _Target, timeout_s: float) -> Link:
  """Return a link on which process 0 has proved that it has the run's secret.

  All ports are tried at once, so that another program on one port causes no delay.
  """
  targets = [(address, port) for port in target.ports for address in target.addresses]
  began, pause, taken_since = time.monotonic(), 0.02, None
  attempts: dict[tuple[str, int], _Attempt] = {}
  results: dict[int, str] = {}
  try:
    while True:
      for where in targets:
        if where not in attempts:
          try:
            attempts[where] = _Attempt(where, target.key)
          except OSError:
            results[where[1]] = _NO_ROUTE
      round_end = time.monotonic() + random.uniform(0.5, 1) * pause
      while (left := round_end - time.monotonic()) > 0:
        if link := _advance(attempts, results, left):
          return link
      now = time.monotonic()
      # If other programs use every port, process 0 cannot listen and has reported that.
      is_taken = len(results) == len(target.ports) and not {*results.values()} & _UNUSED
      taken_since = (taken_since or now) if is_taken else None
      if now - began > timeout_s or (taken_since and now - taken_since > TAKEN_S):
        results |= {p[1]: a.so_far for p, a in attempts.items() if p[1] not in results}
        raise ConfigError(_not_found(hello, target, results, now - began))
      pause = min(1.0, 1.5 * pause)
  finally:
    server.close_all(attempt.sock for attempt in attempts.values())


def _advance(
  attempts: dict[tuple[str, int], _Attempt], results: dict[int, str], seconds: float
) -> Link | None:
  """Advance all attempts; return the link of one that has succeeded, or None.

  Failed attempts are removed, and their results are recorded by port in `results`.
  """
  poll = select.poll()
  for attempt in attempts.values():
    poll.register(attempt.sock, attempt.waits_for)
  ready = dict(poll.poll(seconds * 1000))
  for address, attempt in list(attempts.items()):
    if attempt.advance(ready.get(attempt.sock.fileno(), 0)) and attempt.greeting:
      del attempts[address]
      return attempt.greeting.link
    if attempt.result:
      results[address[1]] = attempt.result
      attempts.pop(address).sock.close()
  return None


def _not_found(hello: Hello, target: _Target, results: dict[int, str], for_s: float) -> str:
  """Return the error of a process that found no process 0: addresses, results, remedy."""
  host, addresses = target.host, target.addresses
  ports: dict[str, list[str]] = {}
  for port, result in results.items():
    ports.setdefault(result, []).append(str(port))
  tried = "; ".join(f"{', '.join(p)} {result}" for result, p in ports.items())
  if not ports.keys() & _UNUSED:
    advice = "set JAXSCALE_COORDINATOR=HOST:PORT to a free port"
  elif _REFUSED in ports:
    advice = "it has not started, has failed (see its output), runs on a different host, "
    advice += f"or has a different secret ({VARIABLE}, else ~/.jaxscale/secret)"
  else:
    advice = f"check firewalls and the route from {hello.node} to {host}"
  with contextlib.suppress(OSError):
    advice += f" (connecting from {network.own_address_seen_by(addresses[0])})"
  where = f"found no process 0 on {host} ({', '.join(addresses[:4])}) within {for_s:.0f} s"
  return f"process {hello.rank} ({hello.node}): {where}, ports {tried}; {advice}"
