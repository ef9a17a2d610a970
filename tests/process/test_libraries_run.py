"""Runs of models of other libraries: killed and resumed, and of two processes."""

import json

import numpy as np
import pytest

from support import commands
from support.extending import blocks_of
from support.tiny_runs import checksums, command, kill, run_processes

CHANGES = ["batch_size=64", "epochs=4", "evaluation.every_epochs=1", "checkpoint.every_epochs=0.2"]
ARGS = [f"--config.{change}" for change in (*CHANGES, "log.plot=False", "log.tensorboard=False")]


@pytest.fixture(params=["Flax NNX", "Equinox"])
def config(request, tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(blocks_of("docs/howto/own_model.md")[request.param])
  return str(path)


def run(config, workdir, num_devices=1):
  done = commands.run(*command(workdir, *ARGS, config=config), num_devices=num_devices)
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
def test_killed_it_resumes_bit_for_bit(config, tmp_path):
  run(config, tmp_path / "whole")
  kill(tmp_path / "killed", *ARGS, config=config)
  assert "resuming from the checkpoint of step" in run(config, tmp_path / "killed")
  assert checksums(tmp_path / "killed") == checksums(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_train_as_one_of_two_devices(config, tmp_path):
  run(config, tmp_path / "one", num_devices=2)
  for _, err, code in run_processes(tmp_path / "two", 2, 1, *ARGS, config=config):
    assert code == 0, err
  losses = []
  for name in ("one", "two"):
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    losses.append([x["train/loss"] for x in map(json.loads, lines) if "train/loss" in x])
  assert losses[0]
  np.testing.assert_allclose(*losses, rtol=1e-6)
