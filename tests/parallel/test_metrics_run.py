"""Metrics in a run: records, pictures, the best checkpoint, and errors in one line."""

import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import f1_score

from jaxscale import cli, config, metrics
from jaxscale.data import DatasetInfo, TextInfo, from_named
from jaxscale.jobs import run_report
from jaxscale.run.fit import fit
from jaxscale.training.metrics import Metric
from support.configs import small_config
from support.errors import config_error

COUNT = []


class Rows(config.Data):
  """Points of two classes."""

  classes: int = 2

  def build(self):
    rng = np.random.default_rng(0)
    made = []
    for size in (96, 77):
      x = rng.normal(size=(size, 4)).astype("float32")
      y = (x[:, 0] + 0.5 * rng.normal(size=size) > 0).astype("int32") % self.classes
      made.append(from_named("rows", {"image": x, "label": y}, num_classes=2))
    return tuple(made)


class OddMiss(config.Metric):
  """Number of misses, better or worse by turns."""

  signs: tuple[float, ...] = (3.0, 1.0, 2.0)
  breaks: str = ""

  def build(self, info):
    def update(outputs, batch, weights):
      if self.breaks == "update":
        raise ValueError("broken update")
      return {"n": weights.sum()}

    def compute(sums):
      if self.breaks == "compute":
        return sums["m"]
      assert sums["n"] == 77 and sums["n"].dtype == np.int64
      COUNT.append(0)
      return self.signs[(len(COUNT) - 1) % 3]

    return Metric(update, compute, lower_is_better=("odd_miss",))


def run(workdir, **fields):
  """Train for three epochs of three steps; the best is kept beside the last."""
  saving = config.Checkpoint(keep_last=1, best_metric=fields.pop("best", None))
  usual = dict(data=Rows(), checkpoint=saving, batch_size=32, epochs=3)
  usual["evaluation"] = config.Evaluation(batch_size=16)
  return fit(small_config(**usual | fields), workdir)


def saved(workdir):
  return sorted(int(name) for name in os.listdir(workdir / "checkpoints"))


FULL = (config.F1(), config.ConfusionMatrix(), config.AUROC(), config.CalibrationError())


def test_a_run_records_and_draws_them(tmp_path, capsys):
  plain = run(tmp_path / "a", best="val/f1", metrics=FULL, log=config.Log(tensorboard=False))
  summary = plain.summary
  lines = [x for x in metrics.read_metrics(tmp_path / "a" / "metrics.jsonl") if "eval/f1" in x]
  assert [x["step"] for x in lines] == [3, 6, 9]
  assert summary["f1"] == lines[-1]["eval/f1"] == summary["evaluation"]["f1"]
  assert {"auroc", "precision", "recall", "calibration_error"} < summary["evaluation"].keys()
  matrix = np.array(summary["confusion_matrix"])
  true, picked = (np.repeat(i, matrix.ravel()) for i in np.indices((2, 2)).reshape(2, -1))
  assert summary["f1"] == pytest.approx(f1_score(true, picked, average="macro"), rel=1e-15)
  best = max(reversed(lines), key=lambda x: x["eval/f1"])
  assert summary["best_metric"] == "f1" and summary["best_value"] == best["eval/f1"]
  assert saved(tmp_path / "a") == sorted({summary["best_step"], 9})
  out = capsys.readouterr().out
  assert f"  f1 {summary['f1']:.4g}  precision" in out
  for name in ("confusion_matrix", "calibration", "metrics"):
    with Image.open(tmp_path / "a" / f"{name}.png") as picture:
      assert min(picture.size) > 300
  assert json.loads((tmp_path / "a" / "summary.json").read_text()) == summary
  report = run_report.describe(tmp_path / "a")
  assert "validation f1" in report and f"best (step {summary['best_step']})" in report


