"""Goodput: where the time of a run went, against a count of every second."""

import errno
import itertools
import json
import os
import random
import threading
import time
from typing import Any

import pytest

from jaxscale import cli
from jaxscale.cluster import session
from jaxscale.cluster.watch import watch as watches
from jaxscale.files import append_json_line
from jaxscale.jobs import folder as folders
from jaxscale.jobs import status
from jaxscale.run import activity as activities
from jaxscale.run.activity import ActivityRecord
from jaxscale.run.goodput import CATEGORIES, FILE, Activity, Goodput, goodput, read_activities
from support.bad_files import EVERY, put
from support.job_script import RUN

OTHERS = dict(starting="start-up", compiling="compile", preparing="compile", saving="saving")
OTHERS |= dict(evaluating="evaluation", leaving="other", checking="other")


class Made:
  """A run of several starts, second by second: what happened, and the lines of it."""

  def __init__(self, seed):
    self.random, self.clock, self.saved = random.Random(seed), 1000, 0
    self.seconds = []  # (category, or "step" and its attempt and number)
    self.lines: list[Activity] = []
    self.waits, self.resumed = [], []  # resumed: (attempt, step)
    for self.is_last in (False, False, False, True):
      self.start_once()

  def spend(self, what, seconds=None):
    number = self.random.randrange(1, 5) if seconds is None else seconds
    self.seconds += [what] * number
    self.clock += number

  def start_once(self):
    """Queued, or down; a process until it is killed, or done."""
    if self.seconds:
      self.spend("down")
    queued, self.own = self.clock, None
    if self.random.random() < 0.7:
      self.spend("queue")
      if self.random.random() < 0.5:
        self.own = queued, self.clock
      else:
        self.waits.append((queued, self.clock))
      self.spend("start-up")
    self.start, self.spent, self.tries = self.clock, {}, []
    self.line(0)
    for roll_back in range(self.random.randrange(1, 3)):
      self.do("starting", 0)
      self.line(self.step if roll_back else 0)  # as `resumes` does
      self.step = self.saved
      self.tries.append(self.step)
      self.resumed.append((len(self.resumed), self.step))
      self.do("compiling", self.step + 1)
      self.train()
    if self.is_last:
      self.do("leaving", self.step)

  def train(self):
    for step in range(self.step + 1, self.step + self.random.randrange(3, 12)):
      self.step = step
      self.do("input", step, self.random.randrange(2))
      self.do("step", step)
      if step % 3 == 0:
        self.do(self.random.choice(["evaluating", "preparing", "checking"]), step + 1)
      if step % 4 == 0:
        self.do("saving", step + 1)
        self.saved = step

  def do(self, activity, step, seconds=None):
    self.line(step)
    what = OTHERS.get(activity, (activity, len(self.resumed), step))
    for _ in range(self.random.randrange(1, 5) if seconds is None else seconds):
      self.spend(what, 1)
      self.spent[activity] = self.spent.get(activity, 0) + 1
      self.line(step)

  def line(self, step):
    tries, spent = [*self.tries], dict(self.spent)
    self.lines.append(Activity(self.start, self.clock, step, tries, spent, self.own))

  def naive(self):
    """Each second, by what was known at the end."""
    found = dict.fromkeys(CATEGORIES, 0)
    for what in self.seconds:
      if isinstance(what, tuple):
        activity, attempt, step = what
        is_lost = any(done < step for later, done in self.resumed if later >= attempt)
        what = "lost" if is_lost else {"step": "training"}.get(activity, activity)
      found[what] += 1
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_second_is_counted_once_and_where_it_belongs(seed):
  """Through kills, roll backs, queues; from every line, and from some."""
  made = Made(seed)
  naive = made.naive()
  found = goodput(made.lines, made.waits)
  assert found is not None and found.seconds == pytest.approx(naive)
  assert found.wall_s == pytest.approx(made.clock - 1000)
  held = found.wall_s - naive["queue"]
  assert found.share == pytest.approx(naive["training"] / held)
  kept = [made.lines[-1]]  # the last, a roll back's, a process's, and one in four
  for line, later in itertools.pairwise(made.lines):
    is_needed = line.resumed != later.resumed or line.start != later.start
    kept += [line] * (is_needed or made.random.random() < 0.25)
  made.random.shuffle(kept)
  some = goodput(kept, made.waits)
  assert some is not None and some.wall_s == pytest.approx(made.clock - 1000)
  for name in set(CATEGORIES) - {"training", "lost", "input"}:
    assert some.seconds[name] == pytest.approx(naive[name])


