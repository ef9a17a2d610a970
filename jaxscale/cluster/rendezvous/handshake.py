"""What a process says of itself when the processes of a run meet.

And what can be wrong with what they say: pure functions from the introductions
to lines that name ranks, hosts and the remedy. Processes that differ train
without any error to replicas that differ (research: one hyper-parameter changed
on one rank, exit code 0, other parameters), so they are refused.
"""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jaxscale
from jaxscale.cluster.detect.launched import Launch
from jaxscale.cluster.rendezvous import network

PACKAGES = ("jaxscale", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_SHOWN = 8  # ranges of ranks, or hosts, in one line

_REMEDIES = {
  "config": "start all with one command line and one config file",
  "code": "let all hosts read one copy of the code",
}


class Introduction(NamedTuple):
  """One process, as it says itself. All of it fits in a line of JSON."""

  rank: int
  of: int
  node: str
  pid: int
  me: str  # tells two processes of one rank from one that comes twice
  place: str  # equal where loopback connects, network.place
  gloo: str | None  # where gloo would listen; "" where it is not used
  versions: dict[str, str]
  digests: dict[str, str]
  trouble: str  # why it cannot take part, "" if it can


def introduce(
  launch: Launch, digests: Mapping[str, str], on_cpu: bool, trouble: str = ""
) -> Introduction:
  """What this process says of itself.

  Args:
    digests: what must be equal in all processes, by name; "config" and "code"
      are known by their remedies.
    on_cpu: its collectives are gloo's.
    trouble: why it cannot take part, such as a GPU that is missing on its host.
  """
  return Introduction(
    launch.process_id, launch.num_processes, network.node_name(), os.getpid(),
    uuid.uuid4().hex, network.place(), network.gloo_address() if on_cpu else "",
    versions(), dict(digests), trouble,
  )  # fmt: skip


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
  """Versions of Python and of packages that are installed; none is imported.

  Args:
    packages: by default what decides on the arithmetic.
  """
  found = {"python": platform.python_version()}
  for package in packages:
    try:
      found[package] = metadata.version(package)
    except metadata.PackageNotFoundError:
      continue
  return found


def digests_of(config: object) -> dict[str, str]:
  """Of a config, by its `repr`, and of every file of this package."""
  package = Path(jaxscale.__path__[0])
  code = hashlib.sha256()
  for path in sorted(package.rglob("*.py")):
    code.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
  settings = hashlib.sha256(repr(config).encode())
  return {"config": settings.hexdigest(), "code": code.hexdigest()}


def read(message: Any) -> Introduction | None:
  """The introduction in a message, if it is one."""
  try:
    it = Introduction(*message)
  except TypeError:
    return None
  kinds = ((it.rank, int), (it.of, int), (it.node, str), (it.pid, int), (it.me, str),
           (it.place, str), (it.gloo, str | None), (it.versions, dict),
           (it.digests, dict), (it.trouble, str))  # fmt: skip
  return it if all(isinstance(value, kind) for value, kind in kinds) else None


def numbers(ranks: Iterable[int]) -> str:
  """Ranks as one says them.

  Example:
    >>> numbers([3]), numbers([0, 2, 3, 4])
    ('process 3', 'processes 0, 2–4')
  """
  ranks = sorted(ranks)
  ranges: list[list[int]] = []
  for rank in ranks:
    if ranges and rank == ranges[-1][1] + 1:
      ranges[-1][1] = rank
    else:
      ranges.append([rank, rank])
  said = [str(a) if a == b else f"{a}–{b}" for a, b in ranges]
  return ("process " if len(ranks) == 1 else "processes ") + few(said)


def where(ranks: Iterable[int], nodes: Sequence[str] | None) -> str:
  """Ranks with the hosts they are on, as far as these are known.

  Example:
    >>> where([1, 2], ["n1", "n2", "n2"]), where([1], None)
    ('processes 1–2 (n2)', 'process 1')
  """
  ranks = sorted(ranks)
  known = [nodes[r] for r in ranks if r < len(nodes) and nodes[r]] if nodes else []
  hosts = few(list(dict.fromkeys(known)))
  return numbers(ranks) + (f" ({hosts})" if hosts else "")


def few(said: list[str]) -> str:
  """The first of them, and how many more."""
  more = len(said) - _SHOWN
  return ", ".join(said[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def twice(first: Introduction, second: Introduction) -> str:
  """The line for two processes that claim one rank."""
  return (
    f"process {first.rank} was started twice: on {first.node} (pid {first.pid}) and "
    f"on {second.node} (pid {second.pid}); give each its own rank, 0 … "
    f"{first.of - 1}"
  )


def disagreements(
  met: Mapping[int, Introduction], addresses: Mapping[int, str]
) -> list[str]:
  """What is wrong with those who have met, a line each; process 0 is the measure.

  Args:
    addresses: the address of a process as seen from the others, where known.
  """
  return [
    *_troubles(met), *_other_counts(met), *_differences(met),
    *_unreachable(met, addresses),
  ]  # fmt: skip


def _troubles(met: Mapping[int, Introduction]) -> list[str]:
  """What processes say they lack themselves, those of one kind together."""
  said: dict[str, list[int]] = {}
  for rank, who in met.items():
    if who.trouble:
      said.setdefault(who.trouble, []).append(rank)
  return [f"{where(ranks, _nodes(met))}: {text}" for text, ranks in said.items()]


def _nodes(met: Mapping[int, Introduction]) -> list[str]:
  return [met[r].node if r in met else "" for r in range(max(met) + 1)]


def _groups(values: Mapping[int, str | None]) -> dict[str | None, list[int]]:
  """The ranks of each value that is not process 0's."""
  groups: dict[str | None, list[int]] = {}
  for rank, value in values.items():
    if value != values[0]:
      groups.setdefault(value, []).append(rank)
  return groups


def _other_counts(met: Mapping[int, Introduction]) -> list[str]:
  counts = {rank: str(who.of) for rank, who in met.items()}
  return [
    f"{where(ranks, _nodes(met))}: started as one of {count} processes, process 0 "
    f"({met[0].node}) as one of {met[0].of}; start all in one step"
    for count, ranks in _groups(counts).items()
  ]


def _differences(met: Mapping[int, Introduction]) -> list[str]:
  lines, nodes = [], _nodes(met)
  for name in dict.fromkeys(n for who in met.values() for n in who.versions):
    values = {rank: who.versions.get(name) for rank, who in met.items()}
    for value, ranks in _groups(values).items():
      lines.append(
        f"{where(ranks, nodes)}: {name} {value or 'missing'}, process 0 "
        f"({nodes[0]}) has {values[0] or 'none'}; start all from one environment"
      )
  for name in dict.fromkeys(n for who in met.values() for n in who.digests):
    values = {rank: who.digests.get(name) for rank, who in met.items()}
    for value, ranks in _groups(values).items():
      lines.append(
        f"{where(ranks, nodes)}: another {name} than process 0 ({nodes[0]}), "
        f"{str(value)[:12]} not {str(values[0])[:12]}; "
        + _REMEDIES.get(name, f"give all the same {name}")
      )
  return lines


def _unreachable(
  met: Mapping[int, Introduction], addresses: Mapping[int, str]
) -> list[str]:
  """Those that gloo could not reach: only it asks the host for its own name."""
  apart = len({who.place for who in met.values()}) > 1
  lines, done = [], set()
  for rank, who in sorted(met.items()):
    lost = who.gloo is None or (apart and who.gloo and network.is_loopback(who.gloo))
    if not lost or (who.node, who.gloo) in done:
      continue
    done.add((who.node, who.gloo))
    is_what = f"is {who.gloo} there" if who.gloo else "does not resolve there"
    address = addresses.get(rank, "ADDRESS")
    lines.append(
      f"process {rank} ({who.node}): its host's own name {is_what}, where no other "
      "host reaches gloo, JAX's collectives on CPUs; put its network address into "
      f"its /etc/hosts, '{address} {who.node}'"
    )
  return lines
