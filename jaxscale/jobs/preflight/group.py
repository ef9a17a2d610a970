"""The processes of a preflight, and their messages.

Process 0 has a connection to every other one and they have one to it, as the
rendezvous leaves them (`cluster.rendezvous`); nothing here needs JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale.cluster.rendezvous.handshake import ranks_with_hosts
from jaxscale.cluster.wire import Link
from jaxscale.errors import ConfigError

PATIENCE_S = 120.0  # for the slowest part of any check, JAX on a cold file system


class Group(NamedTuple):
  """The processes that take part.

  Attributes:
    rank: of this process.
    hosts: the host of every process, by rank.
    links: by rank, to all others in process 0, to process 0 in the others.
    key: which only processes of this run have.
  """

  rank: int
  hosts: tuple[str, ...]
  links: Mapping[int, Link]
  key: bytes = b""

  @property
  def host_ranks(self) -> tuple[int, ...]:
    """The lowest rank of every host, which acts for the host."""
    return tuple(dict.fromkeys(self.hosts.index(host) for host in self.hosts))

  @property
  def acts(self) -> bool:
    """Whether this process acts for its host."""
    return self.rank in self.host_ranks

  def name(self, *ranks: int) -> str:
    """How a message names processes: "process 2 (n3)"."""
    return ranks_with_hosts(ranks, self.hosts)


def send(group: Group, rank: int, step: str, value: Any) -> None:
  """Send a value to a process that is connected to this one.

  Raises:
    ConfigError: it is gone.
  """
  try:
    group.links[rank].send([step, value])
  except OSError as e:
    raise _lost(group, rank, step, e) from None


def receive(group: Group, rank: int, step: str) -> Any:
  """The value that a process sends in this step.

  Raises:
    ConfigError: it is gone, silent, or in another step.
  """
  try:
    their_step, value = group.links[rank].receive(PATIENCE_S)
  except (OSError, EOFError, ValueError, TypeError) as e:
    raise _lost(group, rank, step, e) from None
  if their_step != step:
    theirs = f"{group.name(rank)} is at {their_step!r}"
    ours = f"{group.name(group.rank)} is at {step!r}; start the same command everywhere"
    raise ConfigError(f"preflight: {theirs} where {ours}")
  return value


def _lost(group: Group, rank: int, step: str, error: Exception) -> ConfigError:
  what = f"left at {step!r}; it says why"
  if rank:
    what = f"was lost at {step!r} ({error}); look at its output, or leave its node out"
  return ConfigError(f"preflight: {group.name(rank)} {what}")


def gather(group: Group, step: str, value: Any) -> list[Any]:
  """The values of all processes, by rank, in process 0; elsewhere []."""
  if group.rank:
    send(group, 0, step, value)
    return []
  return [value, *(receive(group, rank, step) for rank in range(1, len(group.hosts)))]


def broadcast(group: Group, step: str, value: Any = None) -> Any:
  """The value of process 0, everywhere."""
  if group.rank:
    return receive(group, 0, step)
  for rank in group.links:
    send(group, rank, step, value)
  return value


def all_gather(group: Group, step: str, value: Any) -> list[Any]:
  """The values of all processes, by rank, in all of them."""
  return broadcast(group, step, gather(group, step, value))


def barrier(group: Group, step: str) -> None:
  """Wait until every process is here."""
  all_gather(group, step, None)
