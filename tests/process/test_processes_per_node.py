"""Several processes on this machine, without Slurm: `--processes-per-node 2`."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from jaxscale.cluster.local_launch import OPTION
from support import at_step
from support.commands import error_line, own_lines, run_train, trained
from support.processes import killed_at_end, wait_until
from support.tiny_runs import ARGS, newest_step, record, start

TWO = f"{OPTION}=2"
SHORT = [*ARGS, "--config.epochs=3"]


def children(process):
  return [*map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]


def has_ended(pid):
  try:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
  except OSError:
    return True


@pytest.fixture
def running(tmp_path):
  """Return (launcher, its children, workdir) of a run that has saved a checkpoint."""
  workdir = tmp_path / "run"
  with killed_at_end(start(workdir, TWO, **at_step.hold(60))) as process:
    wait_until(lambda: newest_step(workdir), process, seconds=500)
    yield process, children(process), workdir


def test_two_processes_train_as_two_devices_of_one_do(tmp_path):
  out = trained(tmp_path / "two", *SHORT, TWO)
  trained(tmp_path / "one", *SHORT, f"{OPTION}=1", num_devices=2)
  ours, theirs = record(tmp_path / "two"), record(tmp_path / "one")
  assert len(ours) == len(theirs) > 1
  for line, expected in zip(ours, theirs, strict=True):
    assert line.keys() == expected.keys()
    for name, value in expected.items():
      np.testing.assert_allclose(line[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
  lines = own_lines(out)
  assert len([line for line in lines if line.startswith("jaxscale ")]) == 1
  assert "2 x cpu, 2 processes" in lines[0] and lines[-1].startswith("done: ")


def test_a_mistake_is_one_line_and_starts_nothing(tmp_path):
  assert "epochs=-1" in error_line(run_train(tmp_path / "run", TWO, "--config.epochs=-1"), 2)
  line = error_line(run_train(tmp_path / "run", f"{OPTION}=many"), 2)
  assert line == f"error: {OPTION}=many: give a whole number >= 1, or auto"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 85)])
def test_a_signal_to_the_launcher_saves(number, code, running):
  process, pids, workdir = running
  assert len(pids) == 2
  process.send_signal(number)
  out, error = process.communicate(timeout=200)
  assert process.returncode == code, out + error
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["outcome"] == "interrupted" and newest_step(workdir) == summary["step"]
  assert f"saved step {summary['step']}; to resume: python -m jaxscale train" in out
  assert TWO in out and "Traceback" not in error
  assert all(map(has_ended, pids))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_all(rank, running):
  process, pids, _ = running
  os.kill(pids[rank], signal.SIGKILL)
  _, error = process.communicate(timeout=200)
  assert process.returncode == 137
  assert f"error: process {rank} was ended by SIGKILL" in error
  assert all(map(has_ended, pids))


def test_a_launcher_that_is_killed_leaves_no_process_but_a_checkpoint(running):
  process, pids, workdir = running
  process.kill()
  wait_until(lambda: all(map(has_ended, pids)), seconds=200)
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["outcome"] == "interrupted" and newest_step(workdir) == summary["step"]
