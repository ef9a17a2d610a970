"""`jaxscale doctor` as a user starts it, on processes with a real rendezvous."""

import shlex
import sys

import pytest

from support.commands import jaxscale
from support.processes import run_group

pytest.importorskip("jaxscale.cluster.rendezvous.client", reason="needs the rendezvous")

DOCTOR = [sys.executable, "-m", "jaxscale", "doctor"]


def doctor(number, *args, first=""):
  """Return the exit codes and outputs of `number` processes; `first` is for their shell."""
  command = shlex.join([*DOCTOR, *map(str, args)])
  ended = run_group(["bash", "-c", f"{first} exec {command}"], number)
  assert all("Traceback" not in err for _, err, _ in ended), ended
  return [code for *_, code in ended], [out for out, *_ in ended]


def test_process_0_prints_and_all_are_ready(tmp_path):
  codes, reported = doctor(3, "--workdir", tmp_path / "runs", "--skip=devices,disk")
  assert codes == [0, 0, 0]
  lines = reported[0].splitlines()
  assert lines[0].startswith("ok    launch: ") and "3 processes on 1 host" in lines[0]
  assert lines[-1] == "preflight: ready"
  assert reported[1:] == ["", ""]


def test_all_leave_with_2_where_one_is_not_ready(tmp_path):
  (tmp_path / "file").write_text("")
  args = "--workdir", tmp_path / "file" / "runs", "--skip=devices"
  codes, reported = doctor(2, *args)
  assert codes == [2, 2]
  assert f"fail  workdir {tmp_path}/file/runs: Not a directory" in reported[0]
  assert reported[0].splitlines()[-1].startswith("fix   give a --workdir that can be")


def test_one_process_looks_at_its_own_host(tmp_path):
  done = jaxscale("doctor", f"--workdir={tmp_path}", "--skip=disk", num_devices=2)
  assert done.returncode == 0, done.stderr
  assert "1 process on 1 host" in done.stdout
  assert "devices: 2 x cpu, tested" in done.stdout
  done = jaxscale("doctor", "--skip=disk,al")
  assert done.returncode == 2 and done.stderr.startswith("error: --skip=al: ")
