"""Server of the rendezvous: process 0 waits for all others and compares them.

Every process gets the same answer. This module does not use JAX.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from jaxscale.cluster import wire
from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous import handshake, network
from jaxscale.cluster.rendezvous.acceptor import Acceptor
from jaxscale.cluster.rendezvous.handshake import Hello
from jaxscale.cluster.secret import VARIABLE
from jaxscale.cluster.wire import Link
from jaxscale.errors import ConfigError

SETTLE_S = 1.0  # seconds after the first error, in which others may report the same
LINGER_S = 10.0  # seconds for which late processes still get the error
LOG_S = 10.0  # seconds between two lines about missing processes
_CHECK_S = 0.1  # seconds between two checks for errors

Place = Callable[[Mapping[int, Hello]], str]  # see `serve`


def serve(
  launch: Launch, hello: Hello, acceptor: Acceptor, timeout_s: float, place: Place, note: str = ""
) -> tuple[list[str], dict[int, Link], dict[int, Link], str, list[list[int]]]:
  """Wait for all other processes, and send each of them "go" or an error.

  Args:
    launch: the launch of this process.
    hello: the description of this process, rank 0.
    acceptor: the acceptor of connections.
    timeout_s: the seconds after which missing processes are an error.
    place: a function from all descriptions to the address of JAX's coordinator.
    note: text to append to the line about missing processes.

  Returns:
    The hosts by rank, the connections by rank, without 0, those for values, the coordinator,
    and the shares by rank (`handshake.shares`).

  Raises:
    ConfigError: the error that every process got.
  """
  server = _Server(launch, hello, acceptor)
  with server.selector:
    kept = set()
    try:
      server.wait_for_all(timeout_s, note)
      hosts = [server.hellos[rank].node for rank in range(launch.num_processes)]
      chosen = place(server.hellos)
      server.send_go(chosen, hosts)
      kept = {*server.links.values(), *server.value_links.values()}
      shares = handshake.shares(server.hellos)
      return hosts, server.links, server.value_links, chosen, shares
    finally:
      close_all(server.connected - kept)
      if strangers := acceptor.describe_refused():
        print(strangers, file=sys.stderr, flush=True)


class _Server:
  """State of the rendezvous: connections, descriptions and errors."""

  def __init__(self, launch: Launch, hello: Hello, acceptor: Acceptor):
    self.launch, self.acceptor = launch, acceptor
    self.selector = selectors.DefaultSelector()
    self.connected: set[Link] = set()
    self.hellos = {0: hello}
    self.links: dict[int, Link] = {}  # for the watch
    self.value_links: dict[int, Link] = {}  # for `group`
    self.errors: list[str] = []
    self.seen = {hello[:4]}  # rank, number, node and pid of all that sent a hello
    self.sent_error = ""  # to all
    try:
      _allow_files(launch.num_processes)
    except ConfigError as e:
      self.errors.append(str(e))
    self.selector.register(acceptor, selectors.EVENT_READ)

  def wait_for_all(self, timeout_s: float, note: str) -> None:
    """Wait until all processes are connected and agree."""
    began = logged = next_check = time.monotonic()
    failed_since = None
    total = self.launch.num_processes
    while True:
      self._receive(_CHECK_S)
      now = time.monotonic()
      if now < next_check and min(len(self.links), len(self.value_links)) < total - 1:
        continue  # thousands may be connecting, and the checks take time
      next_check = now + _CHECK_S
      connected = self.links.keys() & self.value_links.keys()
      missing = [r for r in range(1, total) if r not in connected]
      errors = self._find_errors()
      if not errors and not missing and not self.sent_error:
        return
      if errors or self.sent_error:  # an error that was sent is final
        failed_since = failed_since or now
        all_came = len(self.seen) >= total
        if not self.sent_error and (all_came or now - failed_since > SETTLE_S):
          self.send_error("; ".join(errors[:3]))
        if self.sent_error and (all_came or now - failed_since > LINGER_S):
          raise ConfigError(self.sent_error)
      elif now - began > timeout_s:
        verb = "has" if len(missing) == 1 else "have"
        fix = "see their output, and start all with one srun or mpirun; if the hosts share no "
        fix += f"home directory, set the same {VARIABLE} for all{note}"
        problem = f"{verb} not connected within {timeout_s:g} s"
        self.send_error(f"{self._describe(missing)} {problem}; {fix}")
        raise ConfigError(self.sent_error)
      elif now - logged > LOG_S:
        logged = now
        print(f"waiting for {self._describe(missing)}", file=sys.stderr)

  def send_go(self, coordinator: str, hosts: list[str]) -> None:
    """Send "go" to all processes."""
    go = wire.encode({"go": [coordinator, hosts, handshake.shares(self.hellos)]})
    for rank, link in self.links.items():
      try:
        link.send(go, timeout=10)
      except OSError as e:  # processes that got "go" find their links closed
        problem = f"disconnected just before the start ({e}); see its output"
        raise ConfigError(f"process {rank} ({hosts[rank]}) {problem}") from e

  def send_error(self, error: str) -> None:
    """Send an error to all connected processes, and later to those that connect."""
    self.sent_error = error
    for link in self.connected:
      with contextlib.suppress(OSError):
        link.send({"error": error}, timeout=1)

  def _describe(self, missing: list[int]) -> str:
    """Describe missing processes, with their hosts if the launcher lists them."""
    nodes, total = self.launch.nodes, self.launch.num_processes
    if len(nodes) == total:  # one process per node, in this order
      return f"{handshake.ranks_with_hosts(missing, nodes)} of {total}"
    came = {hello.node.partition(".")[0] for hello in self.hellos.values()}
    silent = [node for node in nodes if node.partition(".")[0] not in came]
    hosts = f" (none from {handshake.first_of(silent)})" if silent else ""
    return f"{handshake.ranks_in_words(missing)} of {total}{hosts}"

  def _find_errors(self) -> list[str]:
    """Return all errors among the processes that have connected so far."""
    addresses = {}
    for rank, link in self.links.items():
      with contextlib.suppress(OSError):
        addresses[rank] = network.plain_address(link.sock.getpeername()[0])
        if self.hellos[rank].network != self.hellos[0].network:
          addresses.setdefault(0, network.plain_address(link.sock.getsockname()[0]))
    return self.errors + handshake.find_mismatches(self.hellos, addresses)

  def _receive(self, timeout: float) -> None:
    for key, _ in self.selector.select(timeout):
      if key.fileobj is self.acceptor:
        for link, message in self.acceptor.accept():
          self._greet(link, message)
        continue
      link = cast("Link", key.fileobj)
      try:
        link.drain()  # a process sends nothing yet, so this finds closed links
      except (EOFError, ValueError):
        self._drop(link)

  def _greet(self, link: Link, message: Any) -> None:
    """Handle the first message of a connection: a description, or a rank and "values"."""
    self.selector.register(link, selectors.EVENT_READ)
    self.connected.add(link)
    try:
      if isinstance(message, dict):
        self.value_links.setdefault(wire.typed(int, message.get("values")), link)
        return
      hello = wire.parse(Hello, message)
    except ValueError as e:
      who = f"a process on {network.peer_address(link)}"
      problem = f"sent an invalid greeting ({e})"
      self.errors.append(f"{who} {problem}; start all from the same environment")
      return
    self.seen.add(hello[:4])
    rank, total = hello.rank, self.launch.num_processes
    earlier = self.hellos.get(rank)
    if self.sent_error:
      with contextlib.suppress(OSError):
        link.send({"error": self.sent_error}, timeout=1)
    elif earlier:
      problem = f"on {earlier.node} (pid {earlier.pid}) and on {hello.node} (pid {hello.pid})"
      fix = f"give each its own rank, 0 … {earlier.num_processes - 1}"
      self.errors.append(f"process {rank} was started twice: {problem}; {fix}")
    elif not 0 <= rank < total:
      text = f"process 0 ({self.hellos[0].node}) expects {total}; start all with one srun or mpirun"
      self.errors.append(f"process {rank} ({hello.node}): {text}")
    else:
      self.hellos[rank], self.links[rank] = hello, link

  def _drop(self, link: Link) -> None:
    """Close a connection, whose process has ended."""
    self.selector.unregister(link)
    self.connected.discard(link)
    link.close()
    for rank in [r for r, known in self.links.items() if known is link]:
      who = f"process {rank} ({self.hellos[rank].node}, pid {self.hellos[rank].pid})"
      self.errors.append(f"{who} connected and then disconnected; see its output")


def close_all(links: Iterable[Any]) -> None:
  """Close links, some of which may already be closed."""
  for link in links:
    link.close()


def _allow_files(num_processes: int) -> None:
  """Raise the limit of open files for three connections per process: our two and JAX's.

  The soft limit is often 1,024 (systemd's DefaultLimitNOFILE=1024:524288,
  systemd-system.conf(5)). A process may raise it up to the hard limit (getrlimit(2)).
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  need = 3 * num_processes + 256  # and libraries, checkpoints, logs
  enough = 2 * need + 512  # the data pipeline uses half of the limit (data/tfrecord.py)
  if soft == resource.RLIM_INFINITY or soft >= enough:
    return
  most = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
  with contextlib.suppress(OSError, ValueError):  # some systems have a lower limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))
    soft = max(most, soft)
  if soft < need:
    problem = f"at most {soft} open files on {network.node_name()}"
    needs = f"but process 0 needs {need} for {num_processes} processes"
    fix = "raise the hard limit there (ulimit -Hn, LimitNOFILE of slurmd)"
    raise ConfigError(f"ulimit -n: {problem}, {needs}; {fix}")
