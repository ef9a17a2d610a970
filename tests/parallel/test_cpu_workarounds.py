"""Programs with collectives on simulated devices."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.collectives.cpu_workarounds import numbered, one_at_a_time
from jaxscale.mesh import batch_axes, make_mesh
from jaxscale.models.attention import rotate
from jaxscale.parallel import placement, stack_loss
from jaxscale.run.session import set_cpu_threads
from support.stack_layouts import stack_layout
from support.tiny_stack import batch


@pytest.fixture
def environment(monkeypatch):
  for name in ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(os, "cpu_count", lambda: 2)
  return monkeypatch


FLAGS = "--xla_dump_to=x --xla_force_host_platform_device_count=8"
# A thread for each of eight collectives of a simulated device; those that were asked for stay.
THREADS = [
  ({"JAX_NUM_CPU_DEVICES": "8"}, "64"),
  ({"XLA_FLAGS": FLAGS}, "64"),
  ({"JAX_NUM_CPU_DEVICES": "8", "NPROC": "3"}, "3"),
  *(({"JAX_NUM_CPU_DEVICES": count}, None) for count in ("", "1", "many")),
]


@pytest.mark.parametrize("variables, threads", THREADS)
def test_simulated_devices_have_threads_for_their_collectives(environment, variables, threads):
  for name, value in variables.items():
    environment.setenv(name, value)
  set_cpu_threads()
  assert os.environ.get("NPROC") == threads


def two_loops(mesh):
  """Neither needs the other; each has a sum in its body, and there is one after it."""

  def loop(x, turns):
    def body(x, _):
      return jnp.tanh(x + jax.lax.pmean(x, "data")), None

    return jax.lax.psum(jax.lax.scan(body, x, length=turns)[0], "data")

  def both(x, y):
    return loop(x, 3), loop(y, 5)

  specs = dict(in_specs=P("data"), out_specs=P("data"))
  return jax.jit(jax.shard_map(both, mesh=mesh, **specs, check_vma=False))


def channels(lowered):
  return [int(n) for n in re.findall(r"handle = (\d+)", lowered.as_text())]


def arguments():
  return np.arange(8, dtype=np.float32), np.ones((8, 2), np.float32)


def test_every_collective_has_a_number_of_its_own():
  function = two_loops(make_mesh())
  lowered = function.lower(*arguments())
  assert len(set(channels(lowered))) == 1, "JAX does it: delete what we do"
  assert channels(numbered(lowered)) == [1, 2, 3, 4]
  assert channels(numbered(lowered)) == [1, 2, 3, 4]
  assert channels(numbered(lowered, apart=False)) == [1, 1, 1, 1]
  compiled = numbered(lowered).compile()
  kept = re.findall(r"all-reduce\(.*channel_id=(\d+)", compiled.as_text())
  assert len(set(kept)) == len(kept) >= 3  # those after the loops become one


def test_functions_are_compiled_once_a_shape_and_place():
  mesh = make_mesh()
  function = one_at_a_time(two_loops(mesh), mesh)
  x, y = arguments()
  a = function(x, y)
  b = function(*jax.device_put((x, y), jax.sharding.NamedSharding(mesh, P("data"))))
  c = function(np.stack([x, x], axis=1), y)
  np.testing.assert_array_equal(a[0], b[0])
  np.testing.assert_array_equal(np.stack([a[0], a[0]], axis=1), c[0])
  np.testing.assert_array_equal(a[1], c[1])
  assert channels(function.lower(x, y)) == [1, 2, 3, 4]


def test_a_device_alone_is_left_alone():
  function = jax.jit(jnp.sin)
  assert one_at_a_time(function, make_mesh(devices=jax.devices()[:1])) is function


def test_the_angles_of_rotary_positions_are_turned_to_cos_and_sin_once():
  def scores(q, k, turn):
    places = jnp.arange(16)
    return jnp.einsum("bthd,bshd->bhts", turn(q, places), turn(k, places))

  def written(x, places):
    rates = (100.0 ** (-np.arange(4) / 4)).astype(np.float32)
    angles = places.astype(np.float32)[:, None, None] * rates
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  q, k = np.random.default_rng(0).normal(size=(2, 3, 16, 2, 8)).astype(np.float32)
  found = []
  for turn in (written, lambda x, places: rotate(x, places, 100.0)):
    compiled = jax.jit(lambda q, k, turn=turn: scores(q, k, turn)).lower(q, k).compile()
    found.append((compiled(q, k), compiled.as_text().count(" cosine(")))
  (expected, again), (rotated, once) = found
  np.testing.assert_allclose(rotated, expected, rtol=1e-5, atol=1e-5)
  assert once == 1
  assert again > 1, "XLA does it: delete what we do"


LOOPS = [(False, 3, "none", {}, "none"), (True, 3, "full", {}, "none")]
LOOPS += [(True, 7, "none", {}, "none"), (True, 3, "none", {"model": 2}, "none")]
LOOPS += [(True, 3, "none", {"fsdp": 2}, "fsdp")]


@pytest.mark.parametrize("is_loop, layers, remat, axes, shard", LOOPS)
def test_few_layers_that_are_whole_are_written_out(is_loop, layers, remat, axes, shard):
  mesh, stack, layout = stack_layout(axes, {"shard": shard}, count=2, num_layers=layers)
  loss_fn = stack_loss(stack, layout, remat=remat)

  def loss(params, batch):
    params = placement.pair_shards(*placement.shards_and_full(params, layout))
    return jax.lax.psum(loss_fn(params, {}, batch, None)[0], layout.token_axes)

  specs = layout.param_specs, P(batch_axes(mesh))
  whole = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
  lowered = jax.jit(whole).lower(layout.shapes, batch(0, mesh))
  assert ("stablehlo.while" in lowered.as_text()) == is_loop
