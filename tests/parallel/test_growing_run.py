"""Runs whose batch grows equal runs whose phases are written out, under every kind of layout."""

import dataclasses
import json

import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import metrics
from jaxscale.config.loading import load_config
from jaxscale.jobs.run_report import describe
from jaxscale.run import train_phases
from jaxscale.run.branch_study import branch_study
from jaxscale.run.fit import fit
from support.configs import settings
from support.errors import config_error
from support.trees import assert_same_bits

QUICK = settings("""
  model=MLP model.hidden=(32,) mesh.data=8 epochs=3 schedule.warmup_epochs=0.5 log.every_steps=1
  checkpoint.every_epochs=1 log.tensorboard=False log.plot=False ema_decay=None batch_size=64
""")
TEXT = settings("""
  model.num_layers=2 model.width=32 model.num_heads=4 model.hidden=64 data.sequence_length=64
  batch_size=64 epochs=0.5 schedule.warmup_epochs=0.1 log.tensorboard=False log.plot=False
""")
BRANCH = settings("""
  phases=Growing phases.when=ByBranch phases.when.margin=9 phases.when.steps=4
  phases.max_batch_size=256
""")


def run(workdir, changes, config="configs/digits.py"):
  return fit(load_config(config, changes), workdir)


def test_seesaw_is_the_run_of_its_phases_bit_for_bit(tmp_path, capsys):
  grown = run(tmp_path / "a", QUICK | settings("phases=Growing phases.max_batch_size=256"))
  printed = capsys.readouterr().out
  described = json.loads((tmp_path / "a" / "config.json").read_text())
  phases = described["derived"]["phases"]
  assert [p["batch_size"] for p in phases] == [64, 128, 256]
  starts = f"({', '.join(str(p['start']) for p in phases)})"
  explicit = {"phases.batch_sizes": "(64, 128, 256)", "phases.follow": "sqrt"}
  # By epochs, as the schedule counts them; each start is the examples of the phases before.
  epochs = tuple((p["examples"] - 1) / 1437 if p["examples"] else 0.0 for p in phases)
  fixed = run(tmp_path / "b", QUICK | explicit | {"phases.epochs": str(epochs)})
  assert [p["start"] for p in phases] == json.loads(starts.replace("(", "[").replace(")", "]"))
  assert_same_bits(grown.state, fixed.state)
  total = described["derived"]["total_steps"]
  why = "the schedule has divided its learning rate by phases.factor again"
  reported = [x for x in describe(tmp_path / "a").splitlines() if "batch size" in x]
  changes = [f"batch size: {p['batch_size']} after step {p['start']}" for p in phases[1:]]
  assert reported == changes
  lines = [line for line in printed.splitlines() if "batch size is now" in line]
  assert len(lines) == 2 and all(
    line.endswith(f"follow=sqrt); {total} steps in all: {why}") for line in lines
  )
  assert lines[0].startswith(f"step {phases[1]['start']}  batch size is now 128 (lr from 0.0")


class Agreeing(cfg.Growth):
  """A rule of a user, which may grow after each epoch, and grows at the second chance."""

  numbers: str = "numpy"

  def build(self, context):
    return tuple(float(epoch * context.num_train) for epoch in (0.5, 1, 1.5))

  def decide(self, point):
    losses = point.branch(2)
    assert losses.shape == (2, 2) and losses.dtype == np.float64
    values = {"text": {"x": "high"}, "none": None, "numpy": {"larger": np.float32(losses[1, 0])}}
    return point.step > 12, f"{point.larger} is as good", values[self.numbers]


OWN = QUICK | {"epochs": "2"}


def test_a_rule_of_ones_own_decides(tmp_path, capsys):
  """The run is that of the phases which the rule chose, bit for bit."""
  config = load_config("configs/digits.py", OWN)
  phases = cfg.Growing(when=Agreeing(), max_batch_size=128)
  grown = fit(dataclasses.replace(config, phases=phases), tmp_path / "a")
  lines = [x for x in capsys.readouterr().out.splitlines() if "128 is as good" in x]
  assert [x.split(": ")[0] for x in lines] == [
    "step 12  batch size stays 64",
    "step 23  batch size grows from 64 to 128",
  ]
  events = [x for x in metrics.read_metrics(tmp_path / "a/metrics.jsonl") if "growth/larger" in x]
  assert [x["step"] for x in events] == [13, 24] and all(x["growth/larger"] > 0 for x in events)
  first, second = metrics.read_json_lines(tmp_path / "a/growth.jsonl")
  assert first["values"] == {"larger": events[0]["growth/larger"]}
  assert second == first | {"step": 23, "batch_size": 128, "values": second["values"]}
  reported = [x for x in describe(tmp_path / "a").splitlines() if "batch size" in x]
  assert reported == ["batch size: 128 after step 23: 128 is as good"]
  assert json.loads((tmp_path / "a" / "batch_sizes.json").read_text()) == [64, 64, 128]
  assert grown.summary["batch_sizes"] == {"0": 64, "23": 128}
  explicit = cfg.Phases(epochs=(0.0, 1.0), batch_sizes=(64, 128), follow="sqrt")
  assert_same_bits(
    grown.state, fit(dataclasses.replace(config, phases=explicit), tmp_path / "b").state
  )


