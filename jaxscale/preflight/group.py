"""The processes of a preflight, and what they say to each other.

Process 0 has a connection to every other one and they have one to it, as the
meeting leaves them (`cluster.rendezvous`); nothing here needs JAX.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.cluster import wire
from jaxscale.errors import ConfigError

PATIENCE_S = 120.0  # for the slowest part of any check, JAX on a cold file system


class Link(NamedTuple):
  """A connection to another process."""

  sock: socket.socket
  receiver: wire.Receiver


class Group(NamedTuple):
  """Who takes part.

  Attributes:
    rank: of this process.
    hosts: the host of every process, by rank.
    links: by rank: to all others in process 0, to process 0 in the others.
  """

  rank: int
  hosts: tuple[str, ...]
  links: Mapping[int, Link]

  @property
  def first_of_host(self) -> tuple[int, ...]:
    """The lowest rank of every host: who speaks for the host."""
    return tuple(dict.fromkeys(self.hosts.index(host) for host in self.hosts))

  @property
  def speaks(self) -> bool:
    """Whether this process speaks for its host."""
    return self.rank in self.first_of_host

  def name(self, rank: int) -> str:
    """How a message names a process."""
    return f"process {rank} ({self.hosts[rank]})"


def make_group(
  rank: int, hosts: Sequence[str], links: Mapping[int, socket.socket]
) -> Group:
  """A group on open sockets.

  Args:
    rank: of this process.
    hosts: the host of every process, by rank.
    links: {rank: socket}, of all others in process 0, {0: socket} elsewhere.
  """
  made = {r: Link(sock, wire.Receiver(sock)) for r, sock in links.items()}
  return Group(rank, tuple(hosts), made)


def send(group: Group, rank: int, step: str, value: Any) -> None:
  """Send a value to a process that has a link to this one.

  Raises:
    ConfigError: it is gone.
  """
  try:
    wire.send(group.links[rank].sock, {"step": step, "value": value})
  except OSError as e:
    raise ConfigError(_lost(group, rank, step, e)) from None


def receive(group: Group, rank: int, step: str, timeout_s: float = PATIENCE_S) -> Any:
  """What a process says in this step.

  Raises:
    ConfigError: it is gone, silent, or somewhere else.
  """
  try:
    said = group.links[rank].receiver.receive(timeout_s)
  except (OSError, EOFError, ValueError) as e:
    raise ConfigError(_lost(group, rank, step, e)) from None
  if said["step"] != step:
    raise ConfigError(
      f"preflight: {group.name(rank)} is at {said['step']!r} where "
      f"{group.name(group.rank)} is at {step!r}; start the same command everywhere"
    )
  return said["value"]


def _lost(group: Group, rank: int, step: str, error: Exception) -> str:
  if rank == 0:
    return f"preflight: {group.name(0)} left at {step!r}; it says why"
  return (
    f"preflight: {group.name(rank)} was lost at {step!r} ({error}); look at its "
    "output, or leave its node out"
  )


def gather(
  group: Group, step: str, value: Any, timeout_s: float = PATIENCE_S
) -> list[Any]:
  """The values of all processes, by rank, in process 0; elsewhere []."""
  if group.rank:
    send(group, 0, step, value)
    return []
  others = range(1, len(group.hosts))
  return [value, *(receive(group, rank, step, timeout_s) for rank in others)]


def broadcast(
  group: Group, step: str, value: Any = None, timeout_s: float = PATIENCE_S
) -> Any:
  """The value of process 0, everywhere."""
  if group.rank:
    return receive(group, 0, step, timeout_s)
  for rank in group.links:
    send(group, rank, step, value)
  return value


def everybody(
  group: Group, step: str, value: Any, timeout_s: float = PATIENCE_S
) -> list[Any]:
  """The values of all processes, by rank, in all of them."""
  return broadcast(group, step, gather(group, step, value, timeout_s), timeout_s)


def barrier(group: Group, step: str, timeout_s: float = PATIENCE_S) -> None:
  """Wait until every process is here."""
  everybody(group, step, None, timeout_s)
