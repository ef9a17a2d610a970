"""A run that is stopped and resumes with another number of devices, as processes."""

import json

import pytest

from jaxscale import metrics
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.run.fit import fit
from jaxscale.run.reporter import Reporter
from support import at_step
from support.commands import error_line, run_train
from support.configs import settings
from support.paths import ROOT
from support.tiny_runs import restored
from support.trees import assert_close

# BatchNorm's statistics are a device's: 8 examples of 64. 68 steps, saved every third.
SHORT = settings("""
  batch_size=64 epochs=3 schedule.warmup_epochs=0.5 evaluation.every_epochs=1
  checkpoint.every_epochs=0.13 log.every_steps=1 log.tensorboard=False log.plot=False
""")
CNN = SHORT | settings("""
  model.features=(4,) model.dense=0 model.convs_per_stage=1 model.batch_norm=True
  model.dropout=0.2
""")
MLP = SHORT | settings("model=MLP model.hidden=(32,)")


class Stopped(Exception):
  pass


def train_until(workdir, changes, step, config="configs/digits.py"):
  """On these eight devices; it breaks off after a step, saved some steps before."""
  real = Reporter.trained

  def trained(self, now, values):
    real(self, now, values)
    if now == step:
      raise Stopped

  with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
    patch.setattr(Reporter, "trained", trained)
    fit(load_config(config, changes), workdir)


def resume(workdir, changes, num_devices, stop=None, config="configs/digits.py"):
  """Resume as a process; it ends as by Ctrl-C after step `stop`."""
  args = [f"--config.{name}={value}" for name, value in changes.items()]
  env = at_step.interrupt(stop) if stop is not None else {}
  return run_train(workdir, *args, config=config, num_devices=num_devices, **env)


def last_state(workdir, changes):
  """Return the newest checkpoint of a run, on the host."""
  return restored(workdir, build.experiment(load_config("configs/digits.py", changes)))


def derived(workdir):
  return json.loads((workdir / "config.json").read_text())["derived"]


def losses(workdir):
  lines = metrics.read_json_lines(workdir / "metrics.jsonl")
  return {x["step"]: x["train/loss"] for x in lines if "train/loss" in x}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Uninterrupted, on eight devices."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    return fit(load_config("configs/digits.py", CNN), workdir).state, workdir


@pytest.mark.slow
def test_half_the_run_on_two_of_eight_devices_is_the_same_run(whole, tmp_path):
  state, uninterrupted = whole
  workdir = tmp_path / "run"
  train_until(workdir, CNN, 24)
  assert derived(workdir)["start_devices"] == 8

  done = resume(workdir, CNN, 3)
  reported = error_line(done, 2)
  assert "batch_size=64 cannot be divided over 3 devices" in reported
  assert "use 1, 2, 4 or 8 devices" in reported and "micro-batches" not in done.stdout
  assert derived(workdir)["num_devices"] == 8  # nothing was written

  done = resume(workdir, CNN, 2, stop=46)
  assert done.returncode == 130, done.stderr
  line = (
    "2 devices, 8 at the start: 4 micro-batches per step instead of 1, so that a "
    "device still holds 8 examples at a time; the global batch and the order of "
    "examples stay the same"
  )
  assert done.stdout.count(line) == 1 == done.stdout.count("at the start")
  numbers = derived(workdir)
  assert (numbers["num_devices"], numbers["start_devices"]) == (2, 8)
  assert (numbers["micro_batch_size"], numbers["device_batch_size"]) == (8, 32)
  assert numbers["phases"][0]["accumulate_steps"] == 4

  done = resume(workdir, CNN, 8)
  assert done.returncode == 0, done.stderr
  assert "resuming from the checkpoint of step 46" in done.stdout
  assert "at the start" not in done.stdout  # it is as it was
  assert derived(workdir)["phases"][0]["accumulate_steps"] == 1
  got = last_state(workdir, CNN)
  assert_close(got.params, state.params, 1e-5)
  assert_close(got.model_state, state.model_state, 1e-5)
  assert_close(got.average, state.average, 1e-5)
  assert losses(workdir) == pytest.approx(losses(uninterrupted), rel=1e-4)


@pytest.mark.slow
def test_phases_noise_scale_and_step_report_take_it(tmp_path):
  changes = MLP | settings("""
    phases.epochs=(0,1,2) phases.batch_sizes=(64,128,256) phases.accumulate_steps=(1,1,2)
    noise_scale=True
  """)
  workdir, whole = tmp_path / "run", tmp_path / "whole"
  wanted = fit(load_config("configs/digits.py", changes), whole)
  train_until(workdir, changes, 15)
  done = resume(workdir, changes | {"log.step_report": "True"}, 2)
  assert done.returncode == 0, done.stderr
  assert "4, 4 and 8 micro-batches per step instead of 1, 1 and 2" in done.stdout
  assert "so that a device still holds 8, 16 and 16 examples at a time" in done.stdout
  assert "step report: " in done.stdout and " on 2 devices" in done.stdout
  assert [s["accumulate_steps"] for s in derived(workdir)["phases"]] == [4, 4, 8]
  # The noise scale compares micro-batches of as many examples as on eight devices.
  got = last_state(workdir, changes)
  assert_close(got.params, wanted.state.params, 1e-5)
  assert_close(got.noise, wanted.state.noise, 1e-4)


@pytest.mark.slow
def test_an_adaptive_run_chooses_as_it_would_have(tmp_path):
  changes = MLP | settings("""
    phases=AdaptiveBatch phases.trial_steps=2 phases.multiple=32 phases.max_batch_size=256
  """)
  workdir, whole = tmp_path / "run", tmp_path / "whole"
  wanted = fit(load_config("configs/digits.py", changes), whole)
  train_until(workdir, changes, 15)
  done = resume(workdir, changes, 2)
  assert done.returncode == 0, done.stderr
  chosen = [json.loads((w / "batch_sizes.json").read_text()) for w in (workdir, whole)]
  assert chosen[0] == chosen[1] and len({*chosen[0]}) > 1
  got = last_state(workdir, changes)
  assert_close(got.params, wanted.state.params, 1e-5)
  # Started again, it knows the sizes: the last phase has as many micro-batches.
  done = resume(workdir, changes, 4)
  assert done.returncode == 0 and "steps are already done" in done.stdout, done.stderr
  phases = derived(workdir)["phases"]
  assert {s["accumulate_steps"] for s in phases} == {2}
  assert [s["batch_size"] for s in phases] == chosen[0]


@pytest.mark.slow
def test_what_devices_owe_is_carried_over_as_well(tmp_path):
  """The exchange is a user's own class, in the config file."""
  recipe = "configs/exchange_top_k.py"
  changes = MLP | {"exchange.share": "0.05"}
  train_until(tmp_path, changes, 15, config=recipe)
  done = resume(tmp_path, changes, 2, config=recipe)
  assert done.returncode == 0, done.stderr
  assert "2 devices, 8 at the start: 4 micro-batches per step" in done.stdout
  assert "converted from 8 devices to 2" in done.stdout
