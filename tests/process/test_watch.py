"""The watch: who is blamed, and real processes that die, raise, hang and stop."""

import math
import re
import signal

import pytest

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch import fault_detection
from jaxscale.cluster.watch.fault_detection import (
  Fault,
  ProcessState,
  find_hang,
  find_slow,
)
from jaxscale.cluster.watch.watch import failure_of
from support.watched import ends, wait_up

FOREVER = "train(10**6)"


def test_a_killed_process_is_named_by_the_leader_alone(family, tmp_path):
  processes = family(FOREVER, FOREVER, FOREVER, FOREVER)
  wait_up(processes)
  processes[3].kill()
  codes, errors = ends(processes, within=30)
  assert codes == [1, 1, 1, -signal.SIGKILL]
  pattern = (
    r"error: process 3 on n3 died, last seen in step \d+( \(input\))? \(killed, "
  )
  assert re.match(pattern, errors[0]) and errors[0].count("\n") == 1
  assert f"stacks in {tmp_path}/faults" in errors[0]
  assert errors[1] == errors[2] == ""
  for rank in (0, 1, 2):
    text = (tmp_path / "faults" / f"process-{rank}.txt").read_text()
    assert errors[0].strip() in text
    assert "in train" in text and "_run" in text  # the main thread and others


def test_without_process_0_everyone_says_so(family):
  processes = family(FOREVER, FOREVER, FOREVER)
  wait_up(processes)
  processes[0].kill()
  codes, errors = ends(processes, within=30)
  assert codes == [-signal.SIGKILL, 1, 1]
  for error in errors[1:]:
    assert error.startswith("error: process 0 on n0 died, seen in step")
    assert error.count("\n") == 1


def test_an_exception_is_the_cause_though_neighbours_raise_too(family):
  raises = "train(20); raise KeyError('no such class')"
  # As when a collective breaks: this process's error comes first.
  victim = (
    "train(19)\n"
    "raise ValueError('UNKNOWN: Gloo AllGather failed: Connection reset by peer')"
  )
  processes = family(FOREVER, victim, raises)
  codes, errors = ends(processes, within=30)
  assert codes == [1, 1, 1]
  assert errors[0].startswith(
    "error: process 2 on n2 failed in step 20: KeyError: 'no such class'"
  )
  assert "Traceback" in errors[2] and "KeyError" in errors[2]


def test_a_stopped_process_is_named_and_others_leave(family):
  processes = family(FOREVER, FOREVER, FOREVER)
  wait_up(processes)
  processes[2].send_signal(signal.SIGSTOP)
  codes, errors = ends(processes[:2], within=30)
  assert codes == [86, 86]
  assert "process 2 on n2 is silent for" in errors[0]
  # What srun does next: SIGTERM and SIGCONT. The stopped one leaves by itself.
  processes[2].send_signal(signal.SIGCONT)
  codes, _ = ends([processes[2]], within=30)
  # By its own timer, or by the word of process 0 that lay there.
  assert codes in ([1], [86])


def test_a_stopped_process_0_ends_the_others(family):
  processes = family(FOREVER, FOREVER)
  wait_up(processes)
  processes[0].send_signal(signal.SIGSTOP)
  codes, errors = ends([processes[1]], within=30)
  assert codes == [86]
  assert errors[0].startswith("error: process 0 on n0 is silent, seen in step")


def test_who_sleeps_before_the_collective_is_the_culprit(family):
  # The others advanced by what can be in flight, and wait inside a later step.
  waits = "train(13); time.sleep(1000)"
  sleeps = "train(10); w.at(11, 'input'); time.sleep(1000)"
  codes, errors = ends(family(waits, waits, sleeps, waits), within=30)
  assert codes == [86] * 4
  assert re.match(
    r"error: process 2 on n2 hangs in step 11 \(input\) for \d s; 3 others wait for it",
    errors[0],
  )


def test_all_inside_one_step_is_nobodys_fault(family):
  waits = "train(13); time.sleep(1000)"
  codes, errors = ends(family(waits, waits), within=30)
  assert codes == [86, 86]
  assert "all 2 processes hang in step 13 for" in errors[0]
  assert "network" in errors[0]


