"""The watch: who is blamed, and real processes that die, raise, hang and stop."""

import math
import os
import re
import signal
import socket
import threading
from pathlib import Path

import pytest

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch import fault_detection, watch
from jaxscale.cluster.watch.fault_detection import Fault, ProcessState, find_hang, find_slow
from jaxscale.cluster.watch.watch import failure_of
from jaxscale.cluster.wire import Keys, Link
from support.commands import run_python
from support.processes import wait_until
from support.watched import HANGING, SILENT, children, ends, wait_up

FOREVER = "train(10**6)"
FOR = r"for \d+ s(, no heartbeat for \d+ s)?"  # a busy machine may keep a thread waiting


def test_a_killed_process_is_named_by_the_leader_alone(family, tmp_path):
  processes = wait_up(family(FOREVER, FOREVER, FOREVER, FOREVER))
  processes[3].kill()
  codes, errors = ends(processes)
  assert codes == [1, 1, 1, -signal.SIGKILL]
  seen = r"last seen (in step \d+|before the first step)( \((input|starting)\))?"
  pattern = rf"error: process 3 on n3 died, {seen} \(killed, "
  assert re.match(pattern, errors[0]) and errors[0].count("\n") == 1
  assert f"stacks in {tmp_path}/faults" in errors[0]
  assert errors[1] == errors[2] == ""
  for rank in (0, 1, 2):
    text = (tmp_path / "faults" / f"process-{rank}.txt").read_text()
    assert errors[0].strip() in text
    assert "in train" in text and "_run" in text  # the main thread and others


def test_without_process_0_everyone_says_so(family):
  processes = wait_up(family(FOREVER, FOREVER, FOREVER))
  processes[0].kill()
  codes, errors = ends(processes)
  assert codes == [-signal.SIGKILL, 1, 1]
  for error in errors[1:]:
    assert re.match(r"error: process 0 on n0 died \(.*\), noticed in step", error), error
    assert error.count("\n") == 1


def test_an_exception_is_the_cause_though_neighbours_raise_too(family):
  raises = (
    "train(20)\nwhile not Path(folder + '.go').exists():\n  time.sleep(0.01)\n"
    "raise KeyError('no such class')"
  )
  patient = "from jaxscale.cluster.watch import monitor; monitor._SETTLE_S = 3\n"
  # As when a collective breaks: this process's error comes first.
  victim = (
    "train(19)\nPath(folder + '.go').touch()\n"
    "raise ValueError('UNKNOWN: Gloo AllGather failed: Connection reset by peer')"
  )
  processes = family(patient + FOREVER, victim, raises)
  codes, errors = ends(processes)
  assert codes == [1, 1, 1]
  assert errors[0].startswith("error: process 2 on n2 failed in step 20: KeyError: 'no such class'")
  assert "Traceback" in errors[2] and "KeyError" in errors[2]


def test_a_stopped_process_is_named_and_others_leave(family):
  processes = wait_up(family(FOREVER, FOREVER, FOREVER, limits=SILENT))
  processes[2].send_signal(signal.SIGSTOP)
  codes, errors = ends(processes[:2])
  assert codes == [86, 86]
  assert "process 2 on n2 has sent no heartbeat for" in errors[0]
  # What srun does next: SIGTERM and SIGCONT. The stopped one leaves by itself.
  processes[2].send_signal(signal.SIGCONT)
  codes, _ = ends([processes[2]])
  # By its own timer, or by the word of process 0 that lay there.
  assert codes in ([1], [86])


STARTS = "print('up', flush=True); time.sleep(1000)"


