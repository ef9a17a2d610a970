"""MLPerf's own checker on the log that docs/extending.md writes."""

import json

import pytest

from jaxscale import metrics
from jaxscale.config.bases import TrackerContext
from jaxscale.config.loading import load_config
from jaxscale.run.fit import fit
from support.extending import write_mine

pytest.importorskip("mlperf_logging")

TRAINED = {"log.trackers": "MLPerf", "log.trackers.MLPerf.flush_s": "40", "epochs": "2"}
TRAINED |= {"log.tensorboard": "False", "schedule": "Cosine", "target_accuracy": "0.1"}
RUN = {
  "config": {"seed": 3, "batch_size": 64, "target_accuracy": 0.7},
  "derived": {"num_train": 384, "num_eval": 128},
  "device_kind": "cpu",
}


def compliance(path):
  """Return what the checker of MLPerf Training 4.0, ResNet's last round, reports."""
  from mlperf_logging.compliance_checker import mlp_compliance

  checker = mlp_compliance.make_checker("training", "4.0.0", False, True)
  mlp_compliance.main(str(path), "training_4.0.0/common.yaml", checker)
  return [*checker.overwritable.values(), *checker.not_overwritable]


def events(path):
  prefix = ":::MLLOG "
  return [json.loads(x.removeprefix(prefix)) for x in path.read_text().splitlines()]


def values(path, key):
  return [event["value"] for event in events(path) if event["key"] == key]


def test_the_log_of_a_run_that_trained_complies(tmp_path):
  fit(load_config(str(write_mine(tmp_path)), TRAINED), tmp_path / "run")
  path = tmp_path / "run" / "mllog.txt"
  assert compliance(path) == []
  lines = metrics.read_metrics(tmp_path / "run" / "metrics.jsonl")
  scores = [x["eval/accuracy"] for x in lines if "eval/accuracy" in x]
  assert values(path, "eval_accuracy") == scores
  last = events(path)[-1]
  assert last["key"] == "run_stop" and last["metadata"]["status"] == "success"
  assert last["metadata"]["epoch_num"] == pytest.approx(2)
  times = [event["time_ms"] for event in events(path)]
  assert times == sorted(times) and times[0] < times[-1]


def test_a_run_that_resumes_has_each_evaluation_once(tmp_path):
  (tracker,) = load_config(str(write_mine(tmp_path)), TRAINED).log.trackers
  (tmp_path / "config.json").write_text(json.dumps(RUN))
  (tmp_path / "starts.jsonl").write_text(json.dumps({"time": 1e9}) + "\n")
  context = TrackerContext("a-1", "a", tmp_path, RUN["config"], {}, print)
  path = tmp_path / "mllog.txt"
  for start, ends in ((0, "interrupted"), (6, "done")):
    source = metrics.TrackerSource("MLPerf", lambda note: tracker.build(context), 40.0)
    writer = metrics.MetricWriter(tmp_path, start=start, tensorboard=False, trackers=[source])
    for step in range(start + 6, start + 13, 6):  # 12 is done twice
      writer.write(step, {"eval/accuracy": step / 24})
    writer.close(ends)
    if ends == "interrupted":
      assert any("run_stop" in problem for problem in compliance(path))
  assert compliance(path) == []
  assert values(path, "eval_accuracy") == [0.25, 0.5, 0.75]
  blocks = [x["metadata"] for x in events(path) if x["key"] == "block_start"]
  assert [x["first_epoch_num"] for x in blocks] == [0.0, 1.0, 2.0]