@pytest.mark.parametrize("numbers, problem", [("text", "ValueError: could"), ("none", "Attribute")])
def test_mistakes_of_a_rule_of_ones_own_are_one_line(numbers, problem, tmp_path):
  phases = cfg.Growing(when=Agreeing(numbers=numbers), max_batch_size=128)
  config = dataclasses.replace(load_config("configs/digits.py", OWN), phases=phases)
  with config_error(match=rf"^\S+:\d+: Agreeing\.decide: {problem}"):
    fit(config, tmp_path)


def test_a_damaged_checkpoint_ends_a_branch_study_in_one_line(tmp_path):
  config = load_config("configs/digits.py", OWN | {"checkpoint.every_epochs": "1"})
  fit(config, tmp_path)
  assert branch_study(config, tmp_path, [64, 128], 512).count("\n") == 2
  with config_error(match="^--branch=511 is less than 4 steps of 128"):
    branch_study(config, tmp_path, [64, 128], 511)
  with config_error(match="^--batch-sizes=60 does not fit the devices"):
    branch_study(config, tmp_path, [60, 120], 512)
  files = (tmp_path / "checkpoints" / "44").rglob("d/*")
  largest = max(files, key=lambda path: path.stat().st_size)
  content = bytearray(largest.read_bytes())
  middle = slice(len(content) // 4, len(content) // 2)
  content[middle] = bytes(len(content[middle]))
  largest.write_bytes(content)
  with config_error(match="^checkpoint=44 is damaged: .*; remove its folder"):
    branch_study(config, tmp_path, [64, 128], 512)


CASES = {
  "data": (QUICK, "configs/digits.py", (0, 1, 2)),
  "micro-batches": (
    QUICK | settings("accumulate_steps=2 clip_norm=0.5 phases.more_micro_batches=True"),
    "configs/digits.py",
    (0, 1, 2),
  ),
  "fsdp": (
    TEXT | settings("mesh.data=1 mesh.fsdp=8 layout.shard=fsdp phases.when.every_epochs=0.2"),
    "configs/text.py",
    (0, 0.2, 0.4),
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_branches_leave_no_trace_in_a_run(case, tmp_path):
  changes, config, epochs = CASES[case]
  grown = run(tmp_path / "a", BRANCH | changes, config)
  assert json.loads((tmp_path / "a" / "batch_sizes.json").read_text()) == [64, 128, 256]
  fixed = {n: v for n, v in changes.items() if not n.startswith("phases")}
  fixed |= {"phases.epochs": str(epochs), "phases.batch_sizes": "(64, 128, 256)"}
  counts = "(2, 4, 8)" if "accumulate_steps" in changes else "()"
  fixed |= {"phases.accumulate_steps": counts, "phases.follow": "sqrt"}
  assert_same_bits(grown.state, run(tmp_path / "b", fixed, config).state)


@pytest.mark.slow
def test_a_decision_is_one_line_and_an_event(tmp_path, capsys):
  changes = QUICK | BRANCH | {"phases.when.margin": "0"}
  run(tmp_path, changes)
  printed = capsys.readouterr().out
  assert "batch 64 or as ByBranch decides" in printed
  lines = [x for x in printed.splitlines() if "batch size stays" in x]
  events = [x for x in metrics.read_metrics(tmp_path / "metrics.jsonl") if "growth/loss" in x]
  assert [x["step"] for x in events] == [24, 46] and len(lines) == 2
  for line, event in zip(lines, events, strict=True):
    loss, larger, off, error = (
      event[f"growth/{n}"] for n in ("loss", "larger_loss", "difference", "error")
    )
    side = "above" if off - error > 0 else "perhaps above"
    assert line == (
      f"step {event['step'] - 1}  batch size stays 64: copies trained on the same 512 examples "
      f"end at loss {larger:.4f} with 128 and {loss:.4f} with 64; {off:+.4f} ± {error:.4f} "
      f"(standard error) is {side} the allowed +0.0000"
    )
  assert json.loads((tmp_path / "batch_sizes.json").read_text()) == [64, 64, 64]


@pytest.mark.slow
def test_a_decision_that_changes_nothing_compiles_nothing(tmp_path, monkeypatch):
  """The run continues with the step that it has, and so does one that resumes."""
  compiled, real = [], train_phases.StepCompiler.begin

  def begin(self, experiment, lowering=None):
    compiled.append(experiment.phase.start)
    return real(self, experiment, lowering)

  monkeypatch.setattr(train_phases.StepCompiler, "begin", begin)
  changes = QUICK | BRANCH | {"phases.when.margin": "0"}
  whole = run(tmp_path / "a", changes)
  assert set(compiled) == {0}
  plain = run(tmp_path / "b", QUICK)
  assert_same_bits(whole.state.params, plain.state.params)
