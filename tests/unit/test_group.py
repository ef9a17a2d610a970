"""Values that processes decide together: whole, of this run alone, and in order."""

import random
import socket
import threading

import jax
import numpy as np
import pytest

from jaxscale import cluster
from jaxscale.cluster import group as groups
from jaxscale.cluster import host_collectives
from jaxscale.cluster.group import Group, PeerError, barrier, broadcast, gather
from jaxscale.cluster.watch.watch import failure_of
from jaxscale.cluster.wire import Keys, Link, encode
from jaxscale.errors import EXIT_CRASH

HOSTS = "n1", "n2", "n3"


@pytest.fixture
def three():
  """Yield three processes of a run, connected by sealed links."""
  pairs = [tuple(map(Link, socket.socketpair())) for _ in HOSTS[1:]]
  for rank, (in_0, other) in enumerate(pairs, 1):
    in_0.seal(Keys(b"to%d" % rank, b"from%d" % rank))
    other.seal(Keys(b"from%d" % rank, b"to%d" % rank))
    in_0.max_bytes = other.max_bytes = groups.MAX_VALUE
  to_all = {rank: in_0 for rank, (in_0, _) in enumerate(pairs, 1)}
  yield [Group(0, HOSTS, to_all, 30.0)] + [
    Group(rank, HOSTS, {0: other}, 30.0) for rank, (_, other) in enumerate(pairs, 1)
  ]
  for pair in pairs:
    for link in pair:
      link.close()


def in_all(processes, function):
  """Return what a function returns, or raises, in the thread of each process."""
  results = [None] * len(processes)

  def run(group):
    try:
      results[group.rank] = function(group)
    except Exception as e:
      results[group.rank] = e

  threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in processes]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
  return results


def test_process_0_gets_all_values_and_the_others_its_own(three):
  assert in_all(three, lambda g: gather(g, "a", g.rank)) == [[0, 1, 2], [], []]
  assert in_all(three, lambda g: broadcast(g, "b", {"x": [1, None]})) == [{"x": [1, None]}] * 3
  assert in_all(three, lambda g: barrier(g, "c")) == [None] * 3
  big = "é\n" * 1_000_000  # more than a socket holds
  assert in_all(three, lambda g: gather(g, "d", big if g.rank else 0))[0] == [0, big, big]


def line(group, value):
  """Return the bytes by which a process sends a value, which are not sent."""
  return group.links[0]._seal(encode(["a", value]))


def forge(name, group):
  """Return the bytes of a message which process 1 has not sent in this place."""
  link, first = group.links[0], line(group, 1)
  link._sent += 1
  second = line(group, 2)
  return {
    "changed": first.replace(b"1]", b"7]"),
    "without a tag": encode(["a", 7]),
    "another tag": b"0" * 32 + first[32:],
    "repeated": first + first,
    "left out": second,
    "in another order": second + first,
    "without its head": first[5:],
    "cut": first[:-4] + b"\n",
    "not text": first[:32] + b"\xff\xfe\n",
    "not JSON": first[:32] + b"[\n",
  }[name]


FORGED = ["changed", "without a tag", "another tag", "repeated", "left out", "in another order"]
FORGED += ["without its head", "cut", "not text", "not JSON"]


@pytest.mark.parametrize("name", FORGED)
def test_a_message_that_process_1_has_not_sent_is_a_fault_with_its_name(three, name):
  leader, other, _ = three
  other.links[0].sock.sendall(forge(name, other))
  with pytest.raises(PeerError) as e:
    groups.receive(leader, 1, "a")
    groups.receive(leader, 1, "a")  # the first one may be its own
  assert str(e.value) == (
    "process 1 (n2) sent an invalid message at 'a' (the message is not from a process of this "
    "run); start the run again"
  )
  failure = failure_of(e.value)
  assert failure.code == EXIT_CRASH and failure.is_user_error  # one line, no traceback


def test_a_message_that_is_sent_back_or_to_a_third_process_is_a_fault(three):
  leader, other, third = three
  groups.send(other, 0, "a", encode(["a", 1]))
  sent = leader.links[1].sock.recv(1000)
  for sock, group in ((leader.links[1].sock, other), (leader.links[2].sock, third)):
    sock.sendall(sent)
    with pytest.raises(PeerError, match=r"process 0 \(n1\) sent an invalid message at 'a'"):
      groups.receive(group, 0, "a")
  third.links[0].sock.sendall(sent)
  with pytest.raises(PeerError, match=r"process 2 \(n3\) sent an invalid message at 'a'"):
    groups.receive(leader, 2, "a")


def test_no_mutated_message_is_believed(three):
  leader, other, _ = three
  rng, first = random.Random(7), line(other, [0.5, "text", {"deep": [None, True]}])
  for _ in range(2000):
    changed = bytearray(first)
    for _ in range(rng.choice((1, 1, 1, 2, 9))):
      place = rng.randrange(len(changed))
      kind = rng.randrange(4)
      if kind == 0:
        changed[place] ^= 1 << rng.randrange(8)
      elif kind == 1:
        changed[place:place] = rng.randbytes(rng.randrange(1, 5))
      elif kind == 2:
        del changed[place : place + rng.randrange(1, 5)]
      else:
        changed[place] = rng.randrange(256)
      changed = changed or bytearray(b"x")
    if changed == first:
      continue
    link, sender = map(Link, socket.socketpair())
    link.seal(leader.links[1].keys)
    sender.sock.sendall(bytes(changed))
    sender.close()
    with link.sock, pytest.raises(PeerError, match=r"process 1 \(n2\) (sent an invalid|was lost)"):
      groups.receive(leader._replace(links={1: link}), 1, "a")


