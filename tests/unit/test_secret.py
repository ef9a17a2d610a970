"""The secret of a run is one user's, and nothing less than it opens a link."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest

from jaxscale.cluster import secret
from jaxscale.cluster.rendezvous import acceptor as accepting
from jaxscale.cluster.rendezvous.acceptor import Acceptor
from jaxscale.cluster.wire import MAX_BYTES
from jaxscale.errors import ConfigError
from support.errors import config_error
from support.rendezvous import link_to
from support.two_users import needs_root

KEY = secret.run_key(b"s" * 32, "job")


@pytest.fixture
def home(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  return tmp_path


def test_the_variable_counts_and_is_long():
  assert repr([KEY]) == "[<key>]" and f"{KEY!r}" == str(KEY) == "<key>"  # in no log
  one, two = ({"JAXSCALE_SECRET": c * 32} for c in "ab")
  assert secret.find_secret(one) == secret.find_secret(one) != secret.find_secret(two)
  with pytest.raises(ConfigError, match="JAXSCALE_SECRET: shorter than 32"):
    secret.find_secret({"JAXSCALE_SECRET": "short"})


def test_a_file_of_the_home_directory_is_made_once_and_is_private(home):
  first = secret.find_secret({})
  assert secret.find_secret({}) == first and len(first) == 32
  path = home / ".jaxscale" / "secret"
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
  assert [p.name for p in path.parent.iterdir()] == ["secret"]


def test_processes_that_start_together_make_one(home):
  code = "from jaxscale.cluster.secret import find_secret as f; print(f({}).hex())"
  command = [sys.executable, "-c", code]
  some = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
  assert len({p.communicate(timeout=300)[0] for p in some}) == 1
  assert all(p.returncode == 0 for p in some)


def another_s(path):
  needs_root()
  os.chown(path, 65534, 65534)


def a_link(path):
  path.rename(path.with_name("else"))
  path.symlink_to("else")


def a_pipe(path):
  path.unlink()
  os.mkfifo(path, 0o600)


def a_file(path):
  path.unlink()
  path.parent.rmdir()
  path.parent.write_text("")


DAMAGE = {
  "readable": lambda path: path.chmod(0o640),
  "another's": another_s,
  "a link": a_link,
  "a pipe": a_pipe,
  "cut": lambda path: path.write_text("abc"),
  "a file": a_file,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_is_not_this_user_s_alone_is_a_line(home, damage):
  secret.find_secret({})
  damage(home / ".jaxscale" / "secret")
  with config_error(str(home / ".jaxscale" / "secret")) as e:
    secret.find_secret({})
  assert "remove it" in str(e.value) or "set JAXSCALE_SECRET" in str(e.value)


@pytest.fixture
def listening():
  """Yield an acceptor that runs in a thread, with its address and its connections."""
  listener = socket.create_server(("127.0.0.1", 0), backlog=2000)
  place, came, ended = listener.getsockname(), [], threading.Event()

  def run():
    with acceptor:
      while not ended.is_set():
        came.extend(acceptor.accept(0.05))

  acceptor = Acceptor([listener], KEY, 4)
  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  yield place, came, acceptor
  ended.set()
  thread.join(300)
  assert not thread.is_alive()
  for link, _ in came:
    link.close()


def connect(place):
  return socket.create_connection(place, timeout=200)


def until(condition, seconds=200):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_ours_that_leaves_again_is_no_stranger(listening):
  """One of ours tries all addresses, and keeps the first that answers."""
  place, came, acceptor = listening
  link_to(place[1], KEY).close()
  link = link_to(place[1], KEY)
  link.send("x")
  until(lambda: came)
  assert not acceptor.refused
  link.close()


def test_who_has_the_key_comes_in(listening):
  place, came, _ = listening
  link = link_to(place[1], KEY)
  link.send({"rank": 1})
  until(lambda: came)
  ((mine, first),) = came
  assert first == {"rank": 1}
  assert link.max_bytes == mine.max_bytes == MAX_BYTES
  line = mine._seal("x" * 100_000)  # comes in pieces, as a line of hosts does
  for part in (line[:50_000], line[50_000:]):
    mine.sock.sendall(part)
    time.sleep(0.05)
  assert link.receive(200) == "x" * 100_000
  link.close()


def test_a_client_believes_nobody_without_the_key(listening):
  for key in (secret.run_key(b"t" * 32, "job"), secret.run_key(b"s" * 32, "another job")):
    with pytest.raises(ValueError):
      link_to(listening[0][1], key)


NUMBER = json.dumps("0" * 32).encode() + b"\n"
NOISE = [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b'"x"\n', b"[" * 60 + b"\n", b"x" * 10_000]
NOISE += [json.dumps([0] * 9).encode() + b"\n", NUMBER + b"{}\n", NUMBER + b"x" * 100_000]


def test_strangers_are_counted_and_keep_nobody_out(listening, monkeypatch):
  place, came, acceptor = listening
  monkeypatch.setattr(accepting, "PROOF_S", 1.0)
  strangers = []
  for noise in NOISE:
    strangers.append(connect(place))
    strangers[-1].sendall(noise)
  link = link_to(place[1], KEY)
  link.send("friend")
  until(lambda: [first for _, first in came] == ["friend"])
  until(lambda: acceptor.refused == {"127.0.0.1": len(NOISE)})
  reported = "refused connections without this run's secret: "
  assert acceptor.describe_refused() == f"{reported}{len(NOISE)} from 127.0.0.1"
  for sock in [*strangers, link]:
    sock.close()
