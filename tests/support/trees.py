"""Comparisons of trees of arrays."""

import jax
import numpy as np


def assert_same_bits(tree, expected):
  """Assert equal structure, and that every leaf is equal bit for bit."""
  assert jax.tree.structure(tree) == jax.tree.structure(expected)
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  for (path, x), y in zip(leaves, jax.tree.leaves(expected), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def assert_close(tree, expected, tolerance, floor=1e-3):
  """Assert that each leaf is within a tolerance of its norm, or of a floor."""
  for a, b in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), floor)


def relative_distance(tree, expected):
  """Return the norm of the difference of two trees, relative to the second's if it is not 0."""
  leaves = map(jax.tree.leaves, (tree, expected))
  a, b = (np.concatenate([*map(np.ravel, some)]).astype(float) for some in leaves)
  return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)


def worst_leaf(tree, expected, floor=0.01):
  """Return the largest distance of two leaves, relative to the second's norm and a floor.

  The floor is a share of the norm of the whole tree: leaves far smaller than that are
  compared with it, as their last bits come from sums of larger ones.
  """
  pairs = [
    (np.asarray(a, np.float64), np.asarray(b, np.float64))
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
  ]
  least = floor * np.sqrt(sum(np.sum(b * b) for _, b in pairs))
  return max(np.linalg.norm(a - b) / (np.linalg.norm(b) + least or 1.0) for a, b in pairs)


def largest_distance(tree, expected):
  """Return the largest relative distance of two leaves; NaN if any is NaN."""

  def of(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)

  return np.max(jax.tree.leaves(jax.tree.map(of, tree, expected)))