@pytest.mark.parametrize("what", ["process", "host"])
@pytest.mark.parametrize("activity", ["starting", "compiling"])
def test_a_process_that_is_stopped_before_the_first_step_is_named(family, what, activity):
  """JAX's coordinator was first, after 100 s, and named nobody or process 0."""
  starts = f"w.at({int(activity == 'compiling')}, '{activity}'); {STARTS}"
  processes = wait_up(family(starts, starts, starts, limits=SILENT))
  victim = processes[1]
  stopped = [victim.pid, *(children(victim) if what == "host" else [])]
  for pid in stopped:
    os.kill(pid, signal.SIGSTOP)
  codes, errors = ends([processes[0], processes[2]])
  for pid in stopped:
    os.kill(pid, signal.SIGKILL)
  assert codes == [86, 86], errors
  assert "process 1 on n1 has sent no heartbeat for" in errors[0]
  assert "(suspended, or its host is down or unreachable)" in errors[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_loads_a_library_is_not_stopped(family, rank):
  """Python's lock is held for longer than a process may be silent."""
  loads = "ctypes.PyDLL(None).sleep(13); Path(folder + '.go').touch(); w.close()"
  waits = "w.at(1, 'compiling')\nwhile not Path(folder + '.go').exists():\n  "
  waits += "time.sleep(0.1)\nw.close()"
  bodies = [loads, waits] if rank == 0 else [waits, loads]
  codes, errors = ends(family(*bodies, limits=SILENT))
  assert codes == [0, 0] and errors == ["", ""]


def test_no_child_outlives_its_process(family):
  processes = wait_up(family(FOREVER, FOREVER, "train(10); w.close()"))
  beating = [children(process) for process in processes]
  assert [len(pids) for pids in beating] == [1, 1, 1]
  processes[1].kill()
  ends(processes)
  for (pid,) in beating:
    wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize("bodies", [[FOREVER] * 3, [STARTS] * 3], ids=["step", "start"])
def test_process_0_that_stood_still_is_named_by_all(family, bodies):
  """The line was that the others had died, which had left because it was silent."""
  processes = wait_up(family(*bodies, limits=SILENT))
  processes[0].send_signal(signal.SIGSTOP)
  codes, errors = ends(processes[1:])
  assert codes == [86, 86]
  for error in errors:
    assert error.startswith("error: process 0 on n0 has sent nothing for ")
    assert "(suspended, or its host is down or unreachable)" in error
  processes[0].send_signal(signal.SIGCONT)
  codes, errors = ends(processes[:1])
  assert codes == [86]
  pattern = r"process 0 on n0 did not run for \d+ s \(suspended\?\); process [12] on n[12]"
  assert re.match(f"error: {pattern} exited", errors[0]), errors[0]


def test_process_0_sends_a_beat_as_often_as_the_others():
  """It sent one in a quarter of the limit, which added to what a cut link lost."""
  ours, theirs = (Link(end, Keys(b"k", b"k")) for end in socket.socketpair())
  limits = Timeouts(heartbeat_interval_s=0.05, heartbeat_timeout_s=1000)
  watching = watch.start({1: ours}, 0, ["n0", "n1"], timeouts=limits)
  theirs.send({"beat": [1, "step", 0, 0.0, 0.0, 1, ""]})
  heard = []
  while len(heard) < 3:  # the fourth of 1000 s would come too late for the test
    heard.append(theirs.receive(200))
  assert heard == [{"beat": 1}] * 3
  theirs.send({"bye": 0})
  threading.Thread(target=watching.close).start()
  while theirs.receive(200) != {"bye": 1}:
    pass
  theirs.close()


def test_who_sleeps_before_the_collective_is_the_culprit(family):
  # The others advanced by what can be in flight, and wait inside a later step.
  waits = "train(13); time.sleep(1000)"
  sleeps = "train(10); w.at(11, 'input'); time.sleep(1000)"
  codes, errors = ends(family(waits, waits, sleeps, waits, limits=HANGING))
  assert codes == [86] * 4
  pattern = rf"process 2 on n2 hangs in step 11 \(input\) {FOR}; 3 others wait for it"
  assert re.search(f"^error: {pattern}", errors[0], re.M), errors[0]


def test_all_inside_one_step_is_nobodys_fault(family):
  waits = "train(13); time.sleep(1000)"
  codes, errors = ends(family(waits, waits, limits=HANGING))
  assert codes == [86, 86]
  assert "all 2 processes hang in step 13 for" in errors[0]
  assert ": check the network, the devices and the model's host code; stacks in" in errors[0]


# What JAX's runtime calls, and what that calls, by their names.
CALLS = """
from jaxscale.cluster import jax_internals
def slow_norm(x):
  {wait}
def run(name, function):
  path = jax_internals.SOURCE + "callback.py"
  exec(compile(f"def {{name}}(f): f(0)", path, "exec"), globals())
  globals()[name](function)
train(13)
run(jax_internals.CALLBACK, slow_norm)
"""


def test_who_is_in_code_of_the_model_is_the_culprit(family):
  """A host callback: all stand in one step, in C++, and its thread is not the main."""
  waits = "train(13); time.sleep(1000)"
  hangs = CALLS.format(wait="time.sleep(1000)")
  codes, errors = ends(family(waits, hangs, waits, limits=HANGING))
  assert codes == [86] * 3
  pattern = rf"process 1 on n1 hangs in step 13 {FOR} in a callback of the model \(slow_n"
  assert re.search(f"^error: {pattern}", errors[0], re.M), errors[0]
  assert "; 2 others wait for it" in errors[0]


def test_a_process_whose_gil_is_held_for_ever(family):
  # PyDLL keeps the GIL, as a C extension that never returns it does.
  holds = "train(10); w.at(11, 'input'); ctypes.PyDLL(None).sleep(1000)"
  processes = family(FOREVER, FOREVER, holds, limits=SILENT)
  codes, errors = ends(processes)
  assert codes == [86, 86, 1]
  assert "process 2 on n2 has sent no heartbeat for" in errors[0]
  assert "(it runs, but some code holds the Python GIL)" in errors[0]
  assert "Timeout" in errors[2]  # faulthandler's own stacks
  assert "<module>" in errors[2]


def test_a_run_of_one_process_can_be_watched_too(family):
  alone = "w.close(); w = watch.start({}, 0, hosts, timeouts=LIMITS, watch_alone=True)\n"
  bodies = [alone + "train(10); time.sleep(1000)"]
  [code], [error] = ends(family(*bodies, limits=HANGING))
  assert code == 86
  assert re.match(rf"error: process 0 on n0 hangs in step 10 {FOR}\n", error)


def test_a_slow_process_is_named_and_lives(family):
  # As in a collective, the quick ones wait in their step.
  waits = "for step in range(1, 10**6): w.at(step, 'input'); w.at(step, 'step'); "
  waits += "time.sleep(0.21)"
  processes = family(waits, waits, "train(10**6, work=0.2)")
  line = processes[0].stderr.readline()
  assert line.startswith("process 2 on n2 is slow at step "), line
  need = r" its host needs (\d+) ms before each step, the median (\d+) ms"
  slow, others = map(int, re.search(need, line).groups())
  assert slow >= 200 > others
  assert [process.poll() for process in processes] == [None] * 3


def test_all_end_normally_and_wait_for_each_other(family):
  done = "train(10); w.close(); print('closed', time.monotonic(), flush=True)"
  late = "train(10); time.sleep(0.8); t = time.monotonic(); w.close(); print('late', t)"
  processes = family(done, late, done)
  outs = [p.communicate(timeout=200) for p in processes]
  assert [p.returncode for p in processes] == [0, 0, 0]
  assert [error for _, error in outs] == ["", "", ""]
  late_at = float(outs[1][0].split()[-1])  # the clock of all processes
  assert all(float(outs[r][0].split()[-1]) > late_at for r in (0, 2))


def test_leaving_while_others_train_is_a_fault(family):
  leaves = "train(10); sys.exit(0)"  # without a word
  codes, errors = ends(family(FOREVER, leaves, FOREVER))
  assert codes == [1, 1, 1]
  assert "process 1 on n1 exited after step 10 while others continue" in errors[0]


def test_process_0_too_can_raise_or_leave(family):
  codes, errors = ends(family("train(10); raise ValueError('x')", FOREVER))
  assert codes == [1, 1]
  assert "error: process 0 on n0 failed in step 10: ValueError: x" in errors[0]
  assert errors[1] == ""


OF_SILENCE = dict(heartbeat_interval_s=1, heartbeat_timeout_s=20, hang_timeout_s=50)
LIMITS = Timeouts(**OF_SILENCE, compile_timeout_s=900, save_timeout_s=600)


def seen(step, activity, since, *, steps=100, count=0, left=False, mean=0.02):
  return ProcessState(1000.0, step, activity, count, since, 0.0, steps, mean, left)


@pytest.mark.parametrize(
  ("ranks", "culprit"),
  [
    # Nobody stands still for too long.
    ([(7, "step", 960), (7, "input", 970)], "nobody"),
    # The other waits for one that is in host code.
    ([(7, "step", 940), (7, "input", 940)], 1),
    # The furthest behind has its reasons: a save may take ten minutes.
    ([(7, "saving", 500), (8, "step", 501)], "nobody"),
    ([(7, "saving", 300), (8, "step", 301)], 0),
    # A compilation may take longer still.
    ([(8, "compiling", 300), (8, "step", 301)], "nobody"),
    # One that is slow, but advances, is not hung.
    ([(9, "step", 940), (8, "step", 999)], "nobody"),
    ([(9, "step", 940), (8, "step", 940)], 1),
    # Batches of an evaluation order those that are in it.
    ([(9, "evaluating", 940, 5), (9, "evaluating", 940, 3)], 1),
    ([(9, "evaluating", 940, 5), (9, "step", 940)], 1),
    # All at one place.
    ([(9, "step", 940), (9, "step", 941)], None),
    # One process is hung by itself.
    ([(9, "step", 940)], 0),
  ],
)
def test_who_hangs(ranks, culprit):
  views = {
    rank: seen(step, activity, since, count=count[0] if count else 0)
    for rank, (step, activity, since, *count) in enumerate(ranks)
  }
  fault = find_hang(views, 1000.0, LIMITS)
  assert (fault.rank if fault else "nobody") == culprit
  if fault:
    assert fault.code == 86


def test_long_steps_and_the_first_step_have_their_own_limits():
  # A step of 20 s may take 200; the very first as long as a compilation.
  assert not find_hang({0: seen(9, "step", 801, mean=20.0)}, 1000.0, LIMITS)
  assert find_hang({0: seen(9, "step", 799, mean=20.0)}, 1000.0, LIMITS)
  assert not find_hang({0: seen(1, "step", 200, steps=1)}, 1000.0, LIMITS)
  assert find_hang({0: seen(1, "step", 50, steps=1)}, 1000.0, LIMITS)


def test_limits_that_users_have_are_those_of_the_guarantees():
  users = Timeouts()
  assert users.heartbeat_timeout_s < 60 and users.rendezvous_timeout_s == 120
  limits = {"starting": 600, "saving": 600, "compiling": 3600, "input": 50, "step": 50}
  for activity, most in limits.items():
    early, late = ({0: seen(9, activity, 1e4 - s)} for s in (most - 1, most + 1))
    assert not find_hang(early, 1e4, users) and find_hang(late, 1e4, users)


def test_who_left_early_is_to_blame_for_those_that_wait():
  ranks = {0: seen(41, "step", 940), 1: seen(40, "leaving", 940, left=True)}
  assert find_hang(ranks, 1000.0, LIMITS).kind == "left"
  assert fault_detection.find_left(ranks).rank == 1
  # At the same step they are only not yet there.
  ranks[0] = seen(40, "saving", 940)
  assert fault_detection.find_left(ranks) is None and not find_hang(ranks, 1000.0, LIMITS)


def test_the_first_of_the_strongest_kind_is_the_cause():
  follows, failed = Fault("consequence", 1, ""), Fault("failed", 2, "")
  died, again = Fault("died", 3, ""), Fault("died", 4, "")
  assert fault_detection.root_cause([follows, failed]) is failed
  assert fault_detection.root_cause([follows, died, failed, again]) is died
  assert fault_detection.root_cause([follows]) is follows


def test_an_error_may_follow_from_another_process():
  class JaxRuntimeError(RuntimeError):  # jaxlib's, by its name
    pass

  reset = "UNKNOWN: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer"
  assert failure_of(ValueError(reset))[:3] == (f"ValueError: {reset}", 1, True)
  assert failure_of(JaxRuntimeError("INTERNAL: unhandled cuda error\nmore"))[2]
  assert not failure_of(JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))[2]
  assert failure_of(KeyError("x"))[:3] == ("KeyError: 'x'", 1, False)
  assert failure_of(MemoryError())[:3] == ("MemoryError", 1, False)
  assert failure_of(SystemExit(7))[:3] == ("SystemExit: 7", 7, False)


