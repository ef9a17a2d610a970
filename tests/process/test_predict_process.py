"""Predictions and evaluations of a run by several processes."""

import csv
import signal
import sys

import pytest

from jaxscale.metrics import read_json
from support.commands import jaxscale, own_lines, trained
from support.processes import ended, killed_at_end, run_group, start_group, wait_until

SMALL = ["--config.data=Synthetic", "--config.data.image_size=8", "--config.data.num_examples=3010"]


def command(name, *argv):
  return [sys.executable, "-m", "jaxscale", name, *map(str, argv)]


@pytest.mark.slow
def test_two_processes_predict_each_example_once_as_they_evaluate(tmp_path):
  run = tmp_path / "run"
  trained(run, *SMALL, "--config.epochs=3", "--config.evaluation.batch_size=64")
  accuracies = {read_json(run / "summary.json")["accuracy"]}
  for count, devices in ((3, 1), (2, 2)):
    to = tmp_path / str(count)
    for name, file in (("predict", to / "out.csv"), ("evaluate", to / "e.json")):
      ended = run_group(command(name, run, "--to", file), count=count, num_devices=devices)
      assert [code for *_, code in ended] == [0] * count, ended
      lines = [own_lines(out) for out, *_ in ended]
      assert lines[0][-1].startswith("done: ") and not any(lines[1:])
    with open(to / "out.csv") as file:
      rows = [*csv.DictReader(file)]
    assert [row["id"] for row in rows] == [*map(str, range(301))]
    accuracies.add(sum(row["label"] == row["target"] for row in rows) / 301)
    accuracies.add(read_json(to / "e.json")["evaluation"]["accuracy"])
    assert [path.name for path in sorted(to.iterdir())] == ["e.json", "out.csv"]
  assert len(accuracies) == 1 and accuracies.pop() > 0.2


@pytest.mark.slow
def test_a_prediction_that_is_asked_to_stop_leaves_no_file(tmp_path):
  run, to = tmp_path / "run", tmp_path / "out" / "x.npz"
  trained(run, *SMALL, "--config.epochs=1", "--config.schedule.warmup_epochs=0")
  many = ["--config.data.num_examples=2000000000", "--to", to]
  with killed_at_end(*start_group(command("predict", run, *many))) as group:
    wait_until(lambda: any(to.parent.glob(".*")) if to.parent.is_dir() else False, group[0])
    group[0].send_signal(signal.SIGTERM)
    found = ended(group, timeout=120)
  assert [code for *_, code in found] == [85, 85], found
  assert "nothing is written; to start again: " in found[0][0]
  assert not [*to.parent.iterdir()]


@pytest.mark.slow
def test_processes_with_different_settings_are_refused(tmp_path):
  run = tmp_path / "run"
  trained(run, *SMALL, "--config.epochs=1", "--config.schedule.warmup_epochs=0")
  line = f"exec {sys.executable} -m jaxscale evaluate {run} --config.evaluation.batch_size=1"
  ended = run_group(["sh", "-c", f"{line}$JAXSCALE_PROCESS_ID"])
  assert {code for *_, code in ended} == {2}
  assert any("config differs from process 0" in err for _, err, _ in ended)
  assert "--batch-size" in jaxscale("predict", "--help").stdout
