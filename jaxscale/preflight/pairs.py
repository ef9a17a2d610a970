"""All pairs of hosts measure the network between them.

Connections are made many at once, so that hosts which cannot be reached cost
one timeout; pairs are then measured in the order of `network.rounds`. A host is
in one pair at a time by itself, so there is no barrier between rounds.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxscale.preflight import network
from jaxscale.preflight.group import Group, broadcast, everybody, gather
from jaxscale.preflight.network import Speed
from jaxscale.preflight.slow import Limits, Measured, Pair, suspects
from jaxscale.preflight.storage import attempt


class _Meeting(NamedTuple):
  """How hosts reach each other: [address, port] by rank, and what proves who it is."""

  places: list[list[Any]]
  key: str
  listener: socket.socket


def measure(group: Group, limits: Limits) -> Measured:
  """Measure all pairs of hosts; all processes call it. The result is process 0's."""
  hosts = list(group.first_of_host)
  all_rounds = network.rounds(hosts)
  if len(hosts) < 2:
    return Measured([], 0, 0)
  began, held = time.monotonic(), 0
  speeds: dict[Pair, Speed] = {}
  with _listener(group) as listener:
    meeting = _meet(group, listener)
    while held < len(all_rounds):
      chunk = all_rounds[held : held + limits.at_once]
      held += len(chunk)
      speeds |= _measure_rounds(group, meeting, chunk, limits)
      over = time.monotonic() - began > limits.total_s
      if broadcast(group, "network: time", over):
        break
    # A slow pair may have been a busy moment: the better of two counts.
    again = _disjoint(suspects(list(speeds.values()), limits), limits.at_once)
    again = broadcast(group, "network: again", again)
    chunk = [[(first, second) for first, second in pairs] for pairs in again]
    second = _measure_rounds(group, meeting, chunk, limits) if chunk else {}
  for pair, speed in second.items():
    speeds[pair] = _better(speeds[pair], speed)
  return Measured(list(speeds.values()), held, len(all_rounds))


def _meet(group: Group, listener: socket.socket) -> _Meeting:
  """Where everybody listens, as process 0's links show their addresses."""
  key = broadcast(group, "network: key", secrets.token_hex(8))
  places = everybody(group, "network: addresses", _own_place(group, listener))
  if group.rank:
    places[0][0] = group.links[0].sock.getpeername()[0]
  return _Meeting(places, key, listener)


def _better(one: Speed, other: Speed) -> Speed:
  if one.error or other.error:
    return other if one.error else one
  return one._replace(
    round_trip_s=min(one.round_trip_s, other.round_trip_s),
    there=max(one.there, other.there),
    back=max(one.back, other.back),
  )


def _disjoint(pairs: Iterable[Pair], most: int) -> list[list[Pair]]:
  """Pairs in rounds where nobody is twice; a few rounds, the rest is left."""
  found: list[list[Pair]] = []
  for pair in pairs:
    for group in found:
      if all(not set(pair) & set(other) for other in group):
        group.append(pair)
        break
    else:
      if len(found) < most:
        found.append([pair])
  return found


def _listener(group: Group) -> socket.socket:
  """Where the hosts above this one connect to."""
  family = next(iter(group.links.values())).sock.family
  listener = socket.socket(family, socket.SOCK_STREAM)
  listener.bind(("", 0))
  listener.listen(1024)
  return listener


