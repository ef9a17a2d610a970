"""Disks that are full, and faults that only one process of two has."""

import contextlib
import errno
import gc
import os
import re
import shutil
import subprocess
import threading
import time

import jax
import pytest

from jaxscale import metrics
from jaxscale.checkpoint import checkpoint_files
from jaxscale.checkpoint.manager import Checkpoints, UnsavedError
from jaxscale.errors import ConfigError
from support.commands import run_train, trained
from support.fault_table import measured
from support.states import at_step, make_states, run_pair, save
from support.tiny_runs import ARGS, checkpoint_names, events_of, run_processes, shown_by_tensorboard
from support.trees import assert_same_bits


@contextlib.contextmanager
def small_disk(path, size, **options):
  """Mount a file system of a given size."""
  path.mkdir()
  words = ",".join(f"{k}={v}" for k, v in {"size": size, **options}.items())
  mount = ["mount", "-t", "tmpfs", "-o", words, "none", str(path)]
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


def test_a_full_disk_costs_one_checkpoint_and_one_line(tmp_path, reported):
  abstract, state = make_states(2, **WIDE)
  with small_disk(tmp_path / "disk", "6M") as disk:
    options = dict(on_failure="continue")
    with Checkpoints(disk / "checkpoints", **options) as checkpoints:
      save(checkpoints, state, 1)
      fill(disk, 300_000)
      save(checkpoints, state, 2)
      (line,) = reported
      again = "start it again: it resumes from its newest checkpoint"
      line_at_end = line.replace("training continues", f"make room, and {again}")
      assert checkpoints.steps() == [1] and checkpoints.unsaved == line_at_end
      found = re.fullmatch(
        r"checkpoint of step 2 could not be saved: the disk is full, (\S+) KB are "
        r"missing \((\S+) MB needed, (\S+) KB free in \S+\); the newest checkpoint: "
        r"step 1; training continues",
        line,
      )
      missing, needed, free = map(float, found.groups())
      size = sum(x.nbytes for x in jax.tree.leaves(state))
      assert needed == round(size / 1e6, 1) and free == pytest.approx(300, abs=50)
      assert missing == pytest.approx(1e3 * needed - free, abs=110)
      assert os.listdir(disk / "checkpoints") == ["1"]  # and its room is free again
      assert_same_bits(checkpoints.restore(abstract), at_step(state, 1))
      (disk / "ballast").unlink()
      save(checkpoints, state, 3)
      assert checkpoints.unsaved is None and checkpoints.steps() == [1, 3]


def no_inodes(disk):
  with contextlib.suppress(OSError):
    for i in range(1000):
      (disk / f"file-{i}").touch()
  for i in range(4):
    (disk / f"file-{i}").unlink()


def read_only(disk):
  subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


