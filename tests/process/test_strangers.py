"""Another user's programs neither stop a start, nor delay it, nor learn of it."""

import json
import os
import signal
import socket
import time

import pytest

from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous.handshake import make_hello
from jaxscale.cluster.wire import Link
from support import rendezvous as starting
from support import strangers
from support.cases import all_slow_except
from support.commands import run_python
from support.rendezvous import connect, greet, job, ports_of
from support.two_users import needs_root

start = pytest.fixture(starting.starter)
NAMES = [f.__name__ for f in strangers.CONNECTING]
attack = pytest.fixture(strangers.starter)


def finish(processes):
  """Wait until all end well; return what each printed, and the log of process 0."""
  ended = [process.communicate(timeout=200) for process in processes]
  assert [p.returncode for p in processes] == [0] * len(processes), ended
  results = [json.loads(out) for out, _ in ended]
  assert all(r["hosts"] == ["n1", "n2", "n3"] for r in results)
  assert {int(r): m["from"] for r, m in results[0]["heard"].items()} == {1: 1, 2: 2}
  return results, ended[0][1]


@pytest.mark.parametrize("name", all_slow_except(NAMES, "idle", "forge"))
def test_who_connects_without_the_secret_is_refused_and_named(start, attack, name):
  run = job(name)
  ports = ports_of(run)
  first = start(0, 3, run, set={"acceptor.PROOF_S": 1})
  connect(ports[0]).close()  # it listens
  stranger = attack(name, ports)
  time.sleep(1.5)  # of the attack, before the others come
  _, log = finish([first, *(start(r, 3, run) for r in (1, 2))])
  assert "refused connections without this run's secret: " in log
  assert log.rstrip().endswith("from 127.0.0.1")
  heard = json.loads(stranger.communicate(timeout=200)[0])
  # A random number, in answer to one, and a proof that is worth nothing elsewhere.
  if name == "forge":
    assert all(len(text) <= 35 + 32 + len('"welcome"\n') for text in heard)
    assert all(n not in text for text in heard for n in (run, "n1", "jax", "error"))
  else:
    assert not any(heard.values() if isinstance(heard, dict) else heard)


@pytest.mark.parametrize(
  "name", all_slow_except([f.__name__ for f in strangers.LISTENING], "relay")
)
def test_who_listens_in_place_of_process_0_is_passed_over(start, attack, name):
  run = job(name)
  ports, user = ports_of(run), os.geteuid() or strangers.NOBODY
  stranger = attack(name, ports, seconds=300)
  connect(ports[0]).close()
  results, log = finish([start(r, 3, run) for r in range(3)])
  assert log.startswith(f"skipped ports that other programs use: {ports[0]} (uid {user})")
  assert len({r["coordinator"] for r in results}) == 1
  stranger.send_signal(signal.SIGUSR1)
  heard = json.loads(stranger.communicate(timeout=200)[0])
  # Nothing but random numbers: no name, no rank, no version.
  assert all(len(text) <= 35 for text in heard), heard


def test_what_was_sent_at_an_earlier_start_is_refused(start, attack, monkeypatch):
  run, recorded, seal = job("again"), [], Link._seal

  def record(link, message):
    recorded.append(seal(link, message))
    return recorded[-1]

  before = [start(r, 3, run) for r in (0, 2)]
  with monkeypatch.context() as patched:
    patched.setattr(Link, "_seal", record)
    launch = Launch("test", 1, 3, "127.0.0.1", 0, 1, run)
    link = greet(run, make_hello(launch, {}, False)._replace(node="n2"))
    assert "go" in link.receive(200)
    link.send({"from": 1})
    finish(before)
    link.close()
  assert len(recorded) == 5  # on each of two links a number and who it is, and that
  first = start(0, 3, run, set={"acceptor.PROOF_S": 1})
  connect(ports_of(run)[0]).close()
  stranger = attack("replay", ports_of(run), seconds=2, recorded=b"".join(recorded))
  time.sleep(0.5)
  _, log = finish([first, *(start(r, 3, run) for r in (1, 2))])
  assert "refused connections without this run's secret: " in log
  heard = json.loads(stranger.communicate(timeout=200)[0])
  assert heard and all("error" not in text and "go" not in text for text in heard)


@pytest.mark.slow
def test_all_at_once_for_a_minute_of_starts(start, attack):
  """Ten runs one after the other, each attacked in every way from its first moment."""
  for _ in range(10):
    run = job("siege")
    ports = ports_of(run)
    strangers = [attack("squat", ports), attack("silent", ports[2:])]
    first = start(0, 3, run, set={"acceptor.PROOF_S": 1})
    connect(ports[1]).close()
    strangers += [attack(name, ports[1:]) for name in NAMES]
    finish([first, *(start(r, 3, run) for r in (1, 2))])
    for stranger in strangers:
      stranger.terminate()


def test_jax_s_coordinator_is_closed_to_other_users_of_the_host(start):
  needs_root()
  run = job("unix")
  both = [start(r, 2, run, stay=200) for r in (0, 1)]
  path = json.loads(both[0].stdout.readline())["coordinator"].removeprefix("unix:")
  code = (
    "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
    "try: s.connect(sys.argv[1])\nexcept PermissionError: print('closed')"
  )
  with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(path)  # as JAX does later
    done = run_python("-c", code, path)
  assert done.stdout == "closed\n", done.stderr
