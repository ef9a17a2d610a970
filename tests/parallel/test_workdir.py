"""Whose a workdir is: nothing saved, another experiment, more epochs."""

import json
import platform
import re
import shlex
import sys

import jax
import numpy as np
import pytest

from jaxscale import cli
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.errors import NonFiniteError
from jaxscale.experiment import build
from jaxscale.metrics import read_json_lines
from jaxscale.run import provenance
from jaxscale.run.fit import fit
from jaxscale.run.train_phases import phase_at, train_batches
from jaxscale.run.workdir import describe_text
from support.configs import tiny_digits
from support.errors import config_error
from support.processes import wait_until
from support.trees import assert_same_bits

SHORT, LONG = {"epochs": "2", "evaluation__every_epochs": "1"}, {"epochs": "4"}


def settings(workdir):
  return json.loads((workdir / "config.json").read_text())["config"]


def test_a_config_that_failed_before_it_saved_does_not_keep_its_workdir(tmp_path):
  """A file that is no weights, a rate that diverges: then the right ones."""
  (tmp_path / "notes.md").write_text("no weights")
  workdir = tmp_path / "run"
  with config_error(match="not a safetensors file"):
    fit(tiny_digits(init_from=str(tmp_path / "notes.md")), workdir)
  assert not (workdir / "config.json").exists()
  with pytest.raises(NonFiniteError):
    fit(tiny_digits(optimizer__lr="1e12"), workdir)
  assert settings(workdir)["optimizer"]["lr"] == 1e12
  # What an experiment decided that saved nothing is not the next one's.
  (workdir / "batch_sizes.json").write_text("[64, 128]")
  record = {"skipped": [], "passed_over": [{"after": 0, "to": 9, "what": "NaN"}]}
  (workdir / "skipped_steps.json").write_text(json.dumps(record))
  result = fit(tiny_digits(**SHORT), workdir)
  assert result.summary["outcome"] == "done" and result.summary["rolled_back"] == 0
  assert settings(workdir)["optimizer"]["lr"] == 0.1
  assert not (workdir / "batch_sizes.json").exists()


def test_what_was_passed_over_before_a_save_stays_passed_over(tmp_path):
  """An experiment that was killed before its first checkpoint keeps its record."""
  record = {"skipped": [], "passed_over": [{"after": 0, "to": 9, "what": "NaN"}]}
  config = tiny_digits(**SHORT, checks__nan_policy="roll_back")
  fit(config, tmp_path)
  for path in (tmp_path / "checkpoints").iterdir():
    path.rename(tmp_path / path.name)
  (tmp_path / "skipped_steps.json").write_text(json.dumps(record))
  assert fit(config, tmp_path).summary["rolled_back"] == 1


@pytest.fixture
def done(tmp_path):
  fit(tiny_digits(**SHORT), tmp_path)
  return tmp_path


def test_more_epochs_continue_a_run_that_is_done_exactly(done, capsys):
  """From its last state, by the schedule of the new length, in the same order."""
  longer = tiny_digits(**LONG)
  experiment = build.experiment(longer)
  with Checkpoints(done / "checkpoints") as checkpoints:
    assert max(checkpoints.steps()) == 23
    state = checkpoints.restore(experiment.abstract_state())
  assert phase_at(experiment, 23) == experiment.phase
  batches = train_batches(experiment, 23)
  for _ in range(23, 45):
    state, _ = experiment.train_step(state, next(batches))
  wanted = jax.device_get(state)

  capsys.readouterr()
  result = fit(longer, done)
  assert_same_bits(jax.device_get(result.state), wanted)
  assert result.summary["step"] == 45 and settings(done)["epochs"] == 4.0
  (line,) = re.findall("resuming from .*", capsys.readouterr().out)
  before = build.rate_at(build.experiment(tiny_digits(**SHORT)), 22)
  rates = f"{before:.3g} to {build.rate_at(experiment, 23):.3g}"
  assert line == (
    "resuming from the checkpoint of step 23: from 23 to 45 steps; the schedule has the "
    f"new length, so lr jumps from {rates}"
  )
  cosine = 0.05 * (1 + np.cos(np.pi * (23 - 11) / (45 - 11)))  # after 11 of warm-up
  np.testing.assert_allclose(build.rate_at(experiment, 23), cosine, rtol=1e-3)


