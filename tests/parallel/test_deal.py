"""Functions of whole matrices are computed by one owner each, under every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.optim import init_matrices, map_matrices, matrix_rows
from jaxscale.optim.matrices import dealt_by
from jaxscale.parallel.deal import make_dealer
from support.dealt import MESHES, SHAPES, STACKED, layout_of, numbers, put


def of_whole(x):
  """Return values of which each depends on the whole matrix [in, out], in numpy."""
  return (x @ x.T @ x) / np.linalg.norm(x) + np.arange(x.shape[0])[:, None] * np.sum(x[0])


def function(x):
  norms = jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
  first = x[:, 0].sum(-1)[:, None, None]
  return x @ x.swapaxes(1, 2) @ x / norms + jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * first


def expected(path, x):
  is_stack = path[0].key == "layers"
  matrices = x.reshape(len(x) if is_stack else 1, -1, x.shape[-1]).astype(np.float64)
  return np.stack([of_whole(m) for m in matrices]).reshape(x.shape)


@pytest.mark.parametrize("name", MESHES)
def test_every_layout_gives_the_results_of_whole_matrices(name):
  layout = layout_of(name)
  tree = numbers(layout, 0)

  @jax.jit
  def apply(tree):
    with dealt_by(make_dealer(layout)):
      return map_matrices(function, tree, stacked=STACKED)

  found = jax.device_get(apply(put(tree, layout)))
  for path, x in jax.tree.leaves_with_path(tree):
    result = found
    for key in path:
      result = result[key.key]
    np.testing.assert_allclose(result, expected(path, x), rtol=3e-5, atol=1e-4, err_msg=str(path))


@pytest.mark.parametrize("name", MESHES)
def test_state_stays_with_the_owner_of_its_matrix(name):
  """Each matrix adds to a sum of its own; rows without a matrix keep their first values."""
  layout = layout_of(name)
  trees = [numbers(layout, seed) for seed in range(3)]
  how = {"stacked": STACKED, "cost": lambda inputs, outputs: inputs * outputs**2}

  def add(x, state):
    sums = state["sum"] + x
    return sums + 0.0, {"sum": sums, "count": state["count"] + 1}

  def make(shape, dtype):
    return {"sum": jnp.zeros(shape, dtype), "count": jnp.zeros((), jnp.int32)}

  @jax.jit
  def init(tree):
    with dealt_by(make_dealer(layout)):
      return init_matrices(make, tree, **how)

  @jax.jit
  def update(tree, state):
    with dealt_by(make_dealer(layout)):
      return map_matrices(add, tree, state=state, **how)

  state = init(put(trees[0], layout))
  for tree in trees:
    result, state = update(put(tree, layout), state)
  total = jax.tree.map(lambda *x: sum(x), *trees)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), jax.device_get(result), total
  )

  with dealt_by(make_dealer(layout)):
    rows = matrix_rows(layout.shapes, **how)
  names = sorted(n for of_shape in rows.values() for n in of_shape if n)
  kinds = [f"layers/{k}/{i}" for k in SHAPES["layers"] for i in range(4)]
  assert names == sorted([*kinds, "head"])
  for shape, of_shape in rows.items():
    kept = state.by_shape[shape]
    assert kept["sum"].shape[0] == len(of_shape) and len(of_shape) % layout.mesh.size == 0
    for row, name in enumerate(of_shape):
      assert int(kept["count"][row]) == (3 if name else 0)
      if name:
        leaf, index = (
          (total["head"], 0)
          if name == "head"
          else (total["layers"][name.split("/")[1]], int(name.split("/")[2]))
        )
        leaf = leaf.reshape(-1, *kept["sum"].shape[1:])
        np.testing.assert_allclose(kept["sum"][row], leaf[index], rtol=1e-5)