def test_a_process_that_is_gone_is_named_and_is_the_consequence_of_a_fault(three):
  leader, other, third = three
  other.links[0].sock.sendall(line(other, 1)[:-1])
  other.links[0].close()
  with pytest.raises(PeerError) as e:
    groups.receive(leader, 1, "a")
  assert str(e.value) == (
    "process 1 (n2) was lost at 'a' (the other end closed the connection); see its output, or "
    "exclude its node"
  )
  assert failure_of(e.value)[:4] == (str(e.value), EXIT_CRASH, True, False)
  with pytest.raises(PeerError, match=r"process 1 \(n2\) was lost at 'b'"):
    for _ in range(2):
      groups.send(leader, 1, "b", encode(["b", 1]))
  leader.links[2].close()
  with pytest.raises(PeerError, match=r"process 0 \(n1\) exited at 'a'; see its output"):
    groups.receive(third, 0, "a")


def test_silence_and_an_endless_message_are_faults(three):
  leader, other, _ = three
  with pytest.raises(PeerError, match=r"process 1 \(n2\) was lost at 'a' \(no message arrived"):
    groups.receive(leader._replace(patience_s=0.01), 1, "a")
  leader.links[1].max_bytes = 1000
  other.links[0].sock.sendall(b"x" * 5000)
  with pytest.raises(PeerError, match=r"invalid message at 'a' \(the message is longer than 1000"):
    groups.receive(leader, 1, "a")


ODD = [None, 5, "a", [], ["a"], ["b", 1], ["a", 1, 2], [["a"], 1], {"a": 1, "b": 2}]


@pytest.mark.parametrize("message", ODD, ids=range(len(ODD)))
def test_a_process_at_another_step_is_named(three, message):
  three[1].links[0].send(message)
  with pytest.raises(PeerError, match=r"process 1 \(n2\) is at .*, but process 0 \(n1\) is"):
    groups.receive(three[0], 1, "a")


@pytest.fixture
def agreeing(three, monkeypatch):
  """Return a function that calls another one in all processes of a run, as threads."""
  own = threading.local()
  monkeypatch.setattr(groups, "connected", lambda: own.group)
  monkeypatch.setattr(jax, "process_count", lambda: 3)
  monkeypatch.setattr(jax, "process_index", lambda: own.group.rank)

  def no_collective(*args):
    raise AssertionError("a collective of JAX")

  monkeypatch.setattr(host_collectives, "gather_openly", no_collective)

  def call(function):
    def run(group):
      own.group = group
      return function(group.rank)

    return in_all(three, run)

  return call


def test_all_processes_get_the_same_values(agreeing, monkeypatch):
  values = [[1, (2.5, None)], {"x": "é\ud800"}, [1, [2.5, None]]]
  same = [[*values[0][:1], [2.5, None]], values[1], values[2]]
  assert agreeing(lambda rank: cluster.gather(values[rank])) == [same] * 3
  assert agreeing(lambda rank: cluster.from_leader((rank, "x"))) == [[0, "x"]] * 3
  nan = agreeing(lambda rank: cluster.from_leader([float("nan"), 1e-300, 0.1]))
  assert all(np.isnan(x) and rest == [1e-300, 0.1] for x, *rest in nan)
  assert agreeing(lambda rank: cluster.barrier("end")) == [None] * 3
  for flags in ([False] * 3, [False, False, True], [True, False, False]):
    assert agreeing(lambda rank, flags=flags: cluster.any_process(flags[rank])) == [any(flags)] * 3
  parts = np.random.default_rng(0).integers(0, 2**64, (3, 2, 5, 1), np.uint64)
  for total in agreeing(lambda rank: cluster.sum_over_processes(parts[rank])):
    assert total.dtype == np.uint64 and np.array_equal(total, parts.sum(axis=0, dtype=np.uint64))
  monkeypatch.setattr("socket.gethostname", lambda: "n1")
  monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3, 4, 5})
  share = host_collectives.share_of_cores.__wrapped__
  assert agreeing(lambda rank: share()) == [2] * 3


def test_equal_values_are_sent_once(agreeing):
  value = {"versions": ["x" * 1000] * 10}
  texts, numbers = host_collectives._distinct([value] * 4000 + [1])
  assert len(texts) == 2 and numbers == [0] * 4000 + [1]
  assert agreeing(lambda rank: cluster.gather(value)) == [[value] * 3] * 3


def test_an_error_of_process_0_s_files_is_raised_in_all(agreeing):
  def full():
    raise OSError(28, "No space left on device", "f")

  for error in agreeing(lambda rank: cluster.on_leader(full, "f")):
    assert isinstance(error, OSError) and error.errno == 28 and error.filename == "f"


def test_processes_that_are_at_different_steps_are_an_error(three):
  gather(three[1], "barrier x", None)
  with pytest.raises(PeerError) as e:
    gather(three[0], "gather", 1)
  assert str(e.value) == (
    "process 1 (n2) is at 'barrier x', but process 0 (n1) is at 'gather'; start the same "
    "command everywhere, and let all processes take the same branches"
  )


@pytest.mark.parametrize("rows", [b"\xff\xfe", b"[1,", b"[" * 200 + b"]" * 200, 1 << 30, -1])
def test_a_value_over_jax_s_connections_that_is_not_json_is_one_line(monkeypatch, rows):
  def process_allgather(own):
    if isinstance(rows, int):
      return np.array([own, rows if rows > 0 else own + rows])[rows < 0 :]
    return np.array([len(rows)]) if own.ndim == 0 else np.frombuffer(rows, np.uint8)[None]

  monkeypatch.setattr(host_collectives.multihost_utils, "process_allgather", process_allgather)
  with pytest.raises(PeerError, match="an invalid value arrived over JAX's open connections"):
    host_collectives.gather_openly(1)
