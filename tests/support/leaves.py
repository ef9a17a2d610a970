"""Assertions about every leaf of a tree."""

import jax
import numpy as np


def assert_close(tree, expected, **tolerances):
  """Assert that every leaf is close to the other tree's, as in `assert_allclose`."""
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, **tolerances)


def assert_near(tree, expected, bound, floor):
  """Assert that each leaf's distance is within a bound, relative to its norm or the floor."""
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
    assert np.linalg.norm(x - y) <= bound * max(np.linalg.norm(y), floor)


def assert_like(tree, abstract):
  """Assert that every leaf has the shape, dtype and sharding of an abstract tree."""
  for x, a in zip(jax.tree.leaves(tree), jax.tree.leaves(abstract), strict=True):
    assert (x.shape, x.dtype, x.sharding) == (a.shape, a.dtype, a.sharding)
