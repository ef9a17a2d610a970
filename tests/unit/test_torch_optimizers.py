"""Optimizers in the forms of PyTorch and timm: weights that those gave."""

import json

import jax
import numpy as np
import pytest

from jaxscale import optim
from support.optimizers import optimize64
from support.paths import DATA
from support.torch_optimizers import CASES, layers

RECORDED = json.loads((DATA / "golden" / "torch_optimizers.json").read_text())


def test_every_case_is_recorded():
  assert RECORDED.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name):
  tx, (params, grads) = CASES[name].ours, layers()
  got = optimize64(tx._replace(update=jax.jit(tx.update)), params, grads)
  for layer, w in got.items():
    wanted = np.reshape(RECORDED[name][layer], w.shape)
    np.testing.assert_allclose(w, wanted, rtol=1e-9, atol=1e-12, err_msg=layer)


def test_without_decay_timm_has_no_ratios():
  params, _ = layers()
  for make in (optim.lars, optim.lamb):
    tx = make(0.1, variant="timm", weight_decay=0.0)
    with jax.enable_x64(True):
      assert optim.trust_ratios(tx.init(params)) == {}
