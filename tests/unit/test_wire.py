"""Messages on a socket: whole, bounded, and nothing taken that comes after."""

import socket
import threading
import time

import pytest

from jaxscale.cluster import wire


@pytest.fixture
def pair():
  here, there = socket.socketpair()
  with here, there:
    yield here, there


def test_what_is_sent_comes_in_order(pair):
  here, there = pair
  sent = [{"a": [1, 2.5, None, "é\n"]}, ["beat", 17], 0, "x" * 100_000]
  thread = threading.Thread(target=lambda: [wire.send(here, m, 5) for m in sent])
  thread.start()
  receiver = wire.Receiver(there)
  assert [receiver.receive(5) for _ in sent] == sent
  thread.join()


def test_a_line_in_pieces_is_one_message(pair):
  here, there = pair
  receiver = wire.Receiver(there)
  for piece in (b'{"a"', b": ", b"1}"):
    here.sendall(piece)
    assert receiver.drain() == []
  here.sendall(b"\n[2]\n[3")
  assert receiver.drain() == [{"a": 1}, [2]]
  here.sendall(b"]\n")
  assert receiver.receive(1) == [3]


def test_another_receiver_resumes_where_the_first_one_stopped(pair):
  here, there = pair
  here.sendall(b"1\n2\n3\nrest")
  assert wire.Receiver(there).receive(1) == 1
  assert wire.Receiver(there).receive(1) == 2
  assert wire.Receiver(there).drain() == [3]
  assert there.recv(10) == b"rest"


def test_silence_is_a_timeout_and_an_end_is_an_end(pair):
  here, there = pair
  receiver, began = wire.Receiver(there), time.monotonic()
  with pytest.raises(TimeoutError):
    receiver.receive(0.2)
  assert 0.2 <= time.monotonic() - began < 1
  here.sendall(b"1\n2")
  here.close()
  assert receiver.receive(1) == 1
  with pytest.raises(EOFError):  # half a message is none
    receiver.receive(1)


@pytest.mark.parametrize(
  "noise",
  [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"[" * 9_000 + b"\n", b"x" * 9_999],
)
def test_what_is_no_message_is_refused(pair, noise):
  here, there = pair
  here.sendall(noise)
  receiver = wire.Receiver(there, max_bytes=8_000)
  with pytest.raises(ValueError):
    for _ in range(3):
      receiver.drain()


def test_who_takes_nothing_holds_nobody_up_for_ever(pair):
  here, _ = pair
  began = time.monotonic()
  with pytest.raises(TimeoutError):
    wire.send(here, "x" * 10_000_000, timeout=0.3)
  assert time.monotonic() - began < 3
  pair[1].close()
  with pytest.raises(OSError):
    wire.send(here, 1, timeout=0.3)
