"""How far the clocks of all hosts are from that of process 0."""

from __future__ import annotations

import time
from typing import NamedTuple

from jaxscale.preflight.finding import Finding
from jaxscale.preflight.group import Group, receive, send

# File systems, Kerberos tickets and the order of lines in logs suffer from more.
MOST_S = 1.0
_ASKED = 8


class Offset(NamedTuple):
  """A clock, seen from process 0.

  Attributes:
    rank: whose clock.
    seconds: that it is ahead.
    round_trip_s: of the question; half of it is what the offset may be wrong by.
  """

  rank: int
  seconds: float
  round_trip_s: float


def measure(group: Group) -> list[Offset]:
  """Process 0 asks every host for its time; all processes call it.

  Of several answers the one with the shortest round trip counts, as in NTP (RFC
  5905, section 10): what delays a message delays it one way more than the other.
  """
  others = [rank for rank in group.first_of_host if rank]
  if group.rank:
    for _ in range(_ASKED if group.speaks else 0):
      receive(group, 0, "clocks")
      send(group, 0, "clocks", time.time())
    return []
  return [_ask(group, rank) for rank in others]


def _ask(group: Group, rank: int) -> Offset:
  answers = []
  for _ in range(_ASKED):
    began, sent = time.perf_counter(), time.time()
    send(group, rank, "clocks", None)
    there = receive(group, rank, "clocks")
    trip = time.perf_counter() - began
    answers.append(Offset(rank, there - (sent + trip / 2), trip))
  return min(answers, key=lambda answer: answer.round_trip_s)


def judge(offsets: list[Offset], hosts: tuple[str, ...]) -> list[Finding]:
  """What is said of the clocks; `hosts` by rank.

  Example:
    >>> judge([Offset(1, 2.5, 0.0001)], ("n1", "n2"))[0].text
    'clock of n2: 2.50 s ahead of n1'
  """
  far = [o for o in offsets if abs(o.seconds) - o.round_trip_s / 2 > MOST_S]
  findings = [
    Finding(
      False,
      f"clock of {hosts[o.rank]}: {abs(o.seconds):.2f} s "
      f"{'ahead of' if o.seconds > 0 else 'behind'} {hosts[0]}",
      "let chronyd or ntpd set the clocks (`chronyc tracking` on each of the two)",
    )
    for o in far
  ]
  if findings or not offsets:
    return findings
  most = max(offsets, key=lambda o: abs(o.seconds))
  return [
    Finding(
      True,
      f"clocks: within {abs(most.seconds) * 1e3:.1f} ms of {hosts[0]}'s "
      f"({hosts[most.rank]} is furthest)",
    )
  ]
