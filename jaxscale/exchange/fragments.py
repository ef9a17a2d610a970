"""Fragments of the parameters, which workers exchange at different steps.

Streaming DiLoCo (arXiv:2501.18512) exchanges the parameters in parts, each with a state of its
own, so that fewer bytes are sent at a time.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from flax.traverse_util import unflatten_dict

from jaxscale.errors import invalid
from jaxscale.optim.tree_paths import path_name


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
  """Return a fragment of a tree: nested dicts of its leaves at the same paths.

  If the fragment is the only one, it is the tree itself.

  Args:
    tree: a tree of arrays.
    number: the number of the fragment.
    count: the number of fragments.

  Example:
    >>> import numpy as np
    >>> pick({"a": {"w": np.zeros(3)}, "b": {"w": np.ones(9)}}, 1, 2)
    {'a': {'w': array([0., 0., 0.])}}
  """
  if count == 1:
    return tree
  leaves = [(path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]
  return unflatten_dict(dict(leaves[i] for i in split(tree, count)[number]), sep="/")


def put(tree: Any, number: int, count: int, fragment: Any) -> Any:
  """Return the tree with the leaves of a fragment replaced; the inverse of `pick`.

  Example:
    >>> import numpy as np
    >>> tree = {"a": np.zeros(3), "b": np.zeros(9)}
    >>> put(tree, 0, 2, {"b": 1.0})["b"]
    1.0
  """
  if count == 1:
    return fragment
  new = {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(fragment)}
  return jax.tree.map_with_path(lambda path, leaf: new.get(path_name(path), leaf), tree)


def states(init: Callable[[Any], Any], tree: Any, count: int) -> Any:
  """Return the state of each fragment, a tuple, or the state of the tree if it is the only one."""
  found = tuple(init(pick(tree, number, count)) for number in range(count))
  return found[0] if count == 1 else found
