"""Disks that are full, and faults that only one process of two meets."""

import contextlib
import errno
import gc
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from test_checkpoint import assert_identical, at_step, setup
from test_process import ARGS, checkpoint_names, free_port, run_processes, run_train

from jaxscale import metrics
from jaxscale.checkpoint import files
from jaxscale.checkpoint.manager import Checkpoints, UnsavedError
from jaxscale.errors import ConfigError
from support.commands import child_env, own_lines
from support.fault_table import measured
from support.paths import ROOT


@contextlib.contextmanager
def small_disk(path, size):
  """A file system of so many bytes."""
  path.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
  done = subprocess.run(mount, capture_output=True, text=True)
  if done.returncode:
    pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
  try:
    yield path
  finally:
    gc.collect()
    subprocess.run(["umount", "-l", str(path)], check=True)


def enlarge(path, size):
  command = ["mount", "-o", f"remount,size={size}", str(path)]
  subprocess.run(command, check=True)


def fill(path, left):
  """Leave so many bytes free."""
  free = shutil.disk_usage(path).free
  (path / "ballast").write_bytes(bytes(free - left))


WIDE = dict(hidden=(2000,))  # 1.2 MB with the optimizer's state


def test_a_full_disk_costs_one_checkpoint_and_one_line(tmp_path):
  abstract, state = setup(2, **WIDE)
  said = []
  with small_disk(tmp_path / "disk", "6M") as disk:
    options = dict(on_failure="continue", say=said.append)
    with Checkpoints(disk / "checkpoints", **options) as checkpoints:
      checkpoints.save(at_step(state, 1))
      checkpoints.wait()
      fill(disk, 300_000)
      checkpoints.save(at_step(state, 2))
      checkpoints.wait()
      assert checkpoints.steps() == [1] and checkpoints.unsaved == said[0][:-10]
      (line,) = said
      found = re.fullmatch(
        r"checkpoint of step 2 could not be saved: the disk is full, (\S+) MB are "
        r"missing \((\S+) MB needed, (\S+) MB free in \S+\); the newest that is: "
        r"step 1; going on",
        line,
      )
      missing, needed, free = map(float, found.groups())
      size = files.state_bytes(state)
      assert needed == round(size / 1e6, 1) and free == 0.3
      assert missing == pytest.approx(needed - free, abs=0.11)
      assert os.listdir(disk / "checkpoints") == ["1"]  # and its room is free again
      assert_identical(checkpoints.restore(abstract), at_step(state, 1))
      (disk / "ballast").unlink()
      checkpoints.save(at_step(state, 3))
      checkpoints.wait()
      assert checkpoints.unsaved is None and checkpoints.steps() == [1, 3]


def test_what_a_failed_save_writes_on_is_removed(tmp_path, monkeypatch):
  """A thread of it that is not done yet brings back what was removed."""
  _, state = setup(2)
  start, written = files.start_writing, []

  def write_late():
    (written[-1] / "state").mkdir(parents=True)
    (written[-1] / "state" / "late").write_bytes(b"late")

  def start_and_fail(directory, state):
    written.append(directory)
    start(directory, state)()
    raise OSError(errno.ENOSPC, "No space left on device")

  options = dict(on_failure="continue", say=lambda line: None)
  with Checkpoints(tmp_path / "checkpoints", **options) as checkpoints:
    with monkeypatch.context() as patch:
      patch.setattr(files, "start_writing", start_and_fail)
      checkpoints.save(at_step(state, 1))
      checkpoints.wait()
      assert not written[0].exists()
      write_late()
    checkpoints.save(at_step(state, 2))
    checkpoints.wait()
    assert checkpoint_names(tmp_path) == ["2"]
    write_late()
    assert len(checkpoint_names(tmp_path)) == 2
  assert checkpoint_names(tmp_path) == ["2"]


