"""Processes meet over TCP, and what keeps them from it is one line in each."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

from jaxscale.cluster import network, roll_call, wire
from jaxscale.cluster.detect import Launch
from jaxscale.cluster.introduction import Introduction, disagreements, versions
from jaxscale.cluster.rendezvous import meet

# One process of a run: it meets, says what it got, sends its rank over the links.
CHILD = """
import json, os, sys, time
from jaxscale.cluster import introduction, network, rendezvous, roll_call, wire
from jaxscale.cluster.detect import Launch
from jaxscale.cluster.rendezvous import meet
from jaxscale.settings import ConfigError
a = json.loads(sys.argv[1])
for name, value in a.get("set", {}).items():
  module, name = name.split(".")
  is_call = module in ("network", "introduction")
  setattr(globals()[module], name, (lambda value=value: value) if is_call else value)
time.sleep(a.get("late", 0))
launch = Launch("test", a["rank"], a["of"], a["host"], 0, 1, a["job"])
try:
  meeting = meet(launch, timeout_s=a.get("timeout", 20), digests=a.get("digests", {}),
                 nodes=a.get("nodes"), on_cpu=a.get("on_cpu", False))
except ConfigError as e:
  print(json.dumps({"error": str(e)}))
  sys.exit(2)
for sock in meeting.links.values():
  wire.send(sock, {"from": a["rank"], "job": a["job"]})
heard = {r: wire.Receiver(s).receive(10) for r, s in meeting.links.items()}
assert "jax" not in sys.modules
worker = os.fork() if a.get("fork") else None
if worker == 0:
  os.closerange(1, 3)  # who waits for our output waits for us only
  time.sleep(30)
  os._exit(0)
print(json.dumps({"hosts": meeting.hosts, "coordinator": meeting.coordinator,
                  "heard": heard, "worker": worker}), flush=True)
time.sleep(a.get("stay", 0))
"""


@pytest.fixture
def start():
  """Starts processes, and ends those that are left."""
  running = []

  def start_one(rank, of, job, host="127.0.0.1", env=None, **options):
    options |= {"rank": rank, "of": of, "job": job, "host": host}
    node = {"SLURMD_NODENAME": f"n{rank + 1}"} | (env or {})
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    process = subprocess.Popen(
      [sys.executable, "-W", "error", "-c", CHILD, json.dumps(options)],
      cwd=ROOT, env=kept | {"PYTHONPATH": str(ROOT)} | node, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    running.append(process)
    return process

  yield start_one
  for process in running:
    if process.poll() is None:
      os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def ends(processes, within):
  """Exit codes and what was said; nothing else on stderr, all in time."""
  deadline = time.monotonic() + within
  results = []
  for process in processes:
    out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    assert not err or err.startswith("waiting for"), err
    results.append((process.returncode, json.loads(out)))
  return results


def the_line(processes, within=15):
  """The one line that all of them ended with, with code 2."""
  results = ends(processes, within)
  assert [code for code, _ in results] == [2] * len(results), results
  lines = {said["error"] for _, said in results}
  assert len(lines) == 1, lines
  assert "\n" not in min(lines)
  return lines.pop()


def job(name):
  """A job's name that no other test, and no other run of the tests, has."""
  return f"{name}-{os.getpid()}-{time.monotonic_ns()}"


def test_four_processes_meet_in_any_order_and_can_talk(start):
  name = job("four")
  late = [0.3, 0, 0.6, 0]
  got = ends([start(r, 4, name, late=late[r]) for r in range(4)], 15)
  assert [code for code, _ in got] == [0] * 4
  assert all(said["hosts"] == ["n1", "n2", "n3", "n4"] for _, said in got)
  ports = {said["coordinator"].split(":")[1] for _, said in got}
  assert len(ports) == 1 and int(ports.pop()) in network.PORTS
  assert {int(r): m["from"] for r, m in got[0][1]["heard"].items()} == {
    1: 1,
    2: 2,
    3: 3,
  }
  assert all(said["heard"]["0"]["from"] == 0 for _, said in got[1:])


def test_one_process_needs_nobody():
  meeting = meet(Launch("single", 0, 1, None, 0, 1, "alone"))
  assert meeting.links == {} and meeting.num_processes == len(meeting.hosts) == 1


