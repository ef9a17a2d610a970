"""Programs of another, malicious user; as a script, one of them.

    python tests/support/strangers.py NAME ADDRESS PORT,PORT… SECONDS RECORDED

It gives up root for "nobody" first, prints "ready", and at the end, or at SIGUSR1, what it heard,
as JSON. Standard library alone: it knows nothing of the run but where to look for it.
"""

import contextlib
import encodings.idna  # noqa: F401  later nobody may read it
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time

NOBODY = 65534
TOLD = threading.Event()  # by SIGUSR1: the attack is over


def goes_on(until):
  """Return whether the attack is not over."""
  return not TOLD.is_set() and time.monotonic() < until


def connected(place):
  """Return a connection, or None."""
  with contextlib.suppress(OSError):
    return socket.create_connection(place, timeout=1)
  return None


def heard_from(sock, seconds=0.2):
  """Return the data from a connection, as text."""
  sock.settimeout(seconds)
  with contextlib.suppress(OSError):
    return sock.recv(4096).decode("latin-1")
  return ""


def open_many(place, until, count):
  """Open as many connections as possible within the time; a failed one is None."""
  return [connected(place) for _ in range(count) if goes_on(until)]


def scan(place, until):
  """Connect to every port where a run may listen, and read."""
  found = {}
  while goes_on(until):
    for port in range(place[1] - 500, place[1] + 500):
      if sock := connected((place[0], port)):
        found[port] = found.get(port, "") + heard_from(sock, 0.05)
        sock.close()
  return found


def idle(place, until, count=1000):
  """Open connections and send nothing."""
  open_ = open_many(place, until, count)
  time.sleep(max(0.0, until - time.monotonic()))
  return [heard_from(sock, 0.001) for sock in open_ if sock]


def slow(place, until, count=300):
  """Send a byte every tenth of a second on each of many connections."""
  open_ = open_many(place, until, count)
  while goes_on(until):
    for sock in filter(None, open_):
      with contextlib.suppress(OSError):
        sock.send(b"x")
    time.sleep(0.1)
  return []


def flood(place, until):
  """Connect as fast as possible on many sockets, and disconnect immediately."""
  while goes_on(until):
    some = [socket.socket() for _ in range(100)]
    for sock in some:
      sock.setblocking(False)
      sock.connect_ex(place)
    for sock in some:
      sock.close()
  return []


def throng(place, until):
  """Send the start of a greeting on as many connections as possible, and leave them open."""
  open_ = []
  while goes_on(until):
    with contextlib.suppress(OSError):
      sock = socket.create_connection(place, timeout=1)
      open_.append(sock)
      sock.send(b'"' + b"ab" * 16 + b'"\n')
    if len(open_) == 2000:
      for sock in open_[:1000]:
        sock.close()
      del open_[:1000]
  return []


def late(place, until):
  """Wait for as long as the timeout allows, then send a byte, over and over."""
  while goes_on(until):
    open_ = [connected(place) for _ in range(20)]
    time.sleep(1.1)
    for sock in filter(None, open_):
      with contextlib.suppress(OSError):
        sock.send(b"\n")
        sock.close()
  return []


def noise(place, until):
  """Make a hundred connections a second with random data."""
  rng = random.Random(5)
  starts = [b"", b"[" * 99, b"{", b'"' + b"0" * 32 + b'"\n', b"GET / HTTP/1.1\r\n"]
  while goes_on(until):
    if sock := connected(place):
      with contextlib.suppress(OSError):
        sock.sendall(rng.choice(starts) + rng.randbytes(rng.randrange(5000)) + b"\n")
      sock.close()
    time.sleep(0.01)
  return []


def forge(place, until):
  """Send a hello as each rank, and process 0's own, without the secret."""
  heard = []
  while goes_on(until):
    for rank in (-1, 0, 1, 2, 99):
      if sock := connected(place):
        with sock, contextlib.suppress(OSError):
          sock.sendall(b'"' + b"ab" * 16 + b'"\n')
          heard.append(heard_from(sock))
          for message in (
            [rank, 3, "n", 1, "u", "p", "f", "", {}, {}, ""],
            {"fail": ["x", 0, False, False, "y"]},
            {"bye": 0},
            {"ask": ["SIGTERM", "preemption"]},
          ):
            sock.sendall(b"0" * 32 + json.dumps(message).encode() + b"\n")
          heard.append(heard_from(sock))
    time.sleep(0.01)
  return heard


def replay(place, until):
  """Send again what a process of the run sent at an earlier start."""
  heard = []
  while goes_on(until):
    if sock := connected(place):
      with sock, contextlib.suppress(OSError):
        sock.sendall(RECORDED)
        heard.append(heard_from(sock))
    time.sleep(0.01)
  return heard


def siege(place, until):
  """Run all attacks above except the scan and the flood at once, on each port that answers.

  The scan and the flood need a core each, so that others get little of a machine with two.
  That has nothing to do with authentication.
  """
  found = set()
  while goes_on(until):
    for port in {place[1], *NEXT} - found:
      if sock := connected((place[0], port)):
        sock.close()
        found.add(port)
        for attack in (idle, slow, late, noise, forge, replay):
          args = ((place[0], port), until)
          threading.Thread(target=attack, args=args, daemon=True).start()
    time.sleep(0.02)
  return sorted(found)


