"""Signals, the walltime and requeues: real processes, also with JAX."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch import signals
from jaxscale.cluster.watch.signals import SignalHandlers
from support.commands import child_env
from support.processes import free_port, line_of
from support.watched import CALM, ends, wait_up

STARTS = "print('up', flush=True); time.sleep(1000)"

# The main thread of this process never comes back to Python.
STUCK = """
import ctypes, os, signal, sys, time
from jaxscale.cluster.watch.signals import SignalHandlers
handlers = SignalHandlers(grace_s=0.6)
handlers.attach(lambda reason: print("asked", reason, flush=True))
print("up", flush=True)
lock = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(lock)
ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


def test_sigterm_reaches_a_stuck_process_and_has_a_deadline(child):
  process = child(STUCK)
  assert line_of(process) == "up"
  began = time.monotonic()
  process.send_signal(signal.SIGTERM)
  assert line_of(process) == "asked SIGTERM"
  _, error = process.communicate(timeout=200)
  assert time.monotonic() - began > 0.5
  assert process.returncode == 85
  assert error == "error: no save within 1 s of SIGTERM; exiting without one\n"


def test_usr1_has_no_deadline_until_sigterm_follows(child):
  process = child(STUCK)
  assert line_of(process) == "up"
  process.send_signal(signal.SIGUSR1)
  assert line_of(process) == "asked SIGUSR1"
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(1.0)
  process.send_signal(signal.SIGTERM)  # no second request, but the clock
  out, _ = process.communicate(timeout=200)
  assert process.returncode == 85 and out == ""


def test_the_second_ctrl_c_leaves_at_once(child):
  process = child(STUCK)
  assert line_of(process) == "up"
  process.send_signal(signal.SIGINT)
  assert line_of(process) == "asked Ctrl-C"
  process.send_signal(signal.SIGINT)
  _, error = process.communicate(timeout=200)
  assert process.returncode == 130
  assert error == "error: second Ctrl-C: exiting without a save\n"


def test_a_signal_before_anybody_listens_is_kept():
  asked = []
  with contextlib.closing(SignalHandlers(grace_s=None)) as handlers:
    signal.raise_signal(signal.SIGUSR2)
    until = time.monotonic() + 100
    while handlers.request is None and time.monotonic() < until:
      time.sleep(0.001)
    assert asked == []
    handlers.attach(asked.append)
    assert asked == [handlers.request] and asked[0].cause == "SIGUSR2"


def test_saved_in_time_nothing_happens():
  left = []
  with contextlib.closing(SignalHandlers(grace_s=0.2)) as handlers:
    asked = threading.Event()
    handlers.attach(lambda reason: asked.set(), lambda *fault: left.append(fault))
    signal.raise_signal(signal.SIGTERM)
    assert asked.wait(300)
    handlers.mark_saved()
    time.sleep(0.4)
  assert left == []


def test_the_signals_are_given_back():
  before = [signal.getsignal(number) for number in signals.STOPPING]
  with contextlib.closing(SignalHandlers(grace_s=None)):
    assert signal.getsignal(signal.SIGTERM) not in before
  assert [signal.getsignal(number) for number in signals.STOPPING] == before
  assert signal.set_wakeup_fd(-1) == -1
  # In a notebook's worker thread nothing can be caught, and nothing breaks.
  made = []
  thread = threading.Thread(target=lambda: made.append(SignalHandlers(grace_s=None).close()))
  thread.start()
  thread.join()
  assert made == [None]


FORKS = """
import os, signal, sys, time
from jaxscale.cluster.watch.signals import SignalHandlers
handlers = SignalHandlers(grace_s=None)
asked = []
handlers.attach(asked.append)
def ended_by(number):
  ready, up = os.pipe()
  child = os.fork()
  if child == 0:
    try:
      os.write(up, b"x")
      time.sleep(300)
    except KeyboardInterrupt:
      os._exit(7)
  os.read(ready, 1)
  os.kill(child, number)
  status = os.waitpid(child, 0)[1]
  time.sleep(0.2)
  return status
print(os.WTERMSIG(ended_by(signal.SIGTERM)), asked)
print(os.WEXITSTATUS(ended_by(signal.SIGINT)), asked)
"""


def test_a_worker_dies_of_its_own_signal(child):
  out, error = child(FORKS).communicate(timeout=200)
  assert out == f"{int(signal.SIGTERM)} []\n7 []\n", error


# Steps until all agree to stop; 85 as the run's own main would.
STOPS = """
from jaxscale.cluster.watch.signals import SignalHandlers
handlers = SignalHandlers(grace_s=200.0)
handlers.attach(w.stop.request, w.fail)
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
sys.exit(why.exit_code)
"""


@pytest.mark.parametrize("told", [[2], [0], [0, 1, 2]])
def test_processes_stop_at_one_step_whoever_is_asked(family, told):
  processes = wait_up(family(STOPS, STOPS, STOPS))
  for rank in told:
    processes[rank].send_signal(signal.SIGTERM)
  outs = [p.communicate(timeout=200) for p in processes]
  assert [p.returncode for p in processes] == [85, 85, 85]
  assert len({out for out, _ in outs}) == 1
  who = "".join(map(str, told))
  assert re.fullmatch(rf"\d+ SIGTERM at process [{who}] on n\d\n", outs[0][0])
  assert outs[0][1].count("\n") == 1 and "all processes save and stop" in outs[0][1]
  assert outs[1][1] == outs[2][1] == ""


