"""The head of 21,841 classes: one step of ResNet-101 in bounded memory."""

import json
import os
import subprocess
import sys

import pytest

from support.commands import child_env, train_command
from support.paths import ROOT

OVERRIDES = {
  "data": "Synthetic", "data.num_classes": "21841", "data.image_size": "64",
  "data.num_examples": "16", "batch_size": "16", "epochs": "1",
  "schedule.warmup_epochs": "0", "dtype": "float32", "log.tensorboard": "False",
  "log.every_steps": "1", "evaluation.batch_size": "1", "model.bn_span": "16",
}  # fmt: skip


@pytest.mark.slow
def test_a_step_of_resnet101_with_21841_classes_fits_in_4_gib(tmp_path):
  overrides = [f"--config.{name}={value}" for name, value in OVERRIDES.items()]
  command = train_command(
    tmp_path / "run", *overrides, config="configs/resnet101_imagenet22k.py"
  )
  with open(tmp_path / "errors", "w+") as errors:
    child = subprocess.Popen(command, env=child_env(1), cwd=ROOT, stderr=errors)
    # Of this child alone: RUSAGE_CHILDREN has the largest of all that this worker had.
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
  text = (tmp_path / "errors").read_text()
  assert child.returncode == 0, text
  assert "params" not in text
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["step"] == 1 and summary["loss"] > 0
  if sys.platform == "linux":  # in KiB there; 2.9 GiB were measured
    assert used.ru_maxrss < 4 * 2**20, f"{used.ru_maxrss / 2**20:.2f} GiB"
