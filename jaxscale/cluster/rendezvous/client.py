"""All processes of a run find each other, before JAX is asked for anything.

What goes wrong inside `jax.distributed.initialize` ends in a C++ abort that names
neither rank nor host, minutes later. So the processes connect first over plain TCP:
process 0 listens on a port that all derive from the name of the job step, the
others find it there, and each sends who it is and what it runs (handshake.py).
Process 0 answers "go", with a port for JAX's coordinator, or one line with what is
wrong (server.py); every process ends with that line. The connections stay open:
`watch` is built on them.

Whoever is on the network and knows the name of the step could connect as one of its
processes: as with JAX's own coordinator, the network is trusted. What does not
speak this protocol is ignored.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import select
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale.cluster import wire
from jaxscale.cluster.detect.launch import LOOPBACK, Launch
from jaxscale.cluster.rendezvous import network, server
from jaxscale.cluster.rendezvous.handshake import Hello, make_hello
from jaxscale.errors import ConfigError

CONNECT_S = 2.0  # seconds for a connection, and at first for an answer on it
ANSWER_S = 10.0  # and later: process 0 may be busy with thousands
TAKEN_S = 10.0  # seconds for which a port may be used by another program
GRACE_S = 15.0  # after the time-out: process 0 is the first to report it

# What there was on a port instead of process 0.
_REFUSED, _DROPPED, _NO_ROUTE = "refused", "no answer", "no route"
_UNUSED = {_REFUSED, _DROPPED, _NO_ROUTE}
_TAKEN = "used by another program"
_SILENT = f"{_TAKEN}, silent"


class _Place(NamedTuple):
  """Where process 0 listens, and in which run."""

  launch: Launch
  host: str
  addresses: list[str]
  ports: list[int]


class ProcessGroup(NamedTuple):
  """All processes of a run: where each is, and the connections between them."""

  process_id: int
  num_processes: int
  hosts: list[str]  # by rank
  coordinator: str  # address:port for JAX, as seen from here
  links: dict[int, socket.socket]  # to all others in process 0, to 0 in the others
  reserved: socket.socket | None = None  # keeps the coordinator's port for process 0


def rendezvous(
  launch: Launch,
  *,
  timeout_s: float = 60.0,
  digests: Mapping[str, str] | None = None,
  on_cpu: bool | None = None,
  error: str = "",
) -> ProcessGroup:
  """Connect to the other processes of this run; each of them calls this.

  Args:
    launch: who this process is. Process 0 listens on `launch.port`, or else on a
      port that follows from `launch.job`.
    timeout_s: seconds to wait for the others. They start Python at the same
      time; a cold file system, or an image to pull, takes longer.
    digests: what has to be equal everywhere, by name: "config", "code".
    on_cpu: whether collectives will be gloo's, which listens at the host's own
      name. By default: whether JAX_PLATFORMS says so.
    error: why this process cannot take part, such as a GPU that is missing.

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
  ports = [launch.port] if launch.port else network.ports_of(launch.job)
  # A pod's name is known once the pod is ready.
  patience_s = timeout_s if launch.kind == "kubernetes" else min(5.0, timeout_s)
  host = launch.host or LOOPBACK
  place = _Place(launch, host, network.resolve(host, patience_s), ports)
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
  here = {sock.fileno() for sock in group.links.values()} - {-1}
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
  launch, host, addresses, ports = place
  note = ""
  if not any(map(network.is_own, addresses)):  # a Service of Kubernetes is fine
    note = f"; they look for process 0 on {host}, but {addresses[0]} is not this host's"
  # A port that was given may be free again in a moment.
  patience_s = 0 if len(ports) > 1 else TAKEN_S / 2
  try:
    bind = functools.partial(network.bind_port, ports, listen=True)
    listener = network.retry(bind, patience_s, pause_s=0.2)[1]
  except OSError as e:
    raise ConfigError(
      f"process 0 ({own.node}): port {', '.join(map(str, ports))}: {e.strerror}; "
      "set JAXSCALE_COORDINATOR=HOST:PORT with a free one"
    ) from e
  port, reserved = 0, None
  candidates = network.ports_of(f"{launch.job}/coordinator")
  try:
    port, reserved = network.bind_port(candidates, listen=False)
  except OSError as e:  # all are to know it
    among = f"among {', '.join(map(str, candidates))} ({e.strerror})"
    own = own._replace(error=f"no free port for JAX's coordinator {among}")
  try:
    hosts, links = server.serve(launch, own, listener, timeout_s, port, note)
  except BaseException:
    if reserved:
      reserved.close()
    raise
  address = network.join_address(LOOPBACK, port)
  return ProcessGroup(0, launch.num_processes, hosts, address, links, reserved)


