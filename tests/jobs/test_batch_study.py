"""Batch studies: the fitted curve by NumPy's own, and what a report says of a sweep."""

import dataclasses
import json

import numpy as np
import pytest

from jaxscale import cli
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError
from jaxscale.jobs import batch_study, spec
from jaxscale.jobs.batch_study import fit_steps
from support.job_script import RUN

DIGITS = "configs/digits.py"


@pytest.mark.parametrize("s_min, b_crit", [(100, 1000), (7.5, 31), (4000, 2e5)])
def test_the_fit_finds_the_hyperbola(s_min, b_crit):
  sizes = b_crit * np.array([0.05, 0.3, 1.1, 4.0])
  # (S / S_min - 1)(E / E_min - 1) = 1, solved for S at E = B S.
  e_min = s_min * b_crit
  steps = [max(np.roots([b / (s_min * e_min), -b / e_min - 1 / s_min, 0])) for b in sizes]
  fit = fit_steps(sizes, steps)
  assert fit is not None
  assert fit.s_min == pytest.approx(s_min, rel=1e-9)
  assert fit.b_crit == pytest.approx(b_crit, rel=1e-9)
  assert fit.b_crit_range == pytest.approx((b_crit, b_crit), rel=1e-9)
  assert fit.error < 1e-9 and fit.num_sizes == 4


def test_the_fit_is_the_least_squares_of_the_relative_error():
  rng = np.random.default_rng(0)
  sizes = 2.0 ** np.arange(5, 13)
  steps = (200 + 60_000 / sizes) * rng.uniform(0.8, 1.2, len(sizes))
  fit = fit_steps(sizes, steps)
  assert fit is not None
  # In examples the curve is a line, whose weighted least squares NumPy has.
  slope, intercept = np.polyfit(sizes, sizes * steps, 1, w=1 / (sizes * steps))
  assert fit.s_min == pytest.approx(slope, rel=1e-6)
  assert fit.b_crit == pytest.approx(intercept / slope, rel=1e-6)
  others = []
  for i in range(len(sizes)):
    b, e = np.delete(sizes, i), np.delete(sizes * steps, i)
    s, e_min = np.polyfit(b, e, 1, w=1 / e)
    others.append(e_min / s)
  assert fit.b_crit_range == pytest.approx((min(others), max(others)), rel=1e-6)
  assert fit.b_crit_range[0] < fit.b_crit < fit.b_crit_range[1]
  errors = abs((fit.s_min * (1 + fit.b_crit / sizes)) / steps - 1)
  assert fit.error == pytest.approx(errors.max()) and fit.error < 0.25


NO_LIMIT = [
  ([1, 2], [10, 6]),  # two points are on every such curve
  ([2, 2, 4], [10, 11, 6]),
  ([1, 2, 4], [400, 200, 100]),  # still ideal: no limit in sight
  ([1, 2, 4], [400, 190, 80]),  # better than ideal
  ([1, 2, 4], [100, 100, 100]),  # no gain at all
  ([1, 2, 4], [100, 110, 120]),
]


@pytest.mark.parametrize("sizes, steps", NO_LIMIT)
def test_no_critical_batch_size_is_made_up(sizes, steps):
  assert fit_steps(sizes, steps) is None


MISTAKES = {
  "--batch-size=64": "did you mean '--batch-sizes'",
  "--batch-sizes=64,x": "--batch-sizes=64,x: give whole numbers",
  "--batch-sizes=64,0": "give whole numbers",
  "--batch-sizes=64,64": "without repeats",
  "--batch-sizes": "--batch-sizes: a value is missing",
  "": "--batch-sizes: missing",
  "--batch-sizes=64 --seeds=none": "--seeds=none: give a whole number >= 1",
  "--batch-sizes=64 --accumulate-steps=0": "steps=0: give a whole",
  "--batch-sizes=64,128 --accumulate-steps=2": "1 numbers for 2 batch sizes",
  "--batch-sizes=64,99 --nodes=2": "trial 1: batch size 99: not divisible",
  "--batch-sizes=64 --config.phases=AdaptiveBatch": "phases=AdaptiveBatch",
  "--batch-sizes=64 --config.target_accuracy=None": "target_accuracy is not",
  "--batch-sizes=64 --config.epoch=1": "did you mean 'epochs'",
  "--batch-sizes=64 --config.phases.batch_sizes=(64,)": "remove the batch sizes from the phases",
}


