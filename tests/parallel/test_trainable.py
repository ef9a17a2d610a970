"""Training of a part of the parameters: parity with one device, and what frozen leaves lack."""

import functools
import re

import jax
import numpy as np
import pytest

from jaxscale.optim.tree_paths import path_name
from support.cases import all_slow_except
from support.parity_table import LAYOUTS, MICRO_BATCHES
from support.trees import worst_leaf
from support.tuned import ALL_ADAPTED, PARTS, on_one_device, tune

CASES = LAYOUTS | MICRO_BATCHES
QUICK = "data x fsdp x model", "zero-2 x stage, 1f1b"


@functools.cache
def tuned(name, part):
  return tune(CASES[name], part)


def momentum(run):
  """Return the velocities of SGD, a tree of the trained leaves."""
  return next(s.trace for s in jax.tree.leaves(run.last.opt_state, is_leaf=is_trace) if is_trace(s))


def is_trace(node):
  return hasattr(node, "trace")


def by_path(tree):
  return {path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", all_slow_except(CASES, *QUICK))
def test_a_part_trains_on_many_devices_as_on_one(name, part):
  found, wanted = tuned(name, part), on_one_device(part)
  np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-6)
  assert worst_leaf(found.last.params, wanted.last.params) <= 2e-6
  assert worst_leaf(momentum(found), momentum(wanted)) <= 2e-6


@pytest.mark.parametrize("part", PARTS)
def test_frozen_leaves_keep_their_bits_and_have_no_state(part):
  run = on_one_device(part)
  pattern = "_lora_" if part == ALL_ADAPTED else part
  before, after, moments = map(by_path, (run.first.params, run.last.params, momentum(run)))
  assert {path for path in before if re.search(pattern, path)} == set(moments)
  for path in before:
    assert np.array_equal(before[path], after[path]) == (path not in moments), path
