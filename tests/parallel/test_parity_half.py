"""Parity in bfloat16: layouts on many devices against one device (support/parity_table.py)."""

import functools

import pytest

from support.parity_table import LAYOUTS, OPTIMIZERS, STEPS, Case, assert_same, runs
from support.trees import worst_leaf

# LARS has the trust ratio of LAMB, and Muon has AdamW for the embedding and the head.
SOME = {name: OPTIMIZERS[name] for name in ("sgd", "lars", "muon, clipped")}


@functools.cache
def one_device():
  return runs(Case({}), "bfloat16", None, optimizers=SOME)[0]


@functools.cache
def in_half(name):
  """Each step from the state of one device, and one after another."""
  return runs(LAYOUTS[name], "bfloat16", one_device().states, None, optimizers=SOME)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", SOME)
@pytest.mark.parametrize("name", LAYOUTS)
def test_in_half_precision_steps_and_runs_are_those_of_one_device(name, optimizer):
  """From another state, different in the last bit, roundings fall otherwise."""
  (each, whole), wanted = in_half(name), one_device()
  assert_same(each, wanted, optimizer, 2e-3, 1e-2)
  for i in range(STEPS):
    loss = wanted.losses[i][optimizer]
    assert whole.losses[i][optimizer] == pytest.approx(loss, rel=2e-3)
    apart = worst_leaf(whole.params[i][optimizer], wanted.params[i][optimizer])
    assert apart <= 2e-3
