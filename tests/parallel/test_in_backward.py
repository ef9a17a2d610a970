"""The exchange inside the backward scan: the same mathematics, earlier."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxscale import collectives
from jaxscale.errors import ConfigError
from jaxscale.exchange import plain
from jaxscale.exchange.in_backward import all_but, in_backward
from jaxscale.exchange.top_k import top_k
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.planning import hlo
from jaxscale.training.state import TrainState, state_shardings
from jaxscale.training.step import make_train_step
from support.paths import DATA

AXES = ("replica", "data")
FIXTURES = DATA / "hlo"
LAYERS, WIDTH, HIDDEN, BATCH = 5, 12, 20, 32
LAYER_BYTES = 4 * (2 * WIDTH * HIDDEN + HIDDEN)
LAYER = 4 * 1024 * 4096  # of the programs in tests/data/hlo


def init(key):
  keys = jax.random.split(key, 4)
  shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
  layers = {
    name: jax.random.normal(k, shape) * 0.1
    for k, (name, shape) in zip(keys, shapes.items(), strict=False)
  }
  layers["bias"] = jnp.zeros((LAYERS, HIDDEN))
  embed = jax.random.normal(keys[2], (3, WIDTH))
  return {"layers": layers, "embed": embed, "head": jnp.ones((WIDTH,)) * 0.2}, {}


def make_loss(tag, remat=False):
  """A residual perceptron, its layers in a scan; sums over the rows."""

  def layer(h, w):
    w = tag(w)
    return h + jax.nn.gelu(h @ w["up"] + w["bias"]) @ w["down"], None

  body = jax.checkpoint(layer) if remat else layer

  def loss(params, model_state, batch, keys):
    h, _ = lax.scan(body, batch["x"] @ params["embed"], params["layers"])
    errors = (h @ params["head"] - batch["y"]) ** 2
    # Of all rows, and so varying over devices as they are.
    examples = (batch["y"] < np.inf).sum(dtype=jnp.int32)
    return errors.sum(), (model_state, {"examples": examples, "loss": errors.sum()})

  return loss


def batch(mesh, seed):
  rng = np.random.default_rng(seed)
  rows = {"x": rng.standard_normal((BATCH, 3)), "y": rng.standard_normal(BATCH)}
  rows = {name: x.astype(np.float32) for name, x in rows.items()}
  return jax.device_put(rows, batch_sharding(mesh))


def is_layer(path):
  return path.startswith("layers/")


def hierarchical(mesh):
  plan = collectives.plan(mesh.shape, LAYER_BYTES, "hierarchical")
  return functools.partial(collectives.sum_tree, by=plan)


def make(tag, exchange, mesh, *, remat=False, accumulate_steps=1):
  """A state and the jitted step."""
  # Not Adam, which would forgive a gradient N times too large.
  tx = optax.sgd(0.02, momentum=0.9)
  loss = make_loss(tag, remat)
  step = make_train_step(loss, tx, mesh, exchange, accumulate_steps=accumulate_steps)
  params = first_params()
  state = TrainState(
    jnp.zeros((), jnp.int32), params, {}, tx.init(params), exchange.init(params), ()
  )
  stacked = jax.tree.map(lambda x: np.stack([x] * 8), state.exchange_state)
  state = state._replace(exchange_state=stacked)
  return jax.device_put(state, state_shardings(mesh)), step


@functools.cache
def first_params():
  return jax.device_get(jax.jit(init)(jax.random.key(3))[0])


def train(state, step, mesh, steps=4):
  norms = []
  for i in range(steps):
    state, metrics = step(state, batch(mesh, i))
    norms.append(metrics["grad_norm"])
  return jax.device_get((state, norms))


@functools.cache
def reference():
  mesh = make_mesh()
  return train(*make(lambda w: w, plain(AXES), mesh), mesh)


def assert_same(got, wanted, tolerance=1e-6):
  (state, norms), (state_ref, norms_ref) = got, wanted
  np.testing.assert_allclose(norms, norms_ref, rtol=10 * tolerance)
  for a, b in zip(*map(jax.tree.leaves, (state.params, state_ref.params)), strict=True):
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("remat", [False, True])
def test_it_equals_the_plain_exchange(remat, accumulate_steps):
  mesh = make_mesh()
  exchange = all_but(plain(AXES), is_layer, AXES)
  options = {"remat": remat, "accumulate_steps": accumulate_steps}
  run = make(in_backward(AXES), exchange, mesh, **options)
  assert_same(train(*run, mesh), reference())


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_any_all_reduce_will_do(accumulate_steps):
  mesh = make_mesh(replica=2)
  exchange = all_but(plain(AXES), is_layer, AXES)
  tag = in_backward(AXES, hierarchical(mesh))
  run = make(tag, exchange, mesh, remat=True, accumulate_steps=accumulate_steps)
  assert_same(train(*run, mesh), reference())


def test_half_precision_is_near():
  mesh = make_mesh()
  plan = collectives.plan(mesh.shape, LAYER_BYTES, "psum")
  reduce = functools.partial(
    collectives.sum_tree, by=plan, payload=jnp.bfloat16, accumulate=jnp.float32
  )
  exchange = all_but(plain(AXES), is_layer, AXES)
  _, norms = train(*make(in_backward(AXES, reduce), exchange, mesh), mesh, steps=1)
  error = abs(norms[0] / reference()[1][0] - 1)
  assert 0 < error < 2**-8


def test_the_inner_exchange_keeps_state_for_the_rest_alone():
  mesh = make_mesh()
  inner = top_k(AXES, num_devices=8, share=0.1)
  exchange = all_but(inner, is_layer, AXES)
  state, step = make(in_backward(AXES), exchange, mesh)
  shapes = [x.shape for x in jax.tree.leaves(state.exchange_state)]
  assert shapes == [(8, 3, WIDTH), (8, WIDTH)]
  state, norms = train(state, step, mesh, steps=2)
  assert np.isfinite(norms).all()
  assert np.linalg.norm(state.exchange_state["residual"]["embed"]) > 0


def test_a_forgotten_identity_is_seen():
  """Else every device would go its own way, and nothing would say so."""
  mesh = make_mesh()
  for check in (True, False):
    exchange = all_but(plain(AXES), is_layer, AXES, check=check)
    state, _ = train(*make(lambda w: w, exchange, mesh), mesh, steps=1)
    finite = {k: np.isfinite(x).all() for k, x in state.params["layers"].items()}
    assert finite == dict.fromkeys(("up", "down", "bias"), not check)
    assert np.isfinite(state.params["embed"]).all()


def test_parameters_that_do_not_vary_get_a_gradient_that_does_not():
  """Outside of the train step, as with `jax.grad` of replicated parameters."""
  mesh = make_mesh(replica=2)
  params, _ = init(jax.random.key(0))
  rows = batch(mesh, 0)

  def grads(tag):
    def local(w, batch):
      w = jax.tree.map(lambda x: lax.pcast(x, AXES, to="varying"), w)
      loss = make_loss(lambda w: w)
      return lax.psum(loss(w, {}, batch, None)[0], AXES)

    def tagged(w, batch):
      others = {k: lax.pcast(x, AXES, to="varying") for k, x in w.items()}

      def loss(layers):
        return make_loss(tag)(others | {"layers": layers}, {}, batch, None)[0]

      return jax.grad(loss)(w["layers"])

    if tag is None:
      mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P())
      return jax.jit(jax.grad(mapped))(params, rows)["layers"]
    mapped = jax.shard_map(tagged, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P())
    return jax.jit(mapped)(params, rows)

  means, sums = grads(in_backward(AXES)), grads(None)
  jax.tree.map(
    lambda m, s: np.testing.assert_allclose(8 * m, s, rtol=1e-4, atol=1e-5), means, sums
  )


def test_no_path_or_no_axis_is_refused():
  exchange = all_but(plain(AXES), lambda path: path == "layer", AXES)
  with pytest.raises(ConfigError, match=r"none of the 5 parameters, such as embed"):
    exchange.init(init(jax.random.key(0))[0])
  mesh = make_mesh()
  exchange = all_but(plain(AXES), is_layer, AXES)
  state, step = make(in_backward(("dat",)), exchange, mesh)
  with pytest.raises(ConfigError, match="no axis 'dat'"):
    step(state, batch(mesh, 0))


def sums_of(tag, exchange, mesh, **options):
  """(kind, bytes, times) of a step's collectives, but for a few bytes."""
  state, step = make(tag, exchange, mesh, **options)
  table = hlo.collectives(step.lower(state, batch(mesh, 0)).compile(), mesh)
  return sorted((r.kind, r.payload_bytes, r.times) for r in table if r.wire_bytes > 64)


