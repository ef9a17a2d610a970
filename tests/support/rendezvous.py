"""Real processes that connect, for the tests of the rendezvous."""

import contextlib
import json
import os
import socket
import sys
import time

from jaxscale.cluster import secret
from jaxscale.cluster.rendezvous import network
from jaxscale.cluster.rendezvous.handshake import Hello
from jaxscale.cluster.wire import Link
from support.commands import child_env
from support.processes import killed_at_end, popen

# One process of a run: it connects, prints what it got, sends its rank over the links.
CHILD = """
import json, os, resource, signal, socket, sys, time
from jaxscale.cluster.rendezvous import acceptor, client, handshake, network, server
from jaxscale.cluster.launch import Launch
from jaxscale.cluster.rendezvous.client import rendezvous
from jaxscale.errors import ConfigError
signal.alarm(300)  # whoever reads its lines waits no longer
a = json.loads(sys.argv[1])
for name, value in a.get("set", {}).items():
  module, name = name.split(".")
  is_call = module in ("network", "handshake")
  function = lambda *_, value=value: value
  setattr(globals()[module], name, function if is_call else value)
time.sleep(a.get("late", 0))
if "files" in a:
  resource.setrlimit(resource.RLIMIT_NOFILE, a["files"])
host, _, port = a["host"].partition(":")
launch = Launch("test", a["rank"], a["of"], host, 0, 1, a["job"],
                port=int(port) if port else None,
                nodes=tuple(a.get("nodes", [])))
try:
  group = rendezvous(launch, timeout_s=a.get("timeout", 200),
                     digests=a.get("digests", {}), on_cpu=a.get("on_cpu", False))
except ConfigError as e:
  print(json.dumps({"error": str(e)}))
  sys.exit(2)
for link in group.links.values():
  sock = link.sock
  assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
  assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
  assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
  assert sock.gettimeout() is None
  link.send({"from": a["rank"], "job": a["job"]})
heard = {r: link.receive(200) for r, link in group.links.items()}
assert "jax" not in sys.modules
worker = os.fork() if a.get("fork") else None
if worker == 0:
  os.closerange(1, 3)  # who waits for our output waits for us only
  time.sleep(30)
  os._exit(0)
print(json.dumps({"hosts": group.hosts, "coordinator": group.coordinator,
                  "heard": heard, "worker": worker}), flush=True)
time.sleep(a.get("stay", 0))
"""


def starter():
  """Return a function that starts processes; those still running end with the test."""
  with contextlib.ExitStack() as stack:

    def start_one(rank, of, job, host="127.0.0.1", env=None, **options):
      options |= {"rank": rank, "of": of, "job": job, "host": host}
      env = child_env() | {"SLURMD_NODENAME": f"n{rank + 1}"} | (env or {})
      process = popen(sys.executable, "-c", CHILD, json.dumps(options), env=env)
      return stack.enter_context(killed_at_end(process))

    yield start_one


def ends(processes, within=200):
  """Return exit codes and output; stderr must have known lines only."""
  deadline = time.monotonic() + within
  results = []
  for process in processes:
    out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    known = "waiting for", "refused connections", "skipped ports"
    assert all(line.startswith(known) for line in err.splitlines()), err
    results.append((process.returncode, json.loads(out)))
  return results


def the_line(processes, within=200):
  """Return the line that all processes ended with; each must have exited with code 2."""
  results = ends(processes, within)
  assert [code for code, _ in results] == [2] * len(results), results
  lines = {reported["error"] for _, reported in results}
  assert len(lines) == 1, lines
  assert "\n" not in min(lines)
  return lines.pop()


def job(name):
  """Return a job name that no other test, and no other run of the tests, has."""
  return f"{name}-{os.getpid()}-{time.monotonic_ns()}"


def key_of(name):
  """Return the key of a run of this name, as its processes derive it."""
  return secret.run_key(secret.find_secret(), name)


def ports_of(name):
  """Return the ports on which process 0 of a run of this name may listen."""
  return network.ports_of(key_of(name).hex())


def greet(name, hello, port=None):
  """Return a link to process 0 of a run of this name, after sending it a hello.

  A process has a second link, which is closed with this one.
  """
  connect(port or ports_of(name)[0]).close()  # it listens
  link = link_to(port or ports_of(name)[0], key_of(name))
  link.send(hello)
  if isinstance(hello, Hello):
    with contextlib.suppress(OSError, EOFError, ValueError):  # it has answered with an error
      link.other = link_to(port or ports_of(name)[0], key_of(name))
      link.close = lambda: (Link.close(link), link.other.close())
      link.other.send({"values": hello.rank})
  return link


def link_to(port, key):
  """Return a link to a program that has the key and listens on a port."""
  with contextlib.ExitStack() as stack:
    sock = stack.enter_context(connect(port))
    network.tune(sock)
    link = secret.greet(sock, key, 200)
    stack.pop_all()
    return link


def connect(port, within=200):
  deadline = time.monotonic() + within
  while True:
    try:
      return socket.create_connection(("127.0.0.1", port), timeout=200)
    except ConnectionRefusedError:
      assert time.monotonic() < deadline
      time.sleep(0.02)


def who(rank, of=4, **other):
  known = dict(node=f"n{rank + 1}", pid=7, network="here", files="here", gloo="")
  known |= dict(versions={"jax": "1"}, digests={"config": "a"}, error="")
  return Hello(rank, of, **known | other)
