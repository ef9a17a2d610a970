"""Signals, the walltime and requeues: real processes, also with JAX."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, child_env
from test_watch import ends, family, wait_up  # noqa: F401

from jaxscale.cluster import requeue, signals, walltime
from jaxscale.cluster.signals import Latch, exit_code

# The main thread of this process never comes back to Python.
STUCK = """
import ctypes, os, signal, sys, time
from jaxscale.cluster.signals import Latch
latch = Latch(grace_s=0.6)
latch.attach(lambda reason: print("asked", reason, flush=True))
print("up", flush=True)
lock = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(lock)
ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.fixture
def child():
  """Starts a process; ends it."""
  started = []

  def start(code, *args, env=None):
    process = subprocess.Popen(
      [sys.executable, "-c", code, *map(str, args)],
      env=(env or os.environ) | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    started.append(process)
    return process

  yield start
  for process in started:
    process.kill()
    process.communicate()


def line_of(process):
  """The next line that is not Gloo's."""
  while (line := process.stdout.readline()).startswith("[Gloo]"):
    pass
  return line.strip()


def test_sigterm_reaches_a_stuck_process_and_has_a_deadline(child):
  process = child(STUCK)
  assert line_of(process) == "up"
  began = time.monotonic()
  process.send_signal(signal.SIGTERM)
  assert line_of(process) == "asked SIGTERM"
  _, error = process.communicate(timeout=5)
  assert 0.5 < time.monotonic() - began < 2.0
  assert process.returncode == 85
  assert error == "error: SIGTERM 1 s ago, and it could not save since\n"


def test_usr1_has_no_deadline_until_sigterm_follows(child):
  process = child(STUCK)
  assert line_of(process) == "up"
  process.send_signal(signal.SIGUSR1)
  assert line_of(process) == "asked SIGUSR1"
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(1.0)
  process.send_signal(signal.SIGTERM)  # no second request, but the clock
  out, _ = process.communicate(timeout=5)
  assert process.returncode == 85 and out == ""


def test_the_second_ctrl_c_leaves_at_once(child):
  process = child(STUCK)
  assert line_of(process) == "up"
  process.send_signal(signal.SIGINT)
  assert line_of(process) == "asked Ctrl-C"
  process.send_signal(signal.SIGINT)
  began = time.monotonic()
  _, error = process.communicate(timeout=5)
  assert process.returncode == 130 and time.monotonic() - began < 1.0
  assert error == "error: a second Ctrl-C: left without a save\n"


def test_a_signal_before_anybody_listens_is_kept():
  asked = []
  with Latch(grace_s=None) as latch:
    signal.raise_signal(signal.SIGUSR2)
    until = time.monotonic() + 5
    while latch.reason is None and time.monotonic() < until:
      time.sleep(0.001)
    assert asked == []
    latch.attach(asked.append)
    assert asked == ["SIGUSR2"] and latch.reason == "SIGUSR2"


def test_saved_in_time_nothing_happens():
  left = []
  with Latch(grace_s=0.2) as latch:
    asked = threading.Event()
    latch.attach(lambda reason: asked.set(), lambda *fault: left.append(fault))
    signal.raise_signal(signal.SIGTERM)
    assert asked.wait(5)
    latch.saved()
    time.sleep(0.4)
  assert left == []


def test_the_signals_are_given_back():
  before = [signal.getsignal(number) for number in signals.STOPPING]
  with Latch():
    assert signal.getsignal(signal.SIGTERM) not in before
  assert [signal.getsignal(number) for number in signals.STOPPING] == before
  assert signal.set_wakeup_fd(-1) == -1
  # In a notebook's worker thread nothing can be caught, and nothing breaks.
  made = []
  thread = threading.Thread(target=lambda: made.append(Latch().close()))
  thread.start()
  thread.join()
  assert made == [None]


FORKS = """
import os, signal, sys, time
from jaxscale.cluster.signals import Latch
latch = Latch(grace_s=None)
asked = []
latch.attach(asked.append)
def ended_by(number):
  child = os.fork()
  if child == 0:
    try:
      time.sleep(100)
    except KeyboardInterrupt:
      os._exit(7)
  time.sleep(0.2)
  os.kill(child, number)
  status = os.waitpid(child, 0)[1]
  time.sleep(0.2)
  return status
print(os.WTERMSIG(ended_by(signal.SIGTERM)), asked)
print(os.WEXITSTATUS(ended_by(signal.SIGINT)), asked)
"""


def test_a_worker_dies_of_its_own_signal(child):
  out, error = child(FORKS).communicate(timeout=20)
  assert out == f"{int(signal.SIGTERM)} []\n7 []\n", error


# Steps until all agree to stop; 85 as the run's own main would.
STOPS = """
from jaxscale.cluster.signals import Latch, exit_code
latch = Latch(grace_s=5.0)
latch.attach(w.stop.request, w.fail)
step, why = 0, None
while not why:
  step += 1
  w.at(step, "input")
  if step == 5:
    print("up", flush=True)
  time.sleep(0.01 * (rank + 1))
  w.at(step, "step")
  why = w.stop.poll()
w.at(step, "saving")
print(step, why, flush=True)
w.close()
sys.exit(exit_code(why))
"""


@pytest.mark.parametrize("told", [[2], [0], [0, 1, 2]])
def test_processes_stop_at_one_step_whoever_is_told(family, told):  # noqa: F811
  processes = family(STOPS, STOPS, STOPS)
  wait_up(processes)
  for rank in told:
    processes[rank].send_signal(signal.SIGTERM)
  outs = [p.communicate(timeout=10) for p in processes]
  assert [p.returncode for p in processes] == [85, 85, 85]
  assert len({out for out, _ in outs}) == 1
  who = "".join(map(str, told))
  assert re.fullmatch(rf"\d+ SIGTERM at process [{who}] on n\d\n", outs[0][0])
  assert outs[0][1].count("\n") == 1 and "all stop together" in outs[0][1]
  assert outs[1][1] == outs[2][1] == ""


def test_who_cannot_save_in_time_ends_all_with_85(family):  # noqa: F811
  stuck = STOPS.replace("grace_s=5.0", "grace_s=0.5")
  stuck = stuck.replace("print(step, why, flush=True)", "time.sleep(100)")
  processes = family(stuck, stuck)
  wait_up(processes)
  processes[1].send_signal(signal.SIGTERM)
  codes, errors = ends(processes, within=5)
  assert codes == [85, 85]
  assert re.search(
    r"process 1 on n1 failed in step \d+ \(saving\): SIGTERM 0 s ago", errors[0]
  )


def test_a_suspended_job_goes_on(family):  # noqa: F811
  processes = family(STOPS, STOPS, STOPS)
  wait_up(processes)
  # As `scontrol suspend` and `scontrol resume`: longer than any limit of theirs.
  for number, pause in (
    (signal.SIGTSTP, 0.2),
    (signal.SIGSTOP, 3),
    (signal.SIGCONT, 1),
  ):
    for process in processes:
      process.send_signal(number)
    time.sleep(pause)
  processes[1].send_signal(signal.SIGUSR1)
  codes, errors = ends(processes, within=10)
  assert codes == [85, 85, 85], errors


WITH_JAX = """
import os, sys, time, threading
from pathlib import Path
rank, port, ours = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "ours"
from jaxscale.cluster import signals
latch = signals.Latch(grace_s=3.0)
if ours:
  signals.forbid_notifier()
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)
from jax.experimental import multihost_utils
latch.attach(lambda reason: print("asked", reason, flush=True))
multihost_utils.process_allgather(np.ones(1))
print("up", flush=True)
if rank == 1:
  time.sleep(1000)
multihost_utils.process_allgather(np.ones(1))  # waits for rank 1
"""


@pytest.mark.parametrize(
  "ours", ["ours", pytest.param("xla's", marks=pytest.mark.slow)]
)
def test_sigterm_in_a_collective_of_jax(child, ours):
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
  processes = [child(WITH_JAX, rank, port, ours, env=child_env()) for rank in (0, 1)]
  try:
    for process in processes:
      assert line_of(process) == "up"
    time.sleep(0.5)  # rank 0 is inside the collective
    began = time.monotonic()
    processes[0].send_signal(signal.SIGTERM)
    if ours == "ours":
      assert line_of(processes[0]) == "asked SIGTERM"
      assert time.monotonic() - began < 1.0
      assert processes[0].wait(10) == 85
      assert 2.5 < time.monotonic() - began < 6.0
    else:  # JAX's way, which is why it is off: nobody hears of it
      time.sleep(4.0)
      assert processes[0].poll() is None
  finally:
    for process in processes:
      process.kill()
  if ours != "ours":
    assert "asked" not in processes[0].stdout.read()


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
  """A command in front of the real one, if there is one; what it was asked."""
  asked = tmp_path / "asked"

  def install(script):
    path = tmp_path / "bin" / "scontrol"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n{script}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return asked

  return install


def test_the_end_of_the_job(scontrol, monkeypatch):
  asked = scontrol(
    "echo '   StartTime=2026-03-01T11:00:00 EndTime=2026-03-01T12:00:00'"
  )
  assert walltime.end_time({"SLURM_JOB_END_TIME": "1772366400"}) == 1772366400.0
  assert not asked.exists()
  monkeypatch.setenv("TZ", "UTC")
  time.tzset()
  try:
    assert walltime.end_time({"SLURM_JOB_ID": "12"}) == 1772366400.0
  finally:
    monkeypatch.undo()
    time.tzset()
  assert asked.read_text() == "show job 12\n"
  assert walltime.end_time({}) is None  # no job
  assert walltime.parse_end_time("EndTime=Unknown") is None


def test_no_end_where_scontrol_fails(scontrol):
  scontrol("exit 1")
  assert walltime.end_time({"SLURM_JOB_ID": "12"}) is None


def test_a_stop_is_asked_for_before_the_end():
  asked = []
  began = time.time()
  walltime.stop_before_end(
    lambda reason: asked.append((time.time(), reason)),
    10.0,
    end=lambda: began + 0.6,
    again=lambda: None,
  )
  time.sleep(0.8)
  # Of so short a job it is a quarter of its 0.6 s that is kept.
  [(when, reason)] = asked
  assert 0.45 <= when - began < 0.7 and reason == "walltime: 0 s are left"


def test_an_end_that_was_moved_is_waited_for():
  asked = []
  began = time.time()
  moved = iter([began + 0.8, began + 0.8])
  walltime.stop_before_end(
    lambda reason: asked.append(time.time()),
    0.1,
    end=lambda: began + 0.5,
    again=lambda: next(moved),
  )
  time.sleep(1.1)
  assert len(asked) == 1 and 0.7 <= asked[0] - began < 1.0
  # No limit: nothing is ever asked. And a run that is over cancels it.
  walltime.stop_before_end(asked.append, 10.0, end=lambda: None)
  walltime.stop_before_end(asked.append, 0.1, end=lambda: time.time() + 0.5).set()
  time.sleep(0.6)
  assert len(asked) == 1


def test_requeue_asks_slurm_for_the_job_or_the_arrays_task(scontrol):
  asked = scontrol("")
  array = {"SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}
  for env in ({"SLURM_JOB_ID": "12"}, {"SLURM_JOB_ID": "1207"} | array):
    env |= {"SLURM_RESTART_COUNT": "2"}
    done = requeue.requeue(requeue.job_name(env), requeue.restarts(env), limit=3)
    assert done.code == 85 and done.line.endswith("is requeued, restart 3")
  lines = ["show job 12", "requeue 12", "show job 1200_7", "requeue 1200_7"]
  assert asked.read_text().splitlines() == lines
  done = requeue.requeue("12", 3, limit=3)
  assert done == (93, "job 12 was requeued 3 times, and not again (limit 3)")
  assert asked.read_text().count("\n") == 4
  assert requeue.requeue(requeue.job_name({}), 0).code == 85


@pytest.mark.parametrize(
  "state", ["COMPLETING Reason=None", "CANCELLED Reason=None", "RUNNING Reason=None"]
)
def test_what_somebody_cancelled_is_not_revived(scontrol, state):
  asked = scontrol(
    f'[ $1 = show ] && echo "   JobState={state} Dependency=(null)"; true'
  )
  done = requeue.requeue("12", 0)
  assert done.code == 85
  if state.startswith("RUNNING"):
    assert done.line == "job 12 is requeued, restart 1"
  else:
    assert done.line == "job 12 was ended by others: not requeued"
    assert asked.read_text() == "show job 12\n"


def test_a_requeue_that_slurm_refuses_says_why(scontrol, monkeypatch, tmp_path):
  scontrol("echo 'Requested operation is presently disabled' >&2; exit 1")
  done = requeue.requeue("12", 0)
  assert done.code == 85 and done.line == (
    "job 12 is saved, not requeued: Requested operation is presently disabled"
  )
  monkeypatch.setenv("PATH", str(tmp_path / "empty"))
  assert "scontrol: No such file" in requeue.requeue("12", 0).line


def test_a_loop_without_progress_is_given_up(tmp_path):
  def starts(job, first, steps):
    return [
      requeue.count_start(tmp_path, job, first + n, step)
      for n, step in enumerate(steps)
    ]

  # Progress in between, however little, begins anew; losing a checkpoint is none.
  assert starts("7", 0, [0, 0, 10, 10, 11, 9, 11]) == [0, 1, 0, 1, 0, 1, 2]
  assert starts("7", 7, [11]) == [3]
  assert requeue.refuse_loop(2, 11) is None
  assert "3 restarts without progress, still at step 11" in requeue.refuse_loop(3, 11)
  # Submitted again, by somebody who has looked; a note that is damaged counts none.
  assert starts("8", 0, [11, 11]) == [0, 1]
  (tmp_path / "restarts.json").write_text("{")
  assert starts("8", 2, [11, 11]) == [0, 1]


def test_exit_codes_tell_a_user_from_a_batch_system():
  assert exit_code("Ctrl-C at process 3 on n4") == 130
  assert exit_code("SIGTERM at process 3 on n4") == 85
  assert exit_code("walltime: 60 s are left at process 0 on n1") == 85
