"""Functions of whole matrices are computed by one owner each, under every layout."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import config as cfg
from jaxscale import hlo
from jaxscale.experiment import build
from jaxscale.mesh import make_mesh
from jaxscale.optim import init_matrices, map_matrices
from jaxscale.optim.matrices import Leaf, cubic, dealt_by, is_dealt
from jaxscale.parallel import deal, make_layout
from jaxscale.parallel.deal import make_dealer
from jaxscale.training.nan_guard import count_steps
from support.configs import small_config
from support.dealt import MESHES, RULES, SHAPES, STACKED, layout_of, numbers, put
from support.saving import restore, save


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


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("name", MESHES)
def test_every_layout_gives_the_results_of_whole_matrices(name, is_shared):
  """Devices that hold the same parts share expensive functions, and repeat cheap ones."""
  layout = layout_of(name)
  tree = numbers(layout, 0)
  cost = (lambda n, m: 1e9 * n * m) if is_shared else cubic

  @jax.jit
  def apply(tree):
    with dealt_by(make_dealer(layout)):
      return map_matrices(function, tree, stacked=STACKED, cost=cost)

  found = jax.device_get(apply(put(tree, layout)))
  for path, x in jax.tree.leaves_with_path(tree):
    result = found
    for key in path:
      result = result[key.key]
    np.testing.assert_allclose(result, expected(path, x), rtol=3e-5, atol=1e-4, err_msg=str(path))


def test_more_devices_than_matrices_are_groups():
  """Five matrices on 8 devices: two groups of 4 compute them, and gather among themselves."""
  layout = layout_of("data")
  tree = {"layers": {"up": numbers(layout, 0)["layers"]["up"]}, "head": numbers(layout, 0)["head"]}

  @jax.jit
  def apply(tree):
    with dealt_by(make_dealer(layout)):
      return map_matrices(function, tree, stacked=STACKED, cost=lambda n, m: 1e9 * n * m)

  for path, x in jax.tree.leaves_with_path(jax.device_get(apply(tree))):
    of_path = tree["head"] if path[0].key == "head" else tree["layers"]["up"]
    np.testing.assert_allclose(x, expected(path, of_path), rtol=3e-5, atol=1e-4)
  mesh = Mesh(layout.mesh.devices, layout.mesh.axis_names)
  where = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), tree)
  (gather,) = hlo.collectives(apply.lower(where).compile(), mesh)
  assert gather.kind == "all-gather" and gather.group_size == 4


@pytest.mark.parametrize("flops", [0.0, 0.1])
def test_a_matrix_is_in_exactly_one_chunk(flops, monkeypatch):
  """Sums of 0.1 are rounded, as those of SOAP's FLOPs are, and a cost may be 0."""
  monkeypatch.setattr(deal, "_CHUNK", 1)
  shapes = jax.ShapeDtypeStruct((32, 8, 16), jnp.float32)
  leaves = [Leaf("layers/up", shapes.shape, shapes.dtype, stacked=True)]
  layout = make_layout(make_mesh(data=1, fsdp=8), {"layers": {"up": shapes}}, RULES, shard="fsdp")
  names = make_dealer(layout).rows(leaves, lambda n, m: flops)["8x16"]
  assert sorted(filter(None, names)) == sorted(leaves[0].names)


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

  rows = dict(state.rows)
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


def test_a_skipped_step_counts_no_matrices():
  """Rows without a matrix must stay 0: a checkpoint of another layout does not have them."""
  make = lambda shape, dtype: {"count": jnp.zeros((), jnp.int32)}  # noqa: E731
  layout = layout_of("fsdp")
  with dealt_by(make_dealer(layout)):
    state = init_matrices(make, {"head": layout.shapes["head"]})
  count, after = count_steps((jnp.int32(3), state))
  assert int(count) == 4
  assert after.by_shape["8x24"]["count"].tolist() == [0] * 8


class Summed(cfg.Optimizer):
  """Sums of the gradients of matrices, kept by their owners."""

  has_matrix_state = True

  def build(self, schedule, context):
    def labels(params):
      return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "rest", params)

    def add(x, sums):
      sums = sums + x
      return sums / jnp.linalg.norm(sums, axis=(1, 2), keepdims=True), sums

    sums = optax.GradientTransformation(
      lambda params: init_matrices(jnp.zeros, params),
      lambda updates, state, params=None: map_matrices(add, updates, state=state),
    )
    parts = optax.partition({"matrix": sums, "rest": optax.identity()}, labels)
    return optax.chain(parts, optax.scale_by_learning_rate(schedule))


def test_an_optimizer_of_a_config_file_is_dealt_out():
  """Its state has a row for each matrix, on its owner, and the model needs no layout of its own."""
  config = small_config(optimizer=Summed(lr=0.1))
  experiment = build.experiment(config, datasets=config.data.abstract(config.batch_size))
  (line,) = experiment.dealt_out
  assert line.startswith("optimizer: 2 whole matrices dealt out over 8 devices, at most 1 on each")
  state = experiment.abstract_state()
  rows = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 3]
  assert [x.shape for x in rows] == [(8, 64, 8), (8, 8, 10)]
  assert all(x.sharding.spec == P(experiment.mesh.axis_names) for x in rows)
  text = experiment.lower_train_step(state).compile().as_text()
  assert "all-gather" in text and "all-to-all" not in text


@pytest.mark.parametrize("devices", [1, 2])
def test_a_state_that_is_a_bare_array_is_dealt_out_again(devices, tmp_path):
  """Each row of the sums is that of its matrix, on fewer devices and with fewer rows."""
  config = small_config(optimizer=Summed(lr=0.1), model=cfg.MLP(hidden=(8, 8, 8)))
  datasets = config.data.abstract(config.batch_size)
  experiment = build.experiment(config, datasets=datasets)
  saved = experiment.init_state()
  numbers = itertools.count(1)  # Rows without a matrix stay 0.
  marked = jax.tree.map(lambda node: mark(node, numbers), saved.opt_state, is_leaf=is_dealt)
  save(tmp_path, saved := saved._replace(opt_state=marked))
  fewer = build.experiment(config, datasets=datasets, devices=jax.devices()[:devices])
  state = restore(tmp_path, fewer.abstract_state())
  before, now = (dict(sums_of(x)) for x in (saved, state))
  assert len(now) == 4 and before.keys() == now.keys()
  for name, x in now.items():
    np.testing.assert_array_equal(x, before[name], err_msg=name)


def mark(node, numbers):
  """Return a node whose matrices are all different, if it is a `MatrixState`."""
  if not is_dealt(node):
    return node
  by_shape = {}
  for shape, names in node.rows:
    x = node.by_shape[shape]
    rows = [np.full(x.shape[1:], next(numbers) if name else 0, x.dtype) for name in names]
    by_shape[shape] = jax.device_put(np.stack(rows), x.sharding)
  return dataclasses.replace(node, by_shape=by_shape)


def sums_of(state):
  """Yield the name and the sums of each matrix."""
  nodes = jax.tree.leaves(jax.device_get(state.opt_state), is_leaf=is_dealt)
  (sums,) = (x for x in nodes if is_dealt(x))
  for shape, names in sums.rows:
    assert len(names) == len(sums.by_shape[shape])
    yield from ((name, x) for name, x in zip(names, sums.by_shape[shape], strict=True) if name)
