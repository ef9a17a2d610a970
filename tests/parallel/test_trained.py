"""Finished runs: loaded, applied to new inputs, evaluated on any devices, trained again."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import jaxscale as jxs
from jaxscale import cli, data
from jaxscale import config as cfg
from jaxscale.config import Checkpoint, Layout, Log, Mesh
from jaxscale.metrics import read_json
from jaxscale.run.predict import open_predictions
from support.cases import all_slow_except
from support.configs import small_config, tiny_language
from support.errors import config_error
from support.paths import ROOT
from support.tables import table

QUIET = Log(plot=False, tensorboard=False, step_report=False)
VIT = cfg.ViT(patch=4, width=16, num_layers=2, num_heads=2, hidden=16, pad_classes_to=4)
RUNS = {
  "data": dict(mesh=Mesh(data=8)),
  "average": dict(mesh=Mesh(data=8), ema_decay=0.5),
  "fsdp": dict(model=cfg.MLP(hidden=(64,)), mesh=Mesh(data=2, fsdp=4), layout=Layout(shard="fsdp")),
  "stack": dict(model=VIT, mesh=Mesh(data=1, fsdp=2, stage=2, model=2), accumulate_steps=2),
  "batch norm": dict(model=cfg.CNN(features=(4,), dense=8, batch_norm=True), mesh=Mesh(data=8)),
}
RUNS["stack"] |= dict(layout=Layout(shard="fsdp"))


def trained(folder, **fields):
  """Return the result of a few steps on the digits."""
  usual = dict(steps=6, epochs=None, schedule=cfg.Cosine(), log=QUIET)
  usual |= dict(checkpoint=Checkpoint(every_epochs=None, every_steps=3, keep_last=2))
  return jxs.fit(small_config(**usual | fields), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Return the folder of the runs, and a function that trains the one of a name once."""
  folder, results = tmp_path_factory.mktemp("runs"), {}

  def run(name):
    if name not in results:
      results[name] = trained(folder / name, **RUNS[name])
    return folder / name, results[name]

  return run


def digits():
  dataset = data.digits("test")
  batch = dataset.load(np.arange(dataset.num_examples), None)
  return batch["image"], batch["label"]


@pytest.mark.parametrize("name", all_slow_except([*RUNS], "data", "average", "fsdp", "batch norm"))
def test_predictions_and_evaluation_are_those_of_the_run(name, runs, tmp_path, capsys):
  workdir, result = runs(name)
  images, labels = digits()
  loaded = jxs.load(workdir)
  found = loaded.predict(images)
  assert loaded.step == 6 and found.probabilities.shape == (360, 10)
  assert (found.labels == labels).sum() == round(360 * result.summary["accuracy"])
  loss = -np.log(np.float64(found.probabilities)[np.arange(360), labels]).mean()
  assert loss == pytest.approx(result.summary["loss"], rel=1e-5)
  for a, b in zip(*map(jax.tree.leaves, (loaded.params, result.state.evaluated()[0])), strict=True):
    np.testing.assert_array_equal(a, b)
  again = loaded.predict(images[:7], batch_size=3).outputs
  np.testing.assert_allclose(again, found.outputs[:7], rtol=1e-4, atol=1e-5)
  # On the run's own mesh every metric is the run's, to the last bit.
  assert cli.main(["evaluate", str(workdir), "--to", f"{tmp_path}/out/e.json"]) == 0
  told = read_json(tmp_path / "out" / "e.json")
  assert told["evaluation"] == result.summary["evaluation"] and told["examples"] == 360
  assert capsys.readouterr().out.splitlines()[-1].startswith("done: accuracy ")


def test_an_mlp_equals_numpy(runs):
  workdir, _ = runs("data")
  images, _ = digits()
  loaded = jxs.load(workdir)
  layers = [{k: np.float64(v) for k, v in x.items()} for x in loaded.params.values()]
  x = ((np.float64(images) - loaded.info.mean) / loaded.info.std).reshape(360, -1)
  hidden = np.maximum(x @ layers[0]["kernel"] + layers[0]["bias"], 0)
  expected = hidden @ layers[1]["kernel"] + layers[1]["bias"]
  np.testing.assert_allclose(loaded.predict(images).outputs, expected, rtol=1e-4, atol=1e-5)