# What a save lacks, and its line: the reason, and what to do.
LACKS = {
  "inodes": (no_inodes, "no inodes (files) are left in ", "delete files, or"),
  "writing": (read_only, "Read-only file system", "mount it for writing"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_each_fault_of_a_save_has_its_own_remedy(tmp_path, lack):
  _, state = make_states(1)
  do, reason, remedy = LACKS[lack]
  options = dict(on_failure="continue")
  with (
    small_disk(tmp_path / "disk", "20M", nr_inodes=200) as disk,
    Checkpoints(disk / "c", **options) as checkpoints,
  ):
    save(checkpoints, state, 1)
    do(disk)
    save(checkpoints, state, 2)
    line = checkpoints.unsaved
    assert line and line.startswith("checkpoint of step 2 could not be saved: ")
    assert reason in line and f"; {remedy}" in line, line
    assert "make room" not in line and checkpoints.steps() == [1]


# TensorStore's words for open files: its kind of error is that of a full disk.
FILES = (
  'RESOURCE_EXHAUSTED: Error opening "zarr" driver: Error reading "step/.zarray": '
  "Failed to open: Too many open files [os_error_code='24'] [source locations='x.cc:1']"
)
ERRORS = {
  "value": (ValueError("No such type"), "ValueError: No such type", "correct this"),
  "files": (OSError(errno.EMFILE, "Too many open files"), "open files", "raise the"),
  "files in text": (ValueError(FILES), "Too many open files", "raise the limit"),
  "quota": (OSError(errno.EDQUOT, "Disk quota"), "quota was full", "make room, or"),
  "disk": (OSError(errno.EIO, "Input/output error"), "Input/output", "have the"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_only_where_room_is_missing_is_it_asked_for(tmp_path, monkeypatch, name):
  error, reason, remedy = ERRORS[name]

  def fail(*args):
    raise error

  _, state = make_states(1)
  monkeypatch.setattr(checkpoint_files, "start_writing", fail)
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(at_step(state, 1))
    with pytest.raises(UnsavedError) as raised:
      checkpoints.wait()
  line = str(raised.value)
  assert reason in line and f"; {remedy}" in line, line
  assert ("room" in line) == (name == "quota") and "\n" not in line


def test_what_a_failed_save_writes_on_is_removed(tmp_path, monkeypatch):
  """A thread of it that is not done yet brings back what was removed."""
  _, state = make_states(2)
  start, written = checkpoint_files.start_writing, []

  def write_late():
    (written[-1] / "state").mkdir(parents=True)
    (written[-1] / "state" / "late").write_bytes(b"late")

  def start_and_fail(directory, state):
    written.append(directory)
    start(directory, state)()
    raise OSError(errno.ENOSPC, "No space left on device")

  options = dict(on_failure="continue")
  with Checkpoints(tmp_path / "checkpoints", **options) as checkpoints:
    with monkeypatch.context() as patch:
      patch.setattr(checkpoint_files, "start_writing", start_and_fail)
      save(checkpoints, state, 1)
      assert not written[0].exists()
      write_late()
    save(checkpoints, state, 2)
    assert checkpoint_names(tmp_path) == ["2"]
    write_late()
    assert len(checkpoint_names(tmp_path)) == 2
  assert checkpoint_names(tmp_path) == ["2"]


def test_a_save_waits_for_a_slow_disk_only_so_long(tmp_path, monkeypatch, reported):
  _, state = make_states(1)
  start, is_fast = checkpoint_files.start_writing, threading.Event()

  def start_slowly(*args):
    written = start(*args)
    return lambda: (is_fast.wait(60), written())

  monkeypatch.setattr(checkpoint_files, "start_writing", start_slowly)
  with Checkpoints(tmp_path, max_wait_s=0.01) as checkpoints:
    checkpoints.save(at_step(state, 1))
    checkpoints.poll()  # neither waits
    checkpoints.save(at_step(state, 2), is_needed=False)
    assert checkpoints.steps() == [] and len(os.listdir(tmp_path)) == 1
    assert reported == [
      "skipping the checkpoint of step 2: the one of step 1 is still being written after 0.01 s"
    ]
    threading.Timer(0.05, is_fast.set).start()
    checkpoints.save(at_step(state, 3))  # the last one waits
    assert checkpoints.steps() == [1] and checkpoints.unsaved is None
    checkpoints.wait()
    save(checkpoints, state, 4, is_needed=False)
    assert checkpoints.steps() == [3, 4] and len(reported) == 1


def test_a_full_disk_may_stop_the_run(tmp_path, capfd, reported):
  _, state = make_states(1, **WIDE)
  with small_disk(tmp_path / "disk", "500k") as disk, Checkpoints(disk) as checkpoints:
    checkpoints.save(at_step(state, 1))
    with pytest.raises(UnsavedError, match="KB are missing"):
      checkpoints.wait()
    checkpoints.wait()  # logged once
  reported = capfd.readouterr()
  assert not reported.out and not reported.err  # no traceback of a thread either


def test_a_directory_that_cannot_be_written(tmp_path):
  _, state = make_states(1)
  (tmp_path / "file").write_text("")
  with (
    Checkpoints(tmp_path / "file" / "x") as checkpoints,
    pytest.raises(UnsavedError, match="could not be saved: NotADirectoryError"),
  ):
    checkpoints.save(at_step(state, 1))


def test_a_list_that_the_disk_does_not_give_costs_one_checkpoint(tmp_path, monkeypatch, reported):
  _, state = make_states(1)
  listdir = os.listdir

  def fail(path):
    if str(path) == str(tmp_path):
      raise OSError(errno.EIO, "Input/output error")
    return listdir(path)

  options = dict(on_failure="continue")
  with Checkpoints(tmp_path, **options) as checkpoints:
    monkeypatch.setattr(os, "listdir", fail)
    save(checkpoints, state, 1)
    monkeypatch.undo()
    save(checkpoints, state, 2)
    assert checkpoints.steps() == [2] and checkpoints.unsaved is None
  (line,) = reported
  assert "Input/output error; the newest checkpoint: unknown; training cont" in line


def test_metrics_wait_for_the_disk(tmp_path, reported):
  with small_disk(tmp_path / "disk", "200k") as disk:
    writer = metrics.MetricWriter(disk)
    writer.write(1, {"train/loss": 1.0})
    fill(disk, 0)
    for step in range(2, 400):
      writer.write(step, {"train/loss": 1.0 / step})
    assert [s.split(": ")[1][:23] for s in reported] == ["No space left on device"] * 2
    assert len(metrics.read_json_lines(disk / "metrics.jsonl")) < 399
    (disk / "ballast").unlink()
    writer.write(400, {"train/loss": 0.0})
    writer.close()
    lines = metrics.read_json_lines(disk / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 401)] and len(reported) == 2
    fill(disk, 0)
    with pytest.raises(ConfigError, match="No space left"):
      metrics.MetricWriter(disk, start=400)
    assert len(metrics.read_json_lines(disk / "metrics.jsonl")) == 400


def test_event_files_are_what_tensorboard_reads(tmp_path):
  """Expect a run that resumes after step 4 to forget the steps after it."""
  (tmp_path / "metrics.jsonl").write_text("")
  writer = metrics.MetricWriter(tmp_path, start=4)
  writer.write(5, {"train/loss": 0.5})
  writer.close()
  (path,) = (tmp_path / "tensorboard").iterdir()
  version, start, loss = events_of(path)
  assert version.file_version == "brain.Event:2"
  assert start.step == 5 and start.session_log.status == start.session_log.START
  assert loss.step == 5 and loss.summary.value[0].tag == "train/loss"
  assert loss.summary.value[0].simple_value == 0.5


@pytest.mark.parametrize("starts", [[0, 0], [0, 3, 0], [0, 3, 3], [0, 5, 2, 0]])
def test_each_step_is_drawn_once_whatever_was_killed(tmp_path, starts, monkeypatch):
  """Killed before the first checkpoint, all steps were drawn twice."""
  for clock, start in enumerate(starts):  # a file is named by the time
    monkeypatch.setattr("jaxscale.metrics.writers.time.time", lambda at=clock: at)
    writer = metrics.MetricWriter(tmp_path, start=start)
    for step in range(start + 1, 7):
      writer.write(step, {"train/loss": 1.0})
    writer.write(6, {"eval/loss": 1.0})
  points = shown_by_tensorboard(tmp_path)
  assert points == [*((s, "train/loss") for s in range(1, 7)), (6, "eval/loss")]
  lines = metrics.read_metrics(tmp_path / "metrics.jsonl")
  assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6]


FULL = ["--config.model.hidden=(1500,)", "--config.epochs=3"]  # 1.3 MB a checkpoint


def assert_full(workdir, code, out, err):
  line = err.removesuffix("\n")
  assert code == 1 and line.startswith("error: ") and "\n" not in line, err
  assert "the disk is full" in line and "are missing" in line
  assert "step 34/34  validation accuracy" in out  # it reached its end
  names = checkpoint_names(workdir)
  assert all(name.isdigit() for name in names)  # whole ones, nothing half-written
  assert f"the newest checkpoint: step {max(map(int, names))};" in line


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_with_one_line_and_resumes_later(tmp_path):
  with small_disk(tmp_path / "disk", "2600k") as disk:
    done = run_train(disk / "run", *ARGS, *FULL)
    assert_full(disk / "run", done.returncode, done.stdout, done.stderr)
    assert done.stdout.count("could not be saved: the disk is full") > 1
    assert "Traceback" not in done.stdout
    enlarge(disk, "20M")
    assert "resuming from the checkpoint of step" in trained(disk / "run", *ARGS, *FULL)


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


@pytest.mark.slow
def test_what_one_process_cannot_do_none_waits_for(tmp_path):
  first, second = run_pair(tmp_path, "faults")
  *unsaved, damaged, restored, late, not_finite = first
  cases = zip(unsaved, (3, 4, 5, 5), (1, 1, 0, 1), strict=True)
  for line, step, who in cases:
    assert f"step {step} could not be saved" in line and f"in process {who}" in line
    assert "the newest checkpoint: step 2; training continues" in line
  assert "checkpoint 2 is damaged ([Errno 28]" in damaged
  assert [restored, not_finite] == second
  assert restored == "restored 1" and not_finite.endswith("not finite at step 8")
  assert "step 7: the one of step 6 is still being written after 0.1 s" in late
  assert sorted(os.listdir(tmp_path)) == ["1", "2.damaged", "6"]