def test_a_run_in_steps_takes_more_steps_and_says_so(tmp_path, capsys):
  def in_steps(steps, **changes):
    in_steps = {"epochs": "None", "steps": str(steps), "schedule__warmup_epochs": "0"}
    return tiny_digits(**in_steps | {"schedule__warmup_steps": "4"} | changes)

  fit(in_steps("10"), tmp_path)
  with config_error(match=r"steps is 10 in the workdir and 9 now"):
    fit(in_steps("9"), tmp_path)
  with config_error(match=r"epochs is None in the workdir and 3.0 now"):
    fit(in_steps(None, epochs="3"), tmp_path)
  capsys.readouterr()
  assert fit(in_steps("15"), tmp_path).summary["step"] == 15
  line = "resuming from the checkpoint of step 10: from 10 to 15 steps; the schedule has"
  assert line in capsys.readouterr().out


def test_each_start_is_on_record_with_its_code_and_command(done):
  wait_until((done / "starts.jsonl").exists, seconds=30)
  fit(tiny_digits(**SHORT), done)
  wait_until(lambda: len(read_json_lines(done / "starts.jsonl")) == 2, seconds=30)
  start = read_json_lines(done / "starts.jsonl")[-1]
  assert start["packages"]["jax"] == jax.__version__
  assert start["host"] == platform.node() and start["python"]
  assert shlex.split(start["command"]) == sys.orig_argv
  commit = provenance.git("rev-parse", "HEAD").strip()
  assert start["commit"] == (commit or None)
  shown = provenance.last_start(done)
  assert commit[:12] in shown and start["command"] in shown
  assert provenance.last_start(done / "nothing") == ""


def test_what_is_printed_before_a_run_is_what_is_not_a_default(tmp_path):
  page = describe_text(build.experiment(tiny_digits()), tmp_path)
  lines = page.splitlines()
  assert lines[0].endswith(" on 8 x cpu") and "row_blocks" not in page
  assert len(lines) <= 12 and max(map(len, lines[2:])) < 100
  assert lines[1] == f"workdir: {tmp_path} (all settings: config.json)"
  assert "model=MLP(hidden=(32,))" in page and "mesh=Mesh(data=8)" in page
  assert "faults" not in page and "training: 45 steps of 128" in page and "peak lr 0.1" in page


def test_evaluating_again_keeps_the_seconds_of_training(done):
  path = done / "summary.json"
  summary = json.loads(path.read_text()) | {"seconds": 1234.5}
  path.write_text(json.dumps(summary))
  assert fit(tiny_digits(**SHORT), done).summary["seconds"] == 1234.5


PRINTABLE = "".join(map(chr, range(32, 127))).replace("/", "")
# In one path: the last of them is also a pattern.
NAMES = PRINTABLE, "ünï-模型-Ω-🚀-e\u0301\u200f", "a\nb\r\n\tc\x1b[1m", "  a  b  "
NAMES += "%s{0}$HOME`id`", "proj [2024]", "hidden=[8]", "[!x]-?-*"
WORKDIRS = {"characters": "/".join(NAMES), "long": "x" * 200 + "/" + "y" * 200}


@pytest.mark.parametrize("name", WORKDIRS)
def test_a_workdir_of_any_name_is_saved_resumed_and_reported(tmp_path, name, capsys):
  workdir = tmp_path / WORKDIRS[name] / "run"
  for folder in workdir.parents[:4]:
    for other in ("proj 2", "hidden=8", "a", "ax", "y-a-b"):  # which patterns find
      (folder / other / "checkpoints").mkdir(parents=True, exist_ok=True)
  fit(tiny_digits(**SHORT), workdir)
  result = fit(tiny_digits(**SHORT | LONG), workdir)
  assert "resuming from the checkpoint of step" in capsys.readouterr().out
  assert result.summary["step"] == 45
  assert Checkpoints(workdir / "checkpoints").steps()[-1] == 45
  assert cli.main(["report", str(workdir)], program="x") == 0
  assert "done, 45 of 45 steps" in capsys.readouterr().out