def test_steps_and_averages_are_chosen(runs):
  workdir, result = runs("average")
  params = jax.tree.leaves(jxs.load(workdir, take="params").params)
  assert np.array_equal(params[0], jax.tree.leaves(result.state.params)[0])
  assert not np.array_equal(params[0], jax.tree.leaves(jxs.load(workdir).params)[0])
  assert jxs.load(workdir, step=3).step == 3
  with config_error(match="step=4: no checkpoint of this step; use one of 3, 6"):
    jxs.load(workdir, step=4)
  with config_error(match="step=best: no checkpoint of this step .best needs .*; use one of 3, 6"):
    jxs.load(workdir, step="best")
  with config_error(match=r"take=average: the run keeps no average"):
    jxs.load(runs("data")[0], take="average")


def test_each_command_takes_the_name_of_a_run_and_its_best_step(runs, tmp_path, capsys):
  workdir, _ = runs("average")
  shutil.copytree(workdir, tmp_path / "named")
  summary = read_json(workdir / "summary.json") | {"best_step": 3}
  (tmp_path / "named" / "summary.json").write_text(json.dumps(summary))
  assert jxs.load(tmp_path / "named", step="best").step == 3
  for name, *to in (["evaluate"], ["predict", "--to=x.csv"], ["export", "--to=x.safetensors"]):
    to = [option.replace("x.", f"{tmp_path}/x.") for option in to]
    assert cli.main([name, "named", f"--runs={tmp_path}", "--step=best", *to]) == 0
    assert "of step 3" in capsys.readouterr().out


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_is_replaced_with_a_line(runs, tmp_path, capsys):
  shutil.copytree(runs("stack")[0], tmp_path / "run")
  path = tmp_path / "run" / "config.json"
  path.write_text(path.read_text().replace('"stage": 2', '"stage": 16'))
  assert cli.main(["evaluate", str(tmp_path / "run")]) == 0
  note, line = capsys.readouterr().out.splitlines()[-2:]
  assert note == "the run's mesh does not fit 8 devices; they split only the batches"
  assert f"accuracy {runs('stack')[1].summary['accuracy']:.2%}" in line


@pytest.mark.slow
def test_a_language_model_gives_logits(tmp_path, capsys):
  config = tiny_language(steps=2, epochs=None, mesh=Mesh(data=8), log=QUIET)
  result = jxs.fit(config, tmp_path / "run")
  tokens = np.arange(60).reshape(3, 20)
  found = jxs.load(tmp_path / "run").predict(tokens)
  assert found.outputs.shape == (3, 20, 256) and found.labels.shape == (3, 20)
  assert cli.main(["evaluate", str(tmp_path / "run"), f"--to={tmp_path}/e.json"]) == 0
  assert read_json(tmp_path / "e.json")["evaluation"] == result.summary["evaluation"]
  assert cli.main(["predict", str(tmp_path / "run"), "--to=x.csv"]) == 2
  assert "is a language model; use jxs.load(run).predict(tokens)" in capsys.readouterr().err


INPUTS = table("""
images[0] | inputs['image'] is uint8[8, 8, 1]; the model takes uint8[n, 8, 8, 1]
images[:0] | inputs['image'] is uint8[0, 8, 8, 1]
images / 3 | which uint8 cannot represent
{"x": images} | inputs['x'] is unknown; give image or label
{"label": images[:, 0, 0, 0]} | inputs=['label'] lack 'image'; give it as well
{"image": images, "label": [1]} | inputs=[1, 360] are different lengths
["nothing.png"] | inputs=nothing.png is no such file
["a", 3] | the model takes
"x.png" | x.png is no such file; give a folder of images, an image, or arrays in a .npy
Path("x.png") | x.png is no such file; give a folder
Image.new("L", (8, 8)) | inputs is a single image; give [image]
""")


