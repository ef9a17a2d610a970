"""Descriptions that processes exchange at the rendezvous, and checks of them.

Pure functions turn the `Hello` of every process into lines with ranks, hosts and the
remedy. Processes that differ are refused, since they would train replicas that differ
without any error (tried: one hyperparameter changed on one rank, exit code 0, different
parameters).
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale import __version__
from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous import network

PACKAGES = ("jaxscale", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_SHOWN = 8  # ranges of ranks, or hosts, in one line

_REMEDIES = {"config": "start all with one command line and one config file"}
_REMEDIES |= {"code": "let all hosts read the same copy of the code"}


class Hello(NamedTuple):
  """The description of a process, which fits in a line of JSON."""

  rank: int
  num_processes: int
  node: str
  pid: int
  network: str  # equal in processes that loopback connects
  files: str  # equal in processes that see the same files
  gloo: str | None  # address where gloo would listen; "" if it is not used
  versions: dict[str, str]
  digests: dict[str, str]
  error: str  # reason why it cannot take part; "" if it can
  cpus: str = ""  # CPUs that it would use alone; see `shares`


_Hellos = Mapping[int, Hello]  # by rank


def make_hello(
  launch: Launch, digests: Mapping[str, str], on_cpu: bool, error: str = "", cpus: str = ""
) -> Hello:
  """Return the description of this process; the arguments are those of `rendezvous`."""
  gloo = network.gloo_address() if on_cpu else ""
  process = network.node_name(), os.getpid()
  namespaces = network.namespace("net"), network.namespace("mnt"), gloo
  own = launch.process_id, launch.num_processes, *process, *namespaces
  return Hello(*own, versions(), dict(digests), error, cpus)


def shares(hellos: _Hellos) -> list[list[int]]:
  """Return for each rank its index among the processes with its CPUs, and their number.

  Args:
    hellos: the descriptions by rank.
  """
  ranks: dict[tuple[str, str], list[int]] = {}
  for rank, hello in sorted(hellos.items()):
    ranks.setdefault((hello.node, hello.cpus), []).append(rank)
  same = [ranks[hello.node, hello.cpus] for _, hello in sorted(hellos.items())]
  return [[bisect.bisect(each, rank) - 1, len(each)] for rank, each in enumerate(same)]


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
  """Return the versions of Python and of installed packages, without importing them.

  Args:
    packages: names of packages; by default those that decide on the arithmetic.
  """
  result = {"python": platform.python_version()}
  for package in packages:
    with contextlib.suppress(metadata.PackageNotFoundError):
      own = package == "jaxscale"  # It may be a source tree without metadata.
      result[package] = __version__ if own else metadata.version(package)
  return result


def digests_of(config: object) -> dict[str, str]:
  """Return digests of a config with its code, and of all files of this package.

  Args:
    config: an object whose method `shared` returns texts by name to compare; without the
      method, its `repr` is compared.
  """
  shared: Any = getattr(config, "shared", lambda: {"config": repr(config)})
  texts: Mapping[str, str] = shared()
  package = Path(__file__).parents[2]
  code = hashlib.sha256()
  for path in sorted(package.rglob("*.py")):
    code.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
  digests = {n: hashlib.sha256(t.encode()).hexdigest() for n, t in texts.items()}
  return digests | {"code": code.hexdigest()}


def first_of(items: Sequence[str]) -> str:
  """Join the first items and add the number of the others."""
  more = len(items) - _SHOWN
  return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def ranks_in_words(ranks: Iterable[int]) -> str:
  """Describe ranks, with ranges for consecutive ones.

  Example:
    >>> ranks_in_words([3]), ranks_in_words([0, 2, 3, 4])
    ('process 3', 'processes 0, 2–4')
  """
  ranges: list[list[int]] = []
  for rank in sorted(ranks):
    if ranges and rank == ranges[-1][-1] + 1:
      ranges[-1][1:] = [rank]
    else:
      ranges.append([rank])
  shown = first_of(["–".join(map(str, limits)) for limits in ranges])
  return f"{'process' if shown.isdigit() else 'processes'} {shown}"


def ranks_with_hosts(ranks: Iterable[int], nodes: Sequence[str] | None) -> str:
  """Describe ranks and the hosts that they run on, if these are known.

  Example:
    >>> ranks_with_hosts([1, 2], ["n1", "n2", "n2"]), ranks_with_hosts([1], None)
    ('processes 1–2 (n2)', 'process 1')
  """
  ranks = sorted(ranks)
  known = [nodes[r] for r in ranks if r < len(nodes) and nodes[r]] if nodes else []
  hosts = first_of(list(dict.fromkeys(known)))
  return ranks_in_words(ranks) + (f" ({hosts})" if hosts else "")


def find_mismatches(hellos: _Hellos, addresses: Mapping[int, str]) -> list[str]:
  """Return a line for each mismatch between the processes and process 0.

  Args:
    hellos: the descriptions by rank.
    addresses: the address of a process as seen from the others, by rank, if known.
  """
  nodes = [hellos[r].node if r in hellos else "" for r in range(max(hellos) + 1)]
  first, lines = f"process 0 ({hellos[0].node})", []

  def differing(values: Mapping[int, Any]) -> Iterator[tuple[Any, str]]:
    """Yield each value that differs from process 0's, with its processes."""
    groups: dict[Any, list[int]] = {values[0]: []}
    for rank, value in values.items():
      groups.setdefault(value, []).append(rank)
    for value in [*groups][1:]:
      yield value, ranks_with_hosts(groups[value], nodes)

  for error in dict.fromkeys(hello.error for hello in hellos.values() if hello.error):
    ranks = [rank for rank, hello in hellos.items() if hello.error == error]
    lines.append(f"{ranks_with_hosts(ranks, nodes)}: {error}")
  for count, who in differing({r: h.num_processes for r, h in hellos.items()}):
    problem = f"started as one of {count} processes, {first} as one of {hellos[0].num_processes}"
    fix = "start all with one srun or mpirun"
    lines.append(f"{who}: {problem}; {fix}")
  for name in dict.fromkeys(n for hello in hellos.values() for n in hello.versions):
    versions = {rank: hello.versions.get(name) for rank, hello in hellos.items()}
    for version, who in differing(versions):
      both = f"{name} {version or 'missing'}, {first} has {versions[0] or 'none'}"
      lines.append(f"{who}: {both}; start all from the same environment")
  for name in dict.fromkeys(n for hello in hellos.values() for n in hello.digests):
    digests = {rank: hello.digests.get(name) for rank, hello in hellos.items()}
    for digest, who in differing(digests):
      both = f"{str(digest)[:12]} not {str(digests[0])[:12]}"
      fix = _REMEDIES.get(name, f"give all the same {name}")
      lines.append(f"{who}: {name} differs from {first}, {both}; {fix}")
  return lines + _unreachable(hellos, addresses)


def _unreachable(hellos: _Hellos, addresses: Mapping[int, str]) -> list[str]:
  """Return a line for each host that gloo could not reach by its own host name."""
  apart = len({hello.network for hello in hellos.values()}) > 1
  lines: dict[tuple[str, str | None], str] = {}
  for rank, hello in sorted(hellos.items()):
    gloo = hello.gloo
    if gloo is not None and not (apart and gloo and network.is_loopback(gloo)):
      continue
    is_what = f"resolves to {gloo} there" if gloo else "does not resolve there"
    address = addresses.get(rank, "ADDRESS")
    problem = f"{is_what}, so no other host can reach gloo (JAX's collectives on CPUs)"
    fix = f"add '{address} {hello.node}' to its /etc/hosts"
    line = f"process {rank} ({hello.node}): its host's own name {problem}; {fix}"
    lines.setdefault((hello.node, gloo), line)
  return list(lines.values())