def test_loading_libraries_is_no_silence():
  def silent(now, alive, *state):
    states = {0: ProcessState(950.0, *state, last_alive=alive)}
    return [f.cause for f in fault_detection.find_silent(states, now, LIMITS)]

  assert not silent(1000.0, 999.0)  # its child process is heard
  for later in ((1600.0, 1599.0), (1000.0, 999.0, 3, "step")):
    assert "holds the Python GIL" in silent(*later)[0]
  for gone in ((1000.0, 0.0), (1000.0, 981.0, 3, "step"), (1000.0, 0.0, 3, "step")):
    assert "suspended, or its host is down" in silent(*gone)[0]


def test_who_never_says_where_it_is_may_train_for_days():
  endless = Timeouts(startup_timeout_s=math.inf)
  assert not find_hang({0: ProcessState(0.0), 1: ProcessState(0.0)}, 1e6, endless)
  ranks = {
    0: ProcessState(1e6 - 500, last_alive=1e6),
    1: ProcessState(1e6 - 700, last_alive=1e6),
  }  # but not without a heartbeat
  assert [f.rank for f in fault_detection.find_silent(ranks, 1e6, endless)] == [1]


def test_what_a_program_does_after_a_run_is_its_own():
  assert not find_hang({0: seen(45, "outside", 0)}, 1e6, Timeouts(startup_timeout_s=math.inf))
  after = {0: seen(45, "outside", 300), 1: seen(45, "outside", 300)}
  assert find_hang(after, 1000.0, LIMITS)  # a command's end has a limit, 600 s
  assert not find_hang(after, 800.0, LIMITS)