@pytest.mark.parametrize("inputs, says", INPUTS)
def test_inputs_that_do_not_fit_are_one_line(inputs, says, runs):
  images, _ = digits()
  with pytest.raises(jxs.ConfigError) as raised:
    jxs.load(runs("data")[0]).predict(
      eval(inputs, {"images": images, "Path": Path, "Image": Image})
    )
  assert says in str(raised.value) and "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Return a folder with a run on images of two classes, one of them damaged."""
  root, rng = tmp_path_factory.mktemp("folder"), np.random.default_rng(0)
  for split, count in (("train", 16), ("val", 9)):
    for number, name in enumerate(("ant", "bee")):
      (root / split / name).mkdir(parents=True)
      for i in range(count):
        pixels = rng.integers(0, 155, (20, 24, 3)) + 100 * number
        Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f"{i}.png")
  (root / "val" / "bee" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
  images = data.ImageFolder(path=str(root), image_size=8, augment="flip")
  result = trained(root / "run", data=images, batch_size=8, mesh=Mesh(data=8))
  assert json.loads((root / "run" / "config.json").read_text())["data"]["class_names"]
  return root, result


def predicted(root, *argv):
  assert cli.main(["predict", f"{root}/run", *argv]) == 0


def test_files_are_viewed_as_in_evaluation(folder):
  root, _ = folder
  loaded = jxs.load(root / "run")
  paths = sorted((root / "val" / "ant").iterdir(), key=lambda p: int(p.stem))
  dataset = data.image_folder(root / "val", image_size=8)
  views = dataset.load(np.arange(9), None)["image"]
  found = loaded.predict(views)
  assert loaded.classes == found.class_names == ("ant", "bee")
  assert {*found.classes} <= {"ant", "bee"}
  for inputs in (paths, [*map(str, paths)], [Image.open(p) for p in paths]):
    np.testing.assert_array_equal(loaded.predict(inputs).outputs, found.outputs)
  only = loaded.predict(str(paths[4])), loaded.predict(root / "val" / "ant")
  assert [len(x.outputs) for x in only] == [1, 9]
  np.testing.assert_allclose(only[0].outputs, found.outputs[4:5], rtol=1e-4, atol=1e-5)


def test_a_file_has_each_example_once_in_order_in_every_format(folder, tmp_path, capsys):
  import pyarrow.parquet as pq

  root, result = folder
  for ending in ("csv", "parquet", "npz"):
    predicted(root, "--to", f"{tmp_path}/new/out.{ending}", "--batch-size=5")
    out = capsys.readouterr().out
    assert out.startswith("done: predictions of step 6 for 18 examples")
    assert out.endswith("; 1 damaged example: bee/3.png\n")
  assert {p.name for p in (tmp_path / "new").iterdir()} == {"out.csv", "out.parquet", "out.npz"}
  rows = pq.read_table(tmp_path / "new" / "out.parquet").to_pylist()
  assert [row["id"] for row in rows] == [f"{c}/{i}.png" for c in ("ant", "bee") for i in range(9)]
  right = sum(row["label"] == row["target"] for row in rows if row["id"] != "bee/3.png")
  assert right == round(18 * result.summary["accuracy"])
  damaged = rows.pop(12)
  assert damaged["label"] == damaged["target"] == -1 and damaged["class"] == ""
  assert np.isnan([damaged["probability"], *damaged["probabilities"]]).all()
  for row in rows:
    assert row["class"] == ("ant", "bee")[row["label"]]
    assert row["probability"] == row["probabilities"][row["label"]] == max(row["probabilities"])
  with np.load(tmp_path / "new" / "out.npz") as arrays:
    assert arrays["probabilities"].shape == (18, 2)
    assert [*arrays["class"][:9]] == [row["class"] for row in rows[:9]]
  head, *lines = (tmp_path / "new" / "out.csv").read_text().splitlines()
  assert head == "id,label,class,probability,target" and len(lines) == 18
  assert lines[12] == "bee/3.png,-1,,nan,-1"


def test_other_data_are_predicted_and_evaluated(folder, tmp_path, capsys):
  root, result = folder
  accuracy = f"accuracy {result.summary['accuracy']:.2%}"
  more = ["--config.metrics=F1", f"--data={root}/val"]
  assert cli.main(["evaluate", f"{root}/run", *more]) == 0
  line = capsys.readouterr().out
  assert accuracy in line and "  f1 0." in line
  predicted(root, f"--data={root}/val/ant", f"--to={tmp_path}/ant.csv")
  assert (tmp_path / "ant.csv").read_text().startswith("id,label,class,probability\n0.png,")
  predicted(root, f"--data={root}/val/ant/4.png", f"--to={tmp_path}/one.csv")
  assert len((tmp_path / "one.csv").read_text().splitlines()) == 2
  x, y = np.zeros((3, 8, 8, 3), np.uint8), np.array([0, 1, 1])
  np.savez(tmp_path / "xy.npz", x=x, y=y)
  np.save(tmp_path / "x.npy", x)
  assert cli.main(["evaluate", f"{root}/run", f"--data={tmp_path}/xy.npz"]) == 0
  predicted(root, f"--data={tmp_path}/x.npy", f"--to={tmp_path}/x.csv")
  assert [x.split(",")[0] for x in (tmp_path / "x.csv").read_text().splitlines()[1:]] == [*"012"]
  np.savez(tmp_path / "bad.npz", x=x, y=y + 1)
  (tmp_path / "pickled.npy").write_bytes(b"\x93NUMPY junk")
  (tmp_path / "notes.txt").write_text("notes")
  capsys.readouterr()
  for argv, says in table(f"""
    evaluate --data {root}/val/ant | has no targets; use subdirectories that are named
    evaluate --data {tmp_path}/bad.npz | label=2 is out of range [0, 1]
    evaluate --data {tmp_path}/pickled.npy | cannot be read
    evaluate --data {tmp_path}/none | is no such file; give a folder of images
    evaluate --data {tmp_path}/notes.txt | is of no known kind; give a folder of images
    evaluate --config.data=Digits | but the run has
    evaluate --config.batch_size=8 | does not apply to a trained model
    evaluate --data {tmp_path} --step 5 | no images
    predict --to x.txt | give a file .parquet, .csv or .npz
    predict --data {root}/val | --to: missing
    evaluate --step 5 | step=5: no checkpoint of this step; use one of 3, 6"""):
    name, *rest = argv.split()
    assert cli.main([name, f"{root}/run", *rest]) == 2, argv
    err = capsys.readouterr().err.splitlines()
    assert says in err[-1], (argv, err)


def test_classes_of_other_data_must_be_the_runs(folder, tmp_path, capsys):
  root, _ = folder
  for split in ("train", "val"):
    shutil.copytree(root / split, tmp_path / split)
    (tmp_path / split / "bee").rename(tmp_path / split / "wasp")
  assert cli.main(["evaluate", f"{root}/run", f"--config.data.path={tmp_path}"]) == 2
  line = capsys.readouterr().err
  assert "has other classes: class 1 is 'bee' in the run and 'wasp' now; use --data" in line
  # By name a folder of another order, or of some of the classes, is right.
  shutil.rmtree(tmp_path / "val" / "ant")
  (tmp_path / "val" / "wasp").rename(tmp_path / "val" / "bee")
  predicted(root, f"--data={tmp_path}/val", f"--to={tmp_path}/bee.npz")
  with np.load(tmp_path / "bee.npz") as arrays:
    assert arrays["target"].tolist() == [1, 1, 1, -1, *[1] * 5]


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
  path = tmp_path / "x.csv"
  path.write_text("old")
  with pytest.raises(KeyError), open_predictions(path) as write:
    write({"id": [0]})
    raise KeyError
  assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_numbers_are_columns_of_outputs(tmp_path):
  x = np.random.default_rng(0).standard_normal((40, 3)).astype("float32")
  arrays = data.Arrays(x=x, y=x[:, :2])
  trained(tmp_path / "run", data=arrays, loss=cfg.SquaredError(), batch_size=8, mesh=Mesh(data=8))
  found = jxs.load(tmp_path / "run").predict(x)
  assert found.probabilities is found.labels is None
  with config_error(match="the examples have no single class; use `labels`"):
    _ = found.classes
  np.save(tmp_path / "x.npy", x)
  predicted(tmp_path, f"--data={tmp_path}/x.npy", f"--to={tmp_path}/x.csv")
  rows = np.loadtxt(tmp_path / "x.csv", delimiter=",", skiprows=1)
  np.testing.assert_allclose(rows[:, 1:], found.outputs, rtol=1e-4, atol=1e-6)
  assert cli.main(["evaluate", f"{tmp_path}/run"]) == 2


def test_the_python_of_the_page_runs(runs, monkeypatch, capsys):
  page = (ROOT / "docs" / "howto" / "predict.md").read_text()
  (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
  monkeypatch.chdir(runs("data")[0].parent)
  exec(code.replace("runs/digits", "data"), {})
  assert capsys.readouterr().out.startswith("[")
