"""Functions of whole matrices, which a layout deals out over devices.

Muon, SOAP and other matrix optimizers apply a function to each whole matrix of a model. Under a
layout a device holds only parts of the matrices, and all devices together must compute the
function once per matrix. An optimizer therefore does not call its function itself, but gives it
to `map_matrices`:

    def update(updates, state, params=None):
      return map_matrices(orthogonalize, updates), state       # function [k, in, out] -> same

Inside the train step `map_matrices` sends every matrix to one device, its *owner*, by one
all-to-all, calls the function there with a stack of k matrices of one shape, and sends the results
back by another all-to-all (`parallel.deal`). Elsewhere it calls the function with the matrices of
one leaf after another. In both cases the function runs on one device and has no collectives. It may
use traced values from outside, such as a learning rate, if they are the same on all devices. On
a CPU it should decompose one matrix at a time (`jax.lax.map`): batches of LAPACK's that begin at
once may wait for each other forever (`optim.eigenbasis`).

State of a matrix that stays with its owner, such as the preconditioners of SOAP, is created by
`init_matrices` and given to `map_matrices`:

    def init(params):
      return init_matrices(lambda shape, dtype: {"left": jnp.eye(shape[0], dtype=dtype)}, params)

    def update(updates, state, params=None):
      return map_matrices(function, updates, state=state)      # also (k, ...) state -> same

It is a `MatrixState`: for every shape of matrices, arrays [rows, ...] with one row per matrix.
Under a layout the first dim is sharded over all devices, each device has the same number of rows,
and rows without a matrix are 0. `MatrixState.rows` tells which matrix a row belongs to, which
depends on the layout; a checkpoint records it, so that another layout restores each matrix's row.
On several devices the state needs a `parallel.Layout`, which a run has if `has_matrix_state =
True` is set in the class of its optimizer.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.metrics.text import grouped
from jaxscale.optim.layers import flags_of
from jaxscale.optim.masks import Mask
from jaxscale.optim.tree_paths import path_name

Shape = tuple[int, int]  # of a matrix: inputs, outputs
Cost = Callable[[int, int], float]  # (inputs, outputs) -> FLOPs of the function for one matrix


class Leaf(NamedTuple):
  """One parameter, which has one matrix or a stack of them.

  Attributes:
    name: path of the parameter, with "/" between names.
    shape: shape of the whole array; the last dim of a matrix is the output, and all other dims
      of a matrix are the input.
    dtype: dtype of the array.
    stacked: whether the first dim counts matrices.
  """

  name: str
  shape: tuple[int, ...]
  dtype: Any
  stacked: bool

  @property
  def count(self) -> int:
    """Return the number of matrices."""
    return self.shape[0] if self.stacked else 1

  @property
  def matrix(self) -> Shape:
    """Return the shape of a matrix."""
    return math.prod(self.shape[int(self.stacked) : -1]), self.shape[-1]

  @property
  def names(self) -> list[str]:
    """Return a name for each matrix: of a stack, "path/0", "path/1", ..."""
    return [f"{self.name}/{i}" for i in range(self.count)] if self.stacked else [self.name]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MatrixState:
  """State of the matrices, by shape.

  Attributes:
    by_shape: for each shape, as text such as "128x384", a tree of arrays [rows, ...].
    rows: pairs of a shape and the name of the matrix in each row, "" for none. A checkpoint
      records them, so that another layout can restore each matrix's row.
  """

  by_shape: dict[str, Any]
  rows: tuple[tuple[str, tuple[str, ...]], ...] = dataclasses.field(metadata={"static": True})


class Dealer(NamedTuple):
  """Distribution of matrices over devices; see `parallel.deal`.

  Attributes:
    rows: (leaves, cost) -> for each shape as text, the name of the matrix in each row, or "".
    apply: (function, leaves, arrays, cost, `MatrixState.by_shape`) -> (arrays, by_shape). The
      function has the arguments matrices [k, inputs, outputs] and a state of k rows.
  """

  rows: Callable[[Sequence[Leaf], Cost], Mapping[str, list[str]]]
  apply: Callable[..., tuple[list[Any], dict[str, Any]]]


def cubic(inputs: int, outputs: int) -> float:
  """Return the FLOPs of a product of a matrix and a square one: 2 in out min(in, out)."""
  return 2 * inputs * outputs * min(inputs, outputs)


def map_matrices(
  function: Callable[..., Any],
  tree: Any,
  *,
  stacked: Mask | Any | None = None,
  cost: Cost = cubic,
  state: MatrixState | None = None,
) -> Any:
  """Apply a function to every matrix of a tree, each on one device.

  Args:
    function: matrices [k, inputs, outputs] -> the same shape and dtype, for any k >= 1 and
      without mixing matrices. With a state: (matrices, tree of arrays [k, ...]) -> (matrices,
      tree). The last dim of a leaf is the output and all before it are the input, so that a
      convolution [h, w, in, out] is the matrix [h w in, out].
    tree: global arrays of two dims or more, at the paths of their parameters. Leaves that
      `optax.masked` or `optax.partition` hide are left out.
    stacked: params -> bool per leaf, or a pattern. True: the first dim of the leaf counts
      matrices. None means that no leaf is stacked.
    cost: (inputs, outputs) -> FLOPs of the function for one matrix, by which matrices are dealt
      out.
    state: state from `init_matrices` with the same `stacked` and `cost`; None means no state.

  Returns:
    The tree of results; with a state, (tree, state).

  Example:
    >>> halved = map_matrices(lambda x: x / 2, {"w": jnp.ones((3, 2, 2))}, stacked=lambda _: True)
    >>> float(halved["w"].sum())
    6.0
  """
  arrays, structure = jax.tree.flatten(tree)
  call = function if state is not None else lambda x, _: (function(x), None)
  by_shape = {} if state is None else state.by_shape
  found = _DEALER.get().apply(call, leaves_of(tree, stacked), arrays, cost, by_shape)
  results = structure.unflatten(found[0])
  return results if state is None else (results, MatrixState(found[1], state.rows))


def init_matrices(
  make: Callable[[Shape, Any], Any],
  tree: Any,
  *,
  stacked: Mask | Any | None = None,
  cost: Cost = cubic,
) -> MatrixState:
  """Create the state of every matrix, one row each.

  Args:
    make: ((inputs, outputs), dtype) -> the initial state of one matrix, a tree of arrays.
    tree: the parameters.
    stacked: the stacked leaves, as in `map_matrices`.
    cost: the cost, as in `map_matrices`.

  Example:
    >>> params = {"w": jnp.ones((3, 2))}
    >>> state = init_matrices(lambda shape, dtype: jnp.zeros(shape[0], dtype), params)
    >>> state.by_shape["3x2"].shape
    (1, 3)
  """
  leaves = leaves_of(tree, stacked)
  kinds = {as_text(leaf.matrix): (leaf.matrix, leaf.dtype) for leaf in leaves}

  def stack(key: str, names: Sequence[str]):
    one = make(*kinds[key])
    return jax.tree.map(lambda x: jnp.stack([x if n else jnp.zeros_like(x) for n in names]), one)

  fixed = tuple((key, tuple(names)) for key, names in _DEALER.get().rows(leaves, cost).items())
  return MatrixState({key: stack(key, names) for key, names in fixed}, fixed)


def saved_rows(state: Any) -> dict[str, list[str]]:
  """Return the name of the matrix in each row, by the path of a tree of arrays [rows, ...].

  Example:
    >>> state = init_matrices(lambda shape, dtype: jnp.zeros(shape), {"w": jnp.ones((3, 2))})
    >>> saved_rows({"mu": state})
    {'mu/by_shape/3x2': ['w']}
  """
  nodes = jax.tree.leaves_with_path(state, is_leaf=is_dealt)
  found = [(path_name(path), x) for path, x in nodes if is_dealt(x)]
  return {f"{path}/by_shape/{key}": [*names] for path, x in found for key, names in x.rows}


class Dealt(NamedTuple):
  """A parameter that an optimizer gives to `map_matrices`.

  Attributes:
    leaf: the parameter.
    flops: the FLOPs of the optimizer's function for each of its matrices.
    has_state: whether the function has a state.
  """

  leaf: Leaf
  flops: float
  has_state: bool


def dealt_matrices(tx: Any, params: Any) -> list[Dealt]:
  """Return the parameters that an optimizer gives to `map_matrices`.

  Args:
    tx: the optimizer, an optax transformation.
    params: the parameters, or their shapes and dtypes.
  """
  found: list[Dealt] = []

  def apply(_: Any, leaves: Sequence[Leaf], arrays: Any, cost: Cost, by_shape: Any):
    found.extend(Dealt(leaf, cost(*leaf.matrix), bool(by_shape)) for leaf in leaves)
    return list(arrays), by_shape

  def step(params: Any):
    with dealt_by(Dealer(_rows, apply)):
      return tx.update(params, tx.init(params), params)

  jax.eval_shape(step, params)
  return found


@contextlib.contextmanager
def dealt_by(dealer: Dealer) -> Generator[None, None, None]:
  """Let the functions of this module deal matrices out inside a `with` block.

  The train step enters it while it traces the optimizer's `init` and `update`.
  """
  token = _DEALER.set(dealer)
  try:
    yield
  finally:
    _DEALER.reset(token)


def leaves_of(tree: Any, stacked: Mask | Any | None) -> list[Leaf]:
  """Return a `Leaf` for each leaf of a tree."""
  flags = flags_of(stacked, tree, default=False)
  pairs = zip(jax.tree.leaves_with_path(tree), flags, strict=True)
  return [Leaf(path_name(path), tuple(x.shape), x.dtype, many) for (path, x), many in pairs]


def slice_rows(state: Any, first: int, count: int) -> Any:
  """Return a part of the rows of a tree of arrays [rows, ...]."""
  return jax.tree.map(lambda x: x[first : first + count], state)


def is_dealt(node: Any) -> bool:
  """Return whether a node of a state is a `MatrixState`."""
  return isinstance(node, MatrixState)


def as_text(shape: Shape) -> str:
  """Return the key of a shape in `MatrixState.by_shape`."""
  return "x".join(map(str, shape))


def _rows(leaves: Sequence[Leaf], _: Cost) -> Mapping[str, list[str]]:
  return grouped((as_text(leaf.matrix), name) for leaf in leaves for name in leaf.names)


def _apply(function: Any, leaves: Sequence[Leaf], arrays: Any, _: Cost, by_shape: dict[str, Any]):
  """Apply a function to one leaf after another, on this device."""
  results, parts, taken = [], {}, collections.Counter()
  for leaf, x in zip(leaves, arrays, strict=True):
    key, count = as_text(leaf.matrix), leaf.count
    first, taken[key] = taken[key], taken[key] + count
    rows = slice_rows(by_shape.get(key), first, count)
    made, rows = function(x.reshape(count, *leaf.matrix), rows)
    results.append(made.reshape(leaf.shape))
    parts.setdefault(key, []).append(rows)
  joined = {key: jax.tree.map(lambda *x: jnp.concatenate(x), *parts[key]) for key in by_shape}
  return results, joined


HERE = Dealer(_rows, _apply)  # on one device
_DEALER = contextvars.ContextVar("dealer", default=HERE)
