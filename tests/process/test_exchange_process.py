"""Runs whose devices keep something for themselves: killed, resumed, moved."""

import shutil

import pytest

from support.commands import error_line, run_train, trained
from support.tiny_runs import checksums, kill, run_processes


def overrides(text):
  return [f"--config.{word}" for word in text.split()]


QUICK = overrides("""
  model=MLP model.hidden=(32,) epochs=8 ema_decay=None evaluation.every_epochs=8
  checkpoint.every_epochs=0.4 log.every_steps=20
""")
COMPRESSED = overrides("exchange=OneBit exchange.plain_epochs=2 exchange.delayed=True")
DIGITS = {"config": "configs/digits.py", "num_devices": 4}
LOCAL = overrides("sync=BlockMomentum sync.sync_every_steps=3")
MULOCO = overrides(
  "optimizer=Muon optimizer.lr=0.01 exchange=OneBit sync=DiLoCo sync.sync_every_steps=3"
  " sync.worker_steps=3,3,1,3"
)
BY_NAME = {"compressed": COMPRESSED, "local": LOCAL, "muloco": MULOCO}
BY_NAME["elastic"] = overrides("sync=SyncEASGD sync.sync_every_steps=2")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("killed") / "run"
  kill(workdir, *QUICK, *COMPRESSED, after=40, **DIGITS)
  return workdir


@pytest.mark.slow
def test_what_was_not_sent_resumes_with_other_devices(tmp_path, killed):
  workdir = shutil.copytree(killed, tmp_path / "run")
  out = trained(workdir, *QUICK, *COMPRESSED, num_devices=2)
  assert "converted from 4 devices to 2" in out
  assert "done: validation accuracy" in out


@pytest.mark.slow
def test_workers_of_their_own_do_not(tmp_path):
  kill(tmp_path, *QUICK, *LOCAL, after=8, **DIGITS)
  done = run_train(tmp_path, *QUICK, *LOCAL, num_devices=2)
  assert "resume with 4 devices" in error_line(done, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_what_devices_keep_survives_a_kill_bit_for_bit(tmp_path, killed, name):
  workdir, args = tmp_path / "run", [*QUICK, *BY_NAME[name]]
  if name == "compressed":
    shutil.copytree(killed, workdir)
  else:
    kill(workdir, *args, after=8, **DIGITS)
  out = trained(workdir, *args, num_devices=4)
  assert "resuming from the checkpoint of step" in out
  trained(tmp_path / "whole", *args, num_devices=4)
  assert checksums(workdir) == checksums(tmp_path / "whole")
  kept = [n for n in checksums(workdir)[1] if n.startswith("exchange_state/inner/inner/stripe")]
  assert kept or name != "compressed"


@pytest.mark.slow
def test_two_processes_hold_the_same(tmp_path):
  """1-bit gradients over gloo; all copies are compared every 10 steps."""
  checked = "--config.checks.replicas_every_steps=10"
  args = [*QUICK, *COMPRESSED, checked]
  results = run_processes(tmp_path / "two", 2, 2, *args, config="configs/digits.py")
  assert [code for *_, code in results] == [0, 0], results[0][1] + results[1][1]
  assert "done: validation accuracy" in results[0][0]
  # And one process resumes what two have saved: here it evaluates.
  out = trained(tmp_path / "two", *args, num_devices=4)
  assert "all 90 steps are already done" in out
