"""Fragments of the parameters, which workers exchange at different steps.

Streaming DiLoCo (arXiv:2501.18512) exchanges the parameters in parts, each with a state of its
own, so that fewer bytes are sent at a time.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.errors import invalid


def split(tree: Any, count: int) -> list[list[int]]:
  """Return the numbers of the leaves in each fragment, balanced by size.

  The largest leaf that is left goes to the smallest fragment. Leaves are not cut: a stack of
  layers has all layers of a parameter in one leaf.

  Args:
    tree: a tree of arrays.
    count: the number of fragments.

  Raises:
    ConfigError: there are more fragments than leaves.

  Example:
    >>> import numpy as np
    >>> split([np.zeros(3), np.zeros(9), np.zeros(5)], 2)
    [[1], [0, 2]]
  """
  sizes = [math.prod(x.shape) for x in jax.tree.leaves(tree)]
  if count > len(sizes):
    problem = f"is more than the {len(sizes)} trained parameters"
    raise invalid("LocalUpdate.fragments", count, problem, f"use {len(sizes)} or less")
  parts: list[list[int]] = [[] for _ in range(count)]
  for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
    min(parts, key=lambda part: sum(sizes[j] for j in part)).append(i)
  return [sorted(part) for part in parts]


def pick(tree: Any, number: int, count: int) -> Any:
  """Return a fragment of a tree: a list of its leaves, or the tree itself if it is the only one.

  Args:
    tree: a tree of arrays.
    number: the number of the fragment.
    count: the number of fragments.
  """
  if count == 1:
    return tree
  leaves = jax.tree.leaves(tree)
  return [leaves[i] for i in split(tree, count)[number]]


def put(tree: Any, number: int, count: int, fragment: Any) -> Any:
  """Return the tree with the leaves of a fragment replaced; the inverse of `pick`.

  Example:
    >>> import numpy as np
    >>> tree = {"a": np.zeros(3), "b": np.zeros(9)}
    >>> put(tree, 0, 2, [1.0])["b"]
    1.0
  """
  if count == 1:
    return fragment
  leaves, structure = jax.tree.flatten(tree)
  for i, leaf in zip(split(tree, count)[number], fragment, strict=True):
    leaves[i] = leaf
  return structure.unflatten(leaves)


def states(init: Callable[[Any], Any], tree: Any, count: int) -> Any:
  """Return the state of each fragment, a tuple, or the state of the tree if it is the only one."""
  found = tuple(init(pick(tree, number, count)) for number in range(count))
  return found[0] if count == 1 else found
