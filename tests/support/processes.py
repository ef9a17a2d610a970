"""Processes on this machine: one that ends with its test, or those of one run."""

import os
import socket
import subprocess
import sys
import time

import pytest

from support.commands import child_env, own_lines
from support.paths import ROOT


def free_port() -> int:
  """A port that nobody listens on."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def wait_until(condition, process=None, seconds=120):
  """Wait until a condition is true; fail where the process ends before."""
  deadline = time.monotonic() + seconds
  while not condition():
    assert process is None or process.poll() is None, f"ended early: {process.communicate()}"
    assert time.monotonic() < deadline, "waited too long"
    time.sleep(0.002)


def start_group(command, count=2, num_devices=1, **env: str):
  """Start the processes of one run, each with its rank in the environment."""
  coordinator = f"127.0.0.1:{free_port()}"
  return [
    subprocess.Popen(
      command,
      env=child_env(
        num_devices,
        JAXSCALE_COORDINATOR=coordinator,
        JAXSCALE_NUM_PROCESSES=str(count),
        JAXSCALE_PROCESS_ID=str(rank),
        **env,
      ),
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in range(count)
  ]


def run_group(command, count=2, num_devices=1, **env: str):
  """(stdout, stderr, exit code) of each process of one run."""
  group = start_group(command, count, num_devices, **env)
  try:
    return [(*p.communicate(timeout=240), p.returncode) for p in group]
  finally:
    for process in group:
      if process.poll() is None:
        process.kill()
        process.communicate()


def line_of(process) -> str:
  """The next line of stdout that is not Gloo's."""
  for line in process.stdout:
    if own := own_lines(line):
      return own[0]
  return ""


@pytest.fixture
def child():
  """Starts Python code as a process, which ends with the test."""
  started = []

  def start(code, *args, env=None):
    process = subprocess.Popen(
      [sys.executable, "-c", code, *map(str, args)],
      env=(env or os.environ) | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    started.append(process)
    return process

  yield start
  for process in started:
    process.kill()
    process.communicate()
