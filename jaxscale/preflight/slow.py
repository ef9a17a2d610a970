"""Which pairs of hosts, and which hosts, are slower than their like."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from jaxscale.preflight.finding import Finding
from jaxscale.preflight.network import Speed

Pair = tuple[int, int]


class Limits(NamedTuple):
  """Bounds of the measurement, and what is slow; the numbers are our own choice.

  Attributes:
    seconds: of sending, a pair and way, about.
    most_bytes: to send at once, a pair and way.
    total_s: after which no further rounds begin.
    connect_s: for a connection to be made.
    stalled_s: without a byte, after which a pair is given up.
    at_once: rounds whose connections are open together.
    times_slower: than the median of all pairs, in bytes/s.
    times_longer: than the median round trip.
    least: bytes/s below which any pair is slow: half of gigabit Ethernet.
    least_trip_s: a round trip below which none is long.
  """

  seconds: float = 0.1
  most_bytes: int = 32 << 20
  total_s: float = 20.0
  connect_s: float = 3.0
  stalled_s: float = 5.0
  at_once: int = 64
  times_slower: float = 3.0
  times_longer: float = 5.0
  least: float = 0.06e9
  least_trip_s: float = 0.5e-3


class Measured(NamedTuple):
  """What process 0 knows in the end.

  Attributes:
    speeds: of the pairs that were measured, or tried.
    rounds: that were held.
    of_rounds: that all pairs take.
  """

  speeds: list[Speed]
  rounds: int
  of_rounds: int


def suspects(speeds: list[Speed], limits: Limits) -> list[Pair]:
  """The pairs that are slower than their like, or could not be measured."""
  usual = _usual(speeds)
  return [(s.first, s.second) for s in speeds if s.error or _is_slow(s, usual, limits)]


def _usual(speeds: list[Speed]) -> tuple[float, float]:
  """Median bytes/s and round trip of all pairs."""
  good = [s for s in speeds if not s.error]
  if not good:
    return 0.0, 0.0
  return (
    statistics.median(s.slower for s in good),
    statistics.median(s.round_trip_s for s in good),
  )


def _is_slow(speed: Speed, usual: tuple[float, float], limits: Limits) -> bool:
  rate, trip = usual
  long = max(trip * limits.times_longer, limits.least_trip_s)
  least = max(rate / limits.times_slower, limits.least)
  return speed.slower < least or speed.round_trip_s > long


def judge(measured: Measured, hosts: tuple[str, ...], limits: Limits) -> list[Finding]:
  """What the measurement says of nodes and pairs, by the names of their hosts.

  Args:
    measured: what `measure` gave process 0.
    hosts: the host of every process, by rank.
    limits: what is slow.
  """
  speeds = measured.speeds
  if not speeds:
    return [Finding(True, f"network: all processes are on {hosts[0]}")]
  rate, trip = _usual(speeds)
  bad = {pair for pair in suspects(speeds, limits)}
  findings = [_summary(measured, rate, trip)] if rate else []
  nodes = _bad_nodes(speeds, bad)
  for node in nodes:
    remedy = f"leave {hosts[node]} out (--exclude={hosts[node]}) and report it"
    own = [s for s in speeds if node in (s.first, s.second)]
    text = f"network: {hosts[node]}: {_faults(own, bad, rate, trip)}"
    findings.append(Finding(False, text, remedy))
  for speed in speeds:
    pair = speed.first, speed.second
    if pair in bad and not set(pair) & set(nodes):
      findings.append(_slow_pair(speed, hosts, rate, trip))
  return findings


def _faults(own: list[Speed], bad: set[Pair], rate: float, trip: float) -> str:
  """What is wrong with the pairs of one node."""
  cut = [s for s in own if s.error]
  slow = [s for s in own if not s.error and (s.first, s.second) in bad]
  parts = []
  if cut:
    parts.append(f"{len(cut)} of {len(own)} pairs do not connect ({cut[0].error})")
  if slow:
    slower = statistics.median(s.slower for s in slow)
    longer = statistics.median(s.round_trip_s for s in slow)
    parts.append(
      f"{len(slow)} of {len(own)} pairs are slow, {_rate(slower)} and {_trip(longer)} "
      f"where the median has {_rate(rate)} and {_trip(trip)}"
    )
  return "; ".join(parts)


def _summary(measured: Measured, rate: float, trip: float) -> Finding:
  text = (
    f"network: {len(measured.speeds)} pairs of hosts, median {_rate(rate)} "
    f"(one TCP stream) and {_trip(trip)} round trip"
  )
  if measured.rounds < measured.of_rounds:
    text += f", {measured.rounds} of {measured.of_rounds} rounds in the time allowed"
  return Finding(True, text)


def _bad_nodes(speeds: list[Speed], bad: set[Pair]) -> list[int]:
  """Nodes that most of their pairs say is at fault, the worst first.

  A node is taken out before the next is looked for: what it spoils of others is
  not theirs. With two hosts nobody can tell which it is.
  """
  left, found = list(speeds), []
  while True:
    pairs = [(s.first, s.second) for s in left]
    members = sorted({rank for pair in pairs for rank in pair})
    share = {
      m: sum(p in bad for p in pairs if m in p) / sum(m in p for p in pairs)
      for m in members
    }
    if len(members) < 3 or (worst := max(share, key=lambda m: share[m])) is None:
      return found
    if share[worst] <= 0.5:
      return found
    found.append(worst)
    left = [s for s in left if worst not in (s.first, s.second)]


def _slow_pair(
  speed: Speed, hosts: tuple[str, ...], rate: float, trip: float
) -> Finding:
  names = f"{hosts[speed.first]} and {hosts[speed.second]}"
  remedy = f"leave one of {names} out, or report the link between them"
  if speed.error:
    return Finding(False, f"network: {names} do not reach each other: {speed.error}",
                   f"{remedy}; a firewall?")  # fmt: skip
  return Finding(
    False,
    f"network: {names}: {_rate(speed.there)} there, {_rate(speed.back)} back, "
    f"{_trip(speed.round_trip_s)} round trip; the median of all pairs is "
    f"{_rate(rate)} and {_trip(trip)}",
    remedy,
  )


def _rate(bytes_s: float) -> str:
  return f"{bytes_s / 1e9:.2f} GB/s" if bytes_s >= 1e8 else f"{bytes_s / 1e6:.1f} MB/s"


def _trip(seconds: float) -> str:
  return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
