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
BY_NAME["streamed"] = overrides(
  "exchange=TwoBit sync=DiLoCo sync.sync_every_steps=6 sync.fragments=2 sync.delay_steps=2"
  " sync.mixing=0.5"
)
BY_NAME["elastic"] = overrides("sync=SyncEASGD sync.sync_every_steps=2")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("killed") / "run"
  kill(workdir, *QUICK, *COMPRESSED, after=40, until=70, **DIGITS)
  return workdir


@pytest.mark.slow
def test_what_was_not_sent_resumes_with_other_devices(tmp_path, killed):
  workdir = shutil.copytree(killed, tmp_path / "run")
  out = trained(workdir, *QUICK, *COMPRESSED, num_devices=2)
  assert "converted from 4 devices to 2" in out
  assert "done: validation accuracy" in out


@pytest.mark.slow
def test_workers_of_their_own_do_not(tmp_path):
  kill(tmp_path, *QUICK, *LOCAL, after=8, until=40, **DIGITS)
  done = run_train(tmp_path, *QUICK, *LOCAL, num_devices=2)
  assert "resume with 4 devices" in error_line(done, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_what_devices_keep_survives_a_kill_bit_for_bit(tmp_path, killed, name):
  workdir, args = tmp_path / "run", [*QUICK, *BY_NAME[name]]
  if name == "compressed":
    shutil.copytree(killed, workdir)
  else:
    kill(workdir, *args, after=8, until=40, **DIGITS)
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


# Process 1 stays before the second step of each round until process 0 begins the last one.
SLOW = """
import pathlib
import time

import jax

from jaxscale import config as cfg
from jaxscale.run import hooks

AHEAD = pathlib.Path(__file__).with_name("ahead")
note = hooks.note


def waiting(run, step, activity):
  if activity == "step" and jax.process_index() == 0:
    AHEAD.write_text(str(step))
  elif activity == "step" and step % 10 == 2:
    deadline = time.monotonic() + 60
    while int((AHEAD.exists() and AHEAD.read_text()) or 0) < step + 8:
      assert time.monotonic() < deadline, f"process 0 waits in step {AHEAD.read_text()}"
      time.sleep(0.01)
  note(run, step, activity)


hooks.note = waiting


def get_config():
  return cfg.Config(
    model=cfg.MLP(hidden=(32,)),
    data=cfg.Digits(),
    optimizer=cfg.Muon(lr=0.01),
    exchange=cfg.TwoBit(),
    sync=cfg.DiLoCo(sync_every_steps=10, worker_steps=(10, 10, 2, 2)),
    batch_size=64,
    steps=40,
    checkpoint=cfg.Checkpoint(every_steps=20, every_epochs=None),
    evaluation=cfg.Evaluation(every_steps=40, every_epochs=None),
    log=cfg.Log(every_steps=10, plot=False),
  )
"""


@pytest.mark.slow
def test_a_process_five_times_slower_does_not_stop_the_other(tmp_path):
  """Process 0 takes all but the last step of a round while process 1 takes one of its two.

  The bits are those of a run in which no process is slow.
  """
  for name, text in ("slow", SLOW), ("even", SLOW.replace("hooks.note = waiting", "")):
    config = tmp_path / f"{name}.py"
    config.write_text(text)
    results = run_processes(tmp_path / name, 2, 2, config=str(config))
    assert [code for *_, code in results] == [0, 0], results[0][1] + results[1][1]
    out = results[0][0] + results[0][1]
    assert "worker_steps=(10, 10, 2, 2): 40.0% of the examples are not trained on" in out
  assert checksums(tmp_path / "slow") == checksums(tmp_path / "even")
