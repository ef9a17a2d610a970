"""Trackers: whatever one does, the run has its lines, and trackers each line once."""

import dataclasses
import json
import math
import re
import sys
import threading

import pytest

from jaxscale import config, errors, metrics
from jaxscale.config.loading import load_config
from jaxscale.config.record import from_plain, to_plain
from jaxscale.errors import ConfigError
from jaxscale.metrics import tracking as background
from jaxscale.run import tracking
from jaxscale.run.fit import fit
from support.configs import tiny_digits
from support.errors import config_error
from support.logs import logged

WAIT_S = 60  # until what must happen soon counts as hung


class Fake:
  """A tracker that keeps what it gets; `fault` is called first with each step."""

  def __init__(self, fault=lambda step: None, known=None, flush_s=WAIT_S):
    self.got, self.opened, self.outcome = [], 0, None
    self.fault, self.known = fault, known
    self.source = metrics.TrackerSource("Fake", self.open, flush_s)

  def open(self, note):
    self.opened += 1
    self.fault(0)
    return metrics.Tracker(self.log, self.finish, self.known, "the note")

  def log(self, step, time, values):
    self.fault(step)
    self.got.append((step, values))

  def finish(self, outcome):
    self.outcome = outcome


def writer_of(workdir, fake, start=0):
  options = dict(tensorboard=False, trackers=[fake.source])
  return metrics.MetricWriter(workdir, start=start, **options)


def write(workdir, fake, steps, start=0, outcome="done"):
  """Write a line per step with this tracker; return the logged lines."""
  with logged() as printed:
    writer = writer_of(workdir, fake, start)
    for step in steps:
      writer.write(step, {"train/loss": 1 / step})
    writer.close(outcome)
  return printed


def lines(*steps):
  return [(step, {"train/loss": 1 / step}) for step in steps]


def steps_in(workdir):
  return [line["step"] for line in metrics.read_metrics(workdir / "metrics.jsonl")]


@pytest.fixture
def no_pause(monkeypatch):
  """Remove the pause before a failed tracker is opened again."""
  monkeypatch.setattr(background, "_RETRY_S", 0)


def failing(count, step):
  """Return a fault that occurs `count` times at a step."""
  left = [count]

  def fault(at):
    if at == step and left[0]:
      left[0] -= 1
      raise OSError("no route to host")

  return fault


def test_each_line_arrives_in_order_and_the_note_is_printed(tmp_path):
  fake = Fake()
  assert write(tmp_path, fake, (1, 2, 3), outcome="interrupted") == ["the note"]
  assert fake.got == lines(1, 2, 3) and fake.outcome == "interrupted"


def test_without_a_line_nothing_is_opened(tmp_path):
  fake = Fake()
  assert write(tmp_path, fake, ()) == [] and fake.opened == 0


@pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt])
def test_one_that_cannot_be_opened_is_reported_once(tmp_path, error):
  def fault(step):
    raise error("no\nroute")

  printed = write(tmp_path, Fake(fault), (1, 2))
  assert printed == [
    f"Fake: {error.__name__}: no route; training continues, and metrics.jsonl has all lines",
    f"Fake did not finish; {tmp_path}/metrics.jsonl has all lines",
  ]
  assert steps_in(tmp_path) == [1, 2]


def test_two_open_one_after_the_other(tmp_path):
  opened, both, overlaps = [], threading.Event(), []

  def fault(step):
    if step == 0:
      opened.append(step)
      if len(opened) == 2:
        both.set()
      overlaps.append(both.wait(0.2))

  fakes = Fake(fault), Fake(fault)
  writer = metrics.MetricWriter(tmp_path, tensorboard=False, trackers=[x.source for x in fakes])
  writer.write(1, {"train/loss": 1.0})
  writer.close()
  assert [fake.got for fake in fakes] == [lines(1)] * 2
  assert overlaps == [False, True]


def test_one_that_fails_later_gets_every_line_once(tmp_path, no_pause):
  fake = Fake(failing(1, step=2))
  printed = write(tmp_path, fake, range(1, 6))
  if fake.outcome is None:  # the end came first: then it is not opened again
    assert len(printed) == 2 and fake.got == lines(1)
  # Whatever the order of threads, at the next start it has the rest.
  again = Fake(known=lambda name: max((step for step, _ in fake.got), default=-1))
  write(tmp_path, again, [6], start=5)
  assert fake.got + again.got == lines(*range(1, 7))


def test_a_line_that_never_arrives_is_left_out(tmp_path, no_pause, reported):
  taken = threading.Event()

  def fault(step):
    if step == 2:
      raise ValueError("what is this?")
    if step == 3:
      taken.set()

  writer = writer_of(tmp_path, fake := Fake(fault))
  for step in (1, 2, 3):
    writer.write(step, {"train/loss": 1 / step, "train/rate": math.nan})
  assert taken.wait(WAIT_S)
  writer.close()
  assert [step for step, _ in fake.got] == [1, 3] and fake.opened == 2
  assert len([line for line in reported if "ValueError: what is this?" in line]) == 1
  assert math.isnan(fake.got[-1][1]["train/rate"])


