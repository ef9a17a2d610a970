"""Group: the processes of a run or of a preflight, which exchange JSON values.

Process 0 is connected to every other process by a sealed link (`wire.Link`) that carries
nothing else. Collectives of JAX are not used: Gloo believes whoever speaks its protocol. A
message has the step at which it was sent, so that processes which are at different steps
are an error instead of a hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale.cluster.rendezvous.handshake import ranks_with_hosts
from jaxscale.cluster.wire import Link, encode
from jaxscale.errors import EXIT_CRASH

PATIENCE_S = 120.0  # seconds for a step of a preflight; JAX on a cold file system is slowest
MAX_VALUE = 1 << 28  # bytes of a message on the links of a run; it may have all processes' values


class PeerError(Exception):
  """Another process of the group was lost, is at a different step or sends invalid messages.

  Attributes:
    is_lost: whether the process was lost, which is often the consequence of a fault.
  """

  exit_code = EXIT_CRASH

  def __init__(self, text: str, *, is_lost: bool = False):
    super().__init__(text)
    self.is_lost = is_lost


def invalid_value(error: Exception) -> PeerError:
  """Return the error for a value over JAX's connections that no process of the run has sent."""
  problem = f"an invalid value arrived over JAX's open connections ({error})"
  return PeerError(f"{problem}; check whether other users run programs on these nodes")


class Group(NamedTuple):
  """The processes that take part.

  Attributes:
    rank: the rank of this process.
    hosts: the host of every process, by rank.
    links: the links by rank: in process 0 to all others, in the others to process 0.
    patience_s: the seconds to wait for a value; None means no limit, if a watch has limits.
  """

  rank: int
  hosts: tuple[str, ...]
  links: Mapping[int, Link]
  patience_s: float | None = PATIENCE_S

  @property
  def host_ranks(self) -> tuple[int, ...]:
    """Lowest rank of each host, which acts for the host."""
    return tuple(dict.fromkeys(self.hosts.index(host) for host in self.hosts))

  @property
  def acts(self) -> bool:
    """True if this process acts for its host."""
    return self.rank in self.host_ranks

  def name(self, *ranks: int) -> str:
    """Describe processes for a message: "process 2 (n3)"."""
    return ranks_with_hosts(ranks, self.hosts)


def send(group: Group, rank: int, step: str, message: bytes) -> None:
  """Send a message to a process that is connected to this one.

  Args:
    group: the processes.
    rank: the rank of the other process.
    step: the step of this process.
    message: the step and a value, as `wire.encode` encodes them.

  Raises:
    PeerError: the process has closed the connection.
  """
  try:
    group.links[rank].send(message)
  except OSError as e:
    raise _lost(group, rank, step, e) from None


def receive(group: Group, rank: int, step: str) -> Any:
  """Receive the value that a process sends in this step.

  Raises:
    PeerError: the process has closed the connection, sends nothing or an invalid message,
      or is in a different step.
  """
  try:
    message = group.links[rank].receive(group.patience_s)
  except (OSError, EOFError) as e:
    raise _lost(group, rank, step, e) from None
  except ValueError as e:
    problem = f"sent an invalid message at {step!r} ({e})"
    raise PeerError(f"{group.name(rank)} {problem}; start the run again") from None
  theirs = message[0] if isinstance(message, list) and len(message) == 2 else None
  if theirs != step:
    ours = f"{group.name(group.rank)} is at {step!r}"
    fix = "start the same command everywhere, and let all processes take the same branches"
    raise PeerError(f"{group.name(rank)} is at {theirs!r:.80}, but {ours}; {fix}")
  return message[1]


def _lost(group: Group, rank: int, step: str, error: Exception) -> PeerError:
  what = f"exited at {step!r}; see its output"
  if rank:
    what = f"was lost at {step!r} ({error}); see its output, or exclude its node"
  return PeerError(f"{group.name(rank)} {what}", is_lost=True)


def gather(group: Group, step: str, value: Any) -> list[Any]:
  """Return the values of all processes, by rank, in process 0; [] in the others."""
  if group.rank:
    send(group, 0, step, encode([step, value]))
    return []
  return [value, *(receive(group, rank, step) for rank in range(1, len(group.hosts)))]


def broadcast(group: Group, step: str, value: Any = None) -> Any:
  """Return the value of process 0 in all processes."""
  if group.rank:
    return receive(group, 0, step)
  message = encode([step, value])  # once for all
  for rank in group.links:
    send(group, rank, step, message)
  return value


def barrier(group: Group, step: str) -> None:
  """Wait until every process has reached this step."""
  broadcast(group, step, gather(group, step, None))


_connected: Group | None = None


def connect(group: Group | None) -> None:
  """Let `connected` return this group, and close the links of the present one."""
  global _connected
  for link in _connected.links.values() if _connected else ():
    link.close()
  for link in group.links.values() if group else ():
    link.max_bytes = MAX_VALUE
  _connected = group


def connected() -> Group | None:
  """Return the group of this session, over which `host_collectives` exchanges values."""
  return _connected
