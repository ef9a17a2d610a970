"""Processes that watch each other."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import killed_at_end, popen

# Healthy processes keep these on any machine; a test of one limit makes that one short.
CALM = {"heartbeat_timeout_s": 200, "hang_timeout_s": 200, "compile_timeout_s": 200}
SILENT = str(CALM | {"heartbeat_timeout_s": 6})
HANGING = str(CALM | {"hang_timeout_s": 5, "compile_timeout_s": 60})
# What a process of these tests does: join by loopback, then "train".
CHILD = """
import ctypes, os, signal, socket, sys, time
from pathlib import Path
from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch import watch
from jaxscale.cluster.wire import Keys, Link

KEYS = Keys(b"tests", b"tests")
signal.alarm(400)  # whoever reads its lines waits no longer
rank, n, port = map(int, sys.argv[1:4])
folder = sys.argv[4]
hosts = [f"n{r}" for r in range(n)]
links = {}
if rank == 0:
  server = socket.socket(fileno=port)  # inherited, and listening
  for _ in range(n - 1):
    sock, _ = server.accept()
    links[sock.recv(1)[0]] = Link(sock, KEYS)
  server.close()
else:
  sock = socket.create_connection(("127.0.0.1", port))
  sock.sendall(bytes([rank]))
  links[0] = Link(sock, KEYS)
LIMITS = Timeouts(**HERE, heartbeat_interval_s=0.1, slow_window_s=1.0)
w = watch.start(links, rank, hosts, timeouts=LIMITS, folder=Path(folder))

def train(steps, work=0.01, first=1):
  for step in range(first, steps + 1):
    w.at(step, "input")
    if step == 5:
      print("up", flush=True)
    time.sleep(work)
    w.at(step, "step")
    time.sleep(0.01)

"""


@pytest.fixture
def family(tmp_path):
  """Return a function that starts processes of one run; they end with the test."""
  with contextlib.ExitStack() as stack:

    def start(*bodies, args=(), limits=str(CALM), env=None) -> list[subprocess.Popen]:
      child, started = CHILD.replace("HERE", limits), []
      env = (env or os.environ) | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
      with socket.create_server(("127.0.0.1", 0)) as server:
        for rank, body in enumerate(bodies):
          at = server.getsockname()[1] if rank else server.fileno()
          argv = [rank, len(bodies), at, tmp_path / "faults", *args]
          fds = [] if rank else [server.fileno()]
          process = popen(sys.executable, "-c", child + body, *argv, env=env, pass_fds=fds)
          started.append(stack.enter_context(killed_at_end(process)))
      return started

    yield start


def ends(processes, within=200):
  """Return exit codes and stderr of all processes, which must end within `within` seconds."""
  until = time.monotonic() + within
  errors = [p.communicate(timeout=max(0.1, until - time.monotonic()))[1] for p in processes]
  return [p.returncode for p in processes], errors


def wait_up(processes):
  """Wait until all processes report that they are up; return them."""
  for process in processes:
    assert process.stdout.readline() == "up\n"
  return processes


def children(process):
  """Return the ids of the running processes that a process has started."""
  text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
  return [int(pid) for pid in text.split()]
