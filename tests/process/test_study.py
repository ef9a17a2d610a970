"""Batch study and time to accuracy: what they compute, and real runs of both."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxscale import cli, data, metrics
from jaxscale.config import LARS, SGD, TFDS, ResNet
from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError
from jaxscale.run import fit as run
from jaxscale.studies import batch_study, time_to_accuracy, trials
from jaxscale.studies.time_to_accuracy import olympic_mean
from support.paths import ROOT

# An MLP on the digits: a run takes seconds.
QUICK = [
  "--config=configs/digits.py", "--config.model=MLP", "--config.model.hidden=32",
  "--config.epochs=8", "--config.ema_decay=None", "--config.target_accuracy=0.8",
  "--config.schedule.warmup_epochs=0", "--config.lr_scaling=linear",
  "--config.lr_reference_batch_size=64", "--config.optimizer.lr=0.05",
  "--config.evaluation.every_epochs=1", "--config.evaluation.batch_size=360",
  "--config.checkpoint.every_epochs=100", "--config.log.tensorboard=False",
]  # fmt: skip


def quick(**changes):
  _, parser = cli.load("train")
  args = parser.read(QUICK)
  return load_config(args.config, args.overrides | changes)


def not_again(*_, **__):
  raise AssertionError("this run was done before")


def test_device_batch_chooses_the_micro_batches(tmp_path):
  made = batch_study.make_trials(
    quick(), [64, 256, 1024], tmp_path, seeds=2, device_batch=20
  )
  got = [(t.config.batch_size, t.config.seed, t.config.accumulate_steps) for t in made]
  assert got == [
    (64, 0, 1), (64, 1, 1), (256, 0, 2), (256, 1, 2), (1024, 0, 8), (1024, 1, 8)
  ]  # fmt: skip
  assert len({t.workdir for t in made}) == 6


@pytest.mark.parametrize(
  "args, message",
  [
    (["--batch-size=64"], "did you mean '--batch-sizes'"),
    (["--batch-sizes=64,x"], "--batch-sizes=64,x: give whole numbers"),
    (["--batch-sizes=64,0"], "give whole numbers"),
    (["--batch-sizes=64,64"], "none twice"),
    (["--batch-sizes"], "--batch-sizes: a value is missing"),
    ([], "--batch-sizes: missing"),
    (["--batch-sizes=64", "--seeds=none"], "--seeds=none: give a whole number >= 1"),
    (["--batch-sizes=64", "--device-batch=0"], "--device-batch=0"),
    (["--batch-sizes=64,100"], "batch_size=100: not divisible by 8 devices"),
    (["--batch-sizes=64,99999998"], "1,437 training examples twice; give 1432 or less"),
    (["--batch-sizes=64,10000000000000000000", "--device-batch=9"], "1432 or less"),
    (["--batch-sizes=64", "--config.phases=AdaptiveBatch"], "phases=AdaptiveBatch"),
    (["--batch-sizes=64,100", "--device-batch=3"], "batch_size=100: not divisible"),
    (["--batch-sizes=64", "--config.target_accuracy=None"], "target_accuracy=None"),
    (["--batch-sizes=64", "--config.epoch=1"], "did you mean 'epochs'"),
    (
      ["--batch-sizes=64", "--config.phases.batch_sizes=(64,)"],
      "take the batch sizes out of the phases",
    ),
  ],
)
def test_a_mistake_is_one_line_before_anything_runs(
  args, message, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(run, "fit", not_again)
  code = cli.main(["batch-study", *QUICK, f"--workdir={tmp_path}/study", *args])
  out, err = capsys.readouterr()
  assert code == 2 and out == ""
  assert err.count("\n") == 1 and err.startswith("error: ") and message in err
  assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
  """A study of three sizes, the largest of which has too few steps to get there."""
  workdir = tmp_path_factory.mktemp("study")
  monkeypatch = pytest.MonkeyPatch()
  monkeypatch.chdir(ROOT)
  args = [*QUICK, "--batch-sizes=256,64,1432", f"--workdir={workdir}"]
  assert cli.main(["batch-study", *args]) == 0
  monkeypatch.undo()
  return args, workdir, json.loads((workdir / "study.json").read_text())


def test_a_study_measures_what_the_records_say(study):
  _, workdir, found = study
  sizes = [64, 256, 1432]
  assert [s["batch_size"] for s in found["sizes"]] == sizes
  assert [r["status"] for r in found["runs"]] == ["reached"] * 2 + ["missed"]
  for measured, size in zip(found["runs"], sizes, strict=True):
    assert measured["peak_lr"] == pytest.approx(0.05 * size / 64)
    lines = metrics.read_json_lines(workdir / f"batch-{size}/seed-0/metrics.jsonl")
    scores = [(x["step"], x["eval/accuracy"]) for x in lines if "eval/accuracy" in x]
    reached = [step for step, accuracy in scores if accuracy >= 0.8]
    assert measured["accuracy"] == scores[-1][1]
    assert measured["steps"] == scores[-1][0] <= math.ceil(8 * 1437 / size)
    if measured["status"] == "reached":
      # It stopped there.
      assert [measured["target_step"]] == reached == [measured["steps"]]
      assert measured["target_examples"] == reached[0] * size
      assert measured["target_epochs"] == reached[0] * size / 1437
      assert measured["target_seconds"] > 0
    else:
      assert not reached and measured["target_step"] is None


def test_the_generalisation_gap_is_that_of_the_parameters(study, capsys):
  """Against NumPy: the two layers, on every example as it is stored."""
  _, workdir, found = study
  config = quick(batch_size="64", stop_at_target="True")
  state, _ = run.fit(config, workdir / "batch-64" / "seed-0")
  params, _ = jax.device_get(state.evaluated())
  first, second = (
    (np.asarray(p["kernel"], np.float64), np.asarray(p["bias"], np.float64))
    for p in jax.tree.leaves(params, is_leaf=lambda x: "kernel" in x)
  )
  capsys.readouterr()

  def accuracy(dataset):
    rows = dataset.load(np.arange(dataset.num_examples), None)
    x = (rows["image"].reshape(-1, 64) - dataset.info.mean[0]) / dataset.info.std[0]
    logits = np.maximum(x @ first[0] + first[1], 0) @ second[0] + second[1]
    return float((logits.argmax(-1) == rows["label"]).mean())

  measured = next(r for r in found["runs"] if r["batch_size"] == 64)
  train, test = accuracy(data.digits("train")), accuracy(data.digits("test"))
  assert measured["train_accuracy"] == pytest.approx(train, abs=1e-9)
  assert measured["gap"] == pytest.approx(train - test, abs=1e-9)


def test_what_is_done_is_not_done_again(study, monkeypatch, capsys):
  args, _, found = study
  monkeypatch.setattr(run, "fit", not_again)
  assert cli.main(["batch-study", *args]) == 0
  out = capsys.readouterr().out
  assert out.count("done before") == 3
  again = json.loads((study[1] / "study.json").read_text())
  assert again == found
  # Other settings are another run.
  with pytest.raises(AssertionError, match="done before"):
    cli.main(["batch-study", *args, "--config.epochs=9"])


def test_the_table_says_what_was_missed(study):
  _, _, found = study
  lines = batch_study.table(found).splitlines()
  assert lines[0] == "configs/digits.py: to 80.00% in 8 epochs at most"
  assert lines[1].split()[:4] == ["batch", "rate", "reached", "steps"]
  assert lines[2].split()[:3] == ["64", "0.05", "1/1"]
  assert "1,432" in lines[4] and "0/1 (1 missed)" in lines[4]
  assert lines[4].split()[5:8] == ["–", "–", "–"]
  assert "known to one evaluation" in lines[5]
  assert lines[6].startswith("no critical batch size: 2 sizes")


def test_the_picture_shows_each_run(study, tmp_path, monkeypatch):
  _, workdir, found = study
  assert (workdir / "study.png").read_bytes()[:4] == b"\x89PNG"
  figures = []
  monkeypatch.setattr(
    Figure, "savefig", lambda figure, *_, **__: figures.append(figure)
  )
  diverged = dict(found["runs"][-1], status="diverged", gap=None, batch_size=2048)
  fit = {"s_min": 50.0, "b_crit": 100.0, "b_crit_range": (90.0, 120.0)}
  drawn = found | {"runs": [*found["runs"], diverged], "fit": fit}
  metrics.plot_study(drawn, tmp_path / "a.png")
  steps, examples, seconds, gap = figures[0].axes

  def marks(axis, marker):
    lines = [line for line in axis.lines if line.get_marker() == marker]
    return [(float(x.get_xdata()[0]), float(x.get_ydata()[0])) for x in lines]

  reached = [r for r in found["runs"] if r["status"] == "reached"]
  missed = found["runs"][-1]
  assert marks(steps, "o") == [(r["batch_size"], r["target_step"]) for r in reached]
  assert marks(steps, "^") == [(1432, missed["steps"])]
  assert marks(steps, "x") == [(2048, diverged["steps"])]
  assert marks(examples, "^") == [(1432, 1432 * missed["steps"])]
  assert len(marks(seconds, "o")) == 2 and len(marks(gap, "o")) == 3
  curves = {line.get_label(): line for line in steps.lines}
  x, y = curves["fit, B_crit = 100"].get_data()
  np.testing.assert_allclose(y, 50 * (1 + 100 / np.asarray(x)))
  x, y = curves["ideal scaling"].get_data()
  np.testing.assert_allclose(np.multiply(x, y), reached[0]["target_examples"])


def test_the_picture_of_nothing_reached(study, tmp_path):
  missed = study[2]["runs"][-1]
  size = dict(study[2]["sizes"][-1])
  drawn = {"title": "none", "runs": [missed], "sizes": [size], "fit": None}
  assert metrics.plot_study(drawn, tmp_path / "b.png").exists()


def test_divergence_is_a_result(tmp_path, monkeypatch, capsys):
  config = trials.prepare(quick(**{"optimizer.lr": "1e9"}))
  trial = trials.Trial(config, tmp_path / "run")
  (outcome,) = trials.run_trials([trial])
  assert outcome.status == "diverged" and outcome.steps >= 1
  assert "at step" in outcome.note and outcome.gap is outcome.target_step is None
  monkeypatch.setattr(run, "fit", not_again)
  assert trials.run_trials([trial]) == [outcome]
  found = batch_study.summarise(config, [outcome], "x")
  assert found["sizes"][0]["diverged"] == 1 and found["fit"] is None
  text = batch_study.table(found)
  assert "0/1 (1 diverged)" in text and "no critical batch size: 0 sizes" in text
  assert metrics.plot_study(found, tmp_path / "c.png").exists()
  assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_an_interrupted_study_says_how_to_resume(tmp_path, monkeypatch, capsys):
  def interrupted(config, workdir):
    workdir.mkdir(parents=True)
    return run.Result(None, {"outcome": "interrupted", "step": 3})  # type: ignore

  args = [*QUICK, "--batch-sizes=64", f"--workdir={tmp_path}"]
  monkeypatch.setattr(run, "fit", interrupted)
  assert cli.main(["batch-study", *args]) == 130
  last = capsys.readouterr().out.splitlines()[-1]
  wanted = " ".join(["jaxscale batch-study", *args])
  assert last == f"interrupted; to resume: {wanted}"
  assert not list(tmp_path.rglob("outcome.json")) and not list(tmp_path.rglob("*.png"))


def outcome(size=64, step: int | None = 10, seed=0, **changes):
  """The outcome of an imagined run."""
  given = {
    "status": "missed" if step is None else "reached", "batch_size": size,
    "seed": seed, "accumulate_steps": 1, "peak_lr": 0.1, "target": 0.8,
    "num_train": 1437, "eval_every": 2, "steps": step or 90, "target_step": step,
    "target_examples": None if step is None else step * size,
    "target_seconds": None if step is None else 0.5 * step,
    "accuracy": 0.81, "train_accuracy": 0.9,
  }  # fmt: skip
  return trials.Outcome(**given | changes)


def test_a_size_with_a_missed_seed_is_shown_but_not_fitted():
  runs = [outcome(b, s) for b, s in [(64, 1100), (128, 600), (256, 350), (512, 225)]]
  config = quick()
  assert batch_study.summarise(config, runs, "x")["fit"]["num_sizes"] == 4
  found = batch_study.summarise(config, [*runs, outcome(512, None, seed=1)], "x")
  assert found["fit"]["num_sizes"] == 3
  last = found["sizes"][-1]
  assert (last["reached"], last["missed"], last["target_step"]) == (1, 1, 225)
  assert last["gap"] == pytest.approx(0.09)


def test_the_noise_scale_is_held_against_the_fit():
  # S = 100 (1 + 640 / B)
  steps = {64: 1100, 128: 600, 256: 350, 512: 225}
  runs = [outcome(b, s, noise_scale=320.0) for b, s in steps.items()]
  notes = batch_study.summarise(quick(), runs, "x")["notes"]
  assert any(n.startswith("critical batch size 640 (S_min 100 steps)") for n in notes)
  assert "scale 320 examples in the harmonic mean over runs, 0.5 of" in notes[-1]


def test_an_infinite_noise_scale_is_not_left_out_of_a_mean():
  infinite = outcome(noise_scale_low=900.0)
  runs = [outcome(noise_scale=300.0), infinite, outcome()]
  assert trials.mean_noise_scale(runs) == pytest.approx(600)
  assert trials.mean_noise_scale([infinite]) == np.inf
  assert trials.mean_noise_scale([outcome()]) is None
  assert batch_study.summarise(quick(), runs, "x")["sizes"][0]["noise_scale"] == 600


def test_a_range_without_an_end_leads_the_note():
  """Without its last size the rest of this falls as fast as the batch grows."""
  steps = {64: 1600, 128: 800, 256: 400, 512: 240}
  runs = [outcome(b, s, noise_scale=320.0) for b, s in steps.items()]
  found = batch_study.summarise(quick(), runs, "x")
  low, high = found["fit"]["b_crit_range"]
  assert high is None and low > 0
  (note,) = [n for n in found["notes"] if "critical batch size" in n]
  assert note.startswith(f"critical batch size at least {low:,.0f}, and no upper limit")
  assert f"; {found['fit']['b_crit']:,.0f} (S_min" in note
  assert found["notes"][-1].endswith("320 examples in the harmonic mean over runs")


@pytest.mark.parametrize(
  "values, mean",
  [
    ([5, 1, 2, 3, 4], 3),
    ([1, 2, 30], 2),
    ([7, 7, 7, 7, 7], 7),
    ([5, 1, 2, 3, None], 10 / 3),  # the one that missed is the worst
    ([5, 1, 2, None, None], None),
    ([None, 1, None], None),
  ],
)
def test_best_and_worst_are_dropped(values, mean):
  assert olympic_mean(values) == (None if mean is None else pytest.approx(mean))


def test_two_runs_are_too_few():
  with pytest.raises(ValueError, match="give 3 or more"):
    olympic_mean([1, 2])
  assert cli.main(["time-to-accuracy", *QUICK, "--seeds=2"]) == 2


def test_missed_runs_are_reported():
  steps = [10, 12, None, 14, 16]
  runs = [outcome(64, s, seed=i) for i, s in enumerate(steps)]
  result = time_to_accuracy.summarise(quick(), runs, "x")
  assert (result["steps"], result["seconds"]) == (14, 7) and result["valid"]
  assert result["epochs"] == pytest.approx(14 * 64 / 1437)
  text = time_to_accuracy.table(result)
  assert "4 of 5 reached" in text.splitlines()[0] and "missed" in text.splitlines()[4]
  runs[0] = outcome(64, None)
  text = time_to_accuracy.table(time_to_accuracy.summarise(quick(), runs, "x"))
  assert text.splitlines()[-1] == "no result: 2 runs missed, one may"
  # A run that was interrupted has no time, and so the mean has none.
  runs[0] = outcome(64, 10, target_seconds=None)
  text = time_to_accuracy.table(time_to_accuracy.summarise(quick(), runs, "x"))
  assert text.splitlines()[-1].endswith("time unknown, a run was interrupted")


def test_the_reference_of_mlperf():
  config = dataclasses.replace(
    quick(), model=ResNet(depth=50), data=TFDS(name="imagenet2012"),
    optimizer=LARS(lr=21.2), target_accuracy=0.759, batch_size=32768,
  )  # fmt: skip
  assert time_to_accuracy.reference(config) == (56.0, 55.445)
  between = dataclasses.replace(config, batch_size=6144)
  assert time_to_accuracy.reference(between) == pytest.approx((40.875, 39.634))
  others: list[dict] = [
    {"batch_size": 256}, {"optimizer": SGD(lr=1.0)}, {"model": ResNet(depth=18)},
    {"target_accuracy": 0.75}, {"data": TFDS(name="imagenette")},
  ]  # fmt: skip
  for change in others:
    other = dataclasses.replace(config, **change)
    assert time_to_accuracy.reference(other) is None, change
  runs = [outcome(32768, 2000, num_train=1_281_167, seed=i) for i in range(5)]
  result = time_to_accuracy.summarise(config, runs, "x")
  assert result["faster_than_reference"]  # 51.2 epochs
  assert "fewer than 55.4 would not pass" in time_to_accuracy.table(result)


@pytest.mark.slow
def test_time_to_accuracy_of_real_runs(tmp_path, capsys):
  args = [*QUICK, "--seeds=3", f"--workdir={tmp_path}", "--config.batch_size=64"]
  assert cli.main(["time-to-accuracy", *args]) == 0
  out = capsys.readouterr().out
  result = json.loads((tmp_path / "time_to_accuracy.json").read_text())
  steps = [r["target_step"] for r in result["runs"]]
  assert [r["seed"] for r in result["runs"]] == [0, 1, 2] and all(steps)
  assert result["steps"] == sorted(steps)[1]
  assert f"without best and worst: {result['steps']:,.1f} steps" in out
  for i, measured in enumerate(result["runs"]):
    events = metrics.read_mllog(tmp_path / f"result_{i}.txt")
    told = {e["key"]: e for e in events}
    assert told["seed"]["value"] == i and told["global_batch_size"]["value"] == 64
    assert told["opt_base_learning_rate"]["value"] == pytest.approx(0.05)
    assert told["run_stop"]["metadata"]["status"] == "success"
    epochs = told["run_stop"]["metadata"]["epoch_num"]
    assert epochs == pytest.approx(measured["target_epochs"], abs=1e-3)
    scores = [e["value"] for e in events if e["key"] == "eval_accuracy"]
    assert scores[-1] == measured["accuracy"] and max(scores[:-1], default=0) < 0.8


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
  (tmp_path / "run").write_text("")
  with pytest.raises(ConfigError, match="a file, use another one"):
    trials.check([trials.Trial(trials.prepare(quick()), tmp_path / "run")])
