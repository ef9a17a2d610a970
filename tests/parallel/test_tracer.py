"""Traces that runs take: when, of what, and that nothing else changes."""

import collections
import contextlib
import resource
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxscale.config import Log
from jaxscale.run import trace_request
from jaxscale.run.fit import fit
from jaxscale.run.trace_request import process_file, session_folder
from jaxscale.run.tracer import Tracer
from jaxscale.training import loop
from support.configs import tiny_digits
from support.traces import steps_of, viewer_events
from support.trees import assert_same_bits

# Of 11.2 steps per epoch; an evaluation and a save are among the steps traced.
SPAN = {"epochs": "10", "evaluation__every_epochs": "9.1"}
SPAN |= {"checkpoint__every_epochs": "9.1", "log__tensorboard": "False"}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
  """Return the result and the workdir of a run of 112 steps on eight devices."""
  workdir = tmp_path_factory.mktemp("traced")
  more = {"log__profile": "100:110", **SPAN}
  return fit(tiny_digits(**more), workdir), workdir


@pytest.mark.slow
def test_the_steps_are_in_it_with_the_hosts_activities(traced):
  events = viewer_events(session_folder(traced[1], "steps_100-110"))
  assert steps_of(events) == list(range(100, 111))
  count = collections.Counter(event["name"] for event in events)
  assert count["input"] == count["step"] == 11
  assert count["evaluation"] == count["saving"] == 1 and not count["check"]
  assert not list((traced[1] / "profile").glob(".*"))


@pytest.mark.slow
def test_every_device_and_the_scopes_of_the_step_are_in_it(traced):
  folder = session_folder(traced[1], "steps_100-110")
  args = [event["args"] for event in viewer_events(folder) if "hlo_op" in event.get("args", {})]
  of_step = [a for a in args if a["hlo_module"] == "jit_train_step"]
  counts = collections.Counter((a["device_ordinal"], a["hlo_op"]) for a in of_step)
  assert {device for device, _ in counts} == {*"01234567"} and len(counts) > 8 * 20
  # Once in each step; a thread may end its last one after the trace.
  assert {*counts.values()} <= {10, 11}
  program = process_file(folder, 0).read_bytes()
  for scope in (b"gradients/jvp(", b"gradients/transpose(jvp(", b"exchange/", b"update/"):
    assert b"jit(train_step)/" in program and scope in program, scope


@pytest.mark.slow
def test_a_trace_changes_no_bit_of_the_run(traced, tmp_path):
  assert_same_bits(fit(tiny_digits(**SPAN), tmp_path).state, traced[0].state)
  assert not (tmp_path / "profile").exists()


class FakeProfiler:
  """Notes which steps it sees, and writes what JAX's would."""

  def __init__(self, monkeypatch):
    self.taken, self.steps, self.folder = [], [], None
    for name in ("start_trace", "stop_trace", "StepTraceAnnotation"):
      monkeypatch.setattr(jax.profiler, name, getattr(self, name))

  def start_trace(self, folder, profiler_options):
    self.folder, self.steps = folder, []

  def stop_trace(self):
    self.taken.append(self.steps)
    target = self.folder / "plugins" / "profile" / "now"
    target.mkdir(parents=True)
    for suffix in (".xplane.pb", ".trace.json.gz"):
      (target / f"host{suffix}").write_text("")

  def StepTraceAnnotation(self, name, step_num):
    self.steps.append(step_num)
    return contextlib.nullcontext()


def walk(tracer, start, total=9, evaluated=(), stop=None):
  """Run the loop with a tracer as `run_control` does; return the steps read before each turn."""
  logged, turns = [], []

  def step(state, batch):
    return state + 1, {"loss": jnp.float32(1), "grad_norm": jnp.float32(1)}

  def turn(at):
    turns.append(logged[-1] if logged else start)
    tracer.turn(at)

  def evaluate(at, state):
    if tracer.is_complete:
      turn(at + 1)

  made = loop.LoopControl(
    at=tracer.at,
    is_traced=tracer.is_due,
    trace=turn,
    is_logged=lambda s: True,
    log=lambda s, m: logged.append(s),
    should_stop=lambda s: s == stop,
  )
  hooks = [loop.Hook(lambda s: s in evaluated, evaluate)]
  loop.train(start, step, iter(range(total)), made, hooks, start=start, total_steps=total)
  return turns


