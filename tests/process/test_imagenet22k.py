"""The head of 21,841 classes: one step of ResNet-101 in bounded memory."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.commands import child_env, train_command
from support.paths import ROOT

OVERRIDES = {
  "data": "Synthetic", "data.num_classes": "21841", "data.image_size": "64",
  "data.num_examples": "16", "batch_size": "16", "epochs": "1",
  "schedule.warmup_epochs": "0", "dtype": "float32", "log.tensorboard": "False",
  "log.every_steps": "1", "evaluation.batch_size": "1", "model.bn_span": "16",
}  # fmt: skip


def peak_kib(pid: int) -> int:
  """The largest resident set that a process had so far; 0: there is no saying."""
  try:
    status = Path(f"/proc/{pid}/status").read_text()
  except OSError:
    return 0
  found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
  return int(found[1]) if found else 0


@pytest.mark.slow
def test_a_step_of_resnet101_with_21841_classes_fits_in_4_gib(tmp_path):
  overrides = [f"--config.{name}={value}" for name, value in OVERRIDES.items()]
  command = train_command(
    tmp_path / "run", *overrides, config="configs/resnet101_imagenet22k.py"
  )
  # Each thread of XLA has memory of its own: 64 of them, as in other tests, took 8 GiB.
  env = child_env(1) | {"NPROC": "2"}
  with open(tmp_path / "errors", "w+") as errors:
    child = subprocess.Popen(command, env=env, cwd=ROOT, stderr=errors)
    # What rusage has of a child is at least what this process itself took at its start.
    peak = 0
    while child.poll() is None:
      peak = max(peak, peak_kib(child.pid))
      time.sleep(0.05)
  text = (tmp_path / "errors").read_text()
  assert child.returncode == 0, text
  assert "params" not in text
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["step"] == 1 and summary["loss"] > 0
  if sys.platform == "linux":  # 3.1 GiB were measured
    assert 2**20 < peak < 4 * 2**20, f"{peak / 2**20:.2f} GiB"