def test_who_cannot_save_in_time_ends_all_with_85(family):
  stuck = STOPS.replace("grace_s=200.0", "grace_s=1.0")
  stuck = stuck.replace("print(step, why, flush=True)", STARTS)
  processes = wait_up(family(stuck, stuck))
  processes[1].send_signal(signal.SIGUSR1)  # which starts no clock
  wait_up(processes)  # both are saving
  processes[1].send_signal(signal.SIGTERM)
  codes, errors = ends(processes)
  assert codes == [85, 85]
  assert re.search(
    r"process 1 on n1 failed in step \d+ \(saving\): no save within 1 s of SIGTERM", errors[0]
  )


@pytest.mark.parametrize("what", ["stopped", "asleep"])
def test_who_keeps_another_from_its_save_is_mentioned(family, what):
  body = STOPS.replace("grace_s=200.0", "grace_s=3.0")
  sleeps = f"import time; {STARTS}" if what == "asleep" else "pass"
  other = body.replace('    print("up", flush=True)', f"    {sleeps}")
  other = other if what == "asleep" else body
  processes = wait_up(family(body, other))
  if what == "stopped":
    processes[1].send_signal(signal.SIGSTOP)
  processes[0].send_signal(signal.SIGTERM)
  codes, errors = ends(processes[:1])
  processes[1].kill()
  assert codes == [85]
  assert re.search(r"process 0 on n0 failed .*: no save within 3 s of SIGTERM", errors[0])
  if what == "stopped":
    assert re.search(r"; process 1 on n1 has sent no heartbeat for \d+ s, last", errors[0])
  else:
    pattern = r"; it waits for process 1 on n1, in step 5 \(input\) for \d+ s"
    assert re.search(pattern, errors[0]), errors[0]


def in_a_network_of_its_own(function):
  """Call it in a thread with a network, of which it gets `ip link set lo`."""

  def run():
    assert ctypes.CDLL(None).unshare(0x40000000) == 0  # CLONE_NEWNET, of this thread
    link = lambda state: subprocess.run(["ip", "link", "set", "lo", state], check=True)  # noqa: E731
    link("up")
    return function(link)

  if os.geteuid() != 0 or not shutil.which("ip"):
    pytest.skip("a network of its own needs root and ip")
  with ThreadPoolExecutor(1) as pool:
    return pool.submit(run).result()


@pytest.mark.slow
def test_a_network_that_is_cut_for_less_than_the_limit_is_survived(family):
  """Both blamed each other: process 0 was heard every 7.5 s, and TCP waits longer."""

  def run(link):
    limits = str(CALM | {"heartbeat_timeout_s": 30})
    processes = wait_up(family(STOPS, STOPS, STOPS, limits=limits))
    link("down")
    time.sleep(23)
    link("up")
    processes[1].send_signal(signal.SIGUSR1)
    return ends(processes)

  codes, errors = in_a_network_of_its_own(run)
  assert codes == [85, 85, 85], errors
  assert "all processes save and stop" in errors[0]


@pytest.mark.slow
def test_all_that_are_cut_off_leave_within_a_minute_and_name_each_other(family):
  """With the limit that a user has."""

  def run(link):
    limits = str(CALM | {"heartbeat_timeout_s": Timeouts().heartbeat_timeout_s})
    processes = wait_up(family(STOPS, STOPS, STOPS, limits=limits))
    link("down")
    return ends(processes, within=60)

  codes, errors = in_a_network_of_its_own(run)
  assert codes == [86, 86, 86], errors
  for error, silent in zip(errors, ("[12]", "0", "0"), strict=True):
    assert re.match(
      rf"error: process {silent} on n{silent} has sent no(thing| heartbeat) for", error
    ), errors


def test_a_suspended_job_resumes(family):
  processes = wait_up(family(STOPS, STOPS, STOPS))
  # As `scontrol suspend` and `scontrol resume`: longer than any limit of theirs.
  for number, pause in ((signal.SIGTSTP, 0.2), (signal.SIGSTOP, 3), (signal.SIGCONT, 1)):
    for process in processes:
      process.send_signal(number)
    time.sleep(pause)
  processes[1].send_signal(signal.SIGUSR1)
  codes, errors = ends(processes)
  assert codes == [85, 85, 85], errors


WITH_JAX = """
import os, sys, time, threading
from pathlib import Path
rank, port = int(sys.argv[1]), sys.argv[2]
from jaxscale.cluster.watch import signals
handlers = signals.SignalHandlers(grace_s=3.0)
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_preemption_service", False)  # as `rendezvous.join`
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)
from jax.experimental import multihost_utils
handlers.attach(lambda reason: print("asked", reason, flush=True))
multihost_utils.process_allgather(np.ones(1))
print("up", flush=True)
if rank == 1:
  time.sleep(1000)
multihost_utils.process_allgather(np.ones(1))  # waits for rank 1
"""


def test_sigterm_in_a_collective_of_jax(child):
  """JAX's own notifier, which is off, would tell nobody of it."""
  port = free_port()
  processes = [child(WITH_JAX, rank, port, env=child_env()) for rank in (0, 1)]
  for process in processes:
    assert line_of(process) == "up"
  time.sleep(0.5)  # rank 0 is inside the collective
  began = time.monotonic()
  processes[0].send_signal(signal.SIGTERM)
  assert line_of(processes[0]) == "asked SIGTERM"
  assert processes[0].wait(300) == 85
  assert time.monotonic() - began > 2.5
