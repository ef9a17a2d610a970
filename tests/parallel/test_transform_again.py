"""A run with a transform of its config file is evaluated and trained again from its copy."""

import json

import numpy as np
import pytest

import jaxscale as jxs
from jaxscale import cli
from jaxscale.config.loading import load_config
from support.errors import config_error
from support.sources import LABELS, make_source
from support.trees import assert_same_bits

CONFIG = """
from jaxscale import config, data

FACTOR = 2


def double(example, rng):
  scale = 1.0 if rng is None else rng.uniform(0.5, 1)
  return example | {{"image": example["image"] * (FACTOR * scale)}}


def get_config(kind):
  transform = double if kind == "def" else lambda example, rng: double(example, rng)
  source = data.Zarr(
    path={path!r}, columns={{"image": "image", "label": "label"}}, transform=transform,
    num_classes=7, statistics=True,
  )
  return config.Config(
    model=config.MLP(hidden=(8,)), data=source, optimizer=config.SGD(lr=0.01), batch_size=64,
    steps=3, log=config.Log(plot=False, tensorboard=False),
  )
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
  """Return a folder with zarr, a config file, and the runs "def" and "lambda"."""
  folder = tmp_path_factory.mktemp("project")
  path = make_source("zarr3", folder).path
  (folder / "own.py").write_text(CONFIG.format(path=str(path)))
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for kind in ("def", "lambda"):
      jxs.fit(load_config(f"{folder}/own.py:{kind}"), folder / kind)
  (folder / "own.py").unlink()
  return folder


def test_it_is_predicted_and_evaluated_on_files_of_its_format(project, tmp_path, capsys):
  given = [str(project / "def"), "--data", str(project / "zarr3")]
  assert cli.main(["evaluate", *given, "--to", str(tmp_path / "e.json")]) == 0
  assert cli.main(["predict", *given, "--to", str(tmp_path / "p.npz")]) == 0
  result = json.loads((tmp_path / "e.json").read_text())
  with np.load(tmp_path / "p.npz") as written:
    np.testing.assert_array_equal(written["target"], LABELS)
    accuracy = (written["label"] == LABELS).mean()
  assert result["examples"] == len(LABELS)
  assert result["evaluation"]["accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_it_is_trained_again_bit_for_bit(project, tmp_path):
  again = jxs.fit(project / "def", tmp_path / "again")
  assert_same_bits(again.state.params, jxs.load(project / "def").params)


def test_a_lambda_is_named_in_one_line(project, tmp_path, capsys):
  run, zarr = str(project / "lambda"), str(project / "zarr3")
  for words in ([], ["--data", zarr]):
    assert cli.main(["predict", run, *words, "--to", str(tmp_path / "p.csv")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "<lambda>: a function that is not at the top level of a file" in line
    assert "define it by def in the config file" in line
  # Arrays need no transform, and their mistakes do not name it.
  np.save(tmp_path / "x.npy", np.zeros((3, 2)))
  assert cli.main(["predict", run, "--data", str(tmp_path / "x.npy"), "--to", "p.csv"]) == 2
  assert "lambda" not in capsys.readouterr().err


def test_a_function_with_other_source_is_not_called(project, tmp_path):
  copy = project / "def" / "code" / "own.py"
  before = copy.read_text()
  copy.write_text(before.replace('example["image"] * (', 'example["image"] + ('))
  try:
    with config_error(match="own:double: a function that is not at the top level"):
      jxs.load_config(str(project / "def"))
  finally:
    copy.write_text(before)
