"""One run at a time writes into a directory, and a run that was replaced knows."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxscale.checkpoint import lock
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cluster.schedulers import current_job
from jaxscale.errors import ConfigError
from support.cases import all_slow_except
from support.commands import child_env, error_line, run_train, trained
from support.fault_table import measured
from support.processes import killed_at_end, popen, run_group, wait_until
from support.states import at_step, make_states
from support.tiny_runs import ARGS, assert_same_run, checkpoint_names, start
from support.trees import assert_same_bits


def names(workdir):
  return sorted(p.name for p in (workdir / "lock").iterdir())


def python(code, *args, **env):
  """Start a process that runs this."""
  return popen(sys.executable, "-c", code, *args, env=child_env(**env), stdin=subprocess.PIPE)


TAKE = """
import os, sys; from pathlib import Path; from jaxscale.checkpoint import lock
from jaxscale.errors import ConfigError
try: held = lock.acquire(Path(sys.argv[1]), sys.argv[2], renew_s=0.1)
except ConfigError as e: print("refused", e); sys.exit(2)
print("taken", held.token, flush=True)
sys.stdin.readline()
os._exit(0)  # as if killed: nothing is released
"""


def test_a_lock_that_was_released_is_free(tmp_path):
  with lock.acquire(tmp_path) as first:
    assert names(tmp_path) == ["1"]
    first.check()
  assert names(tmp_path) == ["1.released"]
  with lock.acquire(tmp_path) as second:
    assert (first.token, second.token) == (1, 2) and names(tmp_path) == ["2"]
    with pytest.raises(lock.LockLostError):
      first.check()


def test_a_run_that_lives_is_not_disturbed(tmp_path):
  with killed_at_end(python(TAKE, tmp_path, "")) as other:
    assert other.stdout.readline() == "taken 1\n"
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
      lock.acquire(tmp_path)
    assert time.monotonic() - began < lock.EXPIRE_S / 2
    line = str(error.value)
    for reported in (os.uname().nodename, f"pid {other.pid}", "since 20", "--workdir"):
      assert reported in line
    assert f"kill {other.pid}" in line and "\n" not in line
    assert names(tmp_path) == ["1"]
    # Once it is gone without a word, nobody waits for its lock to expire.
    other.communicate("\n")
    with lock.acquire(tmp_path) as held:
      assert held.token == 2 and time.monotonic() - began < lock.EXPIRE_S


def test_a_restart_replaces_what_is_left_of_its_job(tmp_path):
  with lock.acquire(tmp_path, "slurm-7.0-r0", renew_s=0.05) as old:
    with lock.acquire(tmp_path, "slurm-7.0-r1") as new:
      new.check()
      with pytest.raises(lock.LockLostError, match=r"taken over .*slurm-7\.0-r1"):
        old.check()
      assert not lock.is_held(old) and lock.is_held(new) and lock.is_held(None)
    old._thread.join(300)
    assert not old._thread.is_alive()
  assert names(tmp_path) == ["2.released"]  # the old one has nothing to let go


def of_another_host(directory, job="", age=0.0):
  """Write a lock as a run on another machine holds it; return its path."""
  (directory / "lock").mkdir(exist_ok=True)
  who = lock.LockOwner("far-away", 12, job, time.time() - 1000, "boot ns 1")
  path = directory / "lock" / "1"
  path.write_text(json.dumps(who._asdict()))
  os.utime(path, (time.time() - age,) * 2)
  return path


def test_a_run_elsewhere_is_waited_for_until_its_lock_expires(tmp_path):
  of_another_host(tmp_path)
  reported, began = [], time.monotonic()
  with lock.acquire(tmp_path, log=reported.append, expire_s=2) as held:
    assert held.token == 2 and time.monotonic() - began > 1.5
  assert len(reported) == 1 and "far-away" in reported[0] and "waiting up to 2 s" in reported[0]


@pytest.mark.parametrize(
  "theirs, age, ours",
  [("", 61, ""), ("slurm-7.0-r0", lock.EXPIRE_SAME_JOB_S + 1, "slurm-7.1-r0")],
  ids=["expired", "a later step of the job"],
)
def test_a_lock_that_expired_is_acquired_at_once(tmp_path, theirs, age, ours):
  of_another_host(tmp_path, theirs, age)
  with lock.acquire(tmp_path, ours, log=pytest.fail) as held:
    assert held.token == 2


def test_a_run_elsewhere_that_renews_is_not_disturbed(tmp_path):
  path = of_another_host(tmp_path, "slurm-7.0-r0")

  def renew(line):  # between the first look and the second
    os.utime(path, (time.time() + 1,) * 2)

  with pytest.raises(ConfigError, match=r"far-away.*scancel 7"):
    lock.acquire(tmp_path, "slurm-8.0-r0", log=renew, expire_s=5)


def test_of_many_that_come_at_once_one_gets_it(tmp_path):
  with killed_at_end(*(python(TAKE, tmp_path, "") for _ in range(5))) as group:
    lines = [p.stdout.readline() for p in group]
    assert sorted(line.split()[0] for line in lines) == ["refused"] * 4 + ["taken"]
    assert names(tmp_path) == ["1"]


def test_a_lock_that_was_deleted_counts_as_lost(tmp_path):
  with lock.acquire(tmp_path) as held:
    held.path.unlink()
    with pytest.raises(lock.LockLostError, match="removed"):
      held.check()


def test_a_file_server_that_does_not_answer_loses_nothing(tmp_path, monkeypatch):
  with lock.acquire(tmp_path) as held:
    with monkeypatch.context() as patch:

      def away(path, **options):
        raise OSError(5, "Input/output error")

      patch.setattr(os, "utime", away)
      with pytest.raises(OSError):
        held.check()
    held.check()


def test_jobs_and_restarts():
  env = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}
  assert current_job({}) is None
  assert str(current_job(env)) == "slurm-12.0-r0"
  assert str(current_job(env | {"SLURM_RESTART_COUNT": "2"})) == "slurm-12.0-r2"
  array = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}
  assert str(current_job(env | array)) == "slurm-9_3.0-r0"
  r = lock.is_restart
  assert r("slurm-12.0-r1", "slurm-12.4-r0") and r("slurm-12-r2", "slurm-12.0-r0")
  assert not r("slurm-12.1-r0", "slurm-12.0-r0")  # may run at the same time
  assert not r("slurm-12.0-r0", "slurm-12.0-r1")  # the older comes back
  assert not r("slurm-13.0-r1", "slurm-12.0-r0") and not r("", "")
  assert not r("slurm-9_3.0-r1", "slurm-9_4.0-r0")


# A run that is suspended at one moment of a save, and continues when it is replaced.
ZOMBIE = """
import os, signal, sys, time
sys.path[:0] = ["tests", "tests/parallel"]
import jax; jax.config.update("jax_num_cpu_devices", 1)
from pathlib import Path
from jaxscale.checkpoint import checkpoint_files, lock
from jaxscale.checkpoint.manager import Checkpoints
from support.states import at_step, make_states