def test_steps_between_two_lines_are_taken_to_be_equally_long():
  steps, start = {"step": 8.0, "input": 2.0}, {"starting": 10.0}
  lines = [Activity(0.0, 10.0, 1, [0], start), Activity(0.0, 20.0, 10, [0], start | steps)]
  lines += [Activity(30.0, 31.0, 7, [6], {"starting": 1.0})]
  found = goodput(lines)
  wanted = {"training": 0.6 * 8, "input": 0.6 * 2, "lost": 0.4 * 10, "down": 10.0}
  assert found and {name: found.seconds[name] for name in wanted} == pytest.approx(wanted)


def test_waits_may_overlap_and_only_the_last_job_starts_up():
  lines = [Activity(10.0, 20.0, 5, [0], {"step": 10.0}, (2.0, 8.0))]
  lines += [Activity(50.0, 60.0, 9, [5], {"step": 10.0}, (35.0, 45.0))]
  # One job in between has left nothing; what Slurm's clock says may be a second off.
  found = goodput(lines, [(1.0, 8.4), (19.0, 25.0), (34.0, 44.0)], until=63.0)
  wanted = {"training": 20.0, "queue": 23.4, "start-up": 6.6, "down": 12.0}
  assert found and found.seconds == pytest.approx(dict.fromkeys(CATEGORIES, 0.0) | wanted)


def test_a_run_that_was_done_is_not_down():
  lines = [Activity(0.0, 10.0, 5, [0], {"step": 10.0}, done=True)]
  lines += [Activity(9e6, 9e6 + 2, 5, [5], {"evaluating": 2.0})]
  found = goodput(lines, [(8e6, 8.5e6)], until=20.0)
  assert found is not None and found.wall_s == 12.0 and found.seconds["down"] == 0.0
  assert goodput([]) is None and goodput([], [(1.0, 2.0)], 5.0) is None


def test_a_line_says_it():
  seconds = dict.fromkeys(CATEGORIES, 0.0)
  made = Goodput(seconds | {"training": 60, "queue": 4000, "down": 40, "lost": 0.2})
  assert str(made) == "goodput 60% of 1:40: training 1:00, down 0:40; queue 1:06:40"
  assert made.summary()["goodput"] == pytest.approx(60 / 100.2, abs=1e-4)
  assert str(Goodput(seconds)) == "goodput – of 0:00: training 0:00"


class Clock:
  """Clock of a watch; the main thread's and the record's are the same."""

  def __init__(self, monkeypatch):
    self.now = 100.0
    monkeypatch.setattr(watches.time, "monotonic", lambda: self.now)
    monkeypatch.setattr(activities.time, "time", lambda: self.now + 1e9)


def test_a_watch_knows_what_the_time_went_into(monkeypatch):
  clock = Clock(monkeypatch)
  alone = watches.start({}, 0, ["localhost"], age_s=2.0)
  places = [(0, "starting"), (1, "input"), (1, "step"), (2, "input"), (2, "step")]
  places += [(2, "evaluating"), (2, "evaluating"), (2, "saving")]
  for i, place in enumerate(places):
    clock.now += 2**i
    alone.at(*place)
  clock.now += 0.5
  spent = alone.spent()
  assert (spent.step, spent.activity, spent.time) == (2, "saving", 100 + 255.5)
  seconds = dict(starting=2 + 1 + 2, input=4 + 16, step=8 + 32, evaluating=64 + 128, saving=0.5)
  assert spent.seconds == seconds


