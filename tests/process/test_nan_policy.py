"""Runs with a NaN: what they log, where they continue, and that resuming is exact."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from jaxscale import metrics
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError, NonFiniteError
from jaxscale.experiment import build
from jaxscale.run import train_phases
from jaxscale.run.fit import fit
from jaxscale.run.goodput import read_activities
from jaxscale.run.nan_policy import NanPolicy
from jaxscale.training import loop
from support.commands import error_line, train_command
from support.fault_table import measured
from support.processes import run_group
from support.tables import assignments

# 45 steps, a checkpoint after 11, 22, 33, 44 and 45.
CONFIG = assignments("""
  epochs=4 schedule.warmup_epochs=1 model=MLP model.hidden=(32,) log.tensorboard=False
  checkpoint.every_epochs=1 evaluation.every_epochs=4 log.every_steps=1 log.plot=False
""")
LABEL = 99  # is not a class: its loss is NaN


def quick(**changes):
  dotted = {k.replace("__", "."): v for k, v in changes.items()}
  return load_config("configs/digits.py", CONFIG | {"mesh.data": "8"} | dotted)


def spoil(monkeypatch, bad, row=100):
  """Let one row of these steps have a label that is none."""
  real = train_phases.train_batches

  def batches(experiment, done):
    for step, batch in enumerate(real(experiment, done), done + 1):
      if step in bad:
        label = batch["label"].at[row].set(LABEL)
        batch["label"] = jax.device_put(label, batch["label"].sharding)
      yield batch

  monkeypatch.setattr(train_phases, "train_batches", batches)


def same_state(a, b):
  for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def record(workdir):
  return json.loads((workdir / "skipped_steps.json").read_text())


def saved(workdir):
  names = [p.name for p in (workdir / "checkpoints").iterdir()]
  return sorted(int(name) for name in names if name.isdigit())


def test_stop_names_device_and_step_and_keeps_the_checkpoint(tmp_path, monkeypatch):
  spoil(monkeypatch, [17])
  with pytest.raises(NonFiniteError) as error:
    fit(quick(), tmp_path)
  assert "device 6: loss is NaN at step 17; last good checkpoint: step 11 in" in str(error.value)
  assert error.value.step == 17 and saved(tmp_path) == [11]
  assert not (tmp_path / "skipped_steps.json").exists()


def test_skip_resumes_and_counts(tmp_path, monkeypatch, capsys):
  spoil(monkeypatch, [17, 18, 30])
  result = fit(quick(checks__nan_policy="skip"), tmp_path)
  assert result.summary["outcome"] == "done" and result.summary["skipped_steps"] == 3
  reported = [x for x in capsys.readouterr().out.splitlines() if "skipped: " in x]
  assert [x.split()[1] for x in reported] == ["17", "18", "30"]
  assert all("process 0 (" in x and "device 6: loss is NaN" in x for x in reported)
  assert [s["step"] for s in record(tmp_path)["skipped"]] == [17, 18, 30]
  lines = {
    x["step"]: x
    for x in metrics.read_json_lines(tmp_path / "metrics.jsonl")
    if "train/skipped_steps" in x
  }
  counts = [lines[step]["train/skipped_steps"] for step in (16, 17, 18, 29, 30, 45)]
  assert counts == [0, 1, 2, 2, 3, 3]
  assert "train/loss" not in lines[17] and lines[19]["train/loss"] > 0
  # The schedules of run and optimizer end together.
  assert result.state.step == 45
  counts = [x for x in jax.tree.leaves(result.state.opt_state) if x.dtype == np.int32]
  assert [int(x) for x in counts] == [45]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_a_run_that_is_interrupted_is_the_run_that_was_not(tmp_path, monkeypatch, policy):
  """Bit for bit, with bad steps on both sides of the interruption."""
  config = quick(checks__nan_policy=policy, checks__max_skipped_steps="5")
  spoil(monkeypatch, [17, 27])
  whole = fit(config, tmp_path / "whole")
  real = loop.train

  def until_25(*args, start, total_steps):
    if start < 25 <= total_steps:  # as if it had been killed there
      real(*args, start=start, total_steps=25)
      raise KeyboardInterrupt
    return real(*args, start=start, total_steps=total_steps)

  monkeypatch.setattr(loop, "train", until_25)
  with pytest.raises(KeyboardInterrupt):
    fit(config, tmp_path / "parts")
  monkeypatch.setattr(loop, "train", real)
  parts = fit(config, tmp_path / "parts")
  same_state(whole.state, parts.state)
  assert record(tmp_path / "whole") == record(tmp_path / "parts")
  # And with what is on record, from the very beginning.
  for path in (tmp_path / "parts" / "checkpoints").iterdir():
    path.rename(tmp_path / f"away-{path.name}")
  same_state(whole.state, fit(config, tmp_path / "parts").state)


@pytest.mark.slow
def test_roll_back_passes_over_what_followed_the_checkpoint(tmp_path, monkeypatch, capsys):
  spoil(monkeypatch, [3, 17, 45])
  result = fit(quick(checks__nan_policy="roll_back"), tmp_path)
  assert [(p["after"], p["to"]) for p in record(tmp_path)["passed_over"]] == [
    (0, 3),
    (11, 17),
    (44, 45),
  ]
  assert result.summary["rolled_back"] == 3 and result.summary["step"] == 45
  assert saved(tmp_path)[-1] == 45 and result.summary["accuracy"] > 0.3
  assert read_activities(tmp_path)[-1].resumed == [0, 0, 11, 44]
  assert result.summary["goodput_seconds"]["lost"] > 0
  out = capsys.readouterr().out
  assert "skipping steps 12 to 17" in out and "rolling back to it" in out
  # By hand: the same steps and no others, on the same batches.
  monkeypatch.undo()
  experiment = build.experiment(quick())
  state, step = experiment.init_state(), experiment.compile_train_step()
  batches = train_phases.train_batches(experiment, 0)
  for number, batch in zip(range(1, 46), batches, strict=False):
    if number <= 3 or 12 <= number <= 17 or number == 45:
      state = build.skip_steps(state, 1)
    else:
      state, _ = step(state, batch)
  same_state(state, result.state)


@pytest.mark.parametrize(
  ("bad", "policy", "words"),
  [
    ([17, 18, 19, 20], "skip", "at step 20 (skipped 4 times in a row, max_consecutive"),
    ([5, 9, 13], "skip", "at step 13 (skipped 3 times, max_skipped_steps=2"),
    ([17, 18, 19, 20], "roll_back", "; rolled back 4 times in a row, max_consecutive"),
  ],
)
def test_too_many_end_the_run(tmp_path, monkeypatch, bad, policy, words):
  most = "2" if len(bad) == 3 else "9"
  spoil(monkeypatch, bad)
  with pytest.raises(NonFiniteError) as error:
    fit(quick(checks__nan_policy=policy, checks__max_skipped_steps=most), tmp_path)
  assert words.replace("at step 20 ", "").replace("at step 13 ", "") in str(error.value)
  assert f" at step {bad[-1]}" in str(error.value)


def test_a_bad_state_is_not_skipped_for_ever(tmp_path, monkeypatch):
  """No further batch can help, so the first skipped step ends the run."""
  real = loop.train

  def corrupted(state, *args, **options):
    bias = state.params["Dense_0"]["bias"]
    bad = jax.device_put(bias.at[3].set(np.inf), bias.sharding)
    dense = state.params["Dense_0"] | {"bias": bad}
    state = state._replace(params=state.params | {"Dense_0": dense})
    return real(state, *args, **options)

  monkeypatch.setattr(loop, "train", corrupted)
  with pytest.raises(NonFiniteError) as error:
    fit(quick(checks__nan_policy="skip"), tmp_path)
  words = "all 8 devices: params/Dense_0/bias is Inf in the state itself at step 1;"
  assert str(error.value).startswith(words)


def test_what_is_passed_over_and_where_to_pause(tmp_path):
  policy = NanPolicy(tmp_path, "roll_back", 9, 3)
  for last_good, bad in [(10, 15), (10, 17), (30, 31), (17, 20)]:
    policy.roll_back(NonFiniteError(bad, "x"), last_good)
  again = NanPolicy(tmp_path, "stop")  # it is the same under any policy
  assert again.done_until(10) == 20 and again.done_until(9) == 9
  assert again.done_until(12) == 20 and again.done_until(20) == 20
  assert again.next_after(0, 99) == 10 and again.next_after(20, 99) == 30
  assert again.next_after(30, 99) == 99 and again.next_after(0, 5) == 5


def test_a_record_that_is_damaged_is_refused(tmp_path):
  (tmp_path / "skipped_steps.json").write_text("{}")
  with pytest.raises(ConfigError, match=r"skipped_steps\.json: no skipped in it; fix"):
    NanPolicy(tmp_path, "skip")


PROCESS = textwrap.dedent("""
  import os, sys
  import jax, numpy as np
  from jaxscale import errors, train
  from jaxscale.run import train_phases
  real = train_phases.train_batches
  def batches(experiment, done):
    for step, batch in enumerate(real(experiment, done), done + 1):
      if step == 17:
        label, row = batch["label"], 100  # of 128: the second process has it
        def rows(index):
          first, stop, _ = index[0].indices(label.shape[0])
          own = np.zeros(stop - first, np.int32)
          own[row - first if first <= row < stop else []] = 99
          return own
        batch["label"] = jax.make_array_from_callback(label.shape, label.sharding, rows)
      yield batch
  train_phases.train_batches = batches
  sys.argv = sys.argv[1:]
  errors.leave(train.main)