def test_the_end_waits_for_one_that_hangs_only_so_long(tmp_path):
  gate, hangs = threading.Event(), threading.Event()

  def fault(step):
    if step == 2:
      hangs.set()
      gate.wait()

  fake = Fake(fault, flush_s=0.05)
  (tmp_path / "a").mkdir()
  printed = write(tmp_path / "a", fake, range(1, 100))
  assert printed[-1].startswith("Fake did not finish in 0.05 s")
  assert steps_in(tmp_path / "a") == [*range(1, 100)]
  assert hangs.wait(WAIT_S) and fake.got == lines(1)
  # `leave` ends the process without what a library would wait for at its exit.
  (thread,) = [t for t in errors._abandoned if t.is_alive()]
  gate.set()
  thread.join(WAIT_S)
  assert fake.got == lines(*range(1, 100))


def test_one_that_cannot_keep_up_gets_all_lines(tmp_path, reported):
  gate = threading.Event()
  writer = writer_of(tmp_path, fake := Fake(lambda step: gate.wait()))
  for step in range(1, 101):
    writer.write(step, {"train/loss": 1 / step})
  gate.set()
  writer.close()
  assert reported == ["the note"]
  assert fake.got == lines(*range(1, 101)) and fake.outcome == "done"


KNOWN = [(None, (3, 4)), (lambda name: -1, (1, 2, 3, 4)), (lambda name: 3, (4,))]


@pytest.mark.parametrize("known, got", KNOWN, ids=["this start", "nothing", "more than saved"])
def test_a_resumed_run_logs_what_the_tracker_lacks(tmp_path, known, got):
  write(tmp_path, Fake(), (1, 2, 3))
  fake = Fake(known=known)
  write(tmp_path, fake, (3, 4), start=2)
  assert fake.got == lines(*got)


# As settings.


def test_a_missing_package_is_one_line_at_the_start(tmp_path, monkeypatch):
  tiny = tiny_digits()
  log = dataclasses.replace(tiny.log, trackers=(config.Wandb(),))
  (tmp_path / "wandb").mkdir()  # as W&B leaves it where it runs
  monkeypatch.chdir(tmp_path)
  elsewhere = [p for p in sys.path if "site-packages" not in p]
  monkeypatch.setattr(sys, "path", [str(tmp_path), *elsewhere])
  for name in [m for m in sys.modules if m.partition(".")[0] == "wandb"]:
    monkeypatch.delitem(sys.modules, name)
  with pytest.raises(ConfigError, match=r"pip install 'jaxscale\[wandb\]'") as error:
    fit(dataclasses.replace(tiny, log=log), tmp_path / "run")
  assert "Config.log.trackers: Wandb needs the package wandb" in str(error.value)
  assert not (tmp_path / "run").exists()


DAMAGED = [None, b"", b"[]", b'{"id": 3}', b'{"id": "../../x"}', b'{"id": ""}']


@pytest.mark.parametrize("content", DAMAGED)
def test_the_id_is_kept_and_made_anew_where_it_is_damaged(tmp_path, content):
  workdir = tmp_path / "a run é"
  workdir.mkdir()
  first = tracking.tracked_id(workdir)
  assert re.fullmatch(r"a-run-[\w-]{8,12}", first, re.ASCII)
  assert tracking.tracked_id(workdir) == first
  path = workdir / tracking.FILE
  path.unlink()
  path.mkdir() if content is None else path.write_bytes(content)
  again = tracking.tracked_id(workdir)
  assert again != first and re.fullmatch(r"[\w-]+", again, re.ASCII)
  assert content is None or tracking.tracked_id(workdir) == again


def test_they_are_chosen_by_name_and_recorded():
  chosen = {"log.trackers.Wandb.project": "x", "log.trackers": "MLflow,Wandb"}
  chosen |= {"log.trackers.MLflow.uri": "https://host"}
  loaded = load_config("configs/digits.py", chosen)
  assert loaded.log.trackers == (config.MLflow(uri="https://host"), config.Wandb(project="x"))
  plain = json.loads(json.dumps(to_plain(loaded)))
  assert plain["log"]["trackers"][0]["class"] == "MLflow"
  assert from_plain(config.Config, plain) == loaded
  assert load_config("configs/digits.py", {"log.trackers": "()"}).log.trackers == ()


MISTAKES = {
  "=Wandv": "did you mean 'Wandb'",
  "=Wandb,Wandb": "Wandb is listed twice",
  ".Wandb.project=x": "not chosen; add --config.log.trackers=Wandb",
  "=Wandb .Wandb.projcet=x": "Wandb has no field 'projcet', did you mean 'project'?",
  "=MLflow .MLflow.uri=https://me:x@host": "MLflow.uri contains a user, password or token, which",
  "=MLflow .MLflow.uri=https://token@host": "which config.json would record; give the address",
}


@pytest.mark.parametrize("chosen", MISTAKES)
def test_mistakes_are_one_line(chosen):
  with config_error(MISTAKES[chosen]):
    words = (f"log.trackers{word}".split("=") for word in chosen.split())
    load_config("configs/digits.py", dict(words))


def test_something_else_than_a_tuple_is_refused():
  with pytest.raises(ConfigError, match=r"expected tuple of MLflow \| Wandb"):
    config.Log(trackers=config.Wandb())
