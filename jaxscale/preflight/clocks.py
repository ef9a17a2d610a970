"""The check `clocks`: how far the clocks of all hosts are from that of process 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxscale.preflight.finding import Finding
from jaxscale.preflight.group import Group, receive, send

# File systems, Kerberos tickets and the order of lines in logs suffer from more.
MOST_S = 1.0
_QUESTIONS = 8


class Offset(NamedTuple):
  """A clock, seen from process 0.

  Attributes:
    rank: the process whose clock it is.
    seconds: by which it is ahead.
    round_trip_s: of the question; half of it is the error bound of the offset.
  """

  rank: int
  seconds: float
  round_trip_s: float


def check(group: Group, options: Any, facts: Any) -> list[Finding]:
  """Process 0 asks every host for its time; all processes call it.

  Of several answers the one with the shortest round trip counts, as in NTP (RFC
  5905, section 10): what delays a message delays it one way more than the other.
  """
  if group.rank:
    for _ in range(_QUESTIONS if group.acts else 0):
      receive(group, 0, "clocks")
      send(group, 0, "clocks", time.time())
    return []
  offsets = []
  for rank in group.host_ranks[1:]:
    answers = []
    for _ in range(_QUESTIONS):
      began, sent = time.perf_counter(), time.time()
      send(group, rank, "clocks", None)
      there = receive(group, rank, "clocks")
      trip = time.perf_counter() - began
      answers.append(Offset(rank, there - (sent + trip / 2), trip))
    offsets.append(min(answers, key=lambda answer: answer.round_trip_s))
  return findings(offsets, group.hosts)


def findings(offsets: Sequence[Offset], hosts: Sequence[str]) -> list[Finding]:
  """What the offsets mean; `hosts` by rank.

  Example:
    >>> findings([Offset(1, 2.5, 0.0001)], ("n1", "n2"))[0].text
    'clock of n2: 2.50 s ahead of n1'
  """
  if not offsets:
    return []
  remedy = "let chronyd or ntpd set the clocks (`chronyc tracking` on each of the two)"
  wrong = []
  for o in offsets:
    if abs(o.seconds) - o.round_trip_s / 2 > MOST_S:
      way = "ahead of" if o.seconds > 0 else "behind"
      text = f"clock of {hosts[o.rank]}: {abs(o.seconds):.2f} s {way} {hosts[0]}"
      wrong.append(Finding(False, text, remedy))
  most = max(offsets, key=lambda o: abs(o.seconds))
  text = f"clocks: within {abs(most.seconds) * 1e3:.1f} ms of {hosts[0]}'s "
  return wrong or [Finding(True, f"{text}({hosts[most.rank]} is furthest)")]