@pytest.mark.parametrize("remat", [False, True])
def test_a_layers_sum_is_inside_the_loop_and_nowhere_else(remat):
  mesh = make_mesh()
  rest = 4 * (3 * WIDTH + WIDTH) + 4  # the loss rides along
  exchange = all_but(plain(AXES), is_layer, AXES)
  got = sums_of(in_backward(AXES), exchange, mesh, remat=remat)
  assert got == [("all-reduce", rest, 1), ("all-reduce", LAYER_BYTES, LAYERS)]
  # What it replaces: one sum of all, after the loop.
  whole = [("all-reduce", rest + LAYERS * LAYER_BYTES, 1)]
  assert sums_of(lambda w: w, plain(AXES), mesh, remat=remat) == whole


def test_the_slow_axis_carries_a_part_of_each_layer_inside_the_loop():
  mesh = make_mesh(replica=2)
  exchange = all_but(plain(AXES), is_layer, AXES)
  table = sums_of(in_backward(AXES, hierarchical(mesh)), exchange, mesh)
  assert ("all-reduce", LAYER_BYTES // 4, LAYERS) in table
  assert ("reduce-scatter", LAYER_BYTES, LAYERS) in table
  assert max(size for _, size, times in table if times == 1) < LAYER_BYTES


@pytest.mark.parametrize(
  ("name", "payload", "times", "share"),
  [("tpu", LAYER // 4, [1, 3], 0.75), ("gpu", LAYER, [4], 1.0)],
)
def test_compiled_for_accelerators_it_hides_behind_other_layers(
  name, payload, times, share
):
  """Two TPU v5e slices and two hosts of 4 H100: what crosses between them.

  On TPU the last turn of the loop is peeled off, and nothing follows its send.
  """
  text = (FIXTURES / f"{name}_in_backward.txt").read_text()
  table = hlo.collectives(text, {"replica": 2, "data": 4})
  sums = [
    r for r in table if "replica" in (r.axes or ()) and r.payload_bytes == payload
  ]
  assert sorted(r.times for r in sums) == times and all(r.is_async for r in sums)
  hidden = [r for r in sums if (r.overlap or 0.0) > 0.1]
  assert sum(r.times for r in hidden) == share * sum(times)
  rest = [r for r in table if "replica" in (r.axes or ()) and r not in sums]
  assert all(r.payload_bytes <= 1024 for r in rest)