def test_slow_is_what_others_wait_for():
  even = {rank: 0.003 + 0.0001 * (rank % 7) for rank in range(64)}
  assert find_slow(even, step_s=0.1) == {}
  assert find_slow(even | {5: 0.05}, step_s=0.1) == {5: 0.05}
  # Of two, the other; what is below a tenth of a step is nobody's trouble.
  assert find_slow({0: 0.001, 1: 0.02}, step_s=0.1) == {1: 0.02}
  assert find_slow({0: 0.001, 1: 0.009}, step_s=0.1) == {}
  # All slow in their own way: no one is.
  assert find_slow({r: 0.1 * r for r in range(8)}, step_s=1.0) == {}


TWO_LEAVE = """
import sys, threading
from pathlib import Path
from jaxscale.cluster.watch import stacks

unlink, removing = Path.unlink, threading.Event()

def once(path, missing_ok):
  unlink(path, missing_ok)
  if threading.current_thread() is not threading.main_thread():
    removing.set()
    threading.Event().wait()  # The process ends before this thread writes.

def second():
  threading.Thread(target=stacks.leave, args=(2, folder, 1, "second"), daemon=True).start()
  removing.wait(2)

folder, Path.unlink, stacks.flush = Path(sys.argv[1]), once, second
stacks.leave(1, folder, 1, "first")
"""


def test_a_second_thread_that_leaves_removes_no_stacks(tmp_path):
  """It did if an error that a fault caused came while the watch left because of that fault."""
  done = run_python("-c", TWO_LEAVE, str(tmp_path))
  assert done.returncode == 1, done.stderr
  written = (tmp_path / "process-1.txt").read_text()
  assert written.startswith("first\n") and "stacks.py" in written
