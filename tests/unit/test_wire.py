"""Messages on a link: whole, bounded, typed, and of nobody but the other end."""

import socket
import threading
import time
from typing import Literal, NamedTuple

import pytest

from jaxscale.cluster.wire import MAX_BYTES, Keys, Link, encode, parse, typed


@pytest.fixture
def pair():
  here, there = map(Link, socket.socketpair())
  yield here, there
  here.close(), there.close()


def sealed(*links, keys=(b"k", b"l")):
  """Return the links, sealed with the keys of both ends of a connection."""
  for link, (own, other) in zip(links, (keys, keys[::-1]), strict=False):
    link.seal(Keys(own, other))
  return links


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_is_sent_comes_in_order(pair, is_sealed):
  here, there = sealed(*pair) if is_sealed else pair
  sent = [{"a": [1, 2.5, None, "é\n"]}, ["beat", 17], 0, "x" * 100_000]
  thread = threading.Thread(target=lambda: [here.send(m, 5) for m in sent])
  thread.start()
  assert [there.receive(5) for _ in sent] == sent
  thread.join()
  there.send({"back": 1}, timeout=0)
  assert here.drain() == [{"back": 1}]


def test_a_line_in_pieces_is_one_message(pair):
  here, there = pair
  for piece in (b'{"a"', b": ", b"1}"):
    here.sock.sendall(piece)
    assert there.drain() == [] and there.next() is None
  here.sock.sendall(b"\n[2]\n[3")
  assert there.drain() == [{"a": 1}, [2]]
  here.sock.sendall(b"]\n")
  assert there.receive(1) == [3]


def test_nothing_is_read_that_follows_the_message(pair):
  """A wait for the socket to be ready then misses nothing."""
  here, there = pair
  here.sock.sendall(b"1\n2\n3\nrest")
  assert there.receive(1) == 1 and there.next() == 2
  assert there.drain() == [3]
  assert there.sock.recv(10) == b"rest"


def test_silence_is_a_timeout_and_an_end_is_an_end(pair):
  here, there = pair
  began = time.monotonic()
  with pytest.raises(TimeoutError):
    there.receive(0.2)
  assert time.monotonic() - began >= 0.2
  here.sock.sendall(b"1\n2")
  here.close()
  assert there.receive(1) == 1
  with pytest.raises(EOFError):  # half a message is none
    there.receive(1)


NOISE = [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[" * 9_000 + b"\n", b"x" * 9_999]
NOISE += [b"9" * 5_000 + b"\n"]


@pytest.mark.parametrize("noise", NOISE)
def test_what_is_no_message_is_refused(pair, noise):
  here, there = pair
  here.sock.sendall(noise)
  there.max_bytes = 8_000
  with pytest.raises(ValueError):
    for _ in range(3):
      there.drain()


def test_an_empty_line_is_no_message_but_shows_that_somebody_lives(pair):
  here, there = sealed(*pair)
  heard = there.heard
  here.send(1)
  here.sock.sendall(b"\n\n")
  here.send(2)
  here.sock.sendall(b"\n")
  assert there.receive(1) == 1 and there.drain() == [2] and there.drain() == []
  assert there.heard > heard
  with pytest.raises(ValueError):  # of a stranger, who has proved nothing yet
    stranger, link = map(Link, socket.socketpair())
    stranger.sock.sendall(b"\n")
    link.drain()
  stranger.close(), link.close()


def test_a_line_without_end_is_refused(pair):
  here, there = pair
  with pytest.raises(ValueError, match="is longer than"):
    for _ in range(2 * MAX_BYTES // 4096):
      here.sock.send(b"x" * 4096)
      there.drain()


def test_who_takes_nothing_holds_nobody_up_for_ever(pair):
  here, _ = pair
  with pytest.raises(TimeoutError):
    here.send("x" * 10_000_000, timeout=0.3)
  pair[1].close()
  with pytest.raises(OSError):
    here.send(1, timeout=0.3)


def test_one_message_that_is_left_out_leaves_the_next_one_whole(pair):
  """A monitor waits for nobody: what is not taken at once is not sent."""
  here, there = sealed(*pair)
  here.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
  sent = 0
  with pytest.raises(TimeoutError):
    while True:
      here.send("x" * 100, timeout=0)
      sent += 1
  got = [there.receive(1) for _ in range(sent)]
  assert got == ["x" * 100] * sent
  here.send("after", timeout=0)
  assert there.receive(1) == "after"


def lines_of(*messages):
  """Return the lines that carry these messages from one sealed end to the other."""
  here, there = sealed(*map(Link, socket.socketpair()))
  for message in messages:
    here.send(message)
  data = there.sock.recv(1 << 16)
  here.close(), there.close()
  return data.splitlines(keepends=True)


ONE, TWO = lines_of({"stop": 1}, {"stop": 2})
FORGED = {
  "without a tag": encode({"stop": 1}),
  "another message": ONE[:32] + encode({"stop": 3}),
  "repeated": ONE + ONE,
  "left out": TWO,
  "in another order": TWO + ONE,
  "cut": ONE[:20] + b"\n",
  "another tag": b"0" * 32 + ONE[32:],
  "one bit": bytes([ONE[0] ^ 1]) + ONE[1:],
}


@pytest.mark.parametrize("name", FORGED)
def test_what_the_other_end_has_not_sent_is_refused(pair, name):
  _, there = sealed(*pair)
  pair[0].sock.sendall(FORGED[name])
  with pytest.raises(ValueError, match="not from a process of this run"):
    there.receive(1)
    there.receive(1)


def test_one_direction_s_messages_are_no_good_in_the_other(pair):
  here, there = sealed(*pair)
  here.send("mine")
  there.sock.sendall(there.sock.recv(100))
  with pytest.raises(ValueError):
    here.receive(1)


class Kinds(NamedTuple):
  """Every type that a message of ours has."""

  number: int
  seconds: float
  text: str
  flag: bool
  maybe: str | None
  names: list[str]
  versions: dict[str, str]
  kind: Literal["a", "b"]


RIGHT = [1, 2.5, "x", True, None, ["n1"], {"jax": "1"}, "a"]


def test_messages_are_typed():
  assert parse(Kinds, RIGHT) == Kinds(*RIGHT)
  assert parse(Kinds, [1, 2, *RIGHT[2:]]).seconds == 2.0


OF_PLACES = {
  0: (1.0, True, "1", 1 << 60, None),
  1: (float("nan"), float("inf"), 10**400, "2"),
  2: (3, None),
  3: (1,),
  4: (1,),
  5: ("n1", [1]),
  6: ([], {"jax": 1}, {str(i): "" for i in range(65)}),
  7: ("c", []),
}
WRONG = [(place, value) for place, values in OF_PLACES.items() for value in values]


OTHERS = [[*RIGHT[:place], value, *RIGHT[place + 1 :]] for place, value in WRONG]
OTHERS += [5, None, {}, "", [], RIGHT[:-1], [*RIGHT, 1]]


@pytest.mark.parametrize("values", OTHERS, ids=range(len(OTHERS)))
def test_other_types_and_numbers_of_values_are_refused(values):
  with pytest.raises(ValueError):
    parse(Kinds, values)


def test_texts_of_others_are_one_bounded_line_without_control_characters():
  bad = "\x1b]0;title\x07\r\n\u202egpj.exe\ud800"
  shown = typed(str, bad)
  assert shown.isprintable() and "\\x1b" in shown and "\\ud800" in shown
  assert len(typed(str, "x" * 100_000)) == 4096
  assert parse(Kinds, [*RIGHT[:2], bad, *RIGHT[3:]]).text == shown
