"""What is stored for the backward pass, and loops over layers, change no loss."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxscale import config as cfg
from jaxscale import models
from jaxscale.data.dataset import DatasetInfo
from jaxscale.experiment import build
from jaxscale.experiment import remat as choice
from jaxscale.mesh import make_mesh
from jaxscale.models.remat import INPUT, REMAT, functions_with_remat
from jaxscale.parallel import make_layout
from jaxscale.parallel.rules import Rule
from jaxscale.parallel.stored import POLICIES, layer_bytes, step_bytes
from support import parity_table
from support.cases import all_slow_except
from support.configs import small_config, tiny_language
from support.errors import config_error
from support.parity_table import OPTIMIZERS, Case, runs

FSDP, STAGES = {"data": 1, "fsdp": 8}, {"data": 2, "stage": 2}
CASES = {
  f"{remat}, {unroll}": Case({"data": 1}, how={"remat": remat, "unroll": unroll})
  for remat in REMAT
  for unroll in (1, 2, "all")
}
CASES |= {
  f"fsdp, {remat}, {unroll}": Case(FSDP, {"shard": "fsdp"}, how={"remat": remat, "unroll": unroll})
  for remat, unroll in (("none", "all"), ("dots_attention", "all"), ("full", "all"), ("dots", 3))
}
CASES["zero-2, none, all"] = Case(FSDP, {"shard": "zero2"}, how={"unroll": "all"})
CASES |= {
  f"{schedule}, {remat}, all": Case(STAGES, (), schedule, 4, how={"remat": remat, "unroll": "all"})
  for schedule, remat in (("gpipe", "dots_attention"), ("1f1b", "full"), ("1f1b", "none"))
}


@pytest.fixture
def twenty_steps(monkeypatch):
  monkeypatch.setattr(parity_table, "STEPS", 20)
  parity_table.batches.cache_clear()
  yield
  parity_table.batches.cache_clear()


@functools.cache
def plain():
  return runs(CASES["none, 1"], "float32", None)[0]


@pytest.mark.parametrize(
  "name", all_slow_except(CASES, "dots_attention, all", "fsdp, dots_attention, all")
)
def test_losses_of_20_steps(name, twenty_steps):
  found, wanted = runs(CASES[name], "float32", None)[0], plain()
  assert len(found.losses) == 20
  for optimizer in OPTIMIZERS:
    losses = ([step[optimizer] for step in run.losses] for run in (found, wanted))
    np.testing.assert_allclose(*losses, rtol=1e-6, err_msg=optimizer)