def test_jaxscale_evaluate_computes_them_too(tmp_path):
  chosen = config.F1(), config.ConfusionMatrix()
  mesh, layout = config.Mesh(fsdp=4), config.Layout(shard="fsdp")
  options = dict(model=config.MLP(hidden=(32,)), mesh=mesh, layout=layout, metrics=chosen)
  options |= dict(data=config.Digits(), log=config.Log(plot=False), epochs=None, steps=3)
  summary = run(tmp_path / "run", **options).summary
  assert cli.main(["evaluate", str(tmp_path / "run"), f"--to={tmp_path}/e.json"]) == 0
  found = json.loads((tmp_path / "e.json").read_text())
  assert found["confusion_matrix"] == summary["confusion_matrix"]
  loss, again = summary["evaluation"].pop("loss"), found["evaluation"].pop("loss")
  assert found["evaluation"] == summary["evaluation"] and again == pytest.approx(loss, rel=1e-6)


def test_the_lowest_of_an_own_metric_is_kept_also_after_a_resume(tmp_path):
  COUNT.clear()
  options = dict(
    best="odd_miss", metrics=(OddMiss(signs=(3.0, 1.0, 1.0)),), log=config.Log(plot=False)
  )
  summary = run(tmp_path, **options).summary
  assert (summary["best_metric"], summary["best_value"]) == ("-odd_miss", 1.0)
  assert summary["best_step"] == 6 and saved(tmp_path) == [6, 9]
  shutil.rmtree(tmp_path / "checkpoints" / "9")
  summary = run(tmp_path, **options).summary  # metrics may change in a run that resumes
  assert summary["best_step"] == 6 and saved(tmp_path) == [6, 9]


def test_a_metric_that_is_not_defined_is_left_out(tmp_path, capsys):
  summary = run(tmp_path, data=Rows(classes=1), metrics=(config.AUROC(),), best="auroc").summary
  assert "auroc is nan for the validation examples; it is left out" in capsys.readouterr().out
  assert "auroc" not in summary["evaluation"] and summary["best_step"] is None
  assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


WRONG = {
  "no such metric": (dict(best="f1"), "Checkpoint.best_metric=f1 is not a metric of this"),
  "update": (dict(metrics=(OddMiss(breaks="update"),)), "OddMiss (update): ValueError: broken up"),
  "compute": (dict(metrics=(OddMiss(breaks="compute"),)), "OddMiss (compute): KeyError"),
  "twice": (None, "Config.metrics: F1 is listed twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_one_line(tmp_path, name):
  fields, problem = WRONG[name]
  with config_error(problem) as error:
    run(tmp_path, **fields or dict(metrics=(config.F1(), config.F1(average="micro"))))
  if "OddMiss" in problem:
    assert f"{__file__}:" in str(error.value)


def test_what_metrics_need_of_the_data():
  text, unlabelled = TextInfo("books", 256, 16), DatasetInfo("pairs", None, label_shape=None)
  for metric, info in ((config.R2(), text), (config.F1(), unlabelled), (config.R2(), unlabelled)):
    with config_error(f"Config.metrics={type(metric).__name__} needs an array 'label'"):
      metric.build(info)
  config.F1().build(text)


class Share(config.Metric):
  """Share of the class 1, from sums or by a mistake."""

  how: str = "sum"

  def build(self, info):
    def update(outputs, batch, weights):
      is_one = batch["label"] == 1
      sums = {"ones": weights.sum(where=is_one), "all": weights.sum()}
      wrong = {"mean": is_one.mean(), "number": 1.0, "most": outputs.max(), "rows": is_one}
      return {"sum": sums, **wrong}[self.how]

    return Metric(update, lambda sums: sums["ones"] / sums["all"])


@pytest.mark.parametrize("how", ["mean", "number", "most"])
def test_a_metric_that_is_no_sum_is_refused_before_the_first_step(how, tmp_path):
  with config_error("Config.metrics=share returns a value for all rows that is not the sum"):
    run(tmp_path, metrics=(Share(how=how),))
  assert not (tmp_path / "checkpoints").exists()
  with config_error("share returns one entry per row; return sums over the rows, or pass gathers"):
    run(tmp_path, metrics=(Share(how="rows"),))


def test_a_metric_that_is_a_sum_is_taken(tmp_path):
  assert 0 < run(tmp_path, epochs=1, metrics=(Share(),)).summary["share"] < 1
