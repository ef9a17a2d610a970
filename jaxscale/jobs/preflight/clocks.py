"""The check `clocks`: offset of every host's clock to that of process 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jaxscale.jobs.preflight.finding import Finding
from jaxscale.jobs.preflight.group import Group, receive, send

# File systems, Kerberos tickets and the order of lines in logs suffer from more.
MOST_S = 1.0
_QUESTIONS = 8


def check(group: Group, options: Any, facts: Any) -> list[Finding]:
  """Process 0 asks every host for its time; all processes call it."""
  if group.rank:
    for _ in range(_QUESTIONS if group.acts else 0):
      receive(group, 0, "clocks")
      send(group, 0, "clocks", time.time())
    return []
  offsets = {group.hosts[rank]: _offset(group, rank) for rank in group.host_ranks[1:]}
  return findings(offsets, group.hosts[0])


def _offset(group: Group, rank: int) -> tuple[float, float]:
  """Return the seconds by which a clock is ahead, and the error bound of that.

  Of several answers the one with the shortest round trip counts, as in NTP (RFC
  5905, section 10): what delays a message delays it one way more than the other.
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
  """Judge the offsets of hosts to the clock of `host`, each with its error bound.

  Example:
    >>> findings({"n2": (2.5, 0.0001)}, "n1")[0].text
    'clock of n2: 2.50 s ahead of n1'
  """
  remedy = "let chronyd or ntpd set the clocks (`chronyc tracking` on each of the two)"
  wrong = []
  for name, (ahead, error) in offsets.items():
    if abs(ahead) - error > MOST_S:
      text = f"clock of {name}: {abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'}"
      wrong.append(Finding(False, f"{text} {host}", remedy))
  if wrong or not offsets:
    return wrong
  most = max(abs(ahead) for ahead, _ in offsets.values())
  return [Finding(True, f"clocks: within {most * 1e3:.1f} ms of {host}'s")]
