"""Rendezvous of a run's processes before `jax.distributed.initialize`.

A failure inside `jax.distributed.initialize` ends minutes later in a C++ abort that
identifies neither rank nor host. So the processes first connect over plain TCP. Process 0
listens on a port that all processes derive from the run's secret and name. The others
connect to it, and each sends a description of itself (handshake.py). Process 0 answers
"go" with the address of JAX's coordinator, or one line that says what is wrong
(server.py); every process ends with that line. The links stay open for `watch`, and a
second link of each process for `group`.

Both ends first prove that they have the run's secret (`cluster.secret`). Connections of
other programs are counted and ignored.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import random
import re
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.cluster import wire
from jaxscale.cluster.launch import LOOPBACK, Launch
from jaxscale.cluster.rendezvous import network, server
from jaxscale.cluster.rendezvous.acceptor import Acceptor
from jaxscale.cluster.rendezvous.handshake import Hello, make_hello
from jaxscale.cluster.secret import VARIABLE, find_secret, greet, run_key
from jaxscale.cluster.wire import Link
from jaxscale.errors import ConfigError
from jaxscale.owners import unsafe_owner

CONNECT_S = 2.0  # seconds for a connection
ANSWER_S = 10.0  # seconds for an answer, as process 0 may be busy with thousands
TAKEN_S = 10.0  # seconds for which other programs may use all ports
GRACE_S = 15.0  # seconds after the timeout, so that process 0 reports it first
_CHECK_S = 0.1  # seconds between two checks of the results

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
  shares: list[list[int]]  # by rank


class ProcessGroup(NamedTuple):
  """All processes of a run: their hosts and the connections between them."""

  process_id: int
  num_processes: int
  hosts: list[str]  # by rank
  coordinator: str  # address:port for JAX, as seen from this host, or unix:PATH
  links: dict[int, Link]  # to all others in process 0, to process 0 in the others
  key: bytes = b""  # known to the processes of this run only
  reserved: socket.socket | None = None  # keeps the coordinator's port for process 0
  share: tuple[int, int] = (0, 1)  # index and number of the processes with the same CPUs
  value_links: Mapping[int, Link] = {}  # second connections to the same processes, for `group`


def rendezvous(
  launch: Launch,
  *,
  timeout_s: float = 60.0,
  digests: Mapping[str, str] | None = None,
  on_cpu: bool = True,
  error: str = "",
  secret: bytes | None = None,
  cpus: str = "",
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
    cpus: the CPUs that this process would use alone.

  Raises:
    ConfigError: a process is missing, was started twice, or differs from process 0. The
      line is the same in all processes that can receive it.

  Example:
    >>> rendezvous(Launch("single", 0, 1, None, 0, 1, "alone")).links
    {}
  """
  if launch.num_processes == 1:
    return ProcessGroup(0, 1, [network.node_name()], "", {})
  hello = make_hello(launch, digests or {}, on_cpu, error, cpus)
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
  def close_links() -> None:
    server.close_all([*group.links.values(), *group.value_links.values()])

  os.register_at_fork(after_in_child=close_links)
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
    with Acceptor(listeners, key, 2 * launch.num_processes) as acceptor:
      served = server.serve(launch, hello, acceptor, timeout_s, place_it, note)
      hosts, links, value_links, coordinator, shares = served
  except BaseException:
    if reserved:
      reserved.close()
    raise
  if coordinator.isdigit():  # at the address where the others have reached this process
    (address,) = network.own_address(links.values()) or ["::"]
    coordinator = network.join_address(address, port)
  own = 0, launch.num_processes, hosts, coordinator, links, key, reserved
  return ProcessGroup(*own, (shares[0][0], shares[0][1]), value_links)


