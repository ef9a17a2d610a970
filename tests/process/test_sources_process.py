"""Runs on zarr and Parquet by two processes that stop, and go on as one process."""

import json
import signal

import numpy as np
import pytest

import jaxscale
from support.commands import run_python, run_train, train_command
from support.processes import ended, killed_at_end, start_group, wait_until
from support.sources import LABELS, make_source
from support.trees import assert_same_bits

CONFIG = """
from jaxscale import config, data


def transform(example, rng):
  if rng is not None:
    example["image"] = example["image"] * rng.uniform(0.5, 1.0)
  return example | {{"image": example["image"] * 1.0}}


def get_config():
  return config.Config(
    model=config.MLP(), data=data.{kind}(path={path!r}, columns={columns}, num_classes=7,
      shuffle="chunks", transform=transform), optimizer=config.SGD(lr=0.01), batch_size=16,
    epochs=40, evaluation=config.Evaluation(every_epochs=50),
    checkpoint=config.Checkpoint(every_epochs=50))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zarr3", "parquet"])
def test_a_run_of_two_processes_goes_on_as_one_bit_for_bit(kind, tmp_path):
  columns = {"image": "image", "label": "label"}
  settings = make_source(kind, tmp_path, columns=columns)
  file, calm, stopped = tmp_path / "config.py", tmp_path / "calm", tmp_path / "stopped"
  words = {"kind": type(settings).__name__, "path": settings.path, "columns": columns}
  file.write_text(CONFIG.format(**words))
  done = run_train(calm, config=str(file), num_devices=2)
  assert done.returncode == 0, done.stderr
  with killed_at_end(*start_group(train_command(stopped, config=str(file)))) as group:
    metrics = stopped / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, group[0])
    group[0].send_signal(signal.SIGTERM)
    found = ended(group, timeout=120)
  assert [code for *_, code in found] == [85, 85], found
  done = run_train(stopped, config=str(file), num_devices=2)
  assert done.returncode == 0, done.stderr
  assert "resum" in done.stdout
  assert_same_bits(*(jaxscale.load(run).params for run in (stopped, calm)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zarr3", "parquet", "hdf5", "npz"])
def test_predict_and_evaluate_take_a_path_of_the_format(kind, tmp_path):
  columns = {"image": "image", "label": "label"}
  settings = make_source(kind, tmp_path, columns=columns)
  run, file, to = tmp_path / "run", tmp_path / "config.py", tmp_path / "p.npz"
  words = {"kind": type(settings).__name__, "path": settings.path, "columns": columns}
  text = CONFIG.format(**words).replace("epochs=40", "epochs=2")
  file.write_text(text)
  done = run_train(run, config=str(file))
  assert done.returncode == 0, done.stderr
  given = [run, "--data", settings.path]
  done = run_python("-m", "jaxscale", "evaluate", *given, "--to", tmp_path / "e.json")
  assert done.returncode == 0, done.stderr
  result = json.loads((tmp_path / "e.json").read_text())
  done = run_python("-m", "jaxscale", "predict", *given, "--to", to)
  assert done.returncode == 0, done.stderr
  with np.load(to) as written:
    np.testing.assert_array_equal(written["target"], LABELS)
    accuracy = (written["label"] == LABELS).mean()
  assert result["examples"] == len(LABELS)
  assert result["evaluation"]["accuracy"] == pytest.approx(accuracy, abs=1e-6)