workdir, moment = Path(sys.argv[1]), sys.argv[2]
_, state = make_states(1)
held = lock.acquire(workdir, "slurm-7.0-r0")
begun, check, finish = checkpoint_files.start_writing, held.check, checkpoint_files.finish

def stop():
  os.kill(os.getpid(), signal.SIGSTOP)
  time.sleep(0.1)  # the kernel stops this thread a moment after it has stopped another
def stop_after(function):
  def stopped(*args):
    result = function(*args)
    stop()
    return result
  return stopped

with Checkpoints(workdir / "checkpoints", lock=held) as checkpoints:
  checkpoints.save(at_step(state, 1)); checkpoints.wait()
  if moment == "written": checkpoint_files.start_writing = stop_after(begun)
  if moment == "merged": checkpoint_files.finish = stop_after(finish)
  if moment == "checked":  # the last moment: nothing but the rename is left
    checkpoint_files.finish = lambda *a: (finish(*a), setattr(held, "check", stop_after(check)))
  if moment == "before": stop()
  try:
    checkpoints.save(at_step(state, 2)); checkpoints.wait()
  except lock.LockLostError as e:
    print(e); os._exit(93)
print("not stopped"); os._exit(0)
"""


@pytest.mark.parametrize(
  "moment", all_slow_except(["before", "written", "merged", "checked"], "checked")
)
@pytest.mark.parametrize("same_step", all_slow_except(["under way", "done"], "done"))
def test_a_writer_that_was_replaced_in_mid_save_commits_nothing(tmp_path, moment, same_step):
  """The new run saves another state of the same step, before the old one wakes."""
  with killed_at_end(python(ZOMBIE, tmp_path, moment)) as old:
    wait_until(lambda: state_of(old.pid) == "T", old)
    abstract, state = make_states(1)
    with (
      lock.acquire(tmp_path, "slurm-7.0-r1") as held,
      Checkpoints(tmp_path / "checkpoints", lock=held) as checkpoints,
    ):
      assert checkpoints.steps() == [1]
      mine = at_step(state, 5)._replace(step=at_step(state, 2).step)
      if same_step == "under way":  # a directory of this step that is half-written
        (tmp_path / "checkpoints" / f"2.tmp-{held.token}").mkdir()
      else:
        checkpoints.save(mine)
        checkpoints.wait()
      before = contents(tmp_path)
      os.kill(old.pid, signal.SIGCONT)
      out, err = old.communicate(timeout=300)
      assert old.returncode == 93, out + err
      assert "another run has taken over" in out and "slurm-7.0-r1" in out
      assert contents(tmp_path) == before
      if same_step == "done":
        assert_same_bits(checkpoints.restore(abstract), mine)
      else:
        assert checkpoints.steps() == [1]


def state_of(pid):
  return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def contents(workdir):
  """Every file, but what the old run may still leave in its own scratch space."""
  return {
    str(p.relative_to(workdir)): p.read_bytes()
    for p in (workdir / "checkpoints").rglob("*")
    if p.is_file() and "tmp-1" not in str(p)
  }


@pytest.mark.slow
def test_a_second_run_by_mistake_is_refused_and_the_first_resumes(tmp_path):
  workdir = tmp_path / "run"
  with killed_at_end(start(workdir, "--config.epochs=200")) as first:
    wait_until(lambda: checkpoint_names(workdir), first)
    second = run_train(workdir, *ARGS, "--config.epochs=200")
    line = error_line(second, 2)
    assert f"pid {first.pid}" in line and "another run is writing to it" in line
    measured("a second run in one workdir", None, 2, line)
    assert first.poll() is None


@pytest.mark.slow
def test_a_suspended_run_wakes_up_beside_its_requeue(tmp_path):
  """Bit for bit what one run makes of it, and not a line of the old one in it."""
  whole, workdir = tmp_path / "whole", tmp_path / "run"
  with killed_at_end(start(workdir, SLURM_JOB_ID="7")) as zombie:
    wait_until(lambda: checkpoint_names(workdir), zombie)
    zombie.send_signal(signal.SIGTSTP)  # as `scontrol suspend`, however long it takes
    wait_until(lambda: state_of(zombie.pid) == "T", zombie)
    trained(whole, *ARGS)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    trained(workdir, *ARGS, **job)
    zombie.send_signal(signal.SIGCONT)
    out, err = zombie.communicate(timeout=300)
    assert zombie.returncode == 93, out + err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "slurm-7-r1" in err
    measured("a suspended run and its requeue", None, 93, err)
    assert_same_run(workdir, whole)


@pytest.mark.parametrize("other", ["none", "a lock of its own"])
def test_a_workdir_that_is_not_shared_is_refused_at_the_start(tmp_path, other):
  """Each process has a folder of that name for itself, as on disks of nodes."""
  if other != "none":
    (tmp_path / "run1").mkdir()
    lock.acquire(tmp_path / "run1")._released.set()
  words = [sys.executable, "-m", "jaxscale.train", "--config", "configs/digits.py"]
  words += [*ARGS, f"--workdir={tmp_path}/run"]
  script = f'exec {shlex.join(words)}"$JAXSCALE_PROCESS_ID"'
  ends = run_group(["bash", "-c", script])
  assert [code for *_, code in ends] == [2, 2], ends
  errors = "".join(error for _, error, _ in ends).splitlines()
  (line,) = [x for x in errors if x.startswith("error: ")]
  assert f"--workdir={tmp_path}/run" in line and "is not shared: process 1 on " in line
  assert "does not see lock/1, which process 0 on " in line
  assert line.endswith("use a directory that all nodes mount")
  assert names(tmp_path / "run0") == ["1.released"]


def test_a_directory_that_is_seen_late_is_shared(tmp_path, monkeypatch):
  """An NFS client may say for some time that there is no such directory."""
  held, asked = lock.acquire(tmp_path), []
  read = lock._read

  def late(path):
    asked.append(path)
    return read(path) if len(asked) > 2 else None

  monkeypatch.setattr(lock, "_read", late)
  monkeypatch.setattr(lock.time, "sleep", lambda s: None)
  assert lock._is_seen(tmp_path / "lock", "1", held.owner) and len(asked) == 3
  other = held.owner._replace(pid=1)
  assert not lock._is_seen(tmp_path / "lock", "1", other)
  held.release()
