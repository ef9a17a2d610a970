"""The check `network`: latency and bandwidth between all pairs of hosts.

What is measured is one TCP stream of Python on the addresses of the rendezvous, not
what NCCL or RDMA reach: it finds the link, port or node that is slower than others of
its kind, which makes a whole job slow. Pairs are measured in rounds in which no host
is twice; a host is in one pair at a time by itself, so no barrier separates rounds.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxscale.cluster import secret
from jaxscale.cluster.rendezvous.acceptor import Acceptor
from jaxscale.cluster.rendezvous.network import bind_port, own_address
from jaxscale.cluster.wire import parse, typed
from jaxscale.errors import ConfigError
from jaxscale.metrics.text import byte_size, short_time
from jaxscale.preflight.finding import Finding
from jaxscale.preflight.group import Group, all_gather, broadcast, gather

Pair = tuple[int, int]
Sockets = dict[int, socket.socket]  # by rank of the other end
_FIRST = 1 << 16  # bytes of the first burst
_PINGS = 20
_NUMBER, _SIZE = struct.Struct("!d"), struct.Struct("!Q")


class NetworkLimits(NamedTuple):
  """Bounds of the measurement, and what is slow; the numbers are our own choice.

  Attributes:
    seconds: about how long one direction of a pair is measured.
    most_bytes: the largest burst.
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


class _Place(NamedTuple):
  """Where a host listens."""

  address: str
  port: int


class Speed(NamedTuple):
  """What a pair of processes measured.

  Attributes:
    first: the lower rank.
    second: the higher rank.
    round_trip_s: of one byte, the median.
    there: bytes/s from the first to the second.
    back: bytes/s from the second to the first.
    error: why it was not measured; then the numbers are 0.
  """

  first: int
  second: int
  round_trip_s: float = 0.0
  there: float = 0.0
  back: float = 0.0
  error: str = ""

  @property
  def pair(self) -> Pair:
    """Both ranks."""
    return self.first, self.second

  @property
  def slower(self) -> float:
    """Bytes/s of the slower direction."""
    return min(self.there, self.back)


class Measurement(NamedTuple):
  """What process 0 knows in the end.

  Attributes:
    speeds: of the pairs that were measured, or tried.
    rounds: rounds that were measured.
    of_rounds: rounds of all pairs.
  """

  speeds: list[Speed]
  rounds: int
  of_rounds: int


def check(group: Group, options: Any, facts: Any) -> list[Finding]:
  """Measure, and report nodes and pairs that are slow; all processes call it."""
  try:
    measured = measure(group, options.limits)
  except ConfigError:
    raise
  except ValueError as e:
    what = f"a process sends what is not a measurement ({e})"
    raise ConfigError(f"preflight: network: {what}; start all alike") from None
  return [] if group.rank else findings(measured, group.hosts, options.limits)


def rounds_of(members: Sequence[int]) -> list[list[Pair]]:
  """Every pair once, in the fewest rounds in which nobody is twice.

  One member stays and the others rotate (the circle method of tournaments): N - 1
  rounds for an even N, N for an odd one.

  Example:
    >>> rounds_of([0, 1, 2, 3])
    [[(0, 3), (1, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 3)]]
  """
  circle = [*members, *([-1] if len(members) % 2 else [])]
  rounds = []
  for _ in circle[1:]:
    pairs = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
    rounds.append(sorted((min(p), max(p)) for p in pairs if -1 not in p))
    circle = [circle[0], *circle[2:], circle[1]]
  return rounds


