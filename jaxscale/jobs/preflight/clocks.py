"""The check `clocks`: offset of every host's clock to that of process 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jaxscale.jobs.preflight.finding import Finding
from jaxscale.jobs.preflight.group import Group, receive, send

# Larger offsets disturb file systems, Kerberos tickets and the order of log lines.
MOST_S = 1.0
_QUESTIONS = 8


def check(group: Group, options: Any, facts: Any) -> list[Finding]:
  """Compare every host's clock with that of process 0; all processes call this."""
  if group.rank:
    for _ in range(_QUESTIONS if group.acts else 0):
      receive(group, 0, "clocks")
      send(group, 0, "clocks", time.time())
    return []
  offsets = {group.hosts[rank]: _offset(group, rank) for rank in group.host_ranks[1:]}
  return findings(offsets, group.hosts[0])


def _offset(group: Group, rank: int) -> tuple[float, float]:
  """Return the seconds by which a clock is ahead, and their error bound.

  The answer with the shortest round trip counts, as in NTP (RFC 5905, section 10), since
  delays of a message usually affect one direction.
  """
  answers = []
  for _ in range(_QUESTIONS):
    began, sent = time.perf_counter(), time.time()
    send(group, rank, "clocks", None)
    answer = receive(group, rank, "clocks")
    half = (time.perf_counter() - began) / 2
    answers.append((half, answer - sent - half))
  error, ahead = min(answers)
  return ahead, error


def findings(offsets: Mapping[str, tuple[float, float]], host: str) -> list[Finding]:
  """Return findings on the offsets of hosts, with error bounds, to the clock of `host`.

  Example:
    >>> findings({"n2": (2.5, 0.0001)}, "n1")[0].text
    'clock of n2: 2.50 s ahead of n1'
  """
  remedy = "synchronize the clocks by chronyd or ntpd (see `chronyc tracking` on both hosts)"
  wrong = []
  for name, (ahead, error) in offsets.items():
    if abs(ahead) - error > MOST_S:
      text = f"clock of {name}: {abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'}"
      wrong.append(Finding(False, f"{text} {host}", remedy))
  if wrong or not offsets:
    return wrong
  most = max(abs(ahead) for ahead, _ in offsets.values())
  return [Finding(True, f"clocks: within {most * 1e3:.1f} ms of {host}'s")]