def _measure_rounds(
  group: Group, meeting: _Meeting, chunk: list[list[Pair]], limits: Limits
) -> dict[Pair, Speed]:
  """Connect all pairs of some rounds, then measure one after another."""
  mine = [pair for pairs in chunk for pair in pairs if group.rank in pair]
  below = [first for first, second in mine if second == group.rank]
  to_below, errors = _connect(
    {rank: tuple(meeting.places[rank]) for rank in below},
    meeting.listener.family,
    limits.connect_s,
  )
  for rank, sock in to_below.items():
    if error := attempt(lambda s=sock: s.sendall(_hello(meeting.key, group.rank))):
      errors[rank] = error
  said = everybody(group, "network: connected", errors)
  failed = {
    (int(rank), second): Speed(int(rank), second, error=why)
    for second, errors in enumerate(said)
    for rank, why in errors.items()
  }
  above = [second for first, second in mine if first == group.rank]
  count = sum((group.rank, second) not in failed for second in above)
  from_above = _accept(meeting.listener, meeting.key, count, limits.connect_s)
  deadline = time.monotonic() + 2 * limits.total_s
  own = []
  for pair in mine:
    other = pair[0] if pair[1] == group.rank else pair[1]
    if sock := {**to_below, **from_above}.get(other):
      own.append(_measure_pair(group.rank, pair, sock, limits, deadline))
  gathered = gather(group, "network: speeds", [s for s in own if s])
  found = dict(failed)
  for speed in (Speed(*s) for speeds in gathered for s in speeds):
    pair = speed.first, speed.second
    if pair not in found or not speed.error:
      found[pair] = speed
  return found


def _hello(key: str, rank: int) -> bytes:
  return f"{key}{rank:8}".encode()


def _own_place(group: Group, listener: socket.socket) -> list[Any]:
  """[address, port] of this process, as process 0 sees it."""
  address = group.links[0].sock.getsockname()[0] if group.rank else ""
  return [address, listener.getsockname()[1]]


def _connect(
  places: dict[int, tuple[str, int]], family: int, timeout_s: float
) -> tuple[dict[int, socket.socket], dict[int, str]]:
  """Connections to all places at once, and why the others could not be made."""
  selector, made, errors = selectors.DefaultSelector(), {}, {}
  for rank, place in places.items():
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.connect_ex(place)
    selector.register(sock, selectors.EVENT_WRITE, rank)
  deadline = time.monotonic() + timeout_s
  while selector.get_map():
    ready = selector.select(max(deadline - time.monotonic(), 0.0))
    for key, _ in ready:
      sock: Any = key.fileobj
      selector.unregister(sock)
      if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        errors[key.data] = os.strerror(code)
        sock.close()
      else:
        made[key.data] = sock
    if not ready:
      for key in list(selector.get_map().values()):
        errors[key.data] = f"no answer in {timeout_s:g} s"
        key.fileobj.close()  # pyright: ignore
      break
  selector.close()
  for sock in made.values():
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return made, errors


def _accept(
  listener: socket.socket, key: str, count: int, timeout_s: float
) -> dict[int, socket.socket]:
  """The connections of hosts above; strangers, who lack the key, are let go."""
  made: dict[int, socket.socket] = {}
  deadline = time.monotonic() + timeout_s
  while len(made) < count and (left := deadline - time.monotonic()) > 0:
    listener.settimeout(left)
    try:
      sock, _ = listener.accept()
    except OSError:
      continue
    try:
      sock.settimeout(left)
      hello = network.exactly(sock, len(_hello(key, 0))).decode()
    except (OSError, ValueError):
      hello = ""
    if not hello.startswith(key):
      sock.close()
      continue
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made[int(hello[len(key) :])] = sock
  return made


def _measure_pair(
  rank: int, pair: Pair, sock: socket.socket, limits: Limits, deadline: float
) -> Speed | None:
  """The higher rank leads and reports; the lower one reports what broke."""
  bounds: Any = {"seconds": limits.seconds, "most_bytes": limits.most_bytes}
  try:
    left = deadline - time.monotonic()
    if left <= 0:
      raise TimeoutError("others before it took all the time")
    sock.settimeout(min(limits.total_s, left))  # the other end may be in another pair
    if rank == pair[0]:
      network.exactly(sock, 1)
      sock.settimeout(limits.stalled_s)
      sock.sendall(b"!")
      network.follow(sock, **bounds)
      return None
    sock.sendall(b"?")
    network.exactly(sock, 1)
    sock.settimeout(limits.stalled_s)
    trip, there, back = network.lead(sock, **bounds)
    return Speed(*pair, trip, there, back)
  except OSError as e:
    return Speed(*pair, error=str(e) or type(e).__name__)
  finally:
    sock.close()