def test_a_full_disk_may_stop_the_run(tmp_path, capfd):
  _, state = setup(1, **WIDE)
  with small_disk(tmp_path / "disk", "500k") as disk, Checkpoints(disk) as checkpoints:
    checkpoints.save(at_step(state, 1))
    with pytest.raises(UnsavedError, match="MB are missing"):
      checkpoints.wait()
    checkpoints.wait()  # said once
  said = capfd.readouterr()
  assert not said.out and not said.err  # no traceback of a thread either


def test_a_directory_that_cannot_be_written(tmp_path):
  _, state = setup(1)
  (tmp_path / "file").write_text("")
  with (
    Checkpoints(tmp_path / "file" / "x") as checkpoints,
    pytest.raises(UnsavedError, match="could not be saved: NotADirectoryError"),
  ):
    checkpoints.save(at_step(state, 1))


def test_metrics_wait_for_the_disk(tmp_path):
  said = []
  with small_disk(tmp_path / "disk", "200k") as disk:
    writer = metrics.MetricWriter(disk, say=said.append)
    writer.write(1, {"train/loss": 1.0})
    fill(disk, 0)
    for step in range(2, 400):
      writer.write(step, {"train/loss": 1.0 / step})
    assert [s.split(": ")[1][:23] for s in said] == ["No space left on device"] * 2
    assert len(metrics.read_json_lines(disk / "metrics.jsonl")) < 399
    (disk / "ballast").unlink()
    writer.write(400, {"train/loss": 0.0})
    writer.close()
    lines = metrics.read_json_lines(disk / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 401)] and len(said) == 2
    fill(disk, 0)
    with pytest.raises(ConfigError, match="No space left"):
      metrics.MetricWriter(disk, start=400)
    assert len(metrics.read_json_lines(disk / "metrics.jsonl")) == 400


def test_event_files_are_what_tensorboard_reads(tmp_path):
  """Of a run that goes on after step 4: the steps after it are to be forgotten."""
  from tensorboardX.proto.event_pb2 import Event

  (tmp_path / "metrics.jsonl").write_text("")
  writer = metrics.MetricWriter(tmp_path, start=4)
  writer.write(5, {"train/loss": 0.5})
  writer.close()
  (path,) = (tmp_path / "tensorboard").iterdir()
  content, events = path.read_bytes(), []
  while content:  # TFRecord: length, its crc, the record, its crc
    length = int.from_bytes(content[:8], "little")
    events.append(Event.FromString(content[12 : 12 + length]))
    content = content[16 + length :]
  version, start, loss = events
  assert version.file_version == "brain.Event:2"
  assert start.step == 5 and start.session_log.status == start.session_log.START
  assert loss.step == 5 and loss.summary.value[0].tag == "train/loss"
  assert loss.summary.value[0].simple_value == 0.5


FULL = ["--config.model.hidden=(1500,)", "--config.epochs=3"]  # 1.3 MB a checkpoint


def assert_full(workdir, code, out, err):
  line = err.removesuffix("\n")
  assert code == 1 and line.startswith("error: ") and "\n" not in line, err
  assert "the disk is full" in line and "MB are missing" in line
  assert "step 34/34  held-out accuracy" in out  # it went on to its end
  names = checkpoint_names(workdir)
  assert all(name.isdigit() for name in names)  # whole ones, nothing half-written
  assert f"the newest that is: step {max(map(int, names))};" in line


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_with_one_line_and_goes_on_later(tmp_path):
  with small_disk(tmp_path / "disk", "2600k") as disk:
    done = run_train(disk / "run", *ARGS, *FULL)
    assert_full(disk / "run", done.returncode, done.stdout, done.stderr)
    assert done.stdout.count("could not be saved: the disk is full") > 1
    assert "Traceback" not in done.stdout
    enlarge(disk, "20M")
    done = run_train(disk / "run", *ARGS, *FULL)
    assert done.returncode == 0, done.stderr
    assert "going on from the checkpoint of step" in done.stdout


