"""The preflight between real processes, with what it is there to find."""

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from jaxscale.cluster.rendezvous.acceptor import Acceptor
from jaxscale.cluster.wire import Link
from jaxscale.errors import ConfigError
from jaxscale.preflight import network
from jaxscale.preflight.group import Group
from support.cases import all_slow_except
from support.preflight_process import HOSTS, answers, only, preflight, start, wrong


def test_a_good_allocation_is_ready_without_jax_within_seconds(tmp_path):
  processes = start(HOSTS, [f"--workdir={tmp_path / 'runs'}", "--skip=devices,disk"])
  reported = answers(processes)
  findings, seconds, imports_jax = reported[0]
  # On a busy machine two of its hosts may be slow to each other.
  refused = [line for line in wrong(findings) if "B/s" not in line]
  assert len(reported) == 4 and not refused and not imports_jax
  assert seconds < 60  # 1.7 s on two busy cores
  text = "\n".join(f.text for f in findings)
  assert "versions on all processes: python 3." in text and "jax 0." in text
  assert "network: 6 pairs of hosts" in text
  assert "all 4 hosts see each other's files" in text
  assert "clocks: within" in text
  assert list((tmp_path / "runs").iterdir()) == []  # nothing is left behind


def test_another_version_on_one_rank_is_named():
  patch = """
    from jaxscale.preflight import software
    real = software.versions()
    if rank == 2: software.versions = lambda: real | {"jaxlib": "0.9.0"}
    if rank == 1: software.versions = lambda: real | {"libtpu": "0.0.3"}
  """
  findings = preflight(HOSTS, only("software"), patch=patch)
  reported = wrong(findings)
  assert any(x.startswith("jaxlib 0.9.0 on process 2 (n3), 0.") for x in reported)
  assert "libtpu 0.0.3 on process 1 (n2), none on the others" in reported
  assert len(reported) == 2


# Blocks are sent; the rates are as if some sender had 0.25 MB/s and all others 1 GB/s.
THROTTLED = """
  from jaxscale.preflight import network

  real = network._measure_pair
  def measure(rank, pair, *rest):
    speed = real(rank, pair, *rest)
    if speed is None or speed.error:
      return speed
    rates = [0.25e6 if SLOW else 1e9 for rank in pair]
    return network.Speed(*pair, 1e-4, *rates)
  network._measure_pair = measure
"""


@pytest.mark.parametrize("direction", all_slow_except(["there", "back"], "there"))
def test_a_slow_pair_is_named(direction):
  rank = {"there": 1, "back": 2}[direction]
  patch = THROTTLED.replace("SLOW", f"pair == (1, 2) and rank == {rank}")
  (summary, slow) = preflight(HOSTS, only("network"), patch=patch)
  assert summary.ok and not slow.ok and "6 pairs" in summary.text
  assert slow.text.startswith("network: n2 and n3: ")
  rates = dict(
    zip(("there", "back"), slow.text.split(": ")[2].split(", "), strict=False)
  )
  rate, unit = rates[direction].split()[:2]
  assert (float(rate), unit) == (250, "KB/s")
  assert "leave one of n2 and n3 out" in slow.remedy


def test_a_slow_node_is_named_and_its_pairs_are_not_listed():
  patch = THROTTLED.replace("SLOW", "rank == 3")
  (summary, slow) = preflight(HOSTS, only("network"), patch=patch)
  assert summary.ok and slow.text.startswith("network: n4: 3 of 3 pairs are slow, ")
  assert "--exclude=n4" in slow.remedy


def test_a_node_that_nobody_reaches_is_named():
  patch = """
    from jaxscale.preflight import network
    real = network._own_place
    network._own_place = lambda *a: [real(*a)[0], 1] if rank == 0 else real(*a)
  """
  (summary, cut) = preflight(HOSTS, only("network"), patch=patch)
  assert cut.text == "network: n1: 3 of 3 pairs do not connect (Connection refused)"
  assert summary.ok and not cut.ok


GROUP = Group(1, ("n0", "n1"), {}, b"key")