def _connect(own: Hello, place: _Place, timeout_s: float) -> ProcessGroup:
  """The way of all others."""
  sock = _find_process_0(own, place, timeout_s)
  try:
    answer = wire.Receiver(sock).receive(timeout_s + GRACE_S)
    if "error" in answer:
      raise ConfigError(answer["error"])
    hosts, port = list(answer["hosts"]), int(answer["go"])
  except BaseException as e:
    sock.close()
    if not isinstance(e, (EOFError, TimeoutError)):
      raise
    raise ConfigError(
      f"process {own.rank} ({own.node}): process 0 on {place.host} left before all had "
      f"connected ({e}); see its last lines"
    ) from e
  # JAX by the address that has worked, whatever the name resolves to elsewhere.
  seen = network.plain_address(str(sock.getpeername()[0]))
  coordinator = network.join_address(seen, port)
  return ProcessGroup(own.rank, own.num_processes, hosts, coordinator, {0: sock})


def _find_process_0(own: Hello, place: _Place, timeout_s: float) -> socket.socket:
  """A connection on which process 0 has welcomed us."""
  began = time.monotonic()
  pause, answer_s, taken_since = 0.02, CONNECT_S, None
  while True:
    results: dict[int, str] = {}
    for port in place.ports:
      for address in place.addresses:
        found = _try_port(own, place.launch.job, (address, port), answer_s)
        if isinstance(found, socket.socket):
          return found
        results[port] = found
    now = time.monotonic()
    # Where others use every port, process 0 cannot listen: it has reported it, or will.
    is_taken = not set(results.values()) & _UNUSED
    taken_since = (taken_since or now) if is_taken else None
    if now - began > timeout_s or (taken_since and now - taken_since > TAKEN_S):
      raise ConfigError(_not_found(own, place, results, now - began))
    time.sleep(random.uniform(0.5, 1) * pause)
    pause = min(1.0, 1.5 * pause)
    if _SILENT in results.values():
      answer_s = min(ANSWER_S, 1.5 * answer_s)


def _try_port(
  own: Hello, job: str, address: tuple[str, int], answer_s: float
) -> socket.socket | str:
  """A connection on which process 0 has welcomed us, or what there was instead."""
  try:
    sock = socket.create_connection(address, timeout=CONNECT_S)
  except OSError as e:
    is_dropped = isinstance(e, TimeoutError)
    refused = isinstance(e, ConnectionRefusedError)
    return _REFUSED if refused else _DROPPED if is_dropped else _NO_ROUTE
  try:
    # The kernel may give a client the very port it calls (TCP's simultaneous open).
    if sock.getsockname() == sock.getpeername():
      raise ConnectionRefusedError
    network.tune(sock)
    wire.send(sock, {"job": job, "hello": own}, timeout=CONNECT_S)
    answer: Any = wire.Receiver(sock, server.HELLO_BYTES).receive(answer_s)
    answer = answer if isinstance(answer, dict) else {}
    if answer.get("welcome") == job:
      return sock
    other = answer.get("other_job")
    result = f"used by another run, {str(other)[:60]}" if other else _TAKEN
  except TimeoutError:
    result = _SILENT
  except ConnectionRefusedError:
    result = _REFUSED
  except (OSError, EOFError, ValueError):
    result = _TAKEN
  sock.close()
  return result


def _not_found(own: Hello, place: _Place, results: dict[int, str], for_s: float) -> str:
  """Where process 0 was looked for, what was there, and what that may mean."""
  _, host, addresses, _ = place
  ports: dict[str, list[str]] = {}
  for port, result in results.items():
    ports.setdefault(result, []).append(str(port))
  tried = "; ".join(f"{', '.join(p)} {result}" for result, p in ports.items())
  if not ports.keys() & _UNUSED:
    advice = "set JAXSCALE_COORDINATOR=HOST:PORT with a free port"
  elif _REFUSED in ports:
    advice = "it has not started, has failed (see its last lines), "
    advice += "or is on another host"
  else:
    advice = f"is there a firewall, or no route from {own.node} to {host}?"
  with contextlib.suppress(OSError):
    advice += f" (looked from {network.own_address_seen_by(addresses[0])})"
  return (
    f"process {own.rank} ({own.node}): no process 0 on {host} "
    f"({', '.join(addresses[:4])}) for {for_s:.0f} s, ports {tried}; {advice}"
  )