def hunt(place, until):
  """Find every port of a host that answers, and run all attacks above on it."""
  found, held = set(), []
  while goes_on(until):
    for port in range(20_000, 32_768):
      with socket.socket() as probe:
        probe.settimeout(0.2)
        if probe.connect_ex((place[0], port)):
          continue
      found.add(port)
      held += [connected((place[0], port)) for _ in range(20)]
      moment = time.monotonic() + 0.1
      forge((place[0], port), moment)
      noise((place[0], port), moment)
    held = held[-500:]
  return sorted(found)


def peer(place, until):
  """Take the place of a Gloo peer at every address in stdin: "IP PORT", one a line.

  Gloo believes whoever sends the number of a connection: a small integer of 8 bytes.
  """
  heard, threads = [], []

  def visit(address, port, number):
    with contextlib.suppress(OSError):
      sock = socket.create_connection((address, port), timeout=1)
      sock.sendall(number.to_bytes(8, "little"))
      body = b'["forged"]'
      head = [48 + len(body), number % 4, 0, 0, len(body), 0]  # of a message
      sock.settimeout(0.05)
      for turn in range(60):
        if number >= 3 and turn % 10 == 9:
          sock.sendall(b"".join(n.to_bytes(8, "little") for n in head) + body)
        with contextlib.suppress(TimeoutError):
          heard.append(sock.recv(1 << 16).decode("latin-1"))

  for line in sys.stdin:
    address, port = line.split()
    for number in range(6):
      threads.append(threading.Thread(target=visit, args=(address, int(port), number)))
      threads[-1].start()
  for thread in threads:
    thread.join()
  return [text for text in heard if text]


def squat(place, until):
  """Listen in place of process 0, and send the two lines that it would send."""
  with socket.create_server(place, backlog=1000) as server, selectors.DefaultSelector() as selector:
    heard = []
    selector.register(server, selectors.EVENT_READ)
    while goes_on(until):
      for key, _ in selector.select(0.1):
        if key.fileobj is server:
          sock, _ = server.accept()
          selector.register(sock, selectors.EVENT_READ)
          continue
        line = heard_from(key.fileobj)
        heard.append(line)
        with contextlib.suppress(OSError):
          key.fileobj.sendall(b'"' + b"cd" * 16 + b'"\n' + b"0" * 32 + b'"welcome"\n')
          key.fileobj.sendall(b"0" * 32 + b'{"error":"you may go"}\n')
        if not line:
          selector.unregister(key.fileobj)
          key.fileobj.close()
    return heard


def silent(place, until):
  """Listen in place of process 0, and send nothing."""
  with socket.create_server(place, backlog=1000):
    while goes_on(until):
      time.sleep(0.05)
  return []


def relay(place, until):
  """Listen in place of process 0, and forward everything to its actual port, the next one."""
  heard = []

  def pump(a, b, keep):
    with contextlib.suppress(OSError):
      while data := a.recv(4096):
        if keep:
          heard.append(data.decode("latin-1"))
        b.sendall(data)
      b.shutdown(socket.SHUT_WR)

  def pass_on(client):
    for port in NEXT:
      if server := connected((place[0], port)):
        client.settimeout(None), server.settimeout(None)
        threading.Thread(target=pump, args=(server, client, False), daemon=True).start()
        return pump(client, server, True)
    return client.close()

  with socket.create_server(place, backlog=1000) as server:
    server.settimeout(0.1)
    while goes_on(until):
      with contextlib.suppress(TimeoutError):
        client, _ = server.accept()
        threading.Thread(target=pass_on, args=(client,), daemon=True).start()
  return heard


def starter():
  """Return a function that starts these programs as another user; they end with the test."""
  with contextlib.ExitStack() as stack:

    def begin(name, ports=(), address="127.0.0.1", seconds=4.0, recorded=b"?\n"):
      words = name, address, ",".join(map(str, ports or [0])), str(seconds), recorded.hex()
      command = [sys.executable, __file__, *words]
      pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
      process = stack.enter_context(subprocess.Popen(command, **pipes))
      stack.callback(process.terminate)
      assert process.stdout.readline() == "ready\n"
      return process

    yield begin


RECORDED = b""  # what is repeated
NEXT: list[int] = []  # ports at which the true process 0 may be
CONNECTING = [scan, idle, slow, flood, throng, late, noise, forge]
LISTENING = [squat, silent, relay]

if __name__ == "__main__":
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
  signal.signal(signal.SIGUSR1, lambda *_: TOLD.set())
  name, address, ports, seconds, recorded = sys.argv[1:]
  RECORDED = bytes.fromhex(recorded)
  signal.alarm(int(float(seconds)) + 60)  # whatever it waits for: nobody waits for it
  port, *NEXT = map(int, ports.split(","))
  if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
  print("ready", flush=True)
  attack = {f.__name__: f for f in [*CONNECTING, *LISTENING, replay, siege, hunt, peer]}[name]
  print(json.dumps(attack((address, port), time.monotonic() + float(seconds))))
