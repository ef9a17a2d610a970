"""Losses as functions of the parameters, from a config or Python, and their state."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale as jxs
from jaxscale import cli
from jaxscale import config as cfg
from jaxscale.config.loading import load_config
from jaxscale.exchange.local_updates import local_sgd
from jaxscale.experiment.build import experiment
from jaxscale.mesh import make_mesh
from jaxscale.training import CustomLoss, GatheredObjective, Objective, Queue
from support.configs import small_config
from support.errors import config_error
from support.paths import ROOT
from support.steps import on_mesh, training

ROWS = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")


def totals(loss, keys):
  return {"loss": loss, "examples": len(keys)}


def queued(params, state, batch, keys):
  loss = (batch["x"] @ params["w"]).sum()
  rows = batch["x"] if state["n"].dtype == jnp.int32 else None
  return loss, ({"q": Queue(rows), "n": state["n"] + 1}, totals(loss, keys))


def start(length):
  return lambda key: (
    {"w": jnp.ones((6, 1))},
    {"q": Queue(jnp.zeros((length, 6))), "n": jnp.int32(0)},
  )


@pytest.mark.parametrize("length", [8, 32, 48])
@pytest.mark.parametrize("num_devices, micros", [(1, 1), (4, 1), (4, 4)])
def test_a_queue_has_the_newest_rows_of_the_global_batches(length, num_devices, micros):
  mesh = make_mesh(devices=jax.devices()[:num_devices])
  options = {"num_microbatches": micros, "skip_bad_steps": True, "ema_decay": 0.5}
  state, step = training(queued, start(length), optax.sgd(0.1), mesh, **options)
  for sign in (1, -1):
    state, _ = step(state, on_mesh(mesh, {"x": sign * ROWS}))
  expected = np.concatenate([np.zeros((length, 6)), ROWS, -ROWS])[-length:]
  for model_state in (state.model_state, state.average[1]):
    np.testing.assert_array_equal(model_state["q"].rows, expected)
  assert state.model_state["n"] == 2


def test_a_queue_that_does_not_fit_is_refused():
  mesh = make_mesh(devices=jax.devices()[:4])

  def halved(params, state, batch, keys):
    loss, (state, sums) = queued(params, state, batch, keys)
    return loss, (state | {"q": Queue(state["q"].rows[::2])}, sums)

  for loss, local, line in (
    (halved, None, "Queue gets new rows (4, 6) of float32; return one for each row of the batch"),
    (queued, local_sgd(2), "gathers rows of all devices"),
  ):
    state, step = training(loss, start(8), optax.sgd(0.1), mesh, local=local)
    with config_error(line):
      step(state, on_mesh(mesh, {"x": ROWS}))


def cross_entropy(logits, batch):
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


MODEL = small_config(steps=3, epochs=None, model=cfg.MLP(hidden=(8,)))


def plain(params, state, batch, keys, scale=1.0):
  """Return the loss of a built-in MLP, by a forward pass of its own."""
  x = batch["image"].reshape(len(keys), -1).astype(jnp.float32) / 16
  for i in range(2):
    x = jax.nn.relu(x) if i else x
    x = x @ params[f"Dense_{i}"]["kernel"] + params[f"Dense_{i}"]["bias"]
  loss = scale * cross_entropy(x, batch).sum()
  return loss, (state, totals(loss, keys))


def test_fit_takes_a_loss_from_python(tmp_path, capsys):
  done = jxs.fit(MODEL, tmp_path / "a", loss_fn=plain)
  assert "PythonLoss: its loss_fn is not tested for results that depend" in capsys.readouterr().out
  assert done.summary["accuracy"] > 0  # of `config.loss`
  recorded = json.loads((tmp_path / "a" / "config.json").read_text())["config"]["loss"]
  assert recorded["class"] == "PythonLoss" and recorded["function"]["object"].endswith(":plain")
  assert recorded["replaces"]["class"] == "CrossEntropy"
  assert jxs.fit(MODEL, tmp_path / "a", loss_fn=plain).summary["loss"] == done.summary["loss"]
  assert jxs.load(tmp_path / "a").step == 3
  capsys.readouterr()
  assert cli.main(["evaluate", str(tmp_path / "a"), f"--to={tmp_path}/e.json"]) == 0
  out = capsys.readouterr().out
  assert out.startswith("note: a loss from Python is not stored, so CrossEntropy of the config")
  evaluation = json.loads((tmp_path / "e.json").read_text())["evaluation"]
  assert evaluation == done.summary["evaluation"]
  assert cli.main(["train", "--config", str(tmp_path / "a")]) == 2
  with config_error("in the workdir", "now"):
    jxs.fit(MODEL, tmp_path / "a", loss_fn=lambda *args: plain(*args, scale=2.0))
  with config_error("loss.class is 'PythonLoss' in the workdir and 'CrossEntropy' now"):
    jxs.fit(MODEL, tmp_path / "a")


def wrong(params, state, batch, keys):
  return batch["image"].nothing


def mean(params, state, batch, keys):
  loss = plain(params, state, batch, keys)[0] / len(keys)
  return loss, (state, totals(loss, keys))


LOCAL = cfg.LocalSGD(sync_every_steps=2)
OBJECTIVE = Objective(cross_entropy)
GATHERED = GatheredObjective(lambda o, b, everyone: cross_entropy(o - o.mean(0), b))
REFUSED = [
  (wrong, {}, "test_custom_loss.py:", "PythonLoss (loss_fn): AttributeError: "),
  (mean, {}, "loss_fn returns the loss", "sum over the rows"),
  (3, {}, "PythonLoss.build returned int; return a training.Objective"),
  (CustomLoss(plain, 3), {}, "PythonLoss.build returned CustomLoss; return"),
  (CustomLoss(plain, OBJECTIVE), {"sync": LOCAL}, "Config.sync", "PythonLoss, a CustomLoss"),
  (OBJECTIVE, {"model": cfg.ViT(patch=4)}, "Config.loss=PythonLoss does not work with ViT"),
]


@pytest.mark.parametrize("loss, fields, line", [(x, f, line) for x, f, *line in REFUSED])
def test_what_does_not_fit_is_refused_in_one_line(loss, fields, line, tmp_path):
  with config_error(*line):
    jxs.fit(small_config(**{"steps": 3, "epochs": None, **fields}), tmp_path, loss_fn=loss)


class OfBatch(cfg.Loss):
  """A loss with its context.

  Attributes:
    parts: what is built.
  """

  parts: object

  def build(self, info, context):
    assert context.axes == ("replica", "data") and context.num_devices == 4
    return self.parts


def test_a_loss_that_depends_on_the_devices_is_named():
  def notes(loss):
    settings = small_config(loss=OfBatch(parts=loss))
    return experiment(settings, devices=jax.devices()[:4]).notes

  (note,) = notes(GATHERED)
  assert note.startswith("OfBatch: its loss depends on the rows of each device")
  right = lambda o, b, everyone: cross_entropy(o - everyone.outputs.mean(0), b)  # noqa: E731

  def found(o, b, everyone):  # repeated rows would find the first copy
    return {"found": (o @ everyone.outputs.T).argmax(-1) == everyone.rows}

  assert not notes(GatheredObjective(right, found))
  wrong = lambda o, b, everyone: {"n": jnp.full(len(o), len(o))}  # noqa: E731
  (note,) = notes(GatheredObjective(right, wrong))
  assert note.startswith("OfBatch: its metric 'n' depends on the rows of each device")
  (note,) = notes(CustomLoss(plain, OBJECTIVE))
  assert note.startswith("OfBatch: its loss_fn is not tested")


REST = """
from jaxscale import models


