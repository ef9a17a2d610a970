"""BatchNorm by number of examples: the same on any number of devices."""

import ast
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from jaxscale import mesh as grids
from jaxscale import models, optim
from jaxscale.models.layers import BatchNorm
from jaxscale.training import losses, model_state
from support.cases import all_slow_except
from support.digits import digits_batch
from support.errors import config_error
from support.leaves import assert_close, assert_near
from support.steps import on_mesh, training

BATCH = 64
STEPS = 10
SPREADS = [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2)]  # devices, of which replicas


def spread(span, num_devices, replica=1):
  """Return the mesh and the models' settings for a BatchNorm span of a batch of 64."""
  shape = grids.mesh_shape(num_devices, replica=replica)
  rows = BATCH // num_devices
  bn = grids.batch_norm_span(span, rows, replica=shape[0], data=shape[1])
  devices = jax.devices()[:num_devices]
  return grids.make_mesh(replica=replica, bn_devices=bn.bn_devices, devices=devices), bn


# The layer against Flax's and against float64.


def layer_case(dtype=jnp.float32, n=16):
  rng = np.random.default_rng(0)
  x, g = (rng.normal(m, 2, (n, 3, 5, 6)).astype(np.float32) for m in (3, 0))
  params = {k: rng.normal(1, 0.5, 6).astype(np.float32) for k in ("scale", "bias")}
  stats = {k: rng.uniform(1, 2, 6).astype(np.float32) for k in ("mean", "var")}
  return jnp.array(x, dtype), jnp.array(g, dtype), params, stats


def forward_and_gradients(apply, params, x, g):
  """-> (y, new stats), (gradient of params, of x) for the cotangent g of y."""
  y, vjp, stats = jax.vjp(apply, params, x, has_aux=True)
  return y, stats, vjp(g)


def ours(stats, **options):
  layer = BatchNorm(**options)

  def apply(params, x):
    variables = {"params": {"bn": params}, "batch_stats": {"bn": stats}}
    y, new = layer.apply(variables, x, train=True, mutable=["batch_stats"])
    return y, new["batch_stats"]["bn"]

  return apply


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ungrouped_equals_flax(dtype):
  x, g, params, stats = layer_case(dtype)
  flax_layer = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype)

  def flax_apply(params, x):
    variables = {"params": params, "batch_stats": stats}
    y, new = flax_layer.apply(variables, x, mutable=["batch_stats"])
    return y, new["batch_stats"]

  got = forward_and_gradients(ours(stats, dtype=dtype), params, x, g)
  with jax.numpy_dtype_promotion("standard"):  # not needed by ours
    wanted = forward_and_gradients(flax_apply, params, x, g)
  tolerance = 1e-5 if dtype == jnp.float32 else 1e-2  # bf16: one rounding
  for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
    assert a.dtype == b.dtype
    a, b = (np.asarray(v, np.float64) for v in (a, b))
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got[1]))
  assert_close(got[1], wanted[1], rtol=2e-6)  # statistics in float32 always


def reference(x, g, params, stats, group):
  """BatchNorm over consecutive groups in float64, and its derivative in closed form."""
  x, g = (np.asarray(v, np.float64).reshape(-1, group * 15, 6) for v in (x, g))
  mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
  root = np.sqrt(var + 1e-5)
  unit = (x - mean) / root
  gs = g * params["scale"]
  dx = gs - gs.mean(1, keepdims=True) - unit * (gs * unit).mean(1, keepdims=True)
  return {
    "y": (unit * params["scale"] + params["bias"]).reshape(-1, 3, 5, 6),
    "mean": 0.9 * stats["mean"] + 0.1 * mean.mean((0, 1)),
    "var": 0.9 * stats["var"] + 0.1 * var.mean((0, 1)),
    "x": (dx / root).reshape(-1, 3, 5, 6),
    "scale": (g * unit).sum((0, 1)),
    "bias": g.sum((0, 1)),
  }


