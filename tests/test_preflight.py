"""The preflight between real processes, with what it is there to find."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, child_env

from jaxscale.preflight import clocks, network, slow, software
from jaxscale.preflight.network import Speed

HOSTS = ["n1", "n2", "n3", "n4"]
PROCESS = Path(__file__).parent / "preflight_process.py"
NOT_JAX = "--skip=devices"


def start(hosts, options, patch="", rank_env=None):
  """The processes of a preflight, process 0 first."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  processes = []
  for rank in range(len(hosts)):
    about = {"rank": rank, "hosts": hosts, "port": port, "options": options,
             "patch": patch}  # fmt: skip
    env = child_env(2, PYTHONPATH=str(ROOT), **(rank_env or {}).get(rank, {}))
    process = subprocess.Popen(
      [sys.executable, str(PROCESS), json.dumps(about)],
      env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    processes.append(process)
    if rank == 0:
      assert process.stdout is not None
      assert process.stdout.readline() == "listening\n", process.communicate()[1]
  return processes


def preflight(hosts, options, patch="", rank_env=None, timeout=60):
  """Findings, seconds and whether JAX was imported, the same in all processes."""
  processes = start(hosts, options, patch, rank_env)
  try:
    ended = [process.communicate(timeout=timeout) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (_, err) in zip(processes, ended, strict=True):
    assert process.returncode == 0, err
  said = [json.loads(out.splitlines()[-1]) for out, _ in ended]
  assert all(findings == said[0][0] for findings, *_ in said)
  findings = [slow.Finding(*f) for f in said[0][0]]
  return findings, max(seconds for _, seconds, _ in said), any(j for *_, j in said)


def wrong(findings):
  return [f.text for f in findings if not f.ok]


def test_smoke(tmp_path):
  findings, seconds, jax = preflight(HOSTS, [f"--workdir={tmp_path}"])
  for f in findings: print(f)
  print(seconds, jax)
