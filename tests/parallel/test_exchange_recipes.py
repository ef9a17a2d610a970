"""Exchanges of config files: layouts, micro-batches, records and resumes as for built-in ones."""

import json

import jax
import numpy as np
import pytest

import jaxscale as jxs
from jaxscale import data
from jaxscale.config.loading import load_config
from jaxscale.experiment.build import experiment
from jaxscale.planning.describe import describe
from jaxscale.run.callbacks import Callback
from support.cases import all_slow_except
from support.configs import settings
from support.leaves import assert_close
from support.steps import on_mesh
from support.trees import assert_same_bits

NAMES = ["top_k", "power_sgd"]
SHORT = settings("""
  steps=4 epochs=None batch_size=32 model=MLP model.hidden=(32,) exchange.plain_epochs=0
  schedule.warmup_epochs=0 log.plot=False log.tensorboard=False
""")


def recipe(name, more=""):
  return load_config(f"configs/exchange_{name}.py", SHORT | settings(more))


def trained(name, more):
  made = experiment(recipe(name, more))
  state, step = made.init_state(), made.compile_train_step()
  batches = data.train_batches(made.train_data, 32, position=0, seed=0)
  for _ in range(4):
    state, metrics = step(state, on_mesh(made.mesh, next(batches)))
  assert np.isfinite(metrics["loss"])
  residual = state.exchange_state["residual"]
  assert any(np.any(x) for x in jax.tree.leaves(jax.device_get(residual)))
  return jax.device_get((metrics["loss"], state.params))


@pytest.mark.parametrize("name", all_slow_except(NAMES, "power_sgd"))
def test_micro_batches_and_zero_change_no_result(name):
  """Neither changes the gradients that a device sends."""
  expected = trained(name, "mesh.data=8")
  for more in ("mesh.data=8 accumulate_steps=2", "mesh.data=2 mesh.fsdp=4 layout.shard=zero1"):
    assert_close(trained(name, more), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", all_slow_except(NAMES, "power_sgd"))
def test_a_run_is_recorded_and_resumes_bit_for_bit(name, tmp_path):
  def fail(step, state, metrics):
    raise RuntimeError("killed")

  config = recipe(name, "checkpoint.every_steps=1 checkpoint.every_epochs=None")
  whole = jxs.fit(config, tmp_path / "whole")
  with pytest.raises(RuntimeError, match="killed"):
    jxs.fit(config, tmp_path / "cut", callbacks=[Callback(every=3, on_step=fail)])
  after = jxs.fit(config, tmp_path / "cut")
  assert_same_bits(jax.device_get(after.state), jax.device_get(whole.state))
  written = json.loads((tmp_path / "cut" / "config.json").read_text())["config"]["exchange"]
  assert written["class"] == f"exchange_{name}:{type(config.exchange).__name__}"
  assert "exchange state " in describe(experiment(load_config(str(tmp_path / "cut"))))
