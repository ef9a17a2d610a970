"""All processes of a run meet, before JAX is asked anything.

What goes wrong inside `jax.distributed.initialize` ends in a C++ abort that names
neither rank nor host, minutes later. So the processes meet first over plain TCP:
process 0 listens on a port that all derive from the name of the job step, the
others find it there, and each says who it is and what it runs. Process 0 answers
"go", with a port for JAX's coordinator, or says in one line what is wrong; that
line is what every process ends with. The connections stay open: `watch` is built
on them.

Whoever is on the network and knows the name of the step could come as one of its
processes: as with JAX's own coordinator, the network is trusted. Who does not
speak as we do is not heard.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale.cluster import wire
from jaxscale.cluster.detect.launched import LOOPBACK, Launch
from jaxscale.cluster.rendezvous import network, server
from jaxscale.cluster.rendezvous.handshake import Introduction, introduce
from jaxscale.errors import ConfigError

CONNECT_S = 2.0  # seconds for a connection, and at first for a word on it
WORD_S = 10.0  # and later: process 0 may be busy with thousands
TAKEN_S = 10.0  # seconds for which a port may be somebody else's
GRACE_S = 15.0  # process 0 is the one to speak first, when time is over


class Meeting(NamedTuple):
  """All have met: who is where, and the connections between them."""

  process_id: int
  num_processes: int
  hosts: list[str]  # by rank
  coordinator: str  # address:port for JAX, as seen from here
  links: dict[int, socket.socket]  # to all others in process 0, to 0 in the others
  reserved: socket.socket | None = None  # keeps the coordinator's port for process 0


def meet(
  launch: Launch,
  *,
  timeout_s: float = 60.0,
  digests: Mapping[str, str] | None = None,
  on_cpu: bool | None = None,
  trouble: str = "",
) -> Meeting:
  """Meet the other processes of this run; each of them calls this.

  Args:
    launch: who this process is. The meeting is at `launch.port`, or else at a
      port that follows from `launch.job`.
    timeout_s: seconds to wait for the others. They start Python at the same
      time; a cold file system, or an image to pull, takes longer.
    digests: what has to be equal everywhere, by name: "config", "code".
    on_cpu: whether collectives will be gloo's, which listens at the host's own
      name. By default: whether JAX_PLATFORMS says so.

  Raises:
    ConfigError: one line, the same in all processes that can be told: who has
      not come, is there twice, or differs, and how.

  Example:
    >>> meet(Launch("single", 0, 1, None, 0, 1, "alone")).links
    {}
  """
  if on_cpu is None:
    on_cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
  if launch.num_processes == 1:
    return Meeting(0, 1, [network.node_name()], "", {})
  own = introduce(launch, digests or {}, on_cpu, trouble)
  host = launch.host or LOOPBACK
  ports = [launch.port] if launch.port else network.ports_of(launch.job)
  if launch.process_id == 0:
    meeting = _receive(launch, own, host, ports, timeout_s)
  else:
    meeting = _visit(launch, own, host, ports, timeout_s)
  # A forked worker that outlives this process must not keep it alive for others.
  os.register_at_fork(after_in_child=lambda: _close(meeting.links.values()))
  return meeting


def leave_last(meeting: Meeting, timeout_s: float = 10.0) -> None:
  """Let process 0 leave after the others: JAX's coordinator ends with it.

  Whoever still writes its last line then is aborted in C++, 0.04 s later
  (measured, jax 0.10.2). Nothing is read: a watch may go on with the links.

  Args:
    timeout_s: seconds after which process 0 leaves all the same.
  """
  if meeting.process_id != 0:
    return
  here = {sock.fileno() for sock in meeting.links.values()} - {-1}
  poll = select.poll()
  for file in here:
    poll.register(file, select.POLLRDHUP)
  deadline = time.monotonic() + timeout_s
  while here and (left := deadline - time.monotonic()) > 0:
    for file, _ in poll.poll(left * 1000):
      poll.unregister(file)
      here.discard(file)


def _receive(
  launch: Launch, own: Introduction, host: str, ports: list[int], timeout_s: float
) -> Meeting:
  """Process 0's way in."""
  addresses = network.resolve(host, _patience(launch, timeout_s))
  note = ""
  if not any(map(network.is_own, addresses)):  # a Service of Kubernetes is well
    note = f"; they look for process 0 on {host}, but {addresses[0]} is not this host's"
  listener = _listen(own, ports, 0 if len(ports) > 1 else TAKEN_S / 2)
  kept: list[socket.socket] = []

  def coordinator_port() -> int:
    candidates = network.ports_of(f"{launch.job}/coordinator")
    try:
      port, reserved = network.free_port(candidates)
    except OSError as e:
      raise ConfigError(
        f"process 0 ({own.node}): no free port for JAX's coordinator among "
        f"{', '.join(map(str, candidates))} ({e.strerror})"
      ) from e
    kept.append(reserved)
    return port

  try:
    hosts, links = server.call(launch, own, listener, timeout_s, coordinator_port, note)
  except BaseException:
    _close(kept)
    raise
  address = network.join_address(LOOPBACK, kept[0].getsockname()[1])
  return Meeting(0, launch.num_processes, hosts, address, links, kept[0])