def measure(group: Group, limits: NetworkLimits) -> Measurement:
  """Measure all pairs of hosts; all processes call it. Process 0 has the result."""
  if len(group.host_ranks) < 2:
    return Measurement([], 0, 0)
  rounds, began, done = rounds_of(group.host_ranks), time.monotonic(), 0
  speeds: dict[Pair, Speed] = {}
  near = own_address(group.links.values())
  _, (listener,) = bind_port([0], near, listen=True)
  with Acceptor([listener], group.key, 2 * limits.at_once) as acceptor:
    # The addresses of the connections to process 0, which sees its own from nobody.
    own = _own_place(group, listener)
    theirs = typed(list[Any], all_gather(group, "network: addresses", own))
    places = [parse(_Place, place) for place in theirs]
    if group.rank:
      address = group.links[0].sock.getpeername()[0]
      places[0] = places[0]._replace(address=address)
    at = acceptor, places
    while done < len(rounds):
      chunk = rounds[done : done + limits.at_once]
      done += len(chunk)
      speeds |= _measure_rounds(group, *at, chunk, limits)
      if broadcast(group, "network: time", time.monotonic() - began > limits.total_s):
        break
    # A slow pair may have been a busy moment: the better of two measurements counts.
    own = [[*pair] for pair in suspects([*speeds.values()], limits)]
    slow = broadcast(group, "network: again", own)
    bad = {tuple(pair) for pair in typed(list[list[int]], slow)}
    again = [left for pairs in rounds if (left := [p for p in pairs if p in bad])]
    chunk = again[: limits.at_once]
    second = _measure_rounds(group, *at, chunk, limits) if chunk else {}
  still = suspects([*(speeds | second).values()], limits)
  speeds |= {pair: speed for pair, speed in second.items() if pair not in still}
  return Measurement([*speeds.values()], done, len(rounds))


def _own_place(group: Group, listener: socket.socket) -> list[Any]:
  """[address, port] of this process, as process 0 sees it."""
  address = group.links[0].sock.getsockname()[0] if group.rank else ""
  return [address, listener.getsockname()[1]]


def _measure_rounds(
  group: Group, acceptor: Acceptor, places: Sequence[_Place],
  rounds: list[list[Pair]], limits: NetworkLimits,
) -> dict[Pair, Speed]:  # fmt: skip
  """Connect all pairs of some rounds, then measure one after another.

  `places` are where hosts listen, by rank.
  """
  mine = [pair for pairs in rounds for pair in pairs if group.rank in pair]
  below = {first: places[first] for first, second in mine if second == group.rank}
  above = {second for first, second in mine if first == group.rank}
  sockets, errors = _connect(group, acceptor, below, above, limits.connect_s)
  found = {
    (int(first), second): Speed(int(first), second, error=error)
    for second, theirs in enumerate(all_gather(group, "network: connected", errors))
    for first, error in typed(dict[str, str], theirs).items()
  }
  deadline, own = time.monotonic() + 2 * limits.total_s, []
  for pair in mine:
    if sock := sockets.get(sum(pair) - group.rank):
      own.append(_measure_pair(group.rank, pair, sock, limits, deadline))
  for speeds in gather(group, "network: speeds", [s for s in own if s]):
    for speed in (parse(Speed, values) for values in typed(list[Any], speeds)):
      if speed.pair not in found or not speed.error:
        found[speed.pair] = speed
  if strange := found.keys() - {pair for pairs in rounds for pair in pairs}:
    raise ValueError(f"{min(strange)} is no pair of these rounds")
  return found


def _connect(
  group: Group, acceptor: Acceptor, below: Mapping[int, tuple[str, int]],
  above: set[int], timeout_s: float,
) -> tuple[Sockets, dict[int, str]]:  # fmt: skip
  """Connections to all below, and of all above; why those below could not be made."""
  made: Sockets = {}
  with ThreadPoolExecutor(max(len(below), 1)) as pool:
    tries: dict[int, Future[socket.socket | str]] = {
      rank: pool.submit(_connect_one, group, place, timeout_s)
      for rank, place in below.items()
    }
    deadline = time.monotonic() + timeout_s
    while above - made.keys() and (left := deadline - time.monotonic()) > 0:
      for link, rank in acceptor.accept(left):
        if isinstance(rank, int) and rank in above - made.keys():
          made[rank] = link.sock
        else:
          link.close()
    results = {rank: one.result() for rank, one in tries.items()}
  errors = {rank: error for rank, error in results.items() if isinstance(error, str)}
  made |= {r: sock for r, sock in results.items() if not isinstance(sock, str)}
  return made, errors


