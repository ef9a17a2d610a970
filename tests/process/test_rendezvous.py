"""Processes connect over TCP, whoever else is on the ports."""

import json
import os
import signal
import socket
import threading

import pytest

from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous import network, server
from jaxscale.cluster.rendezvous.acceptor import Acceptor
from jaxscale.cluster.rendezvous.client import rendezvous
from support import rendezvous as starting
from support.commands import run_python
from support.rendezvous import connect, ends, greet, job, key_of, link_to, ports_of, the_line, who

start = pytest.fixture(starting.starter)


def test_four_processes_connect_in_any_order_and_can_talk(start):
  name = job("four")
  late = [0.3, 0, 0.6, 0]
  got = ends([start(r, 4, name, late=late[r]) for r in range(4)])
  assert [code for code, _ in got] == [0] * 4
  assert all(reported["hosts"] == ["n1", "n2", "n3", "n4"] for _, reported in got)
  (coordinator,) = {reported["coordinator"] for _, reported in got}
  assert coordinator.startswith("unix:/")  # which no other user reaches
  assert {int(r): m["from"] for r, m in got[0][1]["heard"].items()} == {1: 1, 2: 2, 3: 3}
  assert all(reported["heard"]["0"]["from"] == 0 for _, reported in got[1:])


def test_one_process_needs_nobody():
  group = rendezvous(Launch("single", 0, 1, None, 0, 1, "alone"))
  assert group.links == {} and group.num_processes == len(group.hosts) == 1


def same_port_first(name, other):
  """Return a name like `other` whose first port equals that of `name`."""
  wanted, names = ports_of(name)[0], (f"{other}-{i}" for i in range(10**6))
  return next(n for n in names if network.ports_of(key_of(n).hex(), 1) == [wanted])


def test_two_steps_of_a_job_on_one_port_never_cross_connect(start):
  one = job("slurm-123.0")
  two = same_port_first(one, "slurm-123.1")
  both = [start(r, 3, name) for r in range(3) for name in (one, two)]
  got = ends(both)
  assert [code for code, _ in got] == [0] * 6
  for i, (_, reported) in enumerate(got):
    wanted = (one, two)[i % 2]
    assert {m["job"] for m in reported["heard"].values()} == {wanted}
  assert len({reported["coordinator"] for _, reported in got}) == 2


@pytest.mark.parametrize("listens", [False, True], ids=["bound", "silent"])
def test_a_taken_port_is_passed_over(start, listens):
  name = job("taken")
  with socket.socket() as stranger:
    stranger.bind(("", ports_of(name)[0]))
    if listens:
      stranger.listen()
    got = ends([start(r, 2, name) for r in range(2)])
  assert [code for code, _ in got] == [0, 0]


def test_the_given_port_is_the_rendezvous_s_and_jax_gets_another(start):
  port, (kept,) = network.bind_port(ports_of(job("given")), [], listen=False)
  kept.close()
  host = f"127.0.0.1:{port}"
  # As on two hosts: they do not see the same files.
  apart = [{"network.namespace": f"n{r}"} for r in range(2)]
  got = ends([start(r, 2, "j", host, set=apart[r]) for r in range(2)])
  assert [code for code, _ in got] == [0, 0]
  (coordinator,) = {reported["coordinator"] for _, reported in got}
  address, _, other = coordinator.partition(":")
  assert address == "127.0.0.1" and int(other) in set(network.PORTS) - {port}


