"""One of several processes compiles, the others load; the next start only loads."""

import shutil
import sys

import pytest

from support.compilations import counts
from support.processes import run_group
from support.tiny_runs import ARGS, checkpoint_names, checksums

PROCESSES, MAIN = 4, ("jit(init)", "jit(train_step)", "jit(local_totals)")


@pytest.fixture
def start(tmp_path, monkeypatch):
  """Return a function that runs to the end and counts compiled and loaded programs by process."""
  for name in ("COMPILATION_CACHE_DIR", "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
    monkeypatch.delenv(f"JAX_{name}", raising=False)

  def start(name, *args):
    notes = tmp_path / f"{name}-notes"
    notes.mkdir()
    script = [sys.executable, "tests/support/compilations.py", f"{notes}/of", "train"]
    usual = ["--config", "configs/digits.py", "--workdir", str(tmp_path / "run")]
    epochs = ["--config.epochs=2.1", "--config.checkpoint.keep_last=20"]
    done = run_group([*script, *usual, *ARGS, *epochs, *args], PROCESSES, 2)
    assert [code for *_, code in done] == [0] * PROCESSES, done
    return [counts(f"{notes}/of.{rank}") for rank in range(PROCESSES)]

  return start


@pytest.mark.slow
def test_four_processes_compile_once(start, tmp_path):
  run = tmp_path / "run"

  def main(found, what):
    return [[of[what][name] for name in MAIN] for of in found]

  once, never = [1, 1, 1], [0, 0, 0]
  cold = start("cold")
  assert main(cold, "compiled") == [once] + [never] * (PROCESSES - 1)
  assert main(cold, "loaded") == [never] + [once] * (PROCESSES - 1)
  expected = checksums(run)

  # As a job that is requeued: from a checkpoint in the middle, and nothing compiled.
  steps = sorted(int(name) for name in checkpoint_names(run) if name.isdigit())
  for step in steps[len(steps) // 2 :]:
    shutil.rmtree(run / "checkpoints" / str(step))
  again = start("again")
  assert main(again, "compiled") == [never] * PROCESSES
  assert main(again, "loaded") == [[0, 1, 1]] * PROCESSES
  assert checksums(run) == expected

  shutil.rmtree(run)
  off = start("off", "--config.compilation.cache=False")
  assert main(off, "compiled") == [once] * PROCESSES
  assert checksums(run) == expected and not (run / "compiled").exists()