def _listen(own: Introduction, ports: list[int], patience_s: float) -> socket.socket:
  """Where the others come. A port that was given may be free again in a moment."""
  deadline = time.monotonic() + patience_s
  while True:
    try:
      return network.listen(ports)[1]
    except OSError as e:
      if time.monotonic() < deadline:
        time.sleep(0.2)
        continue
      raise ConfigError(
        f"process 0 ({own.node}): port {', '.join(map(str, ports))}: {e.strerror}; "
        "set JAXSCALE_COORDINATOR=HOST:PORT with a free one"
      ) from e


def _visit(
  launch: Launch, own: Introduction, host: str, ports: list[int], timeout_s: float
) -> Meeting:
  """The others' way in."""
  sock = _find(launch, own, host, ports, timeout_s)
  here = f"process {own.rank} ({own.node})"
  try:
    answer = wire.Receiver(sock).receive(timeout_s + GRACE_S)
    if "error" in answer:
      raise ConfigError(answer["error"])
    hosts, port = list(answer["hosts"]), int(answer["go"])
  except (EOFError, TimeoutError) as e:
    sock.close()
    raise ConfigError(
      f"{here}: process 0 on {host} left before all had met ({e}); see its last lines"
    ) from e
  except BaseException:
    sock.close()
    raise
  # JAX by the address that has worked, whatever the name resolves to elsewhere.
  seen = network.plain_address(str(sock.getpeername()[0]))
  coordinator = network.join_address(seen, port)
  return Meeting(own.rank, launch.num_processes, hosts, coordinator, {0: sock})


def _patience(launch: Launch, timeout_s: float) -> float:
  """Seconds until a name has to be known: a pod's is once the pod is ready."""
  return timeout_s if launch.kind == "kubernetes" else min(5.0, timeout_s)


def _find(
  launch: Launch, own: Introduction, host: str, ports: list[int], timeout_s: float
) -> socket.socket:
  """A connection on which process 0 has said welcome."""
  began = time.monotonic()
  addresses = network.resolve(host, _patience(launch, timeout_s))
  pause, word_s, taken_since = 0.02, CONNECT_S, None
  while True:
    results: dict[int, str] = {}
    for port in ports:
      for address in addresses:
        found = _knock(launch, own, address, port, word_s)
        if isinstance(found, socket.socket):
          return found
        results[port] = found
    now = time.monotonic()
    # Where others hold every port, process 0 cannot listen: it has said so, or will.
    taken = not set(results.values()) & _NOBODY
    taken_since = (taken_since or now) if taken else None
    if now - began > timeout_s or (taken_since and now - taken_since > TAKEN_S):
      raise ConfigError(_not_found(own, host, addresses, results, now - began))
    time.sleep(random.uniform(0.5, 1) * pause)
    pause = min(1.0, 1.5 * pause)
    if _SILENT in results.values():
      word_s = min(WORD_S, 1.5 * word_s)


_REFUSED, _DROPPED = "refused", "no answer"
_NO_ROUTE, _SILENT = "no route", "somebody else's, silent"
_NOBODY = {_REFUSED, _DROPPED, _NO_ROUTE}


def _knock(
  launch: Launch, own: Introduction, address: str, port: int, word_s: float
) -> socket.socket | str:
  """A connection on which process 0 has said welcome, or what there was instead."""
  try:
    sock = socket.create_connection((address, port), timeout=CONNECT_S)
  except ConnectionRefusedError:
    return _REFUSED
  except TimeoutError:
    return _DROPPED
  except OSError:
    return _NO_ROUTE
  try:
    # The kernel may give a caller the very port it calls (TCP's simultaneous open).
    if sock.getsockname() == sock.getpeername():
      raise ConnectionRefusedError
    network.tune(sock)
    wire.send(sock, {"meeting": launch.job, "who": own}, timeout=CONNECT_S)
    answer: Any = wire.Receiver(sock, server.HELLO_BYTES).receive(word_s)
    if isinstance(answer, dict) and answer.get("welcome") == launch.job:
      return sock
    job = answer.get("other") if isinstance(answer, dict) else None
    result = f"another run's, {str(job)[:60]}" if job else "somebody else's"
  except TimeoutError:
    result = _SILENT
  except ConnectionRefusedError:
    result = _REFUSED
  except (OSError, EOFError, ValueError):
    result = "somebody else's"
  sock.close()
  return result


def _not_found(
  own: Introduction, host: str, addresses: list[str], results: dict[int, str],
  seconds: float,
) -> str:  # fmt: skip
  """Where was looked, what was there, and what that may mean."""
  ways: dict[str, list[int]] = {}
  for port, result in results.items():
    ways.setdefault(result, []).append(port)
  tried = "; ".join(f"{', '.join(map(str, p))} {way}" for way, p in ways.items())
  if not set(results.values()) & _NOBODY:
    advice = "set JAXSCALE_COORDINATOR=HOST:PORT with a free port"
  elif _REFUSED in ways:
    advice = "it has not come, has failed (see its last lines), or is on another host"
  else:
    advice = f"is there a firewall, or no way from {own.node} to {host}?"
  with contextlib.suppress(OSError):
    advice += f" (looked from {network.own_address_seen_by(addresses[0])})"
  return (
    f"process {own.rank} ({own.node}): no process 0 on {host} "
    f"({', '.join(addresses[:4])}) for {seconds:.0f} s, ports {tried}; {advice}"
  )


def _close(sockets) -> None:
  for sock in sockets:
    sock.close()