def test_strangers_do_not_disturb(start):
  name = job("strangers")
  port = ports_of(name)[0]
  first = start(0, 2, name)
  bad = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" * 99, b"[" * 50_000, b"{}\n", b"5\n"]
  bad += [b"", b'{"job": 1, "hello": {"rank": []}}\n']
  bad += [json.dumps({"job": name, "hello": [1] * 9}).encode() + b"\n"]
  strangers = [connect(port) for _ in bad]
  for sock, words in zip(strangers, bad, strict=True):
    sock.sendall(words)
  strangers[0].close()
  with connect(port) as flood, pytest.raises(OSError):
    for _ in range(1000):  # without an end of line: cut off, not collected
      flood.sendall(b"x" * 10_000)
  with pytest.raises((ValueError, EOFError)):  # of the same user, of another run
    link_to(port, key_of("another job"))
  got = ends([first, start(1, 2, name)])
  assert [code for code, _ in got] == [0, 0]
  for sock in strangers:
    sock.close()


def test_a_forked_worker_does_not_keep_a_dead_process_s_link_open(start):
  name = job("fork")
  child = start(1, 2, name, fork=True, stay=300)
  group = rendezvous(Launch("test", 0, 2, "127.0.0.1", 0, 1, name), timeout_s=200)
  try:
    link = group.links[1]
    link.send({})
    assert link.receive(200)["from"] == 1
    worker = json.loads(child.stdout.readline())["worker"]
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EOFError):
      link.receive(200)
    os.kill(worker, signal.SIGKILL)
  finally:
    group.links[1].close()
    group.value_links[1].close()
    group.reserved.close()


LIMITS = [  # processes, soft and hard limit of open files -> the soft one then
  (2, 1024, 1024, 1024),
  (2, 2048, 4096, 2048),
  (500, 256, 4096, 4024),  # 2 x (3 x 500 + 256) + 512
  (1000, 256, 4096, 4096),
  (1280, 4096, 4096, 4096),
  (1281, 256, 4096, None),
]


@pytest.mark.parametrize("count, soft, hard, wanted", LIMITS)
def test_process_0_raises_the_limit_of_open_files(count, soft, hard, wanted):
  code = (
    "import resource as r\n"
    "from jaxscale.cluster.rendezvous.server import _allow_files\n"
    f"r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard})); _allow_files({count})\n"
    "print(*r.getrlimit(r.RLIMIT_NOFILE))\n"
  )
  done = run_python("-c", code)
  if wanted is None:
    assert "ConfigError: ulimit -n: at most 4096 open files on" in done.stderr
    assert "process 0 needs 4099 for 1281 processes" in done.stderr
  else:
    assert done.stdout.split() == [str(wanted), str(hard)], done.stderr


def test_more_processes_connect_than_files_may_be_open_at_first(start):
  count, name = 120, job("files")
  alike = {"handshake.versions": {"jax": "1"}}
  first = start(0, count, name, files=[64, 4096], set=alike, digests={"config": "a"})
  guests = [greet(name, who(rank, count)) for rank in range(1, count)]
  for rank, link in enumerate(guests, 1):
    _, hosts, shares = link.receive(200)["go"]
    assert len(hosts) == len(shares) == count
    link.send({"from": rank, "job": name})
  ((code, reported),) = ends([first])
  assert code == 0 and len(reported["heard"]) == count - 1
  for link in guests:
    link.close()


def test_too_low_a_hard_limit_of_open_files_is_a_line_for_all(start):
  name = job("hard")
  line = the_line([start(0, 2, name, files=[64, 200]), start(1, 2, name)])
  assert line.startswith("ulimit -n: at most 200 open files on n1, but process 0 needs 262")
  assert "raise the hard limit there" in line


def test_a_thousand_processes_connect():
  """Their sockets, that is: one thread here plays all of them."""
  count, name = 1000, job("thousand")
  own = who(0, count)
  port, listeners = network.bind_port(ports_of(name), [], listen=True)
  guests = []

  def come():
    for rank in range(1, count):
      guests.append(greet(name, who(rank, count), port))

  thread = threading.Thread(target=come)
  thread.start()
  launch = Launch("test", 0, count, None, 0, 1, name)
  with Acceptor(listeners, key_of(name), count) as acceptor:
    served = server.serve(launch, own, acceptor, 300, lambda hellos: "4321")
  hosts, links, value_links, _, shares = served
  thread.join()
  assert hosts == [f"n{r + 1}" for r in range(count)] and len(links) == count - 1
  assert guests[-1].receive(200) == {"go": ["4321", hosts, shares]}
  assert value_links.keys() == links.keys() and not {*value_links.values()} & {*links.values()}
  for link in [*guests, *links.values(), *value_links.values()]:
    link.close()
