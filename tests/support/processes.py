"""Processes on this machine: one that ends with its test, or all of one run."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands import child_env, own_lines
from support.paths import ROOT


def free_port() -> int:
  """Return a port that nobody listens on."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def wait_until(condition, process=None, seconds=120):
  """Wait until a condition is true; fail if the process ends first."""
  deadline = time.monotonic() + seconds
  while not condition():
    assert process is None or process.poll() is None, f"ended early: {process.communicate()}"
    assert time.monotonic() < deadline, "waited too long"
    time.sleep(0.002)


def popen(*command, **options) -> subprocess.Popen[str]:
  """Start a command in the root, with its output in pipes."""
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  return subprocess.Popen([*map(str, command)], **{"cwd": ROOT, **pipes, **options})


@contextlib.contextmanager
def killed_at_end(*processes):
  """Yield the process, or all of them, and kill those still running on exit."""
  try:
    yield processes if len(processes) > 1 else processes[0]
  finally:
    for process in processes:
      process.kill()
      process.communicate()


def start_group(command, count=2, num_devices=1, **env: str):
  """Start the processes of one run, each with its rank in the environment."""
  env |= dict(JAXSCALE_COORDINATOR=f"127.0.0.1:{free_port()}", JAXSCALE_NUM_PROCESSES=str(count))
  env.setdefault("PYTHONFAULTHANDLER", "1")
  ranks = [child_env(num_devices, JAXSCALE_PROCESS_ID=str(i), **env) for i in range(count)]
  return [popen(*command, env=rank) for rank in ranks]


def run_group(command, count=2, num_devices=1, **env: str):
  """Return (stdout, stderr, exit code) of each process of one run."""
  with killed_at_end(*start_group(command, count, num_devices, **env)) as group:
    return ended(group)


def ended(group, timeout=240):
  """Return (stdout, stderr, exit code) of each process; of those that hang, fail with stacks."""
  try:
    return [(*p.communicate(timeout=timeout), p.returncode) for p in group]
  except subprocess.TimeoutExpired:
    for process in group:
      process.send_signal(signal.SIGABRT)  # `start_group` has switched faulthandler on
    texts = [f"{''.join(p.communicate())}exit code {p.returncode}" for p in group]
    pytest.fail("a process did not end:\n" + "\n".join(texts))


def listening(pids) -> set[tuple[str, int]]:
  """Return the IPv4 addresses and ports where processes listen, "127.0.0.1" for all addresses."""
  found, own = {}, set()
  for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
      _, local, _, state, *_, inode = line.split()[:10]
      address, _, port = local.partition(":")
      if state == "0A":
        quad = bytes.fromhex(address[-8:])[::-1]
        host = "127.0.0.1" if quad in (bytes(4), b"\x01\0\0\0") else socket.inet_ntoa(quad)
        found[f"socket:[{inode}]"] = host, int(port, 16)
  for pid in pids:
    with contextlib.suppress(OSError):
      for file in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
          own.add(os.readlink(f"/proc/{pid}/fd/{file}"))
  return {place for inode, place in found.items() if inode in own}


def line_of(process) -> str:
  """Return the next line of stdout that Gloo did not write."""
  for line in process.stdout:
    if own := own_lines(line):
      return own[0]
  return ""


@pytest.fixture
def child():
  """Return a function that starts Python code as a process, which ends with the test."""
  with contextlib.ExitStack() as stack:

    def start(code, *args, env=None):
      env = (env or os.environ) | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
      process = popen(sys.executable, "-c", code, *args, env=env, stdin=subprocess.PIPE)
      return stack.enter_context(killed_at_end(process))

    yield start
