"""`jaxscale doctor` as a user starts it, on processes with a real rendezvous."""

import re
import socket
import subprocess
import sys

import pytest

from support.commands import child_env
from support.paths import ROOT

pytest.importorskip("jaxscale.cluster.rendezvous.client", reason="needs the rendezvous")

DOCTOR = [sys.executable, "-m", "jaxscale", "doctor"]


def doctor(number, *args, rank_env=None):
  """The exit codes and outputs of as many processes."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  processes = []
  for rank in range(number):
    given = {
      "JAXSCALE_COORDINATOR": f"127.0.0.1:{port}",
      "JAXSCALE_NUM_PROCESSES": str(number),
      "JAXSCALE_PROCESS_ID": str(rank),
    }
    env = child_env(**given, **(rank_env or {}).get(rank, {}))
    process = subprocess.Popen(
      [*DOCTOR, *map(str, args)],
      env=env,
      cwd=ROOT,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    processes.append(process)
  try:
    reported = [process.communicate(timeout=300) for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert all("Traceback" not in err for _, err in reported), reported
  return [process.returncode for process in processes], reported


def test_process_0_prints_and_all_are_ready(tmp_path):
  codes, reported = doctor(3, "--workdir", tmp_path / "runs", "--skip=devices,network,disk")
  assert codes == [0, 0, 0]
  lines = reported[0][0].splitlines()
  assert lines[0].startswith("ok    launch: ") and "3 processes on 1 host" in lines[0]
  assert lines[-1] == "preflight: ready"
  assert [out for out, _ in reported[1:]] == ["", ""]


@pytest.mark.slow
def test_an_all_reduce_between_the_processes_is_timed():
  """In processes that join as a run does; one that cannot is reported."""
  codes, reported = doctor(2, "--skip=software,clocks,files,devices,disk")
  assert codes == [0, 0], reported
  (line,) = [x for x in reported[0][0].splitlines() if "network" in x]
  text = "ok    network: an all-reduce of 16.8 MB over 2 devices in 2 processes takes "
  assert line.startswith(text) and line.endswith("B/s")
  unknown = {1: {"XLA_FLAGS": "--xla_nonsense=1"}}
  codes, reported = doctor(2, "--skip=software,clocks,files,devices,disk", rank_env=unknown)
  assert codes == [2, 2]
  says = r"not   network: process 1 \(.*\): XLA_FLAGS: this jax does not know --xla_nons"
  assert re.search(says, reported[0][0]), reported


def test_all_leave_with_2_where_one_is_not_ready(tmp_path):
  (tmp_path / "file").write_text("")
  args = "--workdir", tmp_path / "file" / "runs", "--skip=devices,network"
  codes, reported = doctor(2, *args)
  assert codes == [2, 2]
  assert f"not   workdir {tmp_path}/file/runs: Not a directory" in reported[0][0]
  assert reported[0][0].splitlines()[-1].startswith("next  give a --workdir that can be")


def test_one_process_looks_at_its_own_host(tmp_path):
  done = subprocess.run(
    [*DOCTOR, f"--workdir={tmp_path}", "--skip=disk"],
    env=child_env(2),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert "1 process on 1 host" in done.stdout
  assert "devices: 2 x cpu, tested" in done.stdout
  done = subprocess.run(
    [*DOCTOR, "--skip=network,al"],
    env=child_env(),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 2 and done.stderr.startswith("error: --skip=al: ")
