"""The head of 21,841 classes: one step of ResNet-101 in bounded memory."""

import json
import resource
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
def test_a_step_of_resnet101_with_21841_classes_fits_in_8_gib(tmp_path):
  overrides = [f"--config.{name}={value}" for name, value in OVERRIDES.items()]
  command = train_command(
    tmp_path / "run", *overrides, config="configs/resnet101_imagenet22k.py"
  )
  done = subprocess.run(
    command, env=child_env(1), cwd=ROOT, capture_output=True, text=True, timeout=900
  )
  assert done.returncode == 0, done.stderr
  assert "params" not in done.stderr
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["step"] == 1 and summary["loss"] > 0
  # The largest resident set of any child so far, in KiB on Linux.
  if sys.platform == "linux":
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak < 8 * 2**20, f"{peak / 2**20:.2f} GiB"
    print(f"peak {peak / 2**20:.2f} GiB")
