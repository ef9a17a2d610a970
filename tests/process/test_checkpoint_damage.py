"""Every kind of damage to every file of a checkpoint: found, reported, and survived."""

import os
import re
import shutil

import pytest

from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.errors import ConfigError
from support.commands import error_line, run_train
from support.fault_table import measured
from support.logs import logged
from support.states import at_step, make_states, run_pair
from support.tiny_runs import ARGS, checkpoint_names
from support.trees import assert_same_bits

pytestmark = pytest.mark.optimized  # what other processes saved is compared bit for bit


def flip(path, where):
  content = bytearray(path.read_bytes())
  content[min(int(where * len(content)), len(content) - 1)] ^= 0x10
  path.write_bytes(content)


def damages(flips, first):
  """Ways to damage a file, by name: bits at even distances among them."""
  places = [(first + i / flips) % 1 for i in range(flips)]
  return {
    **{f"flip {i}": lambda p, w=w: flip(p, w) for i, w in enumerate(places)},
    "cut": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "empty": lambda p: p.write_bytes(b""),
    "gone": lambda p: p.unlink(),
  }


def kind_of(path):
  """Return the purpose of a file, without its random name."""
  return re.sub(r"/[0-9a-f]{32}$", "/*", str(path))


def sweep(whole, scratch, flips, devices=2):
  """{(kind of file, damage): what became of it}, each on a fresh copy."""
  abstract, state = make_states(devices)
  expected = {step: at_step(state, step) for step in (1, 2)}
  files = sorted(p.relative_to(whole) for p in (whole / "2").rglob("*") if p.is_file())
  assert files
  found: dict[tuple[str, str], set[str]] = {}
  for i, file in enumerate(files):
    # In every file elsewhere: a golden section further on.
    for damage, do in damages(flips, i * 0.618).items():
      if damage.startswith("flip") and not (whole / file).stat().st_size:
        continue
      shutil.rmtree(scratch, ignore_errors=True)
      shutil.copytree(whole, scratch)
      do(scratch / file)
      with logged() as reported, Checkpoints(scratch) as checkpoints:
        restored = checkpoints.restore(abstract)
      step = int(restored.step)
      assert_same_bits(restored, expected[step])  # never another value
      if step == 2:
        outcome = "unharmed"
        assert not reported and sorted(os.listdir(scratch)) == ["1", "2"]
      else:
        outcome = "renamed"
        (line,) = reported
        assert "checkpoint 2 is damaged" in line and "\n" not in line
        assert sorted(os.listdir(scratch)) == ["1", "2.damaged"]
      found.setdefault((kind_of(file), damage), set()).add(outcome)
  return found


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
  directory = tmp_path_factory.mktemp("one")
  _, state = make_states(2)
  with Checkpoints(directory) as checkpoints:
    for step in (1, 2):
      checkpoints.save(at_step(state, step))
  return directory


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
  directory = tmp_path_factory.mktemp("two")
  run_pair(directory)
  return directory


def assert_carried(found):
  """Assert that damage to each file that has a part of the state is reported."""
  for kind, damage in found:
    vital = ("2/manifest.json", "2/state/manifest.ocdbt")
    if kind in vital and not damage.startswith("flip"):
      # Without the index of all parts, those of the processes are merged again.
      is_merged_again = kind.endswith("/state/manifest.ocdbt") and damage == "gone"
      outcome = "unharmed" if is_merged_again else "renamed"
      assert found[kind, damage] == {outcome}, (kind, damage)
  data = [k for k, d in found if k.endswith("process_0/d/*") and d == "gone"]
  assert data and all("renamed" in found[k, "gone"] for k in data)


@pytest.mark.slow
def test_damage_to_every_file(of_one, tmp_path):
  found = sweep(of_one, tmp_path / "scratch", flips=9)
  assert_carried(found)
  reported = "checkpoint 2 is damaged (…); renamed it to 2.damaged, resuming from 1"
  fault = "flip, cut, empty, delete, in each file of a checkpoint"
  measured(fault, None, 0, reported, "what the damaged one had")


@pytest.mark.slow
def test_damage_to_every_file_of_two_processes(of_two, tmp_path):
  found = sweep(of_two, tmp_path / "scratch", flips=3)
  assert_carried(found)
  assert any("process_1" in kind for kind, _ in found)


@pytest.mark.slow
def test_a_directory_without_a_checkpoint_is_noticed(of_one, tmp_path, reported):
  """Killed by hand or by a purge: what is empty or has lost its state."""
  abstract, state = make_states(1)
  for lost in ("everything", "state"):
    scratch = tmp_path / lost
    shutil.copytree(of_one, scratch)
    shutil.rmtree(scratch / "2" if lost == "everything" else scratch / "2" / "state")
    (scratch / "2").mkdir(exist_ok=True)
    reported.clear()
    with Checkpoints(scratch) as checkpoints:
      assert_same_bits(checkpoints.restore(abstract), at_step(state, 1))
    assert "checkpoint 2 is damaged" in reported[0]


def test_a_run_with_nothing_but_damage_never_starts_anew(of_one, tmp_path):
  abstract, _ = make_states(1)
  shutil.copytree(of_one, tmp_path / "all")
  for step in "12":
    (tmp_path / "all" / step / "manifest.json").unlink()
  for _ in range(2):  # also when it is started once more
    with (
      Checkpoints(tmp_path / "all") as checkpoints,
      pytest.raises(ConfigError, match="all checkpoints are damaged"),
    ):
      checkpoints.restore(abstract)


def test_plain_orbax_reads_the_arrays(of_one):
  import orbax.checkpoint as ocp

  abstract, state = make_states(2)
  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(of_one / "2" / "state", abstract)
  assert_same_bits(restored, at_step(state, 2))


@pytest.mark.slow
def test_the_command_line_says_damage_in_one_line(tmp_path):
  workdir = tmp_path / "run"
  args = [*ARGS, "--config.epochs=3"]
  assert run_train(workdir, *args).returncode == 0
  for name in checkpoint_names(workdir):
    (workdir / "checkpoints" / name / "manifest.json").write_text("{")
  done = run_train(workdir, *args)
  assert "all checkpoints are damaged" in error_line(done, 2)
