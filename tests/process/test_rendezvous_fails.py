"""Reasons that keep processes from connecting are one line in each, in seconds."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time

import pytest

from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous import network, server
from jaxscale.cluster.rendezvous.acceptor import Acceptor
from jaxscale.cluster.rendezvous.handshake import find_mismatches, versions
from jaxscale.errors import ConfigError
from support import rendezvous as starting
from support.fault_table import measured
from support.rendezvous import ends, greet, job, key_of, ports_of, the_line, who

start = pytest.fixture(starting.starter)


def test_who_never_comes_is_named_with_the_hosts_to_look_at(start):
  began = time.monotonic()
  name, nodes = job("missing"), ["n1", "n2", "n7", "n8", "n9"]
  first = start(0, 5, name, timeout=5, nodes=nodes)
  link = greet(name, who(1, 5, versions=versions(), digests={}))
  line = the_line([first])
  assert link.receive(200) == {"error": line}
  link.close()
  assert line.startswith("processes 2–4 (n7, n8, n9) of 5 have not connected within 5 s")
  seconds = time.monotonic() - began
  measured("tasks missing, faults.rendezvous_timeout_s=5", seconds, 2, line)
  nodes = ["n1.site", "n2.site", "n7.site"]  # two on each, or some other way
  here = [start(0, 5, job("nodes"), timeout=2, nodes=nodes)]
  line = the_line(here)
  assert line.startswith("processes 1–4 of 5 (none from n2.site, n7.site) have not")


def test_a_process_killed_while_it_waits_is_named(start):
  name = job("killed")
  patient = {"server.LINGER_S": 200}
  first, second = (start(r, 4, name, set=patient) for r in (0, 1))
  greet(name, who(2, 4, versions=versions(), digests={})).close()
  line = the_line([second])  # nothing starts while process 3 is missing
  greet(name, who(3, 4, versions=versions(), digests={})).close()
  assert the_line([first]) == line
  assert line.startswith("process 2 (n3, pid 7) connected and then disconnected")


def test_without_process_0_the_others_say_where_they_looked(start):
  name = job("nobody")
  got = ends([start(r, 3, name, timeout=1.5) for r in (1, 2)])
  for rank, (code, reported) in zip((1, 2), got, strict=True):
    assert code == 2
    line = reported["error"]
    assert re.match(
      rf"process {rank} \(n{rank + 1}\): found no process 0 on 127.0.0.1 \(127.0.0.1\) "
      r"within \d+ s, ports [\d, ]+ refused; ",
      line,
    )
    assert "it has not started, has failed" in line
    # Another program of this machine may use one of them.
    assert all(str(port) in line for port in ports_of(name))


def test_packets_that_are_dropped_look_like_a_firewall(start):
  with socket.socket() as full:  # Linux drops who calls a listener with a full queue
    full.bind(("", 0))
    full.listen(0)
    address = ("127.0.0.1", full.getsockname()[1])
    queue = [socket.socket() for _ in range(3)]
    for sock in queue:
      sock.setblocking(False)
      sock.connect_ex(address)
    (got,) = ends([start(1, 2, job("far"), f"127.0.0.1:{address[1]}", timeout=1)])
    for sock in queue:
      sock.close()
  assert f"ports {address[1]} no answer; check firewalls" in got[1]["error"]


def test_a_name_that_is_another_host_s_is_reported_by_process_0(start):
  # 203.0.113.0/24 is for documentation (RFC 5737): no address of this host.
  (got,) = ends([start(0, 2, job("else"), "203.0.113.9:23456", timeout=1)])
  assert got[1]["error"] == (
    "process 1 of 2 has not connected within 1 s; see their output, and start all with one "
    "srun or mpirun; if the hosts share no home directory, set the same JAXSCALE_SECRET for "
    "all; they look for process 0 on 203.0.113.9, but 203.0.113.9 is not an address of this host"
  )


@pytest.mark.parametrize("is_given", [False, True], ids=["derived", "given"])
def test_a_different_secret_is_one_line_that_names_the_variable(start, is_given):
  """Process 0 listens on a given port, but proves nothing to a process with a different secret."""
  name, host, expected = job("secret"), "127.0.0.1", "or has a different secret (JAXSCALE_SECRET, "
  if is_given:
    with socket.create_server(("", 0)) as free:
      host = f"127.0.0.1:{free.getsockname()[1]}"
    expected = "used by another program, or by a run with a different secret"
  options = dict(job=name, host=host, set={"client.TAKEN_S": 2})
  one, two = ({"JAXSCALE_SECRET": c * 40} for c in "ab")
  group = start(0, 2, env=one, timeout=8, **options), start(1, 2, env=two, timeout=4, **options)
  first, other = ends(group)
  assert first[0] == other[0] == 2
  assert "process 1 of 2 has not connected within 8 s" in first[1]["error"]
  assert "set the same JAXSCALE_SECRET for all" in first[1]["error"]
  assert expected in other[1]["error"]


def test_a_process_0_that_fails_is_not_waited_for(start):
  name = job("leader")
  others = [start(1, 3, name, timeout=200)]
  first = start(0, 3, name, set={"server.LOG_S": 0.1})
  while "waiting for process 2 of 3" not in first.stderr.readline():
    pass  # process 1 has not come yet
  os.kill(first.pid, signal.SIGKILL)
  (got,) = ends(others)
  assert (
    got[0] == 2 and "process 0 on 127.0.0.1 exited before all had connected" in (got[1]["error"])
  )


ODD = """[
  5, null, [], {}, "go", {"error": 5}, {"go": 5}, {"go": ["12345"]}, {"go": ["12345", ["n1"]]},
  {"go": ["xxxxxxxx", ["n1", "n2"], BOTH]}, {"go": ["99999999", ["n1", "n2"], BOTH]},
  {"go": ["12345", ["n1", 2], BOTH]}, {"go": ["/tmp", ["a", "b"], BOTH]},
  {"go": ["12345", ["n1", "n2"], [[0, 1]]]}, {"go": ["12345", ["n1", "n2"], [[0, 1], [2, 2]]]},
  {"go": ["12345", ["n1", "n2"], [[0, 1], [1]]]}
]""".replace("BOTH", "[[0, 1], [0, 1]]")


def test_a_process_0_that_is_not_understood_is_a_line(start):
  """A process of another version, or damaged, has the secret."""
  for answer in json.loads(ODD):
    name = job("odd")
    _, listeners = network.bind_port(ports_of(name), [], listen=True)
    other = start(1, 2, name, timeout=200)
    with Acceptor(listeners, key_of(name), 2) as acceptor:
      while not (came := acceptor.accept(1.0)):
        pass
      came[0][0].send(answer)
    ((code, reported),) = ends([other])
    came[0][0].close()
    assert code == 2, answer
    assert "process 0 on 127.0.0.1 exited before all had connected" in reported["error"]


def test_a_process_that_is_not_understood_is_a_line_for_all(start):
  name = job("strange")
  ranks = [start(0, 3, name), start(1, 3, name)]
  link = greet(name, [1, "x"])
  line = the_line(ranks)
  assert line.startswith("a process on 127.0.0.1 sent an invalid greeting")
  assert link.receive(200) == {"error": line}
  link.close()
  name = job("address")
  first = start(0, 2, name, set={"network.gloo_address": "10.0.0.1"}, on_cpu=True)
  link = greet(
    name, who(1, 2, gloo="garbage", network="elsewhere", versions=versions(), digests={})
  )
  assert "go" in link.receive(200)  # where gloo listens is not ours to know
  link.close()
  first.kill()


def test_one_rank_started_twice(start):
  name = job("twice")
  both = {"SLURMD_NODENAME": "n8"}
  ranks = [start(0, 3, name), start(1, 3, name), start(1, 3, name, env=both)]
  line = the_line(ranks)
  assert line.startswith("process 1 was started twice: on n")
  assert "n2 (pid " in line and "n8 (pid " in line and "rank, 0 … 2" in line


def test_other_config_on_one_rank(start):
  name = job("config")
  ranks = [start(r, 4, name, digests={"config": "ab12" if r == 3 else "cd34"}) for r in range(4)]
  assert the_line(ranks) == (
    "process 3 (n4): config differs from process 0 (n1), ab12 not cd34; start all "
    "with one command line and one config file"
  )


def test_other_versions_and_who_comes_late_hears_it_too(start):
  name = job("versions")
  other = {"python": "3.11.2", "jax": "0.9.0"}
  same = {"handshake.versions": {"python": "3.11.2", "jax": "0.10.2"}}
  first = start(0, 4, name, set=same | {"server.SETTLE_S": 5, "server.LINGER_S": 200})
  hellos = [who(r, 4, versions=other, digests={}) for r in (1, 2)]
  links = [greet(name, hello) for hello in hellos]
  (line,) = {link.receive(200)["error"] for link in links}
  assert line == (
    "processes 1–2 (n2, n3): jax 0.9.0, process 0 (n1) has 0.10.2; start all from the "
    "same environment"
  )
  assert the_line([first, start(3, 4, name, set=same)]) == line
  for link in links:
    link.close()


def test_other_numbers_of_processes(start):
  name = job("counts")
  line = the_line([start(0, 2, name), start(1, 3, name)])
  assert line.startswith("process 1 (n2): started as one of 3 processes, process 0 (n1)")


def test_a_host_whose_own_name_is_loopback_is_refused_where_gloo_is_used(start):
  name = job("gloo")
  own = [
    {"network.gloo_address": g, "network.namespace": p}
    for g, p in [("10.0.0.1", "a"), ("127.0.1.1", "b")]
  ]
  ranks = [start(r, 2, name, on_cpu=True, set=own[r]) for r in (0, 1)]
  line = the_line(ranks)
  assert line.startswith("process 1 (n2): its host's own name resolves to 127.0.1.1 there")
  assert "add '127.0.0.1 n2' to its /etc/hosts" in line  # the address that process 0 sees


def test_loopback_is_well_where_all_are_on_one_host_or_gloo_is_not_used():
  one = {r: who(r, 2, gloo="127.0.0.1") for r in (0, 1)}
  assert find_mismatches(one, {}) == []
  two = {r: who(r, 2, gloo="127.0.0.1", network=f"p{r}") for r in (0, 1)}
  assert len(find_mismatches(two, {})) == 2
  assert find_mismatches({r: w._replace(gloo="") for r, w in two.items()}, {}) == []
  assert "does not resolve there" in find_mismatches({0: one[0]._replace(gloo=None)}, {})[0]


def test_a_name_that_does_not_resolve(start):
  began = time.monotonic()
  ranks = [start(r, 2, job("name"), "no-such-host.invalid:2345", timeout=1) for r in (0, 1)]
  for rank, (code, reported) in enumerate(ends(ranks)):
    assert code == 2
    assert reported["error"].startswith(
      f"no-such-host.invalid: the name of process 0's host does not resolve on n{rank + 1} ("
    )
    assert "JAXSCALE_COORDINATOR=ADDRESS:PORT" in reported["error"]
  measured("a name that does not resolve", time.monotonic() - began, 2, reported["error"])


def test_a_given_port_that_stays_taken_is_reported_by_all(start):
  began = time.monotonic()
  with socket.create_server(("", 0)) as stranger:
    port = stranger.getsockname()[1]
    options = dict(timeout=60, set={"client.TAKEN_S": 2})
    got = ends([start(r, 2, "j", f"127.0.0.1:{port}", **options) for r in (0, 1)])
  assert [code for code, _ in got] == [2, 2]
  line = got[0][1]["error"]
  assert f"port {port} (uid {os.getuid()}): Address already in use" in line
  assert f"ports {port} used by another program" in got[1][1]["error"]
  assert all("free" in reported["error"] for _, reported in got)
  measured("a given port that is taken, for 2 s", time.monotonic() - began, 2, line)


def test_no_free_port_for_jax_is_reported_by_all(start):
  name = job("coordinator")
  taken: list[socket.socket] = []
  for port in network.ports_of(f"{key_of(name).hex()}/coordinator"):
    with contextlib.suppress(OSError):  # another test has it: it is not free either
      taken += network.bind_port([port], [], listen=False)[1]
  line = the_line([start(r, 2, name) for r in range(2)])
  assert line.startswith("process 0 (n1): no free port for JAX's coordinator among ")
  for sock in taken:
    sock.close()


def test_a_line_that_was_printed_stays_even_if_all_come_after_it():
  """Processes that heard it have gone, so the run must not begin without them."""
  name = job("told")
  port, listeners = network.bind_port(ports_of(name), [], listen=True)
  errors = []

  def lead():
    launch = Launch("test", 0, 3, None, 0, 1, name)
    acceptor = Acceptor(listeners, key_of(name), 3)
    with acceptor, pytest.raises(ConfigError) as e:
      server.serve(launch, who(0, 3), acceptor, 30, lambda hellos: "1")
    errors.append(str(e.value))

  thread = threading.Thread(target=lead)
  thread.start()
  for rank, config in ((1, "b"), (1, "a"), (2, "a")):
    link = greet(name, who(rank, 3, digests={"config": config}), port)
    assert "process 1 (n2): config differs" in link.receive(200)["error"]
    link.close()
  thread.join()
  assert len(errors) == 1