""")


def run_two(workdir, *args):
  """Run two processes of two devices to their ends."""
  settings = [f"--config.{name}={value}" for name, value in CONFIG.items()]
  command = [sys.executable, "-c", PROCESS, *train_command(workdir, *settings, *args)[2:]]
  ends = run_group(command, num_devices=2)
  return [subprocess.CompletedProcess(command, code, out, err) for out, err, code in ends]


@pytest.mark.slow
def test_both_processes_name_the_one_whose_batch_it_was(tmp_path):
  results = run_two(tmp_path / "stop")
  line = error_line(results[0], 1)  # reported once, for all
  assert results[1].returncode == 1 and not results[1].stderr
  assert line.startswith(f"error: process 1 ({os.uname().nodename}), device ")
  assert ": loss is NaN at step 17; last good checkpoint: step 11 in" in line
  assert not (tmp_path / "stop" / "faults").exists()
  measured("NaN in one process", None, 1, line, 17 - 11)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_both_processes_resume_together(tmp_path, policy):
  results = run_two(tmp_path, f"--config.checks.nan_policy={policy}")
  assert [done.returncode for done in results] == [0, 0], results
  assert "process 1 (" in results[0].stdout and "loss is NaN" in results[0].stdout
  summary = json.loads((tmp_path / "summary.json").read_text())
  counts = summary["skipped_steps"], summary["rolled_back"]
  assert counts == ((1, 0) if policy == "skip" else (0, 1))
  assert summary["step"] == 45 and summary["accuracy"] > 0.3