WHEN = [
  ("3:5", 0, {}, [3, 4, 5], "traced steps 3 to 5: "),
  ("3:5", 0, {"evaluated": (4, 5)}, [3, 4, 5], "traced steps 3 to 5: "),
  ("1:1", 0, {}, [1], "traced steps 1 to 1: "),
  ("8:9", 0, {}, [8, 9], "traced steps 8 to 9: "),
  ("8:12", 0, {}, [8, 9], "traced steps 8 to 9: "),
  ("3:5", 3, {}, [4, 5], "traced steps 4 to 5: "),
  ("3:5", 0, {"stop": 4}, [3, 4], "traced steps 3 to 4: "),
  ("3:5", 5, {}, None, None),
  ("10:12", 0, {}, None, "log.profile=10:12: the run has 9 steps; no trace"),
  ("7:8", 0, {"stop": 4}, None, "log.profile=7:8: the run ended after step 4; no"),
]


@pytest.mark.parametrize("profile, start, options, taken, says", WHEN)
def test_when_it_traces(tmp_path, monkeypatch, profile, start, options, taken, says, reported):
  fake = FakeProfiler(monkeypatch)
  with Tracer(tmp_path, Log(profile=profile)) as tracer:
    tracer.check_plan(9)
    turns = walk(tracer, start, **options)
  assert fake.taken == ([taken] if taken else [])
  assert [line[: len(says)] for line in reported] == ([says] if says else [])
  # No step is in flight when it begins or ends.
  assert taken is None or turns[0] == taken[0] - 1
  assert len(turns) < 2 or turns[1] == taken[-1]
  if taken:
    name = f"steps_{taken[0]}-{profile.split(':')[1]}"
    assert len([*session_folder(tmp_path, name).iterdir()]) == 2


def test_it_traces_what_is_asked_for_once(tmp_path, monkeypatch):
  fake = FakeProfiler(monkeypatch)
  monkeypatch.setattr("jaxscale.run.tracer._POLL_S", 0.0)
  requests = [trace_request.make(n, ranks, 60.0) for n, ranks in ((2, (0,)), (1, (5,)))]
  for request in requests:  # of the second one, process 5 alone
    with Tracer(tmp_path, Log(profile="6:7")) as tracer:
      tracer.check_plan(9)
      trace_request.write(tmp_path, request)
      walk(tracer, 0)
    trace_request.withdraw(tmp_path, request)
  assert fake.taken == [[1, 2], [6, 7], [6, 7]]
  with Tracer(tmp_path, Log()) as tracer:  # a restart, and it waits still
    trace_request.write(tmp_path, requests[0])
    walk(tracer, 0)
  assert len(fake.taken) == 3


def test_it_looks_for_a_request_once_a_second(tmp_path, monkeypatch):
  looks, clock = [], iter(range(1000, 1100))
  monkeypatch.setattr(trace_request, "read", looks.append)
  fake_time = SimpleNamespace(monotonic=lambda: next(clock) / 10)
  monkeypatch.setattr("jaxscale.run.tracer.time", fake_time)
  tracer = Tracer(tmp_path, Log())
  assert not any(tracer.is_due(step) for step in range(1, 101))
  assert len(looks) == 10


def test_processes_that_are_not_there_are_named(tmp_path, reported):
  with Tracer(tmp_path, Log(profile="1:2", profile_processes=(3,))) as tracer:
    tracer.check_plan(9)
    assert not tracer.is_due(1)
  assert reported == ["log.profile_processes=(3,): the run has processes 0 to 0"]


def test_a_full_disk_costs_a_line_and_the_next_trace_is_taken(tmp_path, reported):
  step = jax.jit(lambda x: (x @ x).sum())
  with Tracer(tmp_path, Log(profile="1:2")) as tracer:
    tracer.check_plan(9)
    assert tracer.is_due(1)
    tracer.turn(1)
    step(jnp.ones((9, 9))).block_until_ready()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # EFBIG, for whoever it is
    try:
      tracer.finish()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (line,) = reported
    assert line.startswith("step 1  no trace: ") and "\n" not in line
    assert not list((tmp_path / "profile").glob(".*")), "nothing half-written stays"
    tracer._planned = (5, 6)
    assert tracer.is_due(5)
    tracer.turn(5)
    step(jnp.ones((9, 9))).block_until_ready()
    tracer.finish()
  assert reported[1].startswith("traced steps 5 to ")
  assert reported[1].endswith(f": `xprof --logdir {tmp_path}/profile`")
  assert any("hlo_op" in e.get("args", {}) for e in viewer_events(tracer._target))


@pytest.mark.parametrize("obstacle", ["a file", "another trace"])
def test_what_is_in_the_way_costs_a_line(tmp_path, obstacle, reported):
  if obstacle == "a file":
    (tmp_path / "profile").write_text("")
  else:
    jax.profiler.start_trace(tmp_path / "mine")
  with Tracer(tmp_path, Log(profile="1:2")) as tracer:
    tracer.check_plan(9)
    walk(tracer, 0, 4)
  if obstacle == "another trace":
    jax.profiler.stop_trace()
  (line,) = reported
  what = "Not a directory" if obstacle == "a file" else "Profile has already been started"
  assert line.startswith("step 1  no trace: ") and what in line
