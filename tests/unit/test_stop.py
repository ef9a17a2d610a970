"""All stop at the same point, whoever asks, when, and however often."""

import random
import socket
import sys
import threading
import time
import timeit
from types import SimpleNamespace
from typing import Any

import pytest

from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch import monitor as watch_monitor
from jaxscale.cluster.watch import watch
from jaxscale.cluster.watch.fault_detection import limit_s
from jaxscale.cluster.watch.monitor import Heartbeat, Monitor
from jaxscale.cluster.watch.signals import StopRequest
from jaxscale.cluster.watch.stop_consensus import StopConsensus, StopCoordinator
from jaxscale.cluster.wire import Link

POINTS = 60


def run(rng: random.Random, num: int, requests: int, points: int = POINTS):
  """Threads that pass points at random speeds; where each stopped, and why.

  Everything is as between processes: a socket each to a monitor, a link's thread each.
  """
  ends = [tuple(map(Link, socket.socketpair())) for _ in range(num)]
  limits = Timeouts(heartbeat_interval_s=0.02, heartbeat_timeout_s=20)
  reported: list[str] = []
  hosts = [f"n{rank}" for rank in range(num)]
  leave = lambda code, folder, rank, line: reported.append(line)  # noqa: E731
  links = {rank: ours for rank, (ours, _) in enumerate(ends)}
  monitor = Monitor(links, hosts, limits, log=reported.append, leave=leave)
  watches = [watch.Watch(i, hosts, theirs, limits, None) for i, (_, theirs) in enumerate(ends)]
  delays = [[rng.choice([0, 0, 1e-4, 1e-3]) for _ in range(points)] for _ in ends]
  stopped: list[Any] = [None] * num

  def train(rank):
    w = watches[rank]
    stopped[rank] = points, None
    for point in range(points):
      if why := w.stop.poll():
        stopped[rank] = point, why
        assert w.stop.poll() == why == w.stop.agreed  # it stays so
        break
      time.sleep(delays[rank][point])
    w.close()

  def ask(seconds, rank, reason):
    time.sleep(seconds)
    watches[rank].stop.request(StopRequest(reason))

  asking = [(rng.uniform(0, 0.02), rng.randrange(num), f"S{i}") for i in range(requests)]
  threads = [threading.Thread(target=ask, args=args) for args in asking]
  threads += [threading.Thread(target=train, args=(rank,)) for rank in range(num)]
  links = [threading.Thread(target=w._run) for w in watches]
  links.append(threading.Thread(target=monitor.run))
  for w in watches:
    w._threads = links[:-1]
  for thread in links + threads:
    thread.start()
  for thread in threads + links:
    thread.join(300)
    assert not thread.is_alive()
  return stopped, reported


@pytest.fixture(autouse=True)
def _no_last_resort(monkeypatch):
  """Watches that share a process would arm and disarm one timer."""
  monkeypatch.setattr(watch.stacks, "arm", lambda seconds: None)
  monkeypatch.setattr(watch.stacks, "disarm", lambda: None)


@pytest.mark.parametrize("seed", range(10))
def test_all_stop_at_the_same_point(seed):
  rng = random.Random(seed)
  early = 0
  for _ in range(20):
    stopped, reported = run(rng, rng.randint(2, 6), rng.randint(1, 3))
    assert len(set(stopped)) == 1, stopped
    early += stopped[0][1] is not None
    assert not any("error" in line for line in reported)
    # However many ask, one reason is printed, once, with who was asked.
    assert sum("all processes save and stop" in line for line in reported) <= 1
  assert early  # not all of them were asked too late


def test_the_reason_names_who_was_asked():
  stopped, reported = run(random.Random(1), 3, 1, points=10**6)
  point, why = stopped[0]
  assert why and point < 10**6
  assert why.cause.startswith("S0 at process ") and " on n" in why.cause
  assert reported == [f"{why}: all processes save and stop after the same step"]
  stopped, reported = run(random.Random(2), 3, 0)  # nobody asks
  assert stopped == [(POINTS, None)] * 3 and reported == []


def test_a_request_when_some_are_done_stops_nobody_short():
  coordinator = StopCoordinator(3)
  assert coordinator.answer(0, 40) is None  # goodbye, after all its points
  assert coordinator.ask(StopRequest("SIGTERM"))
  assert not coordinator.ask(StopRequest("SIGUSR1"))
  assert coordinator.answer(1, 38) is None
  assert coordinator.answer(2, 39) == 40  # the others have 40 as well


def test_a_held_process_passes_no_point_until_it_is_decided():
  stop = StopConsensus(lambda reason: None)
  assert [stop.poll() for _ in range(3)] == [None] * 3
  assert stop.hold() == 3
  seen = []
  thread = threading.Thread(target=lambda: seen.extend(stop.poll() for _ in range(3)))
  thread.start()
  time.sleep(0.05)
  assert seen == [] and stop.passed == 3
  stop.decide(5, StopRequest("SIGTERM"))
  thread.join(300)
  assert seen == [None, None, StopRequest("SIGTERM")]
  stop.decide(9, StopRequest("later"))
  assert stop.hold() == 5 and stop.poll() == StopRequest("SIGTERM")  # no second decision


def test_one_process_alone_stops_at_its_next_point():
  alone = watch.start({}, 0, ["here"])
  assert alone.stop.poll() is None
  threading.Thread(target=alone.stop.request, args=(StopRequest("Ctrl-C", "interrupt"),)).start()
  deadline = time.monotonic() + 5
  while (why := alone.stop.poll()) is None:
    assert time.monotonic() < deadline
  assert why == ("Ctrl-C", "interrupt") and why.exit_code == 130
  alone.close()


