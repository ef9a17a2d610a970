"""Runs whose devices keep something for themselves: killed, resumed, moved."""

import shutil

import pytest

from support.commands import error_line, run_train
from support.processes import wait_until
from support.tiny_runs import checksums, newest_step, run_processes, start

QUICK = [
  "--config.model=MLP", "--config.model.hidden=(32,)", "--config.epochs=8",
  "--config.ema_decay=None", "--config.evaluation.every_epochs=8",
  "--config.checkpoint.every_epochs=0.4", "--config.log.every_steps=20",
]  # fmt: skip
COMPRESSED = [
  "--config.exchange=OneBit", "--config.exchange.plain_epochs=2",
  "--config.exchange.delayed=True",
]  # fmt: skip
LOCAL = ["--config.sync=BlockMomentum", "--config.sync.sync_every_steps=3"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole") / "run"
  done = run_train(workdir, *QUICK, *COMPRESSED, num_devices=4)
  assert done.returncode == 0, done.stderr
  return workdir


def kill_after(workdir, *args, step):
  process = start(workdir, *QUICK, *args, config="configs/digits.py", num_devices=4)
  wait_until(lambda: newest_step(workdir) > step, process)
  process.kill()
  process.communicate()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("killed") / "run"
  kill_after(workdir, *COMPRESSED, step=40)
  return workdir


@pytest.mark.slow
def test_what_was_not_sent_survives_a_kill_bit_for_bit(tmp_path, uninterrupted, killed):
  workdir = shutil.copytree(killed, tmp_path / "run")
  done = run_train(workdir, *QUICK, *COMPRESSED, num_devices=4)
  assert done.returncode == 0, done.stderr
  assert "resuming from the checkpoint of step" in done.stdout
  assert checksums(workdir) == checksums(uninterrupted)
  names = checksums(workdir)[1]
  assert any(name.startswith("exchange_state/inner/inner/stripe") for name in names)


@pytest.mark.slow
def test_what_was_not_sent_resumes_with_other_devices(tmp_path, killed):
  workdir = shutil.copytree(killed, tmp_path / "run")
  done = run_train(workdir, *QUICK, *COMPRESSED, num_devices=2)
  assert done.returncode == 0, done.stderr
  assert "carried over from 4 devices to 2" in done.stdout
  assert "done: held-out accuracy" in done.stdout


@pytest.mark.slow
def test_workers_of_their_own_do_not(tmp_path):
  workdir = tmp_path / "run"
  kill_after(workdir, *LOCAL, step=8)
  done = run_train(workdir, *QUICK, *LOCAL, num_devices=2)
  assert "resume with 4 devices" in error_line(done, 2)


@pytest.mark.slow
def test_workers_survive_a_kill_bit_for_bit(tmp_path):
  workdir, whole = tmp_path / "run", tmp_path / "whole"
  kill_after(workdir, *LOCAL, step=8)
  assert run_train(workdir, *QUICK, *LOCAL, num_devices=4).returncode == 0
  assert run_train(whole, *QUICK, *LOCAL, num_devices=4).returncode == 0
  assert checksums(workdir) == checksums(whole)


@pytest.mark.slow
def test_two_processes_hold_the_same(tmp_path):
  """1-bit gradients over gloo; all copies are compared every 10 steps."""
  checked = "--config.checks.replicas_every_steps=10"
  args = [*QUICK, *COMPRESSED, checked]
  results = run_processes(tmp_path / "two", 2, 2, *args, config="configs/digits.py")
  assert [code for *_, code in results] == [0, 0], results[0][1] + results[1][1]
  assert "done: held-out accuracy" in results[0][0]
  # And one process resumes what two have saved: here it evaluates.
  done = run_train(tmp_path / "two", *args, num_devices=4)
  assert "all 90 steps are done" in done.stdout