ADDRESSES, CONNECTED, SPEEDS = (
  f"network: {step}" for step in ("addresses", "connected", "speeds")
)
NO_MEASUREMENTS = [
  (1, [[ADDRESSES, 5]]),
  (1, [[ADDRESSES, [5, ["127.0.0.1", 1]]]]),
  (1, [[ADDRESSES, [[], ["127.0.0.1", 1]]]]),
  (0, [[ADDRESSES, ["127.0.0.1", "x"]]]),
  (0, [[ADDRESSES, ["127.0.0.1", 1]], [CONNECTED, []]]),
  (0, [[ADDRESSES, ["127.0.0.1", 1]], [CONNECTED, {"9": "x"}], [SPEEDS, []]]),
  (
    0,
    [[ADDRESSES, ["127.0.0.1", 1]], [CONNECTED, {}], [SPEEDS, [[5, 7, 0, 0, 0, ""]]]],
  ),
  (0, [[ADDRESSES, ["127.0.0.1", 1]], [CONNECTED, {}], [SPEEDS, [[0, 1, "x"]]]]),
]


@pytest.mark.parametrize(
  "rank, messages", NO_MEASUREMENTS, ids=range(len(NO_MEASUREMENTS))
)
def test_what_is_no_measurement_is_one_line(rank, messages):
  with socket.create_server(("127.0.0.1", 0)) as server:
    theirs = Link(socket.create_connection(server.getsockname()))
    ours = Link(server.accept()[0])
  for message in messages:
    theirs.send(message)
  group = Group(rank, ("n1", "n2"), {1 - rank: ours}, b"key")
  limits = network.NetworkLimits(connect_s=0.05)
  with pytest.raises(ConfigError, match=r"sends what is not a measurement \("):
    network.check(group, SimpleNamespace(limits=limits), None)
  theirs.close(), ours.close()


def test_who_does_not_answer_costs_one_timeout():
  with (
    socket.socket() as full,
    socket.socket() as other,
    socket.create_server(("127.0.0.1", 0)) as silent,
    Acceptor([], b"key", 1) as acceptor,
  ):
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    other.connect(full.getsockname())  # Linux now lets further ones wait
    below = {1: full.getsockname(), 2: silent.getsockname()}
    made, errors = network._connect(GROUP, acceptor, below, set(), 0.5)
    assert not made and errors == {1: "no answer in 0.5 s", 2: "no answer in 0.5 s"}


def test_strangers_keep_no_pair_from_connecting():
  listener = socket.create_server(("127.0.0.1", 0))
  place = listener.getsockname()
  with (
    Acceptor([listener], b"key", 2) as acceptor,
    socket.create_connection(place) as silent,
    socket.create_connection(place) as loud,
    ThreadPoolExecutor() as pool,
  ):
    loud.sendall(b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n")
    friend = GROUP._replace(rank=7)
    connecting = pool.submit(network._connect_one, friend, place, 5.0)
    found, errors = network._connect(GROUP, acceptor, {}, {7}, 5.0)
    assert list(found) == [7] and not errors
    assert acceptor.refused == {"127.0.0.1": 1}
    silent.close()
    for sock in (connecting.result(), found[7]):
      sock.close()


def test_a_clock_that_is_off_is_named():
  patch = """
    import time, types
    from jaxscale.preflight import clocks
    off = {1: 5.0, 2: -2.5, 3: 0.2}.get(rank, 0.0)
    clocks.time = types.SimpleNamespace(
      time=lambda: time.time() + off, perf_counter=time.perf_counter)
  """
  reported = wrong(preflight(HOSTS, only("clocks"), patch=patch))
  assert reported == [
    "clock of n2: 5.00 s ahead of n1",
    "clock of n3: 2.50 s behind n1",
  ]


def test_a_process_that_dies_ends_the_others_with_its_name():
  patch = """
    import os
    from jaxscale.preflight import network
    if rank == 2: network.measure = lambda *a: os._exit(9)
  """
  reported = answers(start(HOSTS, [only("clocks", "network")], patch))
  texts = [findings[0].text for findings, *_ in reported]
  assert len(reported) == 3
  assert "process 2 (n3) was lost at 'network" in texts[0]
  assert all("process 0 (n1) left at 'network" in text for text in texts[1:])