def _place_coordinator(port: int, hellos: Mapping[int, Hello]) -> str:
  """Return the port of JAX's coordinator, or a socket that only this user can reach.

  JAX's coordinator authenticates nobody. If all processes see the same files, it listens
  on a socket in a directory that is closed to other users.
  """
  is_shared = len({hello.files for hello in hellos.values()}) == 1
  for place in dict.fromkeys([tempfile.gettempdir(), "/tmp"] * is_shared):
    # gRPC accepts only these characters without escapes; unix(7) has room for 107.
    if not re.fullmatch(r"[A-Za-z0-9/._-]{1,80}", place):
      continue
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
      folder = tempfile.mkdtemp(prefix="jaxscale-", dir=place)
      if problem := unsafe_owner(Path(folder), is_folder=True):
        os.rmdir(folder)
        advice = "so JAX's coordinator is not in it; set TMPDIR to a folder of yours"
        print(f"note: TMPDIR={place}: {problem}, {advice}", file=sys.stderr, flush=True)
        continue
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
  links = [link]
  try:
    link.send(hello, timeout=ANSWER_S)
    if value_link := _connect_again(link, target.key):
      links.append(value_link)
      with contextlib.suppress(OSError):  # the other link has an error to read
        value_link.send({"values": hello.rank}, timeout=ANSWER_S)
    answer = wire.typed(dict[str, Any], link.receive(timeout_s + GRACE_S))
    if "error" in answer:
      raise ConfigError(wire.typed(str, answer["error"]))
    coordinator, hosts, shares = wire.parse(_Go, answer.get("go"))
    is_port = coordinator.isdigit() and int(coordinator) < 1 << 16
    index, count = shares[hello.rank] if len(shares) == len(hosts) else (0, 0)
    is_whole = len(hosts) == hello.num_processes and 0 <= index < count
    if not value_link or not is_whole or not (is_port or coordinator.startswith("unix:/")):
      raise ValueError("it sent an invalid answer")
  except BaseException as e:
    server.close_all(links)
    if not isinstance(e, OSError | EOFError | ValueError) or isinstance(e, ConfigError):
      raise
    problem = f"process 0 on {target.host} exited before all had connected ({e}); see its output"
    raise ConfigError(f"process {hello.rank} ({hello.node}): {problem}") from e
  if coordinator.isdigit():
    # The name may resolve to a different address elsewhere; this one has worked.
    seen = network.peer_address(link) or target.addresses[0]
    coordinator = network.join_address(seen, int(coordinator))
  own = hello.rank, hello.num_processes, hosts, coordinator, {0: link}, target.key
  return ProcessGroup(*own, share=(index, count), value_links={0: value_link})


def _connect_again(link: Link, key: bytes) -> Link | None:
  """Return a second link to process 0; None if process 0 has already answered with an error."""
  address, port = link.sock.getpeername()[:2]
  pause_s = 0.0
  while not wire.is_ready(link, time.monotonic() + pause_s):
    if isinstance(other := _try(address, port, key), Link):
      return other
    pause_s = _CHECK_S
  return None


def _find_process_0(hello: Hello, target: _Target, timeout_s: float) -> Link:
  """Return a link on which process 0 has proved that it has the run's secret.

  All ports are tried at once, each by a thread, so that another program on one port causes
  no delay.
  """
  results: dict[int, str] = {}
  winner: list[Link] = []
  is_over, deciding = threading.Event(), threading.Lock()

  def search(address: str, port: int) -> None:
    pause_s = 0.02
    while not is_over.wait(random.uniform(0.5, 1) * pause_s):
      pause_s = min(1.0, 1.5 * pause_s)
      found = _try(address, port, target.key)
      if isinstance(found, str):
        results[port] = found
        continue
      with deciding:
        if is_over.is_set():  # another address of process 0 was faster
          return found.close()
        winner.append(found)
        is_over.set()

  for place in itertools.product(target.addresses, target.ports):
    threading.Thread(target=search, args=place, name="rendezvous", daemon=True).start()
  began, taken_since = time.monotonic(), None
  try:
    while not is_over.wait(_CHECK_S):
      now = time.monotonic()
      # If other programs use every port, process 0 cannot listen and has reported that.
      is_taken = len(results) == len(target.ports) and not {*results.values()} & _UNUSED
      taken_since = (taken_since or now) if is_taken else None
      if now - began > timeout_s or (taken_since and now - taken_since > TAKEN_S):
        every = dict.fromkeys(target.ports, _DROPPED) | results
        raise ConfigError(_not_found(hello, target, every, now - began))
  finally:
    is_over.set()
  return winner[0]


def _try(address: str, port: int, key: bytes) -> Link | str:
  """Connect to a port; return a link to process 0, or the reason why it is not there."""
  try:
    sock = socket.create_connection((address, port), CONNECT_S)
  except ConnectionRefusedError:
    return _REFUSED
  except TimeoutError:
    return _DROPPED
  except OSError:  # also without IPv6 or a free file descriptor
    return _NO_ROUTE
  try:
    # The kernel may assign the client the port it connects to (TCP simultaneous open).
    if sock.getsockname() == sock.getpeername():
      result = _REFUSED
    else:
      network.tune(sock)
      return greet(sock, key, ANSWER_S)
  except TimeoutError:
    result = _SILENT
  except (OSError, EOFError, ValueError):
    result = _TAKEN
  sock.close()
  return result


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