class Pair(config.Model):
  def build(self, context):
    net = models.functions(models.MLPModule(10, (8,)), context.info.image_shape)

    def apply(*args):
      outputs, state = net.apply(*args)
      return (outputs, 2 * outputs), state

    return net._replace(apply=apply)


def get_config(name):
  loss = {"Focal": Focal, "InfoNCE": InfoNCE, "Teacher": Teacher}[name]
  model = Pair() if name == "InfoNCE" else config.MLP(hidden=(8,))
  optimizer = config.SGD(lr=0.01)
  return config.Config(
    model=model, data=config.Digits(), loss=loss(), optimizer=optimizer, batch_size=16, steps=9
  )
"""


@pytest.mark.parametrize("name", ["Focal", "InfoNCE", "Teacher"])
def test_the_losses_of_the_page_train(name, tmp_path):
  page = (ROOT / "docs" / "howto" / "own_loss.md").read_text()
  blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
  (tmp_path / "mine.py").write_text("\n".join([*blocks, REST]))
  settings = load_config(f"{tmp_path / 'mine.py'}:{name}")
  losses = []
  for num_devices in (1, 4):
    made = experiment(settings, devices=jax.devices()[:num_devices])
    rows = made.train_data.load(np.arange(16), np.zeros((16, made.train_data.num_draws)))
    _, metrics = made.train_step(made.init_state(), on_mesh(made.mesh, rows))
    losses.append(float(metrics["loss"]))
  assert losses[0] == pytest.approx(losses[1], rel=1e-6) and np.isfinite(losses[0])