def test_healthy_calls_cost_as_little_as_a_hundred_empty_ones():
  """They take a fifth of a microsecond; benchmarks/watch.py has all that a step pays."""
  alone = watch.start({}, 0, ["here"])
  steps = iter(range(10**9))

  def step():
    number = next(steps)
    alone.at(number, "input")
    alone.at(number, "step")

  # The smallest of several: what else this machine does is not our cost.
  empty, poll, two = (
    min(timeit.repeat(f, number=2000, repeat=7)) for f in (lambda: None, alone.stop.poll, step)
  )
  assert poll < 100 * empty
  assert two / 2 < 50 * empty


def test_another_stage_has_a_first_step_and_a_pace_of_its_own():
  ours, theirs = map(Link, socket.socketpair())
  monitor = Monitor({0: ours}, ["n0"], Timeouts(), log=print)
  seen = monitor._states[0]
  for step, phase, now in ((5, "step", 0.0), (9, "step", 4.0)):
    monitor._update(0, seen, Heartbeat(step, phase, 0, 0.0, 0.0, step), now)
  assert seen.mean_s == 1.0
  assert limit_s(seen, Timeouts()) == max(Timeouts().hang_timeout_s, 10.0)
  monitor._update(0, seen, Heartbeat(10, "compiling", 0, 0.0, 0.0, 9), 5.0)
  monitor._update(0, seen, Heartbeat(10, "step", 0, 0.0, 0.0, 10), 5.5)
  assert limit_s(seen, Timeouts()) == Timeouts().compile_timeout_s and seen.mean_s == 0.5
  ours.close(), theirs.close()


NOT_MESSAGES = [5, None, [], "x", {"beat": 5}, {"beat": [1, 2, 3]}, {"fail": 5}, {"ask": 5}]
NOT_MESSAGES += [{"ask": ["x", "other"]}, {"held": "x"}, {"held": 10**30}, {"bye": True}]
NOT_MESSAGES += [{"fail": ["x", 0, "no", False, ""]}]
NOT_MESSAGES += [{"beat": [1, "step", 0, float("nan"), 0.0, 1]}]


@pytest.mark.parametrize("message", NOT_MESSAGES, ids=repr)
def test_a_process_that_sends_no_messages_is_named_for_it(message):
  ours, theirs = map(Link, socket.socketpair())
  own, inner = map(Link, socket.socketpair())
  left = []
  options = dict(log=print, leave=lambda *args: left.append(args))
  monitor = Monitor({0: inner, 1: ours}, ["n0", "n1"], Timeouts(), **options)
  theirs.send(message)
  thread = threading.Thread(target=monitor.run)
  thread.start()
  thread.join(300)
  ((code, _, _, line),) = left
  assert code == 1 and line.startswith("error: process 1 on n1 sent an invalid mess")
  for link in (ours, theirs, own, inner):
    link.close()


@pytest.mark.parametrize("last", [{"alone": 40.0}, None], ids=["alone", "died"])
def test_a_monitor_suspended_between_select_and_receive_names_itself(last, monkeypatch):
  """Only `select` was looked at: the line then named the process that had left."""
  ours, theirs = map(Link, socket.socketpair())
  own, inner = map(Link, socket.socketpair())
  drain, asleep_s = ours.drain, [0.0]

  def suspended():
    asleep_s[0] = 40.0
    return drain()

  clock = lambda: time.perf_counter() + asleep_s[0]  # noqa: E731
  monkeypatch.setattr(watch_monitor, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
  monkeypatch.setattr(ours, "drain", suspended)
  left = []
  options = dict(log=print, leave=lambda *args: left.append(args))
  limits = Timeouts(heartbeat_timeout_s=60)
  monitor = Monitor({0: inner, 1: ours}, ["n0", "n1"], limits, **options)
  if last:
    theirs.send(last)
  else:
    theirs.close()
  monitor.run()
  ((_, _, _, line),) = left
  if last:
    assert line.startswith("error: process 0 on n0 did not run for 40 s (suspended?)")
  else:
    assert line.startswith("error: process 1 on n1 died, ") and "did not run for 40 s" in line
  for link in (ours, theirs, own, inner):
    link.close()


OF_MONITOR = [5, {"stop": 5}]
OF_MONITOR += [{"stop": stop} for stop in (["x", "y", "preemption"], [None, "y", "preemption"])]
OF_MONITOR += [{"stop": [1, "y", "z"]}, {"fault": ["a", 0, True]}, {"fault": ["a", -5, False]}]
OF_MONITOR += [{"fault": ["a", 10**12, False]}, {"fault": ["a", 86, False]}]


@pytest.mark.parametrize("message", OF_MONITOR, ids=repr)
def test_what_a_monitor_sends_ends_a_process_by_a_code_that_is_no_success(message, monkeypatch):
  monkeypatch.setattr(watch.stacks, "leave", lambda code, *_: sys.exit(code))
  ours, theirs = map(Link, socket.socketpair())
  alone = watch.Watch(1, ["n0", "n1"], ours, Timeouts(), None)
  theirs.send(message)
  with pytest.raises(SystemExit) as e:
    alone._run()
  assert e.value.args == (86 if message == OF_MONITOR[-1] else 1,)
  watch.stacks.disarm()
  ours.close(), theirs.close()


def test_a_fault_that_nobody_hears_of_ends_by_a_code_that_is_no_success(monkeypatch):
  left = []
  monkeypatch.setattr(watch.stacks, "leave", lambda code, *_: left.append(code))
  ours, theirs = map(Link, socket.socketpair())
  theirs.close()
  watch.Watch(1, ["n0", "n1"], ours, Timeouts(), None).fail("a fault", 0)
  assert left == [1]
  ours.close()