@pytest.mark.parametrize("where", all_slow_except(SPREADS, (1, 1), (8, 2)), ids=str)
@pytest.mark.parametrize("span, far", [(4, 0.0), (16, 0.0), (32, 0.0), (64, 0.0), (64, 200.0)])
def test_equals_float64_over_the_same_groups(span, far, where):
  """A group is the same rows on any number of devices: output and gradients.

  Also 100 standard deviations from 0, once the running mean has followed.
  """
  x, g, params, stats = layer_case(n=BATCH)
  x, stats = x + far, stats | {"mean": stats["mean"] + np.float32(far)}
  mesh, bn = spread(span, *where)
  axes = mesh.axis_names

  def local(params, stats, x, g):
    params, stats = jax.tree.map(lambda v: lax.pcast(v, axes, to="varying"), (params, stats))
    apply = ours(stats, axis_name=bn.axis_name, group_size=bn.group_size)
    y, new, (d_params, dx) = forward_and_gradients(apply, params, x, g)
    return y, lax.pmean(new, axes), lax.psum(d_params, axes), dx

  rows, whole = P(axes), P()
  specs = dict(in_specs=(whole, whole, rows, rows), out_specs=(rows, whole, whole, rows))
  sharded = jax.shard_map(local, mesh=mesh, **specs)
  y, new, d_params, dx = jax.jit(sharded)(params, stats, x, g)
  wanted = reference(x, g, params, stats, span)
  for name, value in {"y": y, "x": dx, **new, **d_params}.items():
    error = np.abs(np.asarray(value, np.float64) - wanted[name]).max()
    assert error <= 2e-6 * np.abs(wanted[name]).max(), name


@pytest.mark.parametrize("options", [{"group_size": 3}, {"group_size": 0}, {"group_size": 32}])
def test_a_group_that_does_not_divide_the_rows_is_one_line(options):
  x, _, params, stats = layer_case()
  with config_error(match=r"^bn_group_size=\d+ does not divide the 16"):
    ours(stats, **options)(params, x)
  with config_error(match="unset one of them"):
    ours(stats, group_size=4, axis_name=("data",))(params, x)


# From a span to a mesh and to what the models get.


def test_a_span_says_who_shares():
  for span, replica, data, *wanted in (
    ("device", 1, 8),
    (16, 1, 8),
    (16, 1, 1),
    (4, 1, 8, 1, None, 4),
    (32, 1, 8, 2, ("bn",)),
    (64, 2, 8, 4, ("bn",)),
    (128, 2, 8, 1, ("data",)),
    (256, 2, 8, 1, grids.AXES),
    ("global", 2, 8, 1, grids.AXES),
  ):
    shared = grids.batch_norm_span(span, 16, replica=replica, data=data)
    assert shared == grids.BatchNormSpan(*wanted)


# Rows that share, replicas, devices of a replica: 24 are 1.5 devices, 48 are 3 of 8.
IMPOSSIBLE = """
5     1 8  give 4
24    1 8  give 32
48    1 8  give 64
128   4 4  give 64
0     1 8  from 2 to 128
-4    1 8  from 2 to 128
256   1 8  from 2 to 128
'all' 1 8  "device" or "global"
"""


def test_an_impossible_span_is_one_line_with_a_remedy():
  for row in IMPOSSIBLE.strip().splitlines():
    span, replica, data, remedy = row.split(maxsplit=3)
    with config_error(remedy, match=f"^bn_span={span} "):
      grids.batch_norm_span(ast.literal_eval(span), 16, replica=int(replica), data=int(data))


@pytest.mark.parametrize("given", [{"data": 3}, {"replica": -2}, {"data": 0}])
def test_impossible_meshes_are_one_line(given):
  with config_error(match="multiply to the 8 devices"):
    grids.mesh_shape(8, **given)


def test_a_mesh_with_a_bn_axis_keeps_who_is_where():
  mesh, split = grids.make_mesh(replica=2), grids.make_mesh(replica=2, bn_devices=2)
  assert dict(split.shape) == {"replica": 2, "data": 2, "bn": 2}
  assert list(split.devices.flat) == list(mesh.devices.flat)
  assert split.axis_types == (*mesh.axis_types, mesh.axis_types[0])
  assert grids.host_shard(split) == grids.host_shard(mesh) == (0, 1)
  rows = np.arange(BATCH)
  whole, parts = (jax.device_put(rows, grids.batch_sharding(m)) for m in (mesh, split))
  for a, b in zip(whole.addressable_shards, parts.addressable_shards, strict=True):
    assert a.device == b.device and a.index == b.index
  with config_error(match=r"^bn_devices=3 .* data axis of 4 devices"):
    grids.make_mesh(replica=2, bn_devices=3)


