"""Processes of a preflight and their messages.

Process 0 is connected to every other process by the links of the rendezvous
(`cluster.rendezvous`). This module does not need JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale.cluster.rendezvous.handshake import ranks_with_hosts
from jaxscale.cluster.wire import Link
from jaxscale.errors import ConfigError

PATIENCE_S = 120.0  # seconds for a step of a check; JAX on a cold file system is slowest


class Group(NamedTuple):
  """The processes that take part in a preflight.

  Attributes:
    rank: the rank of this process.
    hosts: the host of every process, by rank.
    links: the links by rank: in process 0 to all others, in the others to process 0.
  """

  rank: int
  hosts: tuple[str, ...]
  links: Mapping[int, Link]

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


def send(group: Group, rank: int, step: str, value: Any) -> None:
  """Send a value to a process that is connected to this one.

  Raises:
    ConfigError: the process has closed the connection.
  """
  try:
    group.links[rank].send([step, value])
  except OSError as e:
    raise _lost(group, rank, step, e) from None


def receive(group: Group, rank: int, step: str) -> Any:
  """Receive the value that a process sends in this step.

  Raises:
    ConfigError: the process has closed the connection, sends nothing, or is in a different
      step.
  """
  try:
    their_step, value = group.links[rank].receive(PATIENCE_S)
  except (OSError, EOFError, ValueError, TypeError) as e:
    raise _lost(group, rank, step, e) from None
  if their_step != step:
    theirs = f"{group.name(rank)} is at {their_step!r}"
    ours = f"{group.name(group.rank)} is at {step!r}; start the same command everywhere"
    raise ConfigError(f"preflight: {theirs}, but {ours}")
  return value


def _lost(group: Group, rank: int, step: str, error: Exception) -> ConfigError:
  what = f"exited at {step!r}; see its output"
  if rank:
    what = f"was lost at {step!r} ({error}); see its output, or exclude its node"
  return ConfigError(f"preflight: {group.name(rank)} {what}")


def gather(group: Group, step: str, value: Any) -> list[Any]:
  """Return the values of all processes, by rank, in process 0; [] in the others."""
  if group.rank:
    send(group, 0, step, value)
    return []
  return [value, *(receive(group, rank, step) for rank in range(1, len(group.hosts)))]


def broadcast(group: Group, step: str, value: Any = None) -> Any:
  """Return the value of process 0 in all processes."""
  if group.rank:
    return receive(group, 0, step)
  for rank in group.links:
    send(group, rank, step, value)
  return value


def barrier(group: Group, step: str) -> None:
  """Wait until every process has reached this step."""
  broadcast(group, step, gather(group, step, None))