def same_port_first(name, other):
  """The first name like `other` whose first port is that of `name`'s."""
  wanted = network.ports_of(name)[0]
  return next(
    f"{other}-{i}" for i in range(10**6)
    if network.ports_of(f"{other}-{i}", 1) == [wanted]
  )  # fmt: skip


def test_two_steps_of_a_job_on_one_port_never_cross_connect(start):
  one = job("slurm-123.0")
  two = same_port_first(one, "slurm-123.1")
  both = [start(r, 3, name) for r in range(3) for name in (one, two)]
  got = ends(both, 20)
  assert [code for code, _ in got] == [0] * 6
  for i, (_, said) in enumerate(got):
    wanted = (one, two)[i % 2]
    assert {m["job"] for m in said["heard"].values()} == {wanted}
  assert len({said["coordinator"] for _, said in got}) == 2


@pytest.mark.parametrize("listens", [False, True], ids=["bound", "silent"])
def test_a_taken_port_is_passed_over(start, listens):
  name = job("taken")
  with socket.socket() as stranger:
    stranger.bind(("", network.ports_of(name)[0]))
    if listens:
      stranger.listen()
    got = ends([start(r, 2, name) for r in range(2)], 15)
  assert [code for code, _ in got] == [0, 0]


def test_the_given_port_is_the_meeting_s_and_jax_gets_another(start):
  port, kept = network.free_port(network.ports_of(job("given")))
  kept.close()
  host = f"127.0.0.1:{port}"
  got = ends([start(r, 2, "j", host) for r in range(2)], 15)
  assert [code for code, _ in got] == [0, 0]
  assert not any(said["coordinator"].endswith(f":{port}") for _, said in got)


def test_strangers_do_not_disturb(start):
  name = job("strangers")
  port = network.ports_of(name)[0]
  first = start(0, 2, name)
  bad = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" * 99, b"[" * 50_000,
         b"{}\n", b"5\n", b'{"meeting": 1, "who": {"rank": []}}\n', b"",
         json.dumps({"meeting": name, "who": [1] * 9}).encode() + b"\n"]  # fmt: skip
  strangers = [connect(port) for _ in bad]
  for sock, words in zip(strangers, bad, strict=True):
    sock.sendall(words)
  strangers[0].close()
  with connect(port) as flood, pytest.raises(OSError):
    for _ in range(1000):  # without an end of line: cut off, not collected
      flood.sendall(b"x" * 10_000)
  other = connect(port)
  wire.send(other, {"meeting": "another job", "who": [1]})
  assert wire.Receiver(other).receive(5) == {"other": name}
  got = ends([first, start(1, 2, name)], 15)
  assert [code for code, _ in got] == [0, 0]
  for sock in [*strangers, other]:
    sock.close()


def connect(port, within=10):
  deadline = time.monotonic() + within
  while True:
    try:
      return socket.create_connection(("127.0.0.1", port), timeout=5)
    except ConnectionRefusedError:
      assert time.monotonic() < deadline
      time.sleep(0.02)


def test_who_never_comes_is_named_with_the_hosts_to_look_at(start):
  name, nodes = job("missing"), ["n1", "n2", "n7", "n7", "n9"]
  here = [start(r, 5, name, timeout=2, nodes=nodes) for r in (0, 1)]
  line = the_line(here, 10)
  assert line.startswith("processes 2–4 (n7, n9) of 5 have not come within 2 s")


def test_a_process_killed_while_it_waits_is_named(start):
  name = job("killed")
  quick = {"roll_call.BACK_S": 1, "roll_call.LINGER_S": 1}
  here = [start(r, 4, name, timeout=60, set=quick) for r in (0, 1)]
  sock = connect(network.ports_of(name)[0])
  killed = who(2, 4, versions=versions(), digests={})
  wire.send(sock, {"meeting": name, "who": killed})
  assert wire.Receiver(sock).receive(5) == {"welcome": name}
  sock.close()
  line = the_line(here, 20)
  assert line.startswith("process 2 (n3, pid 7) came and has gone")


def who(rank, of=4, **other):
  known = {
    "node": f"n{rank + 1}", "pid": 7, "me": f"me{rank}", "place": "here",
    "gloo": "", "versions": {"jax": "1"}, "digests": {"config": "a"},
  }  # fmt: skip
  return Introduction(rank, of, **(known | other))


