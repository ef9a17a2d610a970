"""Commands join, stop when asked to, and report to their job."""

import dataclasses
import itertools
import signal
import time

import pytest

from jaxscale import cluster
from jaxscale.cluster.watch import fault_detection
from jaxscale.cluster.watch import watch as watches
from jaxscale.cluster.watch.signals import StopRequest
from jaxscale.cluster.watch.stop_consensus import StopRequested
from jaxscale.config import Config, Faults
from jaxscale.data import to_device
from jaxscale.errors import ConfigError, GiveUpError, user_message
from jaxscale.run import hooks, session, train_phases
from jaxscale.run.fit import fit
from support.configs import tiny_digits
from support.tiny_runs import record
from support.trees import assert_same_bits

SIGTERM = StopRequest("SIGTERM at process 0 on n1")


def config(**faults) -> Config:
  return dataclasses.replace(tiny_digits(), faults=Faults(**faults))


@pytest.fixture
def in_a_job(scontrol, monkeypatch):
  monkeypatch.setenv("SLURM_JOB_ID", "12")
  monkeypatch.delenv("JAXSCALE_REQUEUE", raising=False)
  return scontrol('[ $1 = show ] && echo "JobState=RUNNING Reason=None"; true')


def test_a_job_that_was_asked_to_stop_is_requeued(in_a_job, capsys):
  assert session.report_stop(config(), SIGTERM, "saved", "to resume: train") == 85
  assert capsys.readouterr().out == "saved\njob 12 is requeued, restart 1\n"
  assert "requeue 12" in in_a_job.read_text()


@pytest.mark.parametrize("reason", [StopRequest("Ctrl-C", "interrupt"), None])
def test_who_pressed_ctrl_c_does_not_want_it_again(in_a_job, capsys, reason):
  assert session.report_stop(config(), reason, "saved", "to resume: train") == 130
  out = capsys.readouterr().out
  assert out == "saved; to resume: train\n" and not in_a_job.exists()


def test_what_a_launcher_starts_it_starts_again_itself(in_a_job, capsys, monkeypatch):
  monkeypatch.setenv("JAXSCALE_REQUEUE", "launcher")
  assert session.report_stop(config(), SIGTERM, "saved", "to resume: train") == 85
  requeued = "job 12 is requeued unless it was cancelled or has no restarts left"
  assert capsys.readouterr().out == f"saved; {requeued}\n" and not in_a_job.exists()


def test_a_job_is_requeued_so_often_and_not_more(in_a_job, monkeypatch, capsys):
  monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
  assert session.report_stop(config(max_restarts=3), SIGTERM, "saved", "to resume: train") == 85
  assert session.report_stop(config(max_restarts=2), SIGTERM, "saved", "to resume: train") == 93
  assert "it was requeued 2 times (limit 2); to resume: train" in capsys.readouterr().out
  assert in_a_job.read_text().count("requeue 12") == 1


def test_restarts_without_progress_are_counted(tmp_path, monkeypatch):
  session.check_progress(config(), tmp_path, 0)  # in no job there is nothing to count
  assert not list(tmp_path.iterdir())
  monkeypatch.setenv("SLURM_JOB_ID", "12")
  for restart, step in enumerate([0, 40, 40]):
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
    session.check_progress(config(max_idle_restarts=2), tmp_path, step)
  monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
  with pytest.raises(GiveUpError, match="2 restarts without progress, still at step 40"):
    session.check_progress(config(max_idle_restarts=2), tmp_path, 40)
  told = user_message(GiveUpError("2 restarts"))
  assert told and told.code == 93


def points(workdir):
  """All but what depends on the clock, one by one."""
  lines = ((line.pop("step"), line) for line in record(workdir))
  return [(step, *item) for step, line in lines for item in line.items()]


@pytest.mark.slow
def test_an_evaluation_that_was_left_off_is_made_up_for(tmp_path, monkeypatch):
  """Asked to stop in the middle of one; then the record is that of a whole run."""
  small = tiny_digits(evaluation__batch_size="120")
  whole = fit(small, tmp_path / "whole")
  asked = []

  def polled(batches, mesh, watch, step, phase):
    for i, batch in enumerate(to_device(batches, mesh)):
      if step == 22 and i == 1 and not asked:
        asked.append(step)
        watch.stop.request(SIGTERM)
      if watch.stop.poll():
        raise StopRequested
      yield batch

  monkeypatch.setattr(hooks, "until_stopped", polled)
  first = fit(small, tmp_path / "run")
  assert asked and first.summary["outcome"] == "interrupted"
  assert first.summary["step"] == 22 and "accuracy" not in first.summary
  last = fit(small, tmp_path / "run")
  assert last.summary["outcome"] == "done"
  assert last.summary["accuracy"] == whole.summary["accuracy"]
  assert points(tmp_path / "run") == points(tmp_path / "whole")


def test_a_run_that_was_asked_to_stop_before_its_first_step_makes_none(tmp_path, monkeypatch):
  alone = watches.start({}, 0, ["localhost"])
  alone.stop.request(SIGTERM)
  monkeypatch.setattr("jaxscale.cluster.session._watch", alone)
  summary = fit(tiny_digits(), tmp_path).summary
  assert summary["outcome"] == "interrupted" and summary["step"] == 0