@pytest.mark.parametrize("args", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_submitted(args, tmp_path, capsys):
  runs = f"--runs={tmp_path}/runs"
  assert cli.main(["batch-study", "--config", DIGITS, runs, *args.split()]) == 2
  out, err = capsys.readouterr()
  assert out == "" and not list(tmp_path.iterdir())
  assert err.count("\n") == 1 and err.startswith("error: ") and MISTAKES[args] in err


def test_a_trial_is_a_size_and_a_seed():
  config = dataclasses.replace(load_config(DIGITS), seed=3)
  made = batch_study.trials(config, [256, 64], 2, [4, 1])
  settings = [(t["batch_size"], t["seed"], t["accumulate_steps"]) for t in made]
  assert settings == [("256", "3", "4"), ("256", "4", "4"), ("64", "3", "1"), ("64", "4", "1")]
  loaded = load_config(DIGITS, made[0])
  assert (loaded.batch_size, loaded.accumulate_steps) == (256, 4)
  assert loaded.stop_at_target and not config.stop_at_target


def outcome(size=64, step: int | None = 10, seed=0, **changes):
  """Return the record of an imagined run: summary.json, or the failure in its log."""
  summary = dict(outcome="done", step=step or 90, target_step=step, accuracy=0.81, loss=0.5)
  summary["target_seconds"] = step and 0.5 * step
  return {"batch_size": size, "seed": seed, **summary, **changes}


CONFIG = dict(accumulate_steps=1, epochs=8.0, lr_scaling="linear", target_accuracy=0.8)
CONFIG["target_loss"] = None
DERIVED = {"num_train": 1437, "peak_lr": 0.05, "eval_every": 2}


def write_study(folder, *outcomes, config=CONFIG):
  """Write the folder of a sweep on this machine that has these outcomes."""
  trials = [{name: str(x[name]) for name in ("batch_size", "seed")} for x in outcomes]
  trials = [trial | {"stop_at_target": "True"} for trial in trials]
  run = RUN._replace(name=folder.name, folder=str(folder), executor="local", trials=tuple(trials))
  for name in ("events", "logs"):
    (folder / name).mkdir(parents=True)
  (folder / "run.json").write_text(json.dumps(spec.to_json(run)))
  line = {"job": "local-7", "executor": "local", "time": 1.0, "tasks": None}
  (folder / "submissions.jsonl").write_text(json.dumps(line))
  for task, found in enumerate(outcomes):
    workdir, failed = run.workdir(task), found["outcome"] != "done"
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"config": config, "derived": DERIVED}))
    event = {"event": "end", "job": f"local-7_{task}", "restarts": 0, "nodes": 1}
    event |= {"code": int(failed), "next": "stop"}
    run.events_file(task).write_text(json.dumps(event))
    if failed:
      run.log_file("local-7", task, 0).write_text(f"step 5\n{found['outcome']}\n")
    else:
      (workdir / "summary.json").write_text(json.dumps(found))
  return folder


def summarised(tmp_path, *outcomes, **changes):
  return batch_study.read(write_study(tmp_path / "study", *outcomes, **changes))


def test_a_report_says_what_each_size_took(tmp_path, capsys):
  nan = "error: device 3: loss is nan at step 6; lower optimizer.lr"
  runs = [outcome(64, 100), outcome(256, 40), outcome(512, None)]
  folder = write_study(tmp_path / "study", *runs, outcome(1024, outcome=nan))
  command = ["report", "study", f"--runs={tmp_path}"]
  assert cli.main(command) == 0
  out, _ = capsys.readouterr()
  study = json.loads((folder / "study.json").read_text())
  assert [r["status"] for r in study["runs"]] == ["reached", "reached", "missed", "failed"]
  assert study["runs"][0]["target_epochs"] == 6400 / 1437
  assert (study["runs"][2]["target_step"], study["runs"][2]["steps"]) == (None, 90)
  lines = out.splitlines()
  assert lines[0] == "study: to 80.00% in 8 epochs at most"
  assert " ".join(lines[1].split()) == "batch lr reached steps epochs seconds accuracy loss"
  assert lines[2].split() == ["64", "0.05", "1/1", "100", "4.45", "50.0", "81.00%", "0.5000"]
  assert "0/1 (1 missed)" in lines[4]
  assert lines[5].split()[:1] == ["1,024"] and "0/1 (1 failed)" in lines[5]
  assert lines[5].split()[-5:] == ["–"] * 5
  assert lines[6].startswith("the resolution of steps to target is one evaluation (")
  assert lines[6].endswith("at worst 5% of them")
  assert lines[7].startswith("no critical batch size: every run reached the target at 2 sizes")
  assert lines[8] == f"batch 1,024, seed 0: {nan}"
  assert lines[9] == f"{folder}/study.json"
  assert cli.main([*command, "--to=a"]) == 2
  assert "--to=a does not apply to a batch study" in capsys.readouterr().err