def test_without_process_0_the_others_say_where_they_looked(start):
  name = job("nobody")
  got = ends([start(r, 3, name, timeout=1.5) for r in (1, 2)], 10)
  for rank, (code, said) in zip((1, 2), got, strict=True):
    ports = ", ".join(map(str, network.ports_of(name)))
    assert code == 2
    assert said["error"].startswith(
      f"process {rank} (n{rank + 1}): no process 0 on 127.0.0.1 (127.0.0.1) for 2 s, "
      f"ports {ports} refused; it has not come, has failed"
    )


def test_packets_that_are_dropped_look_like_a_firewall(start):
  with socket.socket() as full:  # Linux drops who calls a listener with a full queue
    full.bind(("", 0))
    full.listen(0)
    address = ("127.0.0.1", full.getsockname()[1])
    queue = [socket.socket() for _ in range(3)]
    for sock in queue:
      sock.setblocking(False)
      sock.connect_ex(address)
    (got,) = ends([start(1, 2, job("far"), f"127.0.0.1:{address[1]}", timeout=1)], 15)
    for sock in queue:
      sock.close()
  assert f"ports {address[1]} no answer; is there a firewall" in got[1]["error"]


def test_a_process_0_that_fails_is_not_waited_for(start):
  name = job("leader")
  others = [start(1, 3, name, timeout=60)]
  first = start(0, 3, name, timeout=60)
  connect(network.ports_of(name)[0]).close()
  time.sleep(1)
  os.kill(first.pid, signal.SIGKILL)
  (got,) = ends(others, 10)
  assert (
    got[0] == 2
    and "process 0 on 127.0.0.1 left before all had met" in (got[1]["error"])
  )


def test_one_rank_started_twice(start):
  name = job("twice")
  both = {"SLURMD_NODENAME": "n8"}
  ranks = [start(0, 3, name), start(1, 3, name), start(1, 3, name, env=both)]
  line = the_line(ranks)
  assert line.startswith("process 1 was started twice: on n")
  assert "n2 (pid " in line and "n8 (pid " in line and "rank, 0 … 2" in line


def test_other_config_on_one_rank(start):
  name = job("config")
  ranks = [start(r, 4, name, digests={"config": "ab12" if r == 3 else "cd34"})
           for r in range(4)]  # fmt: skip
  assert the_line(ranks) == (
    "process 3 (n4): another config than process 0 (n1), ab12 not cd34; start all "
    "with one command line and one config file"
  )


def test_other_versions_and_who_comes_late_hears_it_too(start):
  name = job("versions")
  other = {"introduction.versions": {"python": "3.11.2", "jax": "0.9.0"}}
  same = {"introduction.versions": {"python": "3.11.2", "jax": "0.10.2"}}
  ranks = [start(r, 4, name, set=same if r in (0, 3) else other,
                 late=3 if r == 3 else 0) for r in range(4)]  # fmt: skip
  assert the_line(ranks) == (
    "processes 1–2 (n2, n3): jax 0.9.0, process 0 (n1) has 0.10.2; start all from one "
    "environment"
  )


def test_other_numbers_of_processes(start):
  name = job("counts")
  line = the_line([start(0, 2, name), start(1, 3, name)])
  assert line.startswith(
    "process 1 (n2): started as one of 3 processes, process 0 (n1)"
  )


def test_a_host_whose_own_name_is_loopback_is_refused_where_gloo_is_used(start):
  name = job("gloo")
  own = [{"network.gloo_address": g, "network.place": p} for g, p in
         [("10.0.0.1", "a"), ("127.0.1.1", "b")]]  # fmt: skip
  ranks = [start(r, 2, name, on_cpu=True, set=own[r]) for r in (0, 1)]
  line = the_line(ranks)
  assert line.startswith("process 1 (n2): its host's own name is 127.0.1.1 there")
  assert "/etc/hosts, '127.0.0.1 n2'" in line  # the address that process 0 sees


def test_loopback_is_well_where_all_are_on_one_host_or_gloo_is_not_used():
  one = {r: who(r, 2, gloo="127.0.0.1") for r in (0, 1)}
  assert disagreements(one, {}) == []
  two = {r: who(r, 2, gloo="127.0.0.1", place=f"p{r}") for r in (0, 1)}
  assert len(disagreements(two, {})) == 2
  assert disagreements({r: w._replace(gloo="") for r, w in two.items()}, {}) == []
  assert (
    "does not resolve there" in disagreements({0: one[0]._replace(gloo=None)}, {})[0]
  )