def test_a_process_whose_gil_is_held_for_ever(family):
  # PyDLL keeps the GIL, as a C extension that never returns it does.
  holds = "train(10); w.at(11, 'input'); ctypes.PyDLL(None).sleep(1000)"
  processes = family(FOREVER, FOREVER, holds)
  codes, errors = ends(processes, within=30)
  assert codes == [86, 86, 1]
  assert "process 2 on n2 is silent for" in errors[0]
  assert "Timeout" in errors[2]  # faulthandler's own stacks
  assert "<module>" in errors[2]


def test_a_run_of_one_process_can_be_watched_too(family):
  alone = (
    "w.close(); w = watch.start({}, 0, hosts, timeouts=LIMITS, watch_alone=True)\n"
  )
  [code], [error] = ends(family(alone + "train(10); time.sleep(1000)"), within=30)
  assert code == 86
  assert re.match(r"error: process 0 on n0 hangs in step 10 for \d s\n", error)


def test_a_slow_process_is_named_and_lives(family):
  quick, slow = "train(60, work=0.05); w.close()", "train(60, work=0.08); w.close()"
  # As in a collective, the quick ones wait.
  quick = quick.replace("train", "w.at(1, 'step'); train").replace("0.05", "0.0")
  processes = family(quick, quick, slow)
  codes, errors = ends(processes, within=30)
  assert codes == [0, 0, 0]
  lines = [line for line in errors[0].splitlines() if "is slow" in line]
  assert lines and lines[0].startswith("process 2 on n2 is slow at step ")
  assert re.search(r" (8\d|9\d) ms of its host before each step", lines[0])


def test_all_end_normally_and_wait_for_each_other(family):
  done = "train(10); w.close(); print('closed', time.time(), flush=True)"
  late = "train(10); time.sleep(0.8); t = time.time(); w.close(); print('late', t)"
  processes = family(done, late, done)
  outs = [p.communicate(timeout=30) for p in processes]
  assert [p.returncode for p in processes] == [0, 0, 0]
  assert [error for _, error in outs] == ["", "", ""]
  late_at = float(outs[1][0].split()[-1])
  assert all(float(outs[r][0].split()[-1]) > late_at for r in (0, 2))


def test_leaving_while_others_train_is_a_fault(family):
  leaves = "train(10); sys.exit(0)"  # without a word
  codes, errors = ends(family(FOREVER, leaves, FOREVER), within=30)
  assert codes == [1, 1, 1]
  assert "process 1 on n1 left after step 10 while others continue" in errors[0]


def test_process_0_too_can_raise_or_leave(family):
  codes, errors = ends(family("train(10); raise ValueError('x')", FOREVER), within=30)
  assert codes == [1, 1]
  assert "error: process 0 on n0 failed in step 10: ValueError: x" in errors[0]
  assert errors[1] == ""


LIMITS = Timeouts(
  heartbeat_interval_s=1,
  heartbeat_timeout_s=20,
  hang_timeout_s=50,
  compile_timeout_s=900,
  save_timeout_s=600,
)


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


def test_who_left_early_is_to_blame_for_those_that_wait():
  ranks = {0: seen(41, "step", 940), 1: seen(40, "leaving", 940, left=True)}
  assert find_hang(ranks, 1000.0, LIMITS).kind == "left"
  assert fault_detection.find_left(ranks).rank == 1
  # At the same step they are only not yet there.
  ranks[0] = seen(40, "saving", 940)
  assert fault_detection.find_left(ranks) is None and not find_hang(
    ranks, 1000.0, LIMITS
  )


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
  ranks = {0: ProcessState(950.0), 1: ProcessState(950.0, 3, "step")}
  assert [f.rank for f in fault_detection.find_silent(ranks, 1000.0, LIMITS)] == [1]
  assert len(fault_detection.find_silent(ranks, 1600.0, LIMITS)) == 2


def test_who_never_says_where_it_is_may_train_for_days():
  endless = Timeouts(startup_timeout_s=math.inf)
  assert not find_hang({0: ProcessState(0.0), 1: ProcessState(0.0)}, 1e6, endless)
  ranks = {
    0: ProcessState(1e6 - 500),
    1: ProcessState(1e6 - 700),
  }  # but not without a heartbeat
  assert [f.rank for f in fault_detection.find_silent(ranks, 1e6, endless)] == [1]


def test_what_a_program_does_after_a_run_is_its_own():
  assert not find_hang(
    {0: seen(45, "outside", 0)}, 1e6, Timeouts(startup_timeout_s=math.inf)
  )
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
