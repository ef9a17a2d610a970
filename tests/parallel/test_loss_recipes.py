"""Recipes with losses of their own: the same on any number of devices, resumed bit for bit."""

import jax
import numpy as np
import pytest

import jaxscale as jxs
from jaxscale import data
from jaxscale.config.loading import load_config
from jaxscale.experiment.build import experiment
from jaxscale.run.callbacks import Callback
from jaxscale.run.export import export
from jaxscale.weights.safetensors import read_index
from support.cases import all_slow_except
from support.configs import settings
from support.leaves import assert_close
from support.steps import on_mesh
from support.trees import assert_same_bits

NAMES = "sam gan clip clip.py:siglip simclr moco distill dqn".split()
FSDP = "mesh.data=1 mesh.fsdp=4 layout.shard=fsdp"


@pytest.fixture(autouse=True)
def teacher(monkeypatch):
  """Give random parameters as a teacher's, in place of a file's."""
  monkeypatch.setattr(jxs, "import_safetensors", lambda path, *state: (*state, ""))


def recipe(name, more=""):
  path = name if ".py" in name else f"{name}.py"
  usual = settings("steps=4 epochs=None schedule.warmup_epochs=0 batch_size=32 log.plot=False")
  if name != "gan":  # Adam divides by gradients' sizes, so that roundings of small ones count
    usual |= settings("optimizer=SGD optimizer.lr=0.02")
  return load_config(f"configs/{path}", usual | settings(more))


def trained(name, num_devices, more=""):
  """Return the notes; metrics, parameters and model state after four steps, and totals."""
  made = experiment(recipe(name, more), devices=jax.devices()[:num_devices])
  state, step = made.init_state(), made.compile_train_step()
  batches = data.train_batches(made.train_data, 32, position=0, seed=0)
  for _ in range(4):
    state, metrics = step(state, on_mesh(made.mesh, next(batches)))
  rows = made.eval_data.load(np.arange(48), None) | {"mask": np.arange(48) < 45}
  totals = made.eval_step(*state.evaluated(), on_mesh(made.mesh, rows))
  assert (np.asarray(metrics.pop("nan_codes")) == -1).all()
  return made.notes, jax.device_get((metrics, state.params, state.model_state, totals))


@pytest.mark.parametrize("name", all_slow_except(NAMES, "clip", "dqn"))
def test_a_recipe_is_the_same_on_any_number_of_devices(name):
  notes, one = trained(name, 1)
  assert all("is not tested for results" in note for note in notes)
  layouts = ["", FSDP, "accumulate_steps=2"]
  for layout in layouts[:2] if name == "sam" else layouts:  # a step of SAM per micro-batch
    assert_close(trained(name, 4, layout)[1], one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", all_slow_except(NAMES, "moco"))
def test_a_recipe_resumes_bit_for_bit(name, tmp_path):
  often = "checkpoint.every_steps=1 checkpoint.every_epochs=None log.tensorboard=False"
  config = recipe(name, often)

  def fail(step, state, metrics):
    raise RuntimeError("killed")

  whole = jxs.fit(config, tmp_path / "whole")
  with pytest.raises(RuntimeError, match="killed"):
    jxs.fit(config, tmp_path / "cut", callbacks=[Callback(every=3, on_step=fail)])
  after = jxs.fit(config, tmp_path / "cut")
  assert_same_bits(jax.device_get(after.state), jax.device_get(whole.state))
  assert after.summary["loss"] == whole.summary["loss"]
  if name != "moco":
    return
  export(tmp_path / "cut", tmp_path / "out.safetensors")
  assert all(path.startswith("params/") for path in read_index(tmp_path / "out.safetensors"))