def _connect_one(
  group: Group, place: tuple[str, int], timeout_s: float
) -> socket.socket | str:
  """A connection to a host that knows who has made it, or why there is none."""
  try:
    link = secret.connect(place, group.key, timeout_s)
    link.send_now(group.rank)
  except TimeoutError:
    return f"no answer in {timeout_s:g} s"
  except OSError as e:
    return e.strerror or str(e)
  except (EOFError, ValueError):
    return "a stranger answers there"
  link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return link.sock


def _measure_pair(
  rank: int, pair: Pair, sock: socket.socket, limits: NetworkLimits, deadline: float
) -> Speed | None:
  """The higher rank leads and reports; the lower one reports only an error."""
  try:
    if (left := deadline - time.monotonic()) <= 0:
      raise TimeoutError("others before it took all the time")
    sock.settimeout(min(limits.total_s, left))  # the other end may be in another pair
    if rank == pair[1]:
      sock.sendall(b"?")
    _exactly(sock, 1)
    sock.settimeout(limits.stalled_s)
    if rank == pair[1]:
      return Speed(*pair, *lead(sock, limits))
    sock.sendall(b"!")
    follow(sock, limits)
  except OSError as e:
    return Speed(*pair, error=str(e) or type(e).__name__)
  finally:
    sock.close()


def lead(sock: socket.socket, limits: NetworkLimits) -> tuple[float, float, float]:
  """Measure a connection whose other end calls `follow`.

  Returns:
    Seconds of a round trip, bytes/s from the other end, bytes/s to it.

  Raises:
    OSError: the connection is lost.
  """
  trips = []
  for _ in range(_PINGS):
    began = time.perf_counter()
    sock.sendall(b".")
    _exactly(sock, 1)
    trips.append(time.perf_counter() - began)
  trip = statistics.median(trips)
  sock.sendall(_NUMBER.pack(trip))
  to_it = _send_bursts(sock, limits, trip)
  _receive_bursts(sock, limits)
  return trip, *_NUMBER.unpack(_exactly(sock, _NUMBER.size)), to_it


def follow(sock: socket.socket, limits: NetworkLimits) -> None:
  """The other end of `lead`."""
  for _ in range(_PINGS):
    sock.sendall(_exactly(sock, 1))
  (trip,) = _NUMBER.unpack(_exactly(sock, _NUMBER.size))
  _receive_bursts(sock, limits)
  sock.sendall(_NUMBER.pack(_send_bursts(sock, limits, trip)))


def _send_bursts(sock: socket.socket, limits: NetworkLimits, trip: float) -> float:
  """Send larger and larger bursts, each acknowledged; bytes/s of the last one.

  The size doubles: a slow link takes about `limits.seconds`, and on a fast one TCP's
  window is open when the last burst is sent.
  """
  size, took = _FIRST // 2, 0.0
  while took <= limits.seconds / 2 and 2 * size <= limits.most_bytes:
    size *= 2
    burst = _SIZE.pack(size) + bytes(size)
    began = time.perf_counter()
    sock.sendall(burst)
    _exactly(sock, 1)
    took = time.perf_counter() - began
  sock.sendall(_SIZE.pack(0))
  return size / max(took - trip, 1e-9)


def _receive_bursts(sock: socket.socket, limits: NetworkLimits) -> None:
  while size := _SIZE.unpack(_exactly(sock, _SIZE.size))[0]:
    if size > limits.most_bytes:
      raise ConnectionError("the other end measures with other limits")
    _exactly(sock, size)
    sock.sendall(b".")


def _exactly(sock: socket.socket, size: int) -> bytes:
  """As many bytes as that, or `ConnectionError`."""
  found = bytearray(size)
  rest = memoryview(found)
  while rest:
    if not (got := sock.recv_into(rest)):
      raise ConnectionError("the other end closed the connection")
    rest = rest[got:]
  return bytes(found)


