"""docs/howto/own_model.md: each block is a config file that trains."""

import jax
import numpy as np
import pytest

from jaxscale import data
from jaxscale.config.loading import load_config
from jaxscale.experiment.build import experiment
from support.extending import blocks_of
from support.steps import on_mesh

BLOCKS = blocks_of("docs/howto/own_model.md")


def test_every_library_has_a_block():
  assert list(BLOCKS) == ["Flax NNX", "Equinox", "Haiku", "Flax Linen", "Functions"]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_trains_alike_on_one_and_on_four_devices(name, tmp_path):
  path = tmp_path / f"{name.replace(' ', '_').lower()}_model.py"
  path.write_text(BLOCKS[name])
  losses = []
  with jax.numpy_dtype_promotion("standard"):
    for num_devices in (1, 4):
      made = experiment(load_config(str(path), {}), devices=jax.devices()[:num_devices])
      assert not made.notes
      state, step = made.init_state(), made.compile_train_step()
      batches = data.train_batches(made.train_data, 128, position=0, seed=0)
      for _ in range(10):
        state, metrics = step(state, on_mesh(made.mesh, next(batches)))
      losses.append(float(metrics["loss"]))
  assert losses[0] < 2.2  # a guess has 2.3 or more
  np.testing.assert_allclose(*losses, rtol=1e-5)