def test_a_name_that_does_not_resolve(start):
  ranks = [start(r, 2, job("name"), "no-such-host.invalid:2345", timeout=1)
           for r in (0, 1)]  # fmt: skip
  for rank, (code, said) in enumerate(ends(ranks, 20)):
    assert code == 2
    assert said["error"].startswith(
      "no-such-host.invalid: the name of process 0's host does not resolve on "
      f"n{rank + 1} ("
    )
    assert "JAXSCALE_COORDINATOR=ADDRESS:PORT" in said["error"]


def test_a_given_port_that_stays_taken_is_said_by_all(start):
  with socket.socket() as stranger:
    stranger.bind(("", 0))
    stranger.listen()
    port = stranger.getsockname()[1]
    ranks = [start(r, 2, "j", f"127.0.0.1:{port}", timeout=60,
                   set={"rendezvous.TAKEN_S": 2}) for r in (0, 1)]  # fmt: skip
    got = ends(ranks, 25)
  assert [code for code, _ in got] == [2, 2]
  assert f"port {port}: Address already in use" in got[0][1]["error"]
  assert f"ports {port} somebody else's" in got[1][1]["error"]
  assert all("free" in said["error"] for _, said in got)


def test_no_free_port_for_jax_is_said_by_all(start):
  name = job("coordinator")
  taken = [network.free_port([p])[1] for p in network.ports_of(f"{name}/coordinator")]
  line = the_line([start(r, 2, name) for r in range(2)])
  assert line.startswith("process 0 (n1): no free port for JAX's coordinator among ")
  for sock in taken:
    sock.close()


def test_a_forked_worker_does_not_keep_a_dead_process_s_link_open(start):
  name = job("fork")
  child = start(1, 2, name, fork=True, stay=30)
  meeting = meet(Launch("test", 0, 2, "127.0.0.1", 0, 1, name), timeout_s=15)
  try:
    sock = meeting.links[1]
    wire.send(sock, {})
    receiver = wire.Receiver(sock)
    assert receiver.receive(10)["from"] == 1
    worker = json.loads(child.stdout.readline())["worker"]
    os.kill(child.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EOFError):
      receiver.receive(10)
    assert time.monotonic() - began < 1
    for option in (socket.TCP_NODELAY, socket.TCP_KEEPIDLE):
      assert sock.getsockopt(socket.IPPROTO_TCP, option)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    os.kill(worker, signal.SIGKILL)
  finally:
    meeting.links[1].close()
    meeting.reserved.close()


def test_process_0_raises_the_limit_of_open_files():
  code = (
    "import resource as r; from jaxscale.cluster.roll_call import _allow_files\n"
    "r.setrlimit(r.RLIMIT_NOFILE, (256, 4096)); _allow_files(2000)\n"
    "assert r.getrlimit(r.RLIMIT_NOFILE) == (3024, 4096)\n"
    "_allow_files(4096)\n"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                        env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
  assert "ConfigError: ulimit -n: 4096 files at most on" in done.stderr


def test_a_thousand_processes_meet_in_seconds():
  """Their sockets, that is: one thread here plays all of them."""
  count, name = 1000, "thousand"
  own = who(0, count)
  port, listener = network.listen(network.ports_of(job(name)))
  began, guests = time.monotonic(), []

  def come():
    for rank in range(1, count):
      sock = socket.create_connection(("127.0.0.1", port))
      wire.send(sock, {"meeting": name, "who": who(rank, count)})
      guests.append(sock)

  thread = threading.Thread(target=come)
  thread.start()
  launch = Launch("test", 0, count, None, 0, 1, name)
  hosts, links = roll_call.call(launch, own, listener, 60, ready=lambda: 4321)
  thread.join()
  assert hosts == [f"n{r + 1}" for r in range(count)] and len(links) == count - 1
  receiver = wire.Receiver(guests[-1])
  assert receiver.receive(5) == {"welcome": name}
  assert receiver.receive(5) == {"go": 4321, "hosts": hosts}
  assert time.monotonic() - began < 10
  for sock in [*guests, *links.values()]:
    sock.close()
