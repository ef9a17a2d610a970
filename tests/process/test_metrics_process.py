"""Metrics of two processes are those of one, and scikit-learn's."""

import json
import sys

import numpy as np
import pytest
from sklearn.metrics import f1_score, roc_auc_score

from support.processes import run_group

CONFIG = """
import jax.numpy as jnp
import numpy as np

from jaxscale import config, data, models


class Scores(config.Data):
  def build(self):
    arrays = dict(np.load({path!r}))
    return (data.from_named("scores", arrays),) * 2


class Given(config.Model):
  def build(self, context):
    def init(key):
      return {{"w": jnp.zeros(5)}}, {{}}

    def apply(params, model_state, inputs, train, keys):
      return inputs + 0 * params["w"], model_state

    return models.ModelFns(init, apply)


def get_config():
  return config.Config(
    model=Given(),
    data=Scores(),
    optimizer=config.SGD(lr=0.1),
    batch_size=24,
    steps=2,
    metrics=(config.F1(), config.AUROC(), config.ConfusionMatrix()),
    evaluation=config.Evaluation(batch_size=30),
    log=config.Log(tensorboard=False, plot=False),
  )
"""


@pytest.mark.slow
def test_two_processes_measure_what_scikit_learn_does(tmp_path):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(1003, 5)).astype("float32")
  y = (x + rng.gumbel(size=x.shape)).argmax(1).astype("int32")
  weight = (rng.integers(0, 9, 1003) / 8).astype("float32")
  np.savez(tmp_path / "x.npz", image=x, label=y, weight=weight)
  file, workdir = tmp_path / "scores.py", tmp_path / "run"
  file.write_text(CONFIG.format(path=str(tmp_path / "x.npz")))
  command = [sys.executable, "-m", "jaxscale.train", "--config", file, "--workdir", workdir]
  for _, err, code in run_group(command, num_devices=3):
    assert code == 0, err
  summary = json.loads((workdir / "summary.json").read_text())
  wanted = f1_score(y, x.argmax(1), average="macro", sample_weight=weight)
  assert summary["f1"] == pytest.approx(wanted, rel=1e-14)
  p = np.exp(x.astype(float)) / np.exp(x.astype(float)).sum(1, keepdims=True)
  areas = [roc_auc_score(y == i, p[:, i], sample_weight=weight) for i in range(5)]
  assert summary["auroc"] == pytest.approx(np.mean(areas), rel=1e-14)
  assert np.sum(summary["confusion_matrix"]) == weight.sum()
