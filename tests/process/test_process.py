"""Real processes: the command line, kills, signals, several hosts."""

import json
import os
import random
import signal
import time

import numpy as np
import pytest
from PIL import Image

from support import at_step
from support.commands import error_line, run_python, run_train, trained
from support.processes import killed_at_end, wait_until
from support.tiny_runs import (
  ARGS,
  assert_same_run,
  checkpoint_names,
  final_state,
  is_saving,
  kill,
  newest_step,
  record,
  run_processes,
  start,
)
from support.trees import assert_close


@pytest.fixture(scope="module")
def no_tensorflow(tmp_path_factory):
  """Return an environment in which importing TensorFlow is an error."""
  package = tmp_path_factory.mktemp("site") / "tensorflow"
  package.mkdir()
  (package / "__init__.py").write_text("raise SystemExit('TensorFlow was imported')")
  path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
  return {"PYTHONPATH": path}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, no_tensorflow):
  workdir = tmp_path_factory.mktemp("whole") / "run"
  assert "done: validation accuracy" in trained(workdir, *ARGS, **no_tensorflow)
  return workdir


@pytest.mark.slow
def test_kills_at_random_moments_change_no_bit(tmp_path, uninterrupted):
  workdir, rng = tmp_path / "run", random.Random(0)
  for number in range(5):
    # Each has 14 of the 79 steps to itself, which a fast machine may train before the kill.
    in_mid_save, until = number % 4 == 0, 14 * (number + 1)
    later = 0 if in_mid_save else rng.uniform(0, 0.3)
    kill(workdir, until=until, in_mid_save=in_mid_save, later=later)
    assert is_saving(workdir) or not in_mid_save
  assert "resuming from the checkpoint of step" in trained(workdir, *ARGS)
  assert not is_saving(workdir)
  assert_same_run(workdir, uninterrupted)


