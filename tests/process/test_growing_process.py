"""Runs whose batch grows, as processes: killed around a growth, and several of one run."""

import json

import pytest

from jaxscale.files import read_json_lines
from support import at_step
from support.commands import error_line, jaxscale, run_train, trained
from support.configs import settings
from support.processes import run_group
from support.tiny_runs import record, restored
from support.trees import assert_same_bits

# 1,437 examples: decisions after steps 23 and 34; a checkpoint every third step.
SHORT = settings("""
  model=MLP model.hidden=(32,) batch_size=64 epochs=3 schedule.warmup_epochs=0.5
  evaluation.every_epochs=1 checkpoint.every_epochs=0.13 log.every_steps=1 log.tensorboard=False
  log.plot=False phases=Growing phases.max_batch_size=256 phases.when=ByBranch
  phases.when.margin=9 phases.when.steps=4
""")
ARGS = [f"--config.{name}={value}" for name, value in SHORT.items()]

# The last step before a growth, the 7th of its 12 steps of branches, the first save after it,
# and the last step of the next branches. "compiling" is counted once before the branches.
MOMENTS = [(23, "input", 1), (24, "compiling", 8), (24, "saving", 1), (35, "compiling", 13)]


def final_state(workdir):
  import jax

  from jaxscale.config.loading import load_config
  from jaxscale.exchange import plain
  from jaxscale.experiment import build
  from jaxscale.mesh import make_mesh

  experiment = build.experiment(load_config(str(workdir), {"mesh.data": "8"}))
  mesh = make_mesh(devices=jax.devices()[:1])
  return restored(workdir, experiment.replace(mesh=mesh, exchange=plain(mesh.axis_names)))


def events(workdir):
  """Return the metrics without a decision's numbers, which a resumed run does not measure again."""
  kept = [
    {k: v for k, v in x.items() if k[:7] != "growth/" or k == "growth/batch_size"}
    for x in record(workdir)
  ]
  return [x for x in kept if len(x) > 1]


@pytest.mark.slow
def test_kills_around_a_growth_leave_no_trace(tmp_path):
  whole, workdir = tmp_path / "whole", tmp_path / "run"
  trained(whole, *ARGS)
  for step, activity, count in MOMENTS:
    killed = run_train(workdir, *ARGS, **at_step.kill(step, activity, count=count))
    assert killed.returncode == -9, killed.stderr
  printed = trained(workdir, *ARGS)
  (line,) = (x for x in printed.splitlines() if x.startswith("step 34  batch size grows"))
  assert "from 128 to 256" in line and "copies trained on the same 1,024 examples" in line
  chosen = [json.loads((w / "batch_sizes.json").read_text()) for w in (workdir, whole)]
  assert chosen == [[64, 128, 256]] * 2
  decided = [read_json_lines(w / "growth.jsonl") for w in (workdir, whole)]
  assert decided[0] == decided[1] and [x["batch_size"] for x in decided[0]] == [128, 256]
  assert_same_bits(final_state(workdir), final_state(whole))
  assert events(workdir) == events(whole)


@pytest.mark.slow
def test_two_processes_decide_together(tmp_path):
  import sys

  command = [sys.executable, "-m", "jaxscale.train", "--config", "configs/digits.py"]
  ended = run_group([*command, "--workdir", str(tmp_path / "two"), *ARGS])
  assert [code for *_, code in ended] == [0, 0], ended
  assert json.loads((tmp_path / "two" / "batch_sizes.json").read_text()) == [64, 128, 256]
  assert ended[0][0].count("batch size grows from") == 2
  assert "batch size grows" not in ended[1][0]


def test_branches_from_the_checkpoints_of_a_run(tmp_path):
  study = "batch-study", "--config", tmp_path / "run", "--batch-sizes", "64,128,256", "--branch"
  more = settings("epochs=2 checkpoint.every_epochs=0.5 checkpoint.keep_last=10 phases=Phases")
  words = {n: v for n, v in SHORT.items() if "phases." not in n} | more
  trained(tmp_path / "run", *(f"--config.{name}={value}" for name, value in words.items()))
  done = jaxscale(*study, "1024", "--config.phases.follow=none")
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  head = "step  examples  batch    loss  difference   error  as good"
  table = lines[lines.index(head) + 1 :]
  assert [line.split()[:3] for line in table[:4]] == [
    ["11", "704", "64"],
    ["11", "704", "128"],
    ["11", "704", "256"],
    ["22", "1,408", "64"],
  ]
  rows = json.loads((tmp_path / "run" / "branches.json").read_text())
  assert len(rows) == len(table) and all(r["as_good"] == "yes" for r in rows[::3])
  assert "give 1024 or more" in error_line(jaxscale(*study, "1000"), 2)
  done = jaxscale(*study, "2560", "--name", "sizes")
  assert "--name=sizes has no effect with --branch" in error_line(done, 2)
  done = jaxscale("batch-study", "--config", "digits", "--batch-sizes", "64", "--branch", "999")
  assert "give the workdir of a run" in error_line(done, 2)
