"""A run's own config.json: trained again, and what a foreign or damaged one may not do."""

import json
import re
import shutil
import sys

import jax
import numpy as np
import pytest

import jaxscale as jxs
from jaxscale import cli
from jaxscale.cli.train import default_workdir
from jaxscale.config.loading import load_config
from jaxscale.metrics import read_json
from support.commands import run_python
from support.configs import small_config
from support.errors import config_error
from support.tables import columns

OWN = """
import flax.linen as nn
import jax.numpy as jnp
import optax
from helper_of_again import double
from steps_of_again import STEPS
from jaxscale import config, data, optim
from jaxscale.config import Checkpoint, Config, Log


class Net(config.Model):
  width: int = 8

  def build(self, context):
    outputs = context.info.num_classes

    class Layers(nn.Module):
      @nn.compact
      def __call__(module, x):
        x = double(x.reshape(len(x), -1) / 16)
        return nn.Dense(outputs)(nn.relu(nn.Dense(self.width)(x)))

    return Layers()


def get_config(width="8"):
  return Config(
    model=Net(width=int(width)), data=data.Digits(), optimizer=optim.SGD(lr=0.1), batch_size=64,
    steps=STEPS, checkpoint=Checkpoint(every_epochs=None, every_steps=4),
    log=Log(plot=False, tensorboard=False),
  )
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
  """Return a folder with a config of own classes, and its run with overrides."""
  folder = tmp_path_factory.mktemp("again")
  (folder / "own.py").write_text(OWN)
  (folder / "helper_of_again.py").write_text("def double(x):\n  return 2 * x\n")
  (folder / "steps_of_again.py").write_text("import four_of_again\nSTEPS = four_of_again.FOUR\n")
  (folder / "four_of_again.py").write_text("FOUR = 4\n")
  overrides = {"seed": "3", "mesh.data": "8", "optimizer.momentum": "0.5", "model.width": "12"}
  config = load_config(f"{folder}/own.py:16", overrides | {"log.every_steps": "2"})
  first = jxs.fit(config, folder / "run")
  return folder, config, first


@pytest.fixture
def run(project, tmp_path, monkeypatch):
  """Return a copy of the run, without the files that it was trained from."""
  monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(project[0])])
  for name in ("helper_of_again", "steps_of_again", "four_of_again"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  shutil.copytree(project[0] / "run", tmp_path / "run")
  return tmp_path / "run"


def leaves(state):
  return [np.asarray(x) for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("path", ["run", "run/config.json"])
def test_a_run_trains_again_bit_for_bit(path, run, project, tmp_path):
  _, config, first = project
  again = load_config(str(tmp_path / path))
  assert again.model.width == 12 and again.log.every_steps == 2
  assert {f: getattr(again, f) for f in ("seed", "mesh", "optimizer", "data", "log")} == {
    f: getattr(config, f) for f in ("seed", "mesh", "optimizer", "data", "log")
  }
  second = jxs.fit(tmp_path / path, tmp_path / "again")
  for a, b in zip(leaves(first.state), leaves(second.state), strict=True):
    np.testing.assert_array_equal(a, b)
  old, new = (read_json(r / "config.json") for r in (run, tmp_path / "again"))
  assert "steps_of_again:STEPS" not in new["identity"]["code"]
  assert old["config"] == new["config"] and old["identity"] == new["identity"]
  assert {p.name for p in (tmp_path / "again" / "code").iterdir()} == {
    "own.py", "helper_of_again.py", "steps_of_again.py", "four_of_again.py"
  }  # fmt: skip
  # In its own workdir it resumes, longer for instance.
  more = jxs.fit(load_config(str(tmp_path / path), {"steps": "5"}), run)
  assert more.summary["step"] == 5


def test_the_workdir_of_a_run_again_is_another(run):
  assert default_workdir(str(run)) == default_workdir(f"{run}/config.json") == f"{run}-again"


def test_a_run_is_loaded_from_its_own_code(run, project):
  _, _, first = project
  loaded = jxs.load(run)
  images = jxs.data.digits("test").load(np.arange(9), None)["image"]
  x = (images.reshape(9, -1) - 4.89) / 6.01 / 8
  layers = sorted(first.state.params.values(), key=lambda layer: -len(layer["kernel"]))
  one, two = ({k: np.float64(v) for k, v in layer.items()} for layer in layers)
  expected = np.maximum(x @ one["kernel"] + one["bias"], 0) @ two["kernel"] + two["bias"]
  np.testing.assert_allclose(loaded.predict(images).outputs, expected, rtol=1e-4, atol=1e-5)
  assert loaded.model and loaded.config.model.width == 12 and loaded.step == 4


def edited(**changes):
  """Change config.json at dotted names."""

  def edit(run):
    path = run / "config.json"
    described = json.loads(path.read_text())
    for name, value in changes.items():
      node, *_ = [described]
      *parents, last = name.split("__")
      for parent in parents:
        node = node[parent]
      node[last] = value
    path.write_text(json.dumps(described))

  return edit


def world_writable(run):
  (run / "code" / "own.py").chmod(0o666)


def damaged(run):
  manifest = run / "checkpoints" / "4" / "manifest.json"
  manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 5'))


HOSTILE = [
  (world_writable, r"own:Net, code that is not executed, since other users can .*code/own.py"),
  (edited(config__model={"class": "os:system"}), "system is not a settings class"),
  (edited(config__model={"class": "../own:Net"}), "is not the name of a module"),
  (edited(config__model={"class": "own:Other"}), "cannot be loaded from .*or use load"),
  (edited(config__loss={"class": "Nothing"}), "Nothing: no such settings class"),
  (edited(data={"name": "x", "num_classes": 10}), "describes the data in another form"),
  (edited(data__num_classes="ten"), "num_classes"),
  (edited(format=1), "was written by jaxscale"),
  (damaged, "all checkpoints are damaged"),
]


@pytest.mark.parametrize("change, says", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_foreign_run_may_not_do(change, says, run, capsys):
  change(run)
  with config_error(match=says):
    jxs.load(run)
  assert cli.main(["evaluate", str(run)]) == 2
  assert cli.main(["predict", str(run), "--to", str(run / "x.csv")]) == 2
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 2 and all(re.search(says.replace(".*or use load", ""), x) for x in lines)
  assert not (run / "x.csv").exists()


def test_the_description_of_the_data_must_fit_the_parameters(run):
  edited(data__image_shape=[9, 8, 1])(run)
  with config_error(match="params/.* is .* in the checkpoint and"):
    jxs.load(run)


def test_code_of_a_foreign_run_is_not_trained(run, tmp_path):
  world_writable(run)
  with config_error(match="other users can write to"):
    jxs.fit(run, tmp_path / "again")
  assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
  "argv, says",
  columns(str, str)("""
    evaluate {run} {run} | give one RUN
    evaluate | RUN: missing; try runs/digits
    evaluate nothing | nothing: no such run, there is none in runs
    train --config {run}/summary.json | not a Python file
    train --config {run}/config.json --config.epoch=1 | did you mean 'epochs'?
  """.strip()),
)  # fmt: skip
def test_mistakes_are_one_line(argv, says, run, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # Its folder runs/ is not that of the checkout.
  assert cli.main(argv.format(run=run).split()) == 2
  assert says in capsys.readouterr().err


NOTEBOOK = """
import flax.linen as nn
import numpy as np
import jaxscale as jxs
from jaxscale import config