def test_a_study_that_has_not_begun_and_a_sweep_of_something_else(tmp_path):
  folder = write_study(tmp_path / "study", outcome())
  (folder / "trials" / "0" / "config.json").unlink()
  with pytest.raises(ConfigError, match="study: no trial has started; see `jaxscale status study`"):
    batch_study.report(folder)
  table = json.loads((folder / "run.json").read_text())
  for trials in ([], [{"seed": "1"}], [{"batch_size": "x", "stop_at_target": "True"}]):
    (folder / "run.json").write_text(json.dumps(table | {"trials": trials}))
    assert batch_study.find(["study"], str(tmp_path)) is None
    with pytest.raises(ConfigError, match="is not a batch study"):
      batch_study.read(folder)


def test_a_trial_whose_record_is_damaged_keeps_what_its_summary_says(tmp_path):
  folder = write_study(tmp_path / "study", outcome(64, 100), outcome(256, 40))
  (folder / "trials" / "1" / "config.json").write_text("{")
  last = batch_study.read(folder)["sizes"][-1]
  assert (last["reached"], last["target_step"], last["peak_lr"]) == (1, 40, None)


def test_a_target_may_be_a_loss(tmp_path):
  config = CONFIG | {"target_accuracy": None, "target_loss": 0.5, "lr_scaling": "none"}
  found = summarised(tmp_path, outcome(accuracy=None), outcome(128), config=config)
  text = batch_study.table(found)
  assert text.splitlines()[0] == "study: to loss 0.5 in 8 epochs at most"
  assert "every size was trained at the same learning rate" in text


def test_a_size_with_a_missed_seed_is_shown_but_not_fitted(tmp_path):
  runs = [outcome(b, s) for b, s in [(64, 1100), (128, 600), (256, 350), (512, 225)]]
  assert summarised(tmp_path / "a", *runs)["fit"]["num_sizes"] == 4
  found = summarised(tmp_path / "b", *runs, outcome(512, None, seed=1))
  assert found["fit"]["num_sizes"] == 3
  last = found["sizes"][-1]
  assert (last["reached"], last["missed"], last["target_step"]) == (1, 1, 225)


def test_the_noise_scale_is_held_against_the_fit(tmp_path):
  # S = 100 (1 + 640 / B)
  steps = {64: 1100, 128: 600, 256: 350, 512: 225}
  runs = [outcome(b, s, noise_scale=320.0) for b, s in steps.items()]
  notes = summarised(tmp_path, *runs)["notes"]
  assert any(n.startswith("critical batch size 640 (S_min 100 steps)") for n in notes)
  assert "scale 320 examples in the harmonic mean over runs, 0.5 of" in notes[-1]


def test_an_infinite_noise_scale_is_not_left_out_of_a_mean(tmp_path):
  infinite = outcome(seed=1, noise_scale_low=900.0)
  found = summarised(tmp_path, outcome(noise_scale=300.0), infinite, outcome(seed=2))
  assert found["sizes"][0]["noise_scale"] == pytest.approx(600)
  mean = batch_study.mean_noise_scale
  assert mean(found["runs"][1:2]) == np.inf and mean(found["runs"][2:]) is None
  assert "Infinity" not in json.dumps(batch_study.summarise("a", CONFIG, found["runs"][1:2]))


def test_a_range_without_an_end_leads_the_note(tmp_path):
  """Without its last size the rest of this falls as fast as the batch grows."""
  steps = {64: 1600, 128: 800, 256: 400, 512: 240}
  runs = [outcome(b, s, noise_scale=320.0) for b, s in steps.items()]
  found = summarised(tmp_path, *runs)
  low, high = found["fit"]["b_crit_range"]
  assert high is None and low > 0
  (note,) = [n for n in found["notes"] if "critical batch size" in n]
  assert note.startswith(f"critical batch size at least {low:,.0f}, without an upper limit")
  assert f"; {found['fit']['b_crit']:,.0f} (S_min" in note
  assert found["notes"][-1].endswith("320 examples in the harmonic mean over runs")