def test_what_jax_alone_has_joined_cannot_agree_on_ctrl_c(monkeypatch):
  before = signal.getsignal(signal.SIGINT)
  with cluster.current_watch():
    assert signal.getsignal(signal.SIGINT) is not before
  monkeypatch.setattr("jax.process_count", lambda: 2)
  with cluster.current_watch():
    assert signal.getsignal(signal.SIGINT) is before


def test_the_loop_says_where_it_is(tmp_path, monkeypatch):
  alone, places = watches.start({}, 0, ["localhost"]), []
  monkeypatch.setattr(alone, "at", lambda step, phase: places.append((step, phase)))
  monkeypatch.setattr("jaxscale.cluster.session._watch", alone)
  fit(tiny_digits(), tmp_path)
  assert places[:4] == [(0, "starting"), (1, "compiling"), (1, "input"), (1, "step")]
  places = [place for place, _ in itertools.groupby(places)]
  phases = [phase for step, phase in places if step == 22]
  assert phases == ["input", "step", "preparing", "evaluating", "saving"]
  phases = [phase for step, phase in places[-5:] if step == 45]
  assert phases == ["step", "evaluating", "saving", "leaving", "outside"]


def test_input_and_checks_that_hang_have_the_hang_limit(tmp_path, monkeypatch):
  """The first evaluation's had that of a compilation, an hour; so had every check."""
  alone, seen = watches.start({}, 0, ["localhost"]), []
  monkeypatch.setattr("jaxscale.cluster.session._watch", alone)
  load, compare = hooks.data.eval_batches, hooks.replica_check.check

  def eval_batches(*args, **options):
    for batch in load(*args, **options):
      seen.append(("batch", alone.spent().activity))
      yield batch

  def check(*args, **options):
    seen.append(("check", alone.spent().activity))
    return compare(*args, **options)

  monkeypatch.setattr(hooks.data, "eval_batches", eval_batches)
  monkeypatch.setattr(hooks.replica_check, "check", check)
  checks = dataclasses.replace(tiny_digits().checks, replicas_every_steps=20)
  fit(dataclasses.replace(tiny_digits(), checks=checks), tmp_path)
  assert {*seen} == {("batch", "evaluating"), ("check", "checking")}
  limits = {fault_detection.ACTIVITIES[activity] for _, activity in seen}
  assert limits == {"hang_timeout_s"}


@pytest.mark.parametrize("jump_s", [-3600.0, 7200.0])
def test_a_clock_that_jumps_changes_no_duration(tmp_path, monkeypatch, jump_s):
  """`after 120 steps, -3589.8 s`."""
  now, load, jumped = time.time, hooks.data.eval_batches, []

  def eval_batches(*args, **options):
    jumped.append(jump_s)
    return load(*args, **options)

  monkeypatch.setattr(hooks.data, "eval_batches", eval_batches)
  monkeypatch.setattr(time, "time", lambda: now() + sum(jumped[:1]))
  began = time.monotonic()
  summary = fit(tiny_digits(), tmp_path).summary
  took = time.monotonic() - began
  assert jumped and 0 < summary["seconds"] <= took + 0.1
  seconds = summary["goodput_seconds"].values()
  assert min(seconds) >= 0 and summary["goodput_seconds"]["down"] == 0


@pytest.mark.slow
def test_trials_of_a_batch_size_are_left_off_and_come_again(tmp_path, monkeypatch):
  """Asked to stop among them; what they choose, and the run, stay the same."""
  adaptive = dict(phases="AdaptiveBatch", phases__every_epochs="2", phases__trial_steps="2")
  small = tiny_digits(**adaptive, phases__max_batch_size="256", batch_size="64")
  whole, real, asked = fit(small, tmp_path / "whole"), train_phases._poll, []

  def poll(run, step):
    asked.append(step)
    if len(asked) == 3:  # the second of two steps of the first trial has begun
      run.watch.stop.request(SIGTERM)
    real(run, step)

  monkeypatch.setattr(train_phases, "_poll", poll)
  first = fit(small, tmp_path / "run")
  assert first.summary["outcome"] == "interrupted"
  assert first.summary["step"] == asked[0] and len(asked) == 3
  last = fit(small, tmp_path / "run")
  assert last.summary["outcome"] == "done"
  assert_same_bits(last.state.params, whole.state.params)


def test_a_notebook_joins_and_keeps_its_ctrl_c():
  before = signal.getsignal(signal.SIGINT)
  cluster.initialize()
  assert signal.getsignal(signal.SIGINT) is before
  for _ in range(2):  # one run that is stopped stops no other
    with cluster.current_watch() as watch:
      assert watch.stop.poll() is None
      watch.stop.request(StopRequest("Ctrl-C", "interrupt"))
      assert watch.stop.poll() == ("Ctrl-C", "interrupt")


def test_mistakes_about_faults_and_workdirs_are_one_line():
  with pytest.raises(ConfigError, match="before heartbeat_timeout_s=200"):
    Faults(heartbeat_timeout_s=200.0)
