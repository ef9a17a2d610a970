"""`colabs/flat_loop.py`: a loop of a user's own, killed and resumed, in one or two processes."""

import contextlib
import json
import re
import sys

import pytest

from support.commands import child_env, own_lines
from support.paths import ROOT
from support.processes import ended, free_port, killed_at_end, popen, wait_until

SCRIPT = ROOT / "colabs" / "flat_loop.py"


@contextlib.contextmanager
def started(folder, processes, devices):
  """Start the script once per process, each with that many devices, in a folder."""
  folder.mkdir(exist_ok=True)
  job = dict(MPLBACKEND="agg")
  if processes > 1:
    job |= dict(JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{free_port()}", NUM_PROCESSES=str(processes))
  ranks = [child_env(devices, PROCESS_ID=str(i), **job) for i in range(processes)]
  group = [popen(sys.executable, SCRIPT, cwd=folder, env=env) for env in ranks]
  with killed_at_end(*group):
    yield group


def trained(folder, processes, devices):
  """Run the script to its end; return the numbers of the lines that process 0 prints."""
  with started(folder, processes, devices) as group:
    results = ended(group)
  assert [code for *_, code in results] == [0] * processes, results
  assert not any(own_lines(out) for out, *_ in results[1:])
  found = re.findall(r"step (\d+)  loss (\S+)  validation accuracy (\S+)%", results[0][0])
  return {int(step): (float(loss), float(accuracy)) for step, loss, accuracy in found}


def killed(folder, processes, devices):
  """Kill all processes once the first checkpoint is there."""
  with started(folder, processes, devices) as group:
    wait_until((folder / "flat_loop" / "100").exists, group[0])
    for process in group:
      process.kill()
  assert not (folder / "flat_loop" / "300").exists()


def checksums(folder):
  manifest = json.loads((folder / "flat_loop" / "300" / "manifest.json").read_text())
  return {name: leaf["checksum"] for name, leaf in manifest["leaves"].items()}


@pytest.mark.slow
def test_two_processes_are_killed_and_resume_bit_for_bit(tmp_path):
  whole = trained(tmp_path / "whole", 2, 1)
  assert [*whole] == [100, 200, 300] and whole[300][1] > 90
  killed(tmp_path / "parts", 2, 1)
  resumed = trained(tmp_path / "parts", 2, 1)
  assert 100 not in resumed and resumed[300] == whole[300]
  assert checksums(tmp_path / "parts") == checksums(tmp_path / "whole")


@pytest.mark.slow
def test_eight_devices_give_the_result_of_one_and_resume_on_others(tmp_path):
  killed(tmp_path / "eight", 1, 8)
  resumed = trained(tmp_path / "eight", 2, 1)
  whole = trained(tmp_path / "one", 1, 1)
  assert [*resumed] == [200, 300]
  for step, (loss, accuracy) in resumed.items():
    assert loss == pytest.approx(whole[step][0], abs=5e-3)
    assert accuracy == pytest.approx(whole[step][1], abs=1)


def test_it_is_100_lines_of_public_functions():
  code = SCRIPT.read_text().partition("import importlib")[2].partition("# %%\n")[2]
  lines = [line for line in code.splitlines() if line.strip() and not line.startswith("#")]
  assert len(lines) <= 100
  assert "Config" not in code and not re.search(r"\b_\w|\._\w", "\n".join(lines))