def test_other_threads_see_every_second_once():
  alone, ended = watches.start({}, 0, ["localhost"]), []
  began = alone._position[3]

  def train():
    for step in range(20_000):
      alone.at(step, "input")
      alone.at(step, "step")
    ended.append(True)

  thread = threading.Thread(target=train)
  thread.start()
  while not ended:
    spent = alone.spent()
    assert sum(spent.seconds.values()) == pytest.approx(spent.time - began)
  thread.join()


def put_lines(folder, *lines):
  put(folder / FILE, "\n".join(map(json.dumps, lines)).encode())


def record(workdir, watch, **options):
  return ActivityRecord(workdir, watch, **{"may_write": lambda: True} | options)


def test_a_record_survives_a_disk_that_is_full_for_a_while(tmp_path, monkeypatch):
  """The next line says what one did not; a cut one hides no other."""
  clock, writes = Clock(monkeypatch), []
  monkeypatch.setattr(activities, "_SHORTEST_S", 1e6)  # the thread writes one line
  alone = watches.start({}, 0, ["localhost"], age_s=3.0)
  full = OSError(errno.ENOSPC, "No space left on device")
  opened = activities.open_to_append

  def failing(path):
    writes.append(path)
    if len(writes) in (2, 4):
      raise full
    if len(writes) == 5:  # as if it had been full after some bytes
      os.write(number := opened(path), b'{"start": 1')
      os.close(number)
      raise full
    return opened(path)

  (tmp_path / FILE).write_text('{"cut by a kill')
  monkeypatch.setattr(activities, "open_to_append", failing)
  with record(tmp_path, alone) as kept:
    while not writes:  # the thread's line
      time.sleep(0.01)
    for step in (7, 9, 12, 20):
      clock.now += 1.0
      alone.at(step, "step")
      kept.resumes(step - 1)
    kept.finish()
    clock.now += 5.0
  found = read_activities(tmp_path)
  assert len(writes) == 6 and len(found) == 3
  last = found[-1]
  seconds = {"starting": 4.0, "step": 8.0}
  assert last == Activity(1e9 + 97, 1e9 + 109, 20, [6, 8, 11, 19], seconds, None, True)
  assert sum(last.seconds.values()) == last.time - last.start
  assert kept.summary()["goodput"] == pytest.approx(8 / 12, abs=1e-4)


def test_a_second_run_of_a_process_did_not_start_with_it(tmp_path, monkeypatch):
  clock = Clock(monkeypatch)
  alone = watches.start({}, 0, ["localhost"], age_s=50.0)
  alone.at(9, "outside")
  clock.now += 20.0
  with record(tmp_path, alone):
    alone.at(0, "starting")
    clock.now += 4.0
  last = read_activities(tmp_path)[-1]
  assert (last.start, last.seconds) == (1e9 + 120, {"starting": 4.0})


def test_nothing_is_written_by_others_or_after_the_lock_is_lost(tmp_path, monkeypatch):
  alone = watches.start({}, 0, ["localhost"])
  with record(tmp_path, alone, may_write=lambda: False) as kept:
    kept.resumes(1)
  monkeypatch.setattr("jaxscale.cluster.is_leader", lambda: False)
  with record(tmp_path, alone) as kept:
    kept.resumes(1)
  assert kept.summary() == {} and list(tmp_path.iterdir()) == []


def test_what_is_in_the_place_of_a_record_costs_the_record(tmp_path):
  (tmp_path / FILE).mkdir()
  with record(tmp_path, watches.start({}, 0, ["localhost"], age_s=5.0)) as kept:
    kept.resumes(1)
  assert read_activities(tmp_path) == []
  assert kept.summary()["goodput_seconds"]["start-up"] >= 5.0


GOOD: dict[str, Any] = Activity(10.0, 12.0, 3, [1], {"step": 2.0})._asdict()
NAN, INF = float("nan"), float("inf")
BAD = [{"start": start} for start in (-1.0, 1e300)]
BAD += [{"time": time} for time in (9.0, NAN, "12")]
BAD += [{"seconds": seconds} for seconds in ({"step": -1.0}, {"step": INF}, [2.0])]
BAD += [{"step": 2.5}, {"resumed": 1}, {"resumed": ["1"]}, {"done": 1}]
BAD += [{"queued": [1.0, "2"]}, {"queued": [NAN, 1.0]}]