class Settings(config.Model):
  def build(self, context):
    return nn.Dense(10)

x = np.ones((8, 3), "float32")
arrays = jxs.data.Arrays(x=x, y=np.arange(8) % 2, eval_share=0.5)
for name, model in ("settings", Settings()), ("module", nn.Dense(2)):
  options = dict(optimizer=config.SGD(lr=0.1), batch_size=4, steps=1, log=config.Log(plot=False))
  jxs.fit(config.Config(model=model, data=arrays, **options), name)
"""


def test_a_run_whose_classes_have_no_file_says_what_to_do(tmp_path, capsys):
  done = run_python("-c", NOTEBOOK, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  for name, what in (("settings", "__main__:Settings"), ("module", "Dense")):
    assert cli.main(["train", "--config", str(tmp_path / name)]) == 2
    assert f"{what}: an object from a notebook or script" in (line := capsys.readouterr().err)
    assert line.endswith("build the config there, or in a config file\n")
    with config_error(match=r"or use load\(run, model=...\)$"):
      jxs.load(tmp_path / name)


def test_parts_that_config_json_cannot_store_are_not_needed(tmp_path):
  import optax

  x = np.random.default_rng(0).standard_normal((40, 3)).astype("float32")
  arrays = jxs.data.Arrays(x=x, y=(x[:, 0] > 0).astype("int32"))
  fields = {"data": arrays, "optimizer": jxs.optim.Optax(make=optax.adafactor, lr=0.01)}
  config = small_config(**fields, steps=2, epochs=None, schedule=jxs.config.Cosine())
  result = jxs.fit(config, tmp_path / "run")
  loaded = jxs.load(tmp_path / "run")
  right = (loaded.predict(x[36:]).labels == (x[36:, 0] > 0)).sum()
  assert right == round(4 * result.summary["accuracy"])
  with config_error(match="the run's data cannot be built again .*; give other data by --data"):
    loaded.config.data.build()
  with config_error(match=r"its config.json has float32\[40, 3\]: an object from a notebook or "):
    load_config(str(tmp_path / "run"))


class TwoInputs(jxs.config.Model):
  """Model of two inputs that returns a tree."""

  def build(self, context):
    def init(key):
      return {"w": jax.random.normal(key, (3, 2)), "v": jax.random.normal(key, (5, 2))}, {}

    def apply(params, state, inputs, train, keys):
      sides = inputs["left"] @ params["w"], inputs["right"] @ params["v"]
      return {"sum": sides[0] + sides[1], "sides": sides}, state

    return jxs.models.ModelFns(init, apply)


class SumError(jxs.config.Loss):
  def build(self, info):
    return jxs.Objective(lambda outputs, batch: ((outputs["sum"] - batch["label"]) ** 2).sum(-1))


def test_several_inputs_and_a_tree_of_outputs(tmp_path):
  rng = np.random.default_rng(0)
  left, right, label = (rng.standard_normal((40, n)).astype("float32") for n in (3, 5, 2))
  arrays = jxs.data.Arrays(x={"left": left, "right": right}, y=label)
  parts = dict(
    data=arrays, model=TwoInputs(), loss=SumError(), batch_size=8, mesh=jxs.config.Mesh(data=8)
  )
  config = small_config(steps=2, epochs=None, schedule=jxs.config.Cosine(), **parts)
  jxs.fit(config, tmp_path / "run")
  loaded = jxs.load(tmp_path / "run", model=TwoInputs())
  found = loaded.predict({"left": left, "right": right}).outputs
  w, v = (np.float64(loaded.params[name]) for name in "wv")
  expected = {"sum": left @ w + right @ v, "sides": (left @ w, right @ v)}
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
  with config_error(match=r"inputs=\['left'\] lack 'right'; give it as well"):
    loaded.predict({"left": left})
  np.savez(tmp_path / "xy.npz", left=left, right=right)
  argv = [f"{tmp_path}/run", f"--data={tmp_path}/xy.npz", f"--to={tmp_path}/out.npz"]
  assert cli.main(["predict", *argv]) == 0
  with np.load(tmp_path / "out.npz") as written:
    np.testing.assert_allclose(written["outputs/sides/1"], found["sides"][1], atol=1e-6)