def run_until_ctrl_c(workdir):
  """Interrupt a run once it has another checkpoint; what it printed."""
  before = newest_step(workdir)
  with killed_at_end(start(workdir, **at_step.hold(40))) as process:
    wait_until(lambda: newest_step(workdir) > before, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
  assert process.returncode == 130, err
  return out, err


@pytest.mark.slow
def test_a_kill_in_mid_save_and_ctrl_c_change_no_bit(tmp_path, uninterrupted):
  workdir = tmp_path / "run"
  kill(workdir, until=14, in_mid_save=True)
  assert is_saving(workdir)
  out, err = run_until_ctrl_c(workdir)
  *_, reported, last = out.splitlines()
  assert "Ctrl-C: saving after this step" in out and reported
  assert last.startswith("saved step ") and "to resume: python -m jaxscale train" in last
  assert f"--workdir {workdir}" in last and not err
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["outcome"] == "interrupted"
  assert str(summary["step"]) in checkpoint_names(workdir)
  assert "resuming from the checkpoint of step" in trained(workdir, *ARGS)
  assert not is_saving(workdir)
  assert_same_run(workdir, uninterrupted)


@pytest.mark.slow
def test_resumes_with_another_number_of_devices(tmp_path, uninterrupted):
  """Half on one device, half on four: the same run to float32's rounding."""
  workdir = tmp_path / "run"
  run_until_ctrl_c(workdir)
  trained(workdir, *ARGS, num_devices=4)
  got, wanted = final_state(workdir), final_state(uninterrupted)
  assert_close(got.params, wanted.params, 1e-5, floor=0)


@pytest.mark.slow
def test_two_processes_of_two_devices_equal_one_of_four(tmp_path):
  one, two = tmp_path / "one", tmp_path / "two"
  # 57 steps: rounding has not grown past the bound.
  short = ["--config.epochs=5", "--config.checkpoint.every_epochs=1"]
  trained(one, *ARGS, *short, num_devices=4)
  (out, err, code), (out1, err1, code1) = run_processes(two, 2, 2, *short)
  assert (code, code1) == (0, 0), err + err1
  assert "done: validation accuracy" in out and "step" not in out1  # one of them talks
  assert_close(final_state(two), final_state(one), 1e-6)
  for a, b in zip(record(two), record(one), strict=True):
    assert a == pytest.approx(b, rel=1e-4)
  # And a checkpoint of two processes is one that a single process resumes from.
  assert "all 57 steps are already done" in run_train(two, *ARGS, *short).stdout


FOLDER = """
from jaxscale.config import *

def get_config():
  return Config(
    model=MLP(hidden=(8,)), data=ImageFolder(path={path!r}, image_size=8),
    optimizer=SGD(lr=0.01), schedule=Cosine(), batch_size=16, epochs=3,
    phases=Phases(epochs=(0, 1), batch_sizes=(16, 32)), noise_scale=True,
    evaluation=Evaluation(every_epochs=1), log=Log(every_steps=1, tensorboard=False, plot=False),
  )
"""


@pytest.mark.slow
def test_two_processes_agree_on_stages_noise_and_damage(tmp_path):
  """Each reads half of the images; the leader knows what the other one found."""
  rng = np.random.default_rng(0)
  for i in range(96):
    path = tmp_path / "images" / ("val" if i % 4 == 3 else "train") / f"c{i % 2}"
    path.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (12, 12, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path / f"{i:02}.png")
    if i in (0, 1, 2, 4, 5, 6, 7):
      (path / f"{i:02}.png").write_bytes(b"no image")
  config = tmp_path / "folder.py"
  config.write_text(FOLDER.format(path=str(tmp_path / "images")))
  alone, two = tmp_path / "alone", tmp_path / "two"
  trained(alone, config=str(config), num_devices=4)
  results = run_processes(two, 2, 2, config=str(config))
  assert [code for *_, code in results] == [0, 0], results[0][1] + results[1][1]
  summaries = [json.loads((w / "summary.json").read_text()) for w in (alone, two)]
  assert [s["damaged_examples"] for s in summaries] == [7, 7]
  assert summaries[1]["noise_scale"] == pytest.approx(summaries[0]["noise_scale"], rel=1e-3)
  assert "training data: 6 damaged examples: c0/00.png" in results[0][0]
  assert "damaged" not in results[1][0]  # one of them talks
  for a, b in zip(record(two), record(alone), strict=True):
    assert a == pytest.approx(b, rel=1e-3)


def test_a_process_that_fails_does_not_hang_the_others(tmp_path):
  began = time.monotonic()
  results = run_processes(tmp_path, 2, 2, "--config.batch_size=130")
  assert [code for *_, code in results] == [2, 2]
  (_, told, _), (_, other, _) = results
  assert "128 or 132" in told and told.count("\n") == 1 and not other  # once, for all
  assert time.monotonic() - began < 250  # JAX's own exit barrier takes 300 s


CLI_MISTAKES = {
  "no config": ([], "try --config digits"),
  "typo in a field": (["--config.optimizr.lr=1"], "did you mean 'optimizer'?"),
  "not divisible": (["--config.batch_size=30", "--config.mesh.data=4"], "devices"),
  "unknown dataset": (["--config.data=TFDS", "--config.data.name=mnst"], "did you mean 'mnist'?"),
}


@pytest.mark.parametrize("mistake", CLI_MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, mistake):
  args, remedy = CLI_MISTAKES[mistake]
  if args and args[0].startswith("--config."):
    args = ["--config", "configs/digits.py", *args]
  done = run_python("-m", "jaxscale.train", *args, "--workdir", tmp_path / "w")
  assert remedy in error_line(done, 2)
  assert not done.stdout and not (tmp_path / "w").exists()


def test_divergence_is_one_line_and_exit_code_1(tmp_path):
  done = run_train(tmp_path, *ARGS, "--config.optimizer.lr=1e12")
  line = error_line(done, 1)
  assert " at step " in line
  assert "last good checkpoint" in line and "lower optimizer.lr" in line


def test_training_imports_no_tensorflow(uninterrupted, no_tensorflow):
  """Not even where it is installed: the run above had a stand-in that raises."""
  assert (uninterrupted / "summary.json").exists()
  done = run_python("-c", "import tensorflow", **no_tensorflow)
  assert "TensorFlow was imported" in done.stderr


@pytest.mark.slow
@pytest.mark.optimized
def test_random_kills_and_losses_of_power_lose_nothing(tmp_path):
  """A few of those of benchmarks/random_kills.py, which says what must hold."""
  kills = ["benchmarks/random_kills.py", "--kills", "3", "--print", "--directory", tmp_path]
  done = run_python(*kills, timeout=1800)
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1])["kills"] == 3
