"""MLPerf's log: its format and its order."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from jaxscale import metrics
from jaxscale.metrics.mllog import run_keys
from support.mllog import LARS, SGD, described, write_run

LINE = re.compile(
  r':::MLLOG \{"namespace": "", "time_ms": \d+, "event_type": '
  r'"(POINT_IN_TIME|INTERVAL_START|INTERVAL_END)", "key": "\w+", "value": .*, '
  r'"metadata": \{"file": "[\w./]+", "lineno": \d+.*\}\}'
)


def values(events, key):
  return [event["value"] for event in events if event["key"] == key]


def test_lines_are_in_the_documented_format(tmp_path):
  before = time.time() * 1e3 - 1
  with metrics.MLLog(tmp_path / "log") as log:
    log.start("eval_start", epoch_num=4)
    log.event("eval_accuracy", np.float32(0.5), epoch_num=np.int64(4))
    log.event("lrs", np.array([1.0, 2.0]), time_ms=17.9)
    log.end("eval_stop", epoch_num=4)
  for line in (tmp_path / "log").read_text().splitlines():
    assert LINE.fullmatch(line), line
  events = metrics.read_mllog(tmp_path / "log")
  assert [e["event_type"] for e in events] == [
    "INTERVAL_START", "POINT_IN_TIME", "POINT_IN_TIME", "INTERVAL_END"
  ]  # fmt: skip
  assert [e["value"] for e in events] == [None, 0.5, [1.0, 2.0], None]
  assert events[2]["time_ms"] == 17
  assert before <= events[0]["time_ms"] <= time.time() * 1e3
  meta = events[1]["metadata"]
  assert meta["epoch_num"] == 4 and meta["file"] == "tests/unit/test_mllog.py"
  source = Path(__file__).read_text().splitlines()
  assert "log.event" in source[meta["lineno"] - 1]


def test_a_line_is_on_disk_when_it_is_logged(tmp_path):
  log = metrics.MLLog(tmp_path / "log")
  log.event("seed", 1)
  assert values(metrics.read_mllog(tmp_path / "log"), "seed") == [1]
  log.close()


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  log = metrics.RunLog(None, described(LARS))
  log.evaluating(10, 0.1)
  log.evaluated(0.5)
  log.stop(success=False)
  assert not list(tmp_path.iterdir())


def test_other_output_and_a_cut_line_are_left_out(tmp_path):
  text = 'noise\n[0] :::MLLOG {"key": "a", "value": 1}\n:::MLLOG {"key": "b", "va'
  (tmp_path / "log").write_text(text)
  assert metrics.read_mllog(tmp_path / "log") == [{"key": "a", "value": 1}]


def test_the_settings_are_those_of_the_run():
  keys = run_keys(described(LARS))
  assert keys["submission_benchmark"] == "resnet"
  assert keys["global_batch_size"] == 4096 and keys["seed"] == 3
  assert keys["gradient_accumulation_steps"] == 4
  assert (keys["train_samples"], keys["eval_samples"]) == (1_281_167, 50_000)
  assert keys["opt_name"] == "lars" and keys["lars_opt_base_learning_rate"] == 10.0
  # 12 epochs of 312.8 steps, 5 of them warm-up, and one: 3754 - 1564 + 1.
  assert keys["lars_opt_learning_rate_decay_steps"] == 2191
  assert keys["model_bn_span"] == 64
  # The reference's own count, where the config says it in epochs.
  fixed = run_keys(described(LARS, decay_epochs=13137 * 4096 / 1_281_167))
  assert fixed["lars_opt_learning_rate_decay_steps"] == 13137


@pytest.mark.parametrize(
  "model, span",
  [
    ({"class": "MLP"}, None),
    ({"class": "CNN", "batch_norm": False, "bn_span": "device"}, None),
    ({"class": "CNN", "batch_norm": True, "bn_span": "device"}, 256),
    ({"class": "ResNet", "bn_span": "global"}, 2048),
    ({"class": "ResNet", "bn_span": 64}, 64),
  ],
)
def test_the_span_of_batch_norm(model, span):
  reported = described(SGD)
  reported["config"]["model"] = model
  assert run_keys(reported).get("model_bn_span") == span
  assert run_keys(reported)["submission_benchmark"] == "imagenet2012"


def test_a_run_is_reported_in_order(tmp_path):
  events = write_run(tmp_path / "log", LARS, [0.5, 0.7, 0.76])
  keys = [e["key"] for e in events]
  assert keys[:2] == ["cache_clear", "init_start"]
  block = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
  after = keys[keys.index("init_stop") :]
  assert after == ["init_stop", "run_start", *block * 3, "run_stop"]
  assert len(set(keys[: keys.index("run_start")])) == keys.index("run_start")
  times = [e["time_ms"] for e in events]
  assert times == sorted(times)
  assert times[keys.index("init_stop")] - times[0] == pytest.approx(5000, abs=2000)
  for start, kind in (("INTERVAL_START", "_start"), ("INTERVAL_END", "_stop")):
    assert all(e["key"].endswith(kind) for e in events if e["event_type"] == start)
  blocks = [e["metadata"] for e in events if e["key"] == "block_start"]
  epoch = 1251 * 4096 / 1_281_167  # 3.9996: a step less than 4 epochs
  wanted = [(0, 4), (epoch, 4), (2 * epoch, 4)]
  got = [(m["first_epoch_num"], m["epoch_count"]) for m in blocks]
  np.testing.assert_allclose(got, wanted, atol=1e-3)
  last = events[-1]["metadata"]
  assert last["status"] == "success"
  assert last["epoch_num"] == pytest.approx(3 * epoch, abs=1e-4)
  missed = write_run(tmp_path / "log", LARS, [0.5, 0.7])
  assert missed[-1]["metadata"]["status"] == "aborted"


def test_a_run_that_resumes_forgets_what_it_will_do_again(tmp_path):
  path = tmp_path / "log"
  first = write_run(path, LARS, [0.5, 0.7])
  log = metrics.RunLog(path, described(LARS), start=1251, epoch=4.0)
  log.evaluating(2502, 8.0)
  log.evaluated(0.76, is_last=True)
  log.stop(success=True)
  events = metrics.read_mllog(path)
  assert values(events, "eval_accuracy") == [0.5, 0.76]
  assert len(values(events, "run_start")) == len(values(events, "run_stop")) == 1
  assert values(events, "resumed") == [1251]
  assert events[0] == first[0]
  # From the start again: a new log.
  assert len(values(write_run(path, LARS, [0.5]), "eval_accuracy")) == 1


def blocks_in_turn(events):
  """Whether every block is ended before the next one begins."""
  keys = [e["key"] for e in events if e["key"] in ("block_start", "block_stop")]
  return keys == ["block_start", "block_stop"] * (len(keys) // 2)


@pytest.mark.parametrize("start", [1251, 2000])  # at an evaluation, and between two
def test_a_run_that_resumes_ends_no_block_twice(tmp_path, start):
  path, epoch = tmp_path / "log", 4096 / 1_281_167
  log = metrics.RunLog(path, described(LARS))
  log.evaluating(1251, 1251 * epoch)
  log.evaluated(0.5)
  log.close()  # killed inside the second block
  for _ in range(2):  # and once more at the same step
    log = metrics.RunLog(path, described(LARS), start=start, epoch=start * epoch)
    log.note("damaged_examples", 3)
    log.close()
  log = metrics.RunLog(path, described(LARS), start=start, epoch=start * epoch)
  log.evaluating(2502, 2502 * epoch)
  log.evaluated(0.76, is_last=True)
  log.stop(success=True)
  events = metrics.read_mllog(path)
  assert blocks_in_turn(events) and len(values(events, "block_start")) == 2
  last = [e["metadata"] for e in events if e["key"] == "block_start"][-1]
  assert last["first_epoch_num"] == pytest.approx(start * epoch, abs=1e-4)
  assert values(events, "resumed") == [start] * 3
  assert values(events, "eval_accuracy") == [0.5, 0.76]


def record(workdir, lines, seconds):
  """The files of a run."""
  reported = described(LARS)
  (workdir / "config.json").write_text(json.dumps(reported))
  (workdir / "summary.json").write_text(json.dumps({"seconds": seconds}))
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (workdir / "metrics.jsonl").write_text(text)


def test_a_finished_run_is_reported_from_its_record(tmp_path):
  lines = [
    {"step": 50, "train/loss": 6.0, "time": 1010.0},
    {"step": 1251, "eval/accuracy": 0.70, "time": 1100.0},
    {"step": 2502, "eval/accuracy": 0.76, "time": 1200.0},
    {"step": 3753, "eval/accuracy": 0.77, "time": 1300.0},
  ]
  record(tmp_path, lines, seconds=305.0)
  path = metrics.log_from_record(tmp_path)
  assert path is not None
  events = metrics.read_mllog(path)
  assert values(events, "eval_accuracy") == [0.70, 0.76]  # the target ends it
  assert values(events, "resumed") == []
  (start,) = [e["time_ms"] for e in events if e["key"] == "run_start"]
  (stop,) = [e for e in events if e["key"] == "run_stop"]
  assert (start, stop["time_ms"]) == (995_000, 1_200_000)
  assert stop["metadata"]["status"] == "success"
  assert stop["metadata"]["epoch_num"] == pytest.approx(8, abs=2e-3)
  # The last process ran for 50 s only: the run began before it.
  record(tmp_path, lines, seconds=50.0)
  events = metrics.read_mllog(metrics.log_from_record(tmp_path) or "")
  assert values(events, "resumed") == [True] and events[0]["time_ms"] == 1_010_000
  record(tmp_path, lines[:1], seconds=1.0)
  assert metrics.log_from_record(tmp_path) is None


def test_epochs_of_an_adaptive_run_are_those_of_the_sizes_it_chose(tmp_path):
  """Against the plan that the run itself follows, at every step."""
  from jaxscale import config as cfg
  from jaxscale.config.loading import load_config
  from jaxscale.config.record import to_plain
  from jaxscale.experiment.derive import derive
  from jaxscale.experiment.phases import examples_at

  adaptive = {"phases": "AdaptiveBatch", "phases.every_epochs": "1.5", "epochs": "5"}
  config = load_config("configs/digits.py", adaptive | {"batch_size": "64"})
  assert isinstance(config.phases, cfg.AdaptiveBatch)
  chosen = [64, 96, 256]
  as_written = derive(config, 1437, 360, 8)  # before any size was chosen
  phases = derive(config, 1437, 360, 8, chosen).phases
  assert len({s.batch_size for s in phases}) == 3
  steps = [1, 33, 34, 35, 50, 57, 58, 62, phases[-1].stop]
  lines = [{"step": s, "eval/accuracy": 0.5, "time": 1000.0 + s} for s in steps]
  record(tmp_path, lines, seconds=100.0)
  reported = json.loads((tmp_path / "config.json").read_text())
  derived = as_written._asdict() | {"phases": [s._asdict() for s in as_written.phases]}
  reported |= {"config": to_plain(config), "derived": derived}
  (tmp_path / "config.json").write_text(json.dumps(reported))

  def epochs():
    events = metrics.read_mllog(metrics.log_from_record(tmp_path) or "")
    return [e["metadata"]["epoch_num"] for e in events if e["key"] == "eval_start"]

  (tmp_path / "batch_sizes.json").write_text(json.dumps(chosen))
  wanted = [examples_at(phases, s) / 1437 for s in steps]
  assert epochs() == pytest.approx(wanted, abs=1e-4) and wanted[-1] >= 5
  (tmp_path / "batch_sizes.json").unlink()
  fixed = [examples_at(as_written.phases, s) / 1437 for s in steps]
  assert epochs() == pytest.approx(fixed, abs=1e-4) != wanted
