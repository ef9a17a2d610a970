"""A batch study on this machine: its runs, and what its report says of them."""

import json

import pytest

from jaxscale import cli, jobs, metrics

# An MLP on the digits; the largest batch has too few steps to get there.
QUICK = """
--config=configs/digits.py --config.model=MLP --config.model.hidden=32 --config.epochs=8
--config.ema_decay=None --config.target_accuracy=0.8 --config.schedule.warmup_epochs=0
--config.lr_scaling=linear --config.lr_reference_batch_size=64 --config.optimizer.lr=0.05
--config.evaluation.every_epochs=1 --config.checkpoint.every_epochs=100
--config.log.tensorboard=False --batch-sizes=256,64,1432
"""


@pytest.mark.slow
def test_a_study_measures_what_the_records_say(tmp_path, capsys):
  runs = ["--runs", str(tmp_path)]
  assert cli.main(["batch-study", *QUICK.split(), "--executor=local", "--name=study", *runs]) == 0
  out, _ = capsys.readouterr()
  assert "study: submitted as local-" in out and ", 3 trials" in out
  assert f"jaxscale report study --runs {tmp_path}" in out
  job = jobs.job("study", str(tmp_path))
  job.wait()
  assert cli.main(["report", "study", *runs]) == 0
  study = json.loads((job.folder / "study.json").read_text())
  assert [s["batch_size"] for s in study["sizes"]] == [64, 256, 1432]
  status = {run["batch_size"]: run["status"] for run in study["runs"]}
  assert status == {64: "reached", 256: "reached", 1432: "missed"}
  for task, found in enumerate(study["runs"]):
    size = found["batch_size"]
    assert found["peak_lr"] == pytest.approx(0.05 * size / 64)
    lines = metrics.read_metrics(job.folder / f"trials/{task}/metrics.jsonl")
    scores = [(x["step"], x["eval/accuracy"]) for x in lines if "eval/accuracy" in x]
    reached = [step for step, accuracy in scores if accuracy >= 0.8]
    assert (found["steps"], found["accuracy"]) == scores[-1]
    if found["status"] == "missed":
      assert not reached and found["target_step"] is None
    else:  # it stopped there
      assert [found["target_step"]] == reached == [found["steps"]]
      assert found["target_examples"] == reached[0] * size
      assert found["target_epochs"] == reached[0] * size / 1437
      assert found["target_seconds"] > 0