@pytest.mark.slow
def test_two_processes_on_a_full_disk_both_end(tmp_path):
  with small_disk(tmp_path / "disk", "2600k") as disk:
    began = time.monotonic()
    (out, err, code), (out1, err1, code1) = run_processes(disk / "run", 2, 1, *FULL)
    assert_full(disk / "run", code, out, err)
    assert code1 == 1 and "Traceback" not in out + out1 + err + err1
    lost = "what no checkpoint had room for"
    measured("disk full, on_failure=continue", None, 1, err.splitlines()[-1], lost)
    assert time.monotonic() - began < 200


# One process of two meets a fault, at one moment of a save after the other, and
# then as both restore; `full` in the place of a function is a disk that is full.
PAIR = """
import sys; sys.path[:0] = ["tests", "tests/parallel"]
from jaxscale import cluster
cluster.initialize()
import jax; jax.config.update("jax_num_cpu_devices", 1)
from jaxscale.checkpoint import files
from jaxscale.checkpoint.manager import Checkpoints
from test_checkpoint import at_step, setup

directory, faults, me = sys.argv[1], sys.argv[2], jax.process_index()
abstract, state = setup(2)
shardings = jax.tree.map(lambda x: x.sharding, state)
start, finish, load = files.start_writing, files.finish, files.load

def state_at(step):
  return jax.jit(lambda s: at_step(s, step), out_shardings=shardings)(state)

def full(*args, **kwargs): raise OSError(28, "No space left on device")
def later(*args): start(*args)(); return full
def of_two(path, *args, **kwargs):
  return (full if path.name == "2" else load)(path, *args, **kwargs)

with Checkpoints(directory, on_failure="continue") as checkpoints:
  for step in (1, 2):
    checkpoints.save(state_at(step)); checkpoints.wait()
  if faults:
    for step, who, name, fault in (
      (3, 1, "start_writing", full), (4, 1, "start_writing", later),
      (5, 0, "finish", full),
    ):
      if me == who: setattr(files, name, fault)
      checkpoints.save(state_at(step))
      for _ in range(3): checkpoints.poll()
      checkpoints.wait()
      assert checkpoints.unsaved and checkpoints.steps() == [1, 2]
      files.start_writing, files.finish = start, finish
    if me == 1: files.load = of_two
    print("restored", int(checkpoints.restore(abstract).step))
    checkpoints.save(state_at(6)); checkpoints.wait()
    assert not checkpoints.unsaved and checkpoints.steps() == [1, 6]
cluster.barrier("end")
"""


def run_pair(directory, faults=""):
  """What two processes say that do this."""
  coordinator = f"127.0.0.1:{free_port()}"
  group = [
    subprocess.Popen(
      [sys.executable, "-c", PAIR, str(directory), faults],
      env=child_env(
        JAXSCALE_COORDINATOR=coordinator,
        JAXSCALE_NUM_PROCESSES="2",
        JAXSCALE_PROCESS_ID=str(i),
      ),
      cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for i in range(2)
  ]  # fmt: skip
  try:
    ended = [(*p.communicate(timeout=240), p.returncode) for p in group]
  finally:
    for process in group:
      process.kill()
      process.communicate()
  assert [code for *_, code in ended] == [0, 0], ended
  assert not any("Traceback" in err for _, err, _ in ended)
  return [own_lines(out) for out, *_ in ended]


def test_what_one_process_cannot_do_none_waits_for(tmp_path):
  first, second = run_pair(tmp_path, "faults")
  *unsaved, damaged, restored = first
  for line, step, who in zip(unsaved, (3, 4, 5), (1, 1, 0), strict=True):
    assert f"step {step} could not be saved" in line and f"process {who}" in line
    assert "the newest that is: step 2; going on" in line
  assert "checkpoint 2 is damaged ([Errno 28]" in damaged
  assert [restored] == second == ["restored 1"]
  assert sorted(os.listdir(tmp_path)) == ["1", "2.damaged", "6"]