def test_damaged_lines_are_left_out(tmp_path):
  contents = [*EVERY.values(), *(json.dumps(GOOD | bad).encode() for bad in BAD)]
  for content in contents:
    put(tmp_path / FILE, content)
    assert read_activities(tmp_path) == []
  odd = [{"queued": [1.0]}, {"step": -(2**62)}, {"resumed": [2**62]}, {"seconds": {}}]
  put_lines(tmp_path, *(GOOD | o for o in odd))
  found = goodput(read_activities(tmp_path))
  assert found is not None and found.wall_s == 2.0


@pytest.mark.parametrize("back_s", [0.0, 12.0, 3600.0])
def test_a_clock_that_is_set_back_between_two_starts_takes_no_time_away(tmp_path, back_s):
  """The later start seemed to be the earlier one, and cut off the other's steps."""
  first = [Activity(10000.0, 10000.0 + t, t, [0], {"step": float(t)}) for t in (4, 9)]
  start = 10010.0 - back_s
  second = Activity(start, start + 7.0, 12, [8], {"step": 7.0})
  later = second._replace(time=start + 8.0, seconds={"step": 8.0})
  put_lines(tmp_path, *(a._asdict() for a in (*first, second)))
  found = goodput(read_activities(tmp_path, later))
  assert found and found.seconds["training"] + found.seconds["lost"] == pytest.approx(17.0)


def test_the_age_of_a_process_is_that_of_ps():
  with open("/proc/uptime") as file:
    since_boot = float(file.read().split()[0])
  assert 0 < session._age_s() < since_boot + 1


def write_run(folder, executor="slurm", trials=()):
  """Write the folder of a run whose job was queued, requeued and ended."""
  run = RUN._replace(folder=str(folder), executor=executor, trials=trials)
  workdir = run.workdir(len(trials) - 1 if trials else 0)
  workdir.mkdir(parents=True)
  (folder / "events").mkdir()
  append_json_line(folder / "submissions.jsonl", {"job": "7", "time": 100.5, "tasks": None})
  job, task = ("7_1", 1) if trials else ("7", 0)
  events = [("start", 110, ""), ("end", 135, "requeue"), ("start", 141, ""), ("end", 160, "stop")]
  for event, at, next_ in events:
    line = {"event": event, "job": job, "restarts": 0, "nodes": 1, "code": 0}
    append_json_line(run.events_file(task), line | {"next": next_, "time": at})
  lines = [Activity(112.0, 134.0, 22, [0], {"step": 22.0})]
  lines += [Activity(144.0, 159.0, 30, [15], {"step": 15.0}, done=True)]
  put_lines(workdir, *(line._asdict() for line in lines))
  return run, task


WANTED = {"training": 30.0, "lost": 7.0, "queue": 15.5, "start-up": 5.0, "down": 1.0}


@pytest.mark.parametrize("trials", [(), ({"seed": "1"}, {"seed": "2"})])
def test_the_events_of_a_job_know_its_queue(tmp_path, trials):
  run, task = write_run(tmp_path / "run", trials=trials)
  found = folders.read_goodput(run, task)
  assert found and found.seconds == pytest.approx(dict.fromkeys(CATEGORIES, 0.0) | WANTED)


def test_status_has_goodput_and_of_one_run_where_the_time_went(tmp_path, capsys):
  for name in "ab":
    run, _ = write_run(tmp_path / name, "local")
    folders.write_spec(run._replace(name=name), ("x", ""))
  (now,) = status.statuses([tmp_path / "a"])
  cli.main(["status", "a", f"--runs={tmp_path}"])
  head, row, line = capsys.readouterr().out.splitlines()
  assert head.split()[-2:] == ["goodput", "restarts"]
  assert row.split()[-2] == "70%" and line == str(now.goodput)
  assert line.startswith("goodput 70% of 0:43: training 0:30, lost 0:07, start-up 0:05")
  cli.main(["status", f"--runs={tmp_path}"])
  assert len(capsys.readouterr().out.splitlines()) == 3