# Through the train step.


@functools.cache
def run(span, num_devices, replica=1):
  """-> initial parameters, first and last state, metrics; all on the host."""
  mesh, bn = spread(span, num_devices, replica)
  over = dict(bn_axis_name=bn.axis_name, bn_group_size=bn.group_size)
  model = models.CNNModule(num_classes=10, features=(4, 8), dense=0, batch_norm=True, **over)
  fns = models.functions(model, (8, 8, 1), mean=(8.0,), std=(5.0,))
  loss = losses.classification_loss(fns.apply)
  state, step = training(loss, fns.init, optim.sgd(0.1), mesh, seed=1)
  start = jax.device_get(state.params)
  history, states = [], []
  for i in range(STEPS):
    state, metrics = step(state, on_mesh(mesh, digits_batch(BATCH, seed=i)))
    history.append(metrics)
    states.append(jax.device_get(state))
  return start, states[0], states[-1], jax.device_get(history)


CASES = [(4, 8, 1), (16, 8, 1), (16, 2, 1), (16, 4, 1), (16, 8, 2), (32, 4, 1), (32, 8, 1)]


@pytest.mark.parametrize("case", all_slow_except(CASES, *CASES[:2]), ids=str)
def test_training_at_one_span_is_the_same_on_any_number_of_devices(case):
  """Below, equal to and above a device's 32, 16 or 8 rows; gradients included."""
  span, *_ = case
  start, first, end, history = run(*case)
  start_1, first_1, end_1, history_1 = run(span, 1)
  for state, wanted in ((first, first_1), (end, end_1)):
    assert_near(state[1:3], wanted[1:3], 1e-6, 1)  # parameters and model state
  # SGD without decay: the first change is the first gradient.
  gradients = [
    jax.tree.map(np.subtract, s, f.params) for s, f in ((start, first), (start_1, first_1))
  ]
  assert_near(*gradients, 1e-5, 1e-2)
  for name in ("loss", "grad_norm"):
    a, b = ([metrics[name] for metrics in h] for h in (history, history_1))
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_spans_are_distinguished():
  """Find a span that changes nothing, which the test above would not see."""
  curves = [[m["loss"] for m in run(span, 1)[3]] for span in (4, 16, 32)]
  for a, b in itertools.pairwise(curves):
    assert np.abs(np.subtract(a, b)).max() > 1e-3


@pytest.mark.parametrize("together", [False, True])
def test_processes_average_statistics_in_one_all_reduce(together):
  """Gloo sums arrays one after another: ResNet-50's 106 are one vector."""
  mesh = grids.make_mesh(replica=2)
  model = models.functions(models.make_resnet(50, num_classes=10), (32, 32, 3))
  _, state = jax.eval_shape(model.init, jax.random.key(0))
  rng = np.random.default_rng(0)
  own = jax.tree.map(lambda x: rng.normal(size=(8, *x.shape)).astype(np.float32), state)

  def mean(x):
    local = jax.tree.map(lambda x: x[0], x)
    return model_state.agree(local, mesh.axis_names, together=together)

  rows = P(("replica", "data"))
  averaged = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=(rows,), out_specs=P()))
  program = averaged.lower(own).as_text()
  assert program.count("stablehlo.all_reduce") == (1 if together else 106)
  for ours, x in zip(jax.tree.leaves(averaged(own)), jax.tree.leaves(own), strict=True):
    np.testing.assert_allclose(ours, x.mean(0, dtype=np.float64), rtol=0, atol=5e-7)


def test_statistics_of_several_types_and_axes_stay_apart():
  mesh = grids.make_mesh(replica=2)
  stats = {"a": jnp.arange(8.0), "b": jnp.arange(8, dtype=jnp.bfloat16), "c": jnp.arange(8.0)}

  def mean(x):
    local = {name: array[0] for name, array in x.items()}
    local["c"] = lax.pmean(local["c"], "replica")  # varies along `data` alone
    return model_state.agree({"batch_stats": local}, mesh.axis_names, together=True)

  rows = P(("replica", "data"))
  found = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=(rows,), out_specs=P()))(stats)
  assert jax.tree.map(float, found["batch_stats"]) == dict.fromkeys("abc", 3.5)
  assert found["batch_stats"]["b"].dtype == jnp.bfloat16
