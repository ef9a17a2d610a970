"""Parity: training on any number of devices equals training on one (support/parity_table.py)."""

import copy
import functools
from typing import get_args

import jax
import numpy as np
import pytest

from jaxscale import optim
from jaxscale.optim.settings import LarsVariant
from support.cases import all_slow_except
from support.parity_table import (
  APART,
  CASES,
  EXCHANGES,
  IS_STACKED,
  LATE,
  OPTIMIZERS,
  QUICK,
  Case,
  assert_same,
  one_device,
  runs,
)
from support.trees import worst_leaf


@functools.cache
def many(name):
  return runs((CASES | APART)[name], "float32", None)[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", all_slow_except(CASES, QUICK))
def test_many_devices_train_as_one(name, optimizer):
  found, wanted = many(name), one_device()
  assert_same(found, wanted, optimizer, 1e-6, 2e-6)
  if name in EXCHANGES:
    assert worst_leaf(found.params[-1][optimizer], wanted.params[-1][optimizer]) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_delayed_is_one_device_that_delays(optimizer):
  assert_same(many(LATE), many("one device, delayed"), optimizer, 1e-6, 2e-6)


LARS = get_args(LarsVariant)
# Smaller where rates are clipped: at 0.05 all of them are, and layers have no ratio.
TRUST = {variant: 0.001 if variant.endswith("clip") else 0.05 for variant in LARS}
OF_LARS = functools.partial(optim.lars, 0.05, stacked=IS_STACKED)
OF_TORCH = dict(variant="torch", adjust="original", adam_rate_factor=0.5)
VARIANTS = {v: OF_LARS(variant=v, trust_coefficient=TRUST[v]) for v in LARS} | {
  "lamb as released": optim.lamb(3e-3, bias_correction=False, weight_decay=1.5, phi_max=3.0),
  "lamb of timm": optim.lamb(3e-3, variant="timm", stacked=IS_STACKED),
  "muon of torch": optim.muon(1e-3, **OF_TORCH, stacked=IS_STACKED),
}


@functools.cache
def variants(name):
  return runs(CASES.get(name, Case({})), "float32", None, optimizers=VARIANTS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["data x fsdp", "replica x data"])
def test_variants_of_layer_wise_optimizers_split_as_one(name, variant):
  found, wanted = variants(name), variants("one device")
  assert_same(found, wanted, variant, 1e-6, 2e-6)
  assert worst_leaf(found.params[-1][variant], wanted.params[-1][variant]) <= 1e-6
  ratios = found.ratios[variant]
  assert ratios.keys() == wanted.ratios[variant].keys()
  for path, ratio in wanted.ratios[variant].items():
    np.testing.assert_allclose(ratios[path], ratio, rtol=1e-5)
  if variant in LARS:
    assert ratios["layers/up"].shape == (4,) and np.all(ratios["layers/up"] != 1)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_finest_rounding_is_found(optimizer):
  with pytest.raises(AssertionError):
    assert_same(many("rounded"), one_device(), optimizer, 1e-6, 2e-6)


def test_a_step_that_forgets_is_found():
  """The bound is worth something: what is wrong by little fails it."""
  found, wanted = many(QUICK), one_device()
  grads = [jax.tree.map(lambda g: g * np.float32(1 + 1e-5), g) for g in found.grads]
  with pytest.raises(AssertionError):
    assert_same(found._replace(grads=grads), wanted, "sgd", 1e-6, 2e-6)
  params = copy.deepcopy(found.params)  # of one leaf, 1 to 2 % of the tree
  params[-1]["sgd"]["layers"]["down_bias"] *= np.float32(1 + 1e-5)
  with pytest.raises(AssertionError):
    assert_same(found._replace(params=params), wanted, "sgd", 1e-6, 2e-6)
