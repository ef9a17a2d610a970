"""Findings of a diagnosis, one line each, and their output."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.cluster.rendezvous.handshake import ranks_with_hosts
from jaxscale.metrics.text import grouped

Results = Sequence[dict[str, Any]]  # results of the processes, by rank
Facts = dict[str, Any]  # what a check tells later checks, as JSON values


class Finding(NamedTuple):
  """One line of a diagnosis.

  Attributes:
    ok: True if there is no problem.
    text: the finding.
    remedy: the remedy of a problem; "" if there is none.
  """

  ok: bool
  text: str
  remedy: str = ""


def report(findings: Sequence[Finding]) -> None:
  """Print one line per finding, then each remedy once.

  Example:
    >>> report([Finding(False, "n2 is slow", "leave n2 out")])
    fail  n2 is slow
    fix   leave n2 out
  """
  for finding in findings:
    print(("ok    " if finding.ok else "fail  ") + finding.text)
  wrong = [f for f in findings if not f.ok]
  for remedy in dict.fromkeys(f.remedy for f in wrong):
    print(f"fix   {remedy}")
  if not wrong:
    print("preflight: ready")
  sys.stdout.flush()


def outliers(values: Mapping[int, Any], hosts: Sequence[str]) -> tuple[Any, dict[Any, str]]:
  """Return the most frequent value, and each other value with the processes that have it.

  Args:
    values: the values by rank.
    hosts: the hosts by rank.

  Example:
    >>> outliers({0: "0.10", 1: "0.9", 2: "0.10"}, ["n1", "n2", "n3"])
    ('0.10', {'0.9': 'process 1 (n2)'})
  """
  ranks = grouped((value, rank) for rank, value in values.items())
  usual = max(ranks, key=lambda value: len(ranks[value]))
  others = (value for value in sorted(ranks) if value != usual)
  return usual, {value: ranks_with_hosts(ranks[value], hosts) for value in others}
