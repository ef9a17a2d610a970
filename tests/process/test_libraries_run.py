"""Runs of models of each library: killed and resumed, and of two processes."""

import json

import numpy as np
import pytest

from support import commands
from support.extending import blocks_of
from support.tiny_runs import checksums, command, kill, run_processes

CHANGES = ["batch_size=64", "epochs=4", "evaluation.every_epochs=1", "checkpoint.every_epochs=0.2"]
ARGS = [f"--config.{change}" for change in (*CHANGES, "log.plot=False", "log.tensorboard=False")]
LIBRARIES = "Flax NNX", "Equinox", "Haiku", "Flax Linen", "Functions"


@pytest.fixture(scope="module", params=LIBRARIES)
def config(request, tmp_path_factory):
  """Return the page's file; the module of Linen itself is the model of its config."""
  path = tmp_path_factory.mktemp("config") / "mine.py"
  text = blocks_of("docs/howto/own_model.md")[request.param]
  if request.param == "Flax Linen":
    text = text.replace("model=MyModel()", "model=Net()")
    assert "model=Net()" in text
  path.write_text(text)
  return str(path)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
  """Return the workdir of an uninterrupted run of one process on two devices."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  run(config, workdir)
  return workdir


def run(config, workdir):
  done = commands.run(*command(workdir, *ARGS, config=config), num_devices=2)
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
def test_killed_it_resumes_bit_for_bit(config, whole, tmp_path):
  kill(tmp_path, *ARGS, until=40, config=config, num_devices=2)
  assert "resuming from the checkpoint of step" in run(config, tmp_path)
  assert checksums(tmp_path) == checksums(whole)


@pytest.mark.slow
def test_two_processes_train_as_one_of_two_devices(config, whole, tmp_path):
  for _, err, code in run_processes(tmp_path, 2, 1, *ARGS, config=config):
    assert code == 0, err
  losses = []
  for workdir in (whole, tmp_path):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    losses.append([x["train/loss"] for x in map(json.loads, lines) if "train/loss" in x])
  assert losses[0]
  np.testing.assert_allclose(*losses, rtol=1e-6)
