"""Parity in bfloat16: layouts on many devices against one device (support/parity_table.py)."""

import functools

import pytest

from support.parity_table import IN_HALF, LAYOUTS, STEPS, assert_same, one_device, runs
from support.trees import worst_leaf


@functools.cache
def in_half(name):
  """Each step from the state of one device, and one after another."""
  return runs(LAYOUTS[name], "bfloat16", one_device("bfloat16").states, None)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", IN_HALF)
@pytest.mark.parametrize("name", LAYOUTS)
def test_in_half_precision_steps_and_runs_are_those_of_one_device(name, optimizer):
  """From another state, different in the last bit, roundings fall otherwise."""
  (each, whole), wanted = in_half(name), one_device("bfloat16")
  assert_same(each, wanted, optimizer, 2e-3, 1e-2)
  for i in range(STEPS):
    loss = wanted.losses[i][optimizer]
    assert whole.losses[i][optimizer] == pytest.approx(loss, rel=2e-3)
    apart = worst_leaf(whole.params[i][optimizer], wanted.params[i][optimizer])
    assert apart <= 2e-3
