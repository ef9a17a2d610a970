"""Runs under layouts as real processes: killed, moved to other layouts, spread."""

import functools
import shutil

import pytest

from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from support.commands import error_line, run_train, trained
from support.compiling import fast_compile_env
from support.tiny_runs import (
  checksums,
  is_saving,
  kill,
  newest_step,
  record,
  restored,
  run_processes,
)
from support.trees import assert_close

pytestmark = pytest.mark.slow

CONFIG, STEPS = "tests/support/tiny_language.py", 27
# Most of their time they compile, all on the same cores.
QUICK = {"config": CONFIG, **fast_compile_env()}


def layout(shard="none", **sizes):
  mesh = {"data": 1} | sizes
  args = [f"--config.mesh.{axis}={n}" for axis, n in mesh.items()]
  return [*args, f"--config.layout.shard={shard}"]


FSDP = layout("fsdp", fsdp=8)
HYBRID = layout("fsdp", data=2, fsdp=2, model=2)
# On four devices.
FOUR = {
  "fsdp": layout("fsdp", fsdp=4),
  "data x model": layout(data=2, model=2),
  "stage x model": [*layout(stage=2, model=2), "--config.accumulate_steps=4"],
}


def run(workdir, *args, num_devices=8):
  return trained(workdir, *args, **QUICK, num_devices=num_devices)


def final_state(workdir):
  """Return the newest checkpoint of a run on the host, read under its own layout."""
  state = restored(workdir, build.experiment(load_config(CONFIG, {"mesh.data": "8"})))
  assert state.step == STEPS
  return state


def assert_same_numbers(workdir, reference, bound=1e-6):
  """Losses of every step, evaluations and the last state, to rounding."""
  losses = 0
  for a, b in zip(record(workdir), record(reference), strict=True):
    assert (a.keys(), a["step"]) == (b.keys(), b["step"])
    for name in {"train/loss", "eval/loss"} & b.keys():
      assert a[name] == pytest.approx(b[name], rel=bound), (name, b["step"])
      losses += 1
  assert losses == STEPS + 2
  # Over 27 steps what an order of additions does grows: 2e-5 of a momentum was seen.
  assert_close(final_state(workdir), final_state(reference), 100 * bound)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole") / "run"
  run(workdir, *HYBRID)
  return workdir


def stop(workdir, args, until, *, in_mid_save=False):
  kill(workdir, *args, until=until, in_mid_save=in_mid_save, num_devices=8, **QUICK)


def test_kills_in_mid_run_and_in_mid_save_change_no_bit(tmp_path, uninterrupted):
  workdir = tmp_path / "run"
  stop(workdir, HYBRID, 8, in_mid_save=True)
  assert is_saving(workdir)
  stop(workdir, HYBRID, 18)
  assert 0 < newest_step(workdir) < STEPS
  assert "resuming from the checkpoint of step" in run(workdir, *HYBRID)
  assert not is_saving(workdir)
  assert checksums(workdir) == checksums(uninterrupted)
  # XLA on CPU does not always add up the losses of four devices in the same order.
  assert_same_numbers(workdir, uninterrupted)


def test_a_killed_run_resumes_under_another_layout(tmp_path, uninterrupted):
  """There and back again; and on a single device without any.

  tests/parallel/test_layout_checkpoint.py has every pair of layouts, in one process.
  """
  workdir = tmp_path / "run"
  stop(workdir, HYBRID, 8, in_mid_save=True)
  step = newest_step(workdir)
  alone = shutil.copytree(workdir, tmp_path / "alone")
  stop(workdir, FSDP, 18, in_mid_save=True)
  assert step < (later := newest_step(workdir)) < STEPS
  out = run(workdir, *HYBRID)
  assert f"resuming from the checkpoint of step {later}" in out
  assert_same_numbers(workdir, uninterrupted)
  out = run(alone, num_devices=1)
  assert f"resuming from the checkpoint of step {step}" in out
  assert_same_numbers(alone, uninterrupted)


def test_what_an_exchange_keeps_of_parts_is_refused_elsewhere(tmp_path):
  delayed = "--config.exchange.delayed=True"
  hybrid = layout("fsdp", data=2, fsdp=4)
  stop(tmp_path, [*hybrid, delayed], 18)
  done = run_train(tmp_path, delayed, config=CONFIG, num_devices=8)
  line = error_line(done, 2)
  assert "saved under another layout, whose parts of gradients no device has now" in line
  assert "resume with the mesh and layout it was saved with, or use another" in line


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
  """Return a function that runs one process with four devices, and returns its workdir."""

  @functools.cache
  def of(name):
    workdir = tmp_path_factory.mktemp("one") / "run"
    run(workdir, *FOUR[name], num_devices=4)
    return workdir

  return of


def run_group(workdir, count, num_devices, *args):
  results = run_processes(workdir, count, num_devices, *args, **QUICK)
  assert [code for *_, code in results] == [0] * count, [err for _, err, _ in results]
  assert all("step" not in out for out, *_ in results[1:])  # one of them talks
  return results[0][0]


# Each layout in four processes and, where two devices of one may share an axis, in
# two of two: here or in the test of resuming.
GROUPS = [("fsdp", 4, 1), ("data x model", 2, 2), ("stage x model", 4, 1)]


@pytest.mark.parametrize(("name", "count", "num_devices"), GROUPS)
def test_processes_train_as_one_with_as_many_devices(
  tmp_path, in_one_process, name, count, num_devices
):
  out = run_group(tmp_path / "run", count, num_devices, *FOUR[name])
  assert "done: validation loss" in out
  assert_same_numbers(tmp_path / "run", in_one_process(name))
  # And one process resumes what they have saved: here it evaluates.
  out = run(tmp_path / "run", *FOUR["fsdp"], num_devices=4)
  assert f"all {STEPS} steps are already done" in out


@pytest.mark.parametrize(("name", "count", "num_devices"), [("fsdp", 2, 2), ("data x model", 4, 1)])
def test_processes_resume_from_what_one_has_saved(
  tmp_path, in_one_process, name, count, num_devices
):
  """The state was saved under another layout, by 8 devices in one process."""
  workdir = tmp_path / "run"
  stop(workdir, HYBRID, 18)
  out = run_group(workdir, count, num_devices, *FOUR[name])
  assert "resuming from the checkpoint of step" in out
  assert_same_numbers(workdir, in_one_process(name))