def suspects(speeds: Sequence[Speed], limits: NetworkLimits) -> list[Pair]:
  """The pairs that are much slower than the median, or could not be measured."""
  rate, trip = _usual(speeds)
  least = max(rate / limits.times_slower, limits.least)
  longest = max(trip * limits.times_longer, limits.least_trip_s)
  slow = (s for s in speeds if s.error or s.slower < least or s.round_trip_s > longest)
  return [s.pair for s in slow]


def _usual(speeds: Sequence[Speed]) -> tuple[float, float]:
  """Median bytes/s and round trip of all pairs."""
  good = [s for s in speeds if not s.error] or [Speed(0, 0)]
  rate = statistics.median(s.slower for s in good)
  return rate, statistics.median(s.round_trip_s for s in good)


def findings(
  measured: Measurement, hosts: Sequence[str], limits: NetworkLimits
) -> list[Finding]:
  """What the measurement says about nodes and pairs, by the names of their hosts.

  Args:
    measured: the measurement of process 0.
    hosts: the host of every process, by rank.
    limits: what is slow.
  """
  speeds = measured.speeds
  if not speeds:
    return [Finding(True, f"network: all processes are on {hosts[0]}")]
  usual, bad, found = _usual(speeds), {*suspects(speeds, limits)}, []
  median = _shown(*usual)
  if usual[0]:
    text = f"network: {len(speeds)} pairs of hosts, median {median} round trip"
    if measured.rounds < measured.of_rounds:
      text += f", {measured.rounds} of {measured.of_rounds} rounds in the time allowed"
    found.append(Finding(True, f"{text} (one TCP stream)"))
  nodes = _bad_nodes(speeds, bad)
  for node in nodes:
    own = [s for s in speeds if node in s.pair]
    cut = [s for s in own if s.error]
    slow = [s for s in own if not s.error and s.pair in bad]
    faults = []
    if cut:
      faults.append(f"{len(cut)} of {len(own)} pairs do not connect ({cut[0].error})")
    if slow:
      text = f"{len(slow)} of {len(own)} pairs are slow, {_shown(*_usual(slow))} where "
      faults.append(f"{text}the median has {median}")
    text = f"network: {hosts[node]}: {'; '.join(faults)}"
    remedy = f"leave {hosts[node]} out (--exclude={hosts[node]}) and report it"
    found.append(Finding(False, text, remedy))
  for s in speeds:
    if s.pair not in bad or {*s.pair} & {*nodes}:
      continue
    names = f"{hosts[s.first]} and {hosts[s.second]}"
    remedy = f"leave one of {names} out, or report the link between them"
    text = f"network: {names}: {byte_size(s.there)}/s there, {byte_size(s.back)}/s back"
    text += f", {short_time(s.round_trip_s)} round trip; the median of all pairs is "
    text += median
    if s.error:
      text = f"network: {names} do not reach each other: {s.error}"
      remedy += "; a firewall?"
    found.append(Finding(False, text, remedy))
  return found


def _bad_nodes(speeds: Sequence[Speed], bad: set[Pair]) -> list[int]:
  """Nodes at fault in most of their pairs, the worst first.

  A node is taken out before the next is looked for: what it spoils in others is not
  their fault. With two hosts nobody can tell which one it is.
  """
  left, found = [s.pair for s in speeds], []
  while len(members := sorted({rank for pair in left for rank in pair})) >= 3:
    own = {m: [pair in bad for pair in left if m in pair] for m in members}
    worst = max(members, key=lambda m: statistics.fmean(own[m]))
    if statistics.fmean(own[worst]) <= 0.5:
      break
    found.append(worst)
    left = [pair for pair in left if worst not in pair]
  return found


def _shown(rate: float, trip: float) -> str:
  return f"{byte_size(rate)}/s and {short_time(trip)}"
