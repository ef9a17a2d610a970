"""Compiles our steps for accelerators that are not here, and keeps their text.

    pip install libtpu==0.0.51 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2
    PYTHONPATH=. python tests/data/hlo/make.py

None of it needs a TPU or GPU. What the reader never looks at is cut out: sources,
metadata, shardings, and of backend_config all but a few keys.
"""

import os
import re
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import exchange
from jaxscale.collectives import same_everywhere, vary
from jaxscale.planning.topologies import target_config
from jaxscale.training.state import abstract_state
from jaxscale.training.step import make_train_step

AXES = ("replica", "data")
KEPT = re.compile(
  r'"(?:is_sync":\w+|estimated_cycles":"\d+"|known_trip_count":\{"n":"\d+"\}'
  r'|emitter":"\w+"|[lr]hs_contracting_dimensions":\[[^\]]*\])'
)


def step(mesh):
  """Our data-parallel train step of a perceptron of 2 layers."""

  def init(key):
    keys = jax.random.split(key)
    return [jax.random.normal(k, (512, 512)) / 23 for k in keys], {}

  def loss(params, model_state, batch, keys):
    x = batch["x"].astype(jnp.bfloat16)
    for w in params:
      x = jax.nn.relu(x @ w.astype(jnp.bfloat16))
    value = jnp.sum(x.astype(jnp.float32) ** 2)
    rows = jax.random.key_data(keys)[:, 0] >= 0
    return value, (model_state, {"examples": rows.sum(dtype=jnp.int32), "loss": value})

  tx, plain = optax.sgd(0.1, momentum=0.9), exchange.plain(AXES)
  state = abstract_state(init, tx, mesh, plain)
  return make_train_step(loss, tx, mesh, plain).lower(state, {"x": shape(mesh, (2048, 512), AXES)})


def scanned(mesh):
  """Our step of 4 layers in a scan, each averaged in the backward pass of it."""
  tag = jax.custom_vjp(lambda w: w)
  tag.defvjp(lambda w: (w, None), lambda _, g: (vary(lax.psum(g, AXES) / mesh.size, AXES),))
  averaged = exchange.Exchange(
    lambda params: (), lambda grads, state: (same_everywhere(grads, AXES), state)
  )

  def init(key):
    return jax.random.normal(key, (4, 1024, 4096)), {}

  def loss(params, model_state, batch, keys):
    def layer(h, w):
      w = tag(w).astype(jnp.bfloat16)
      return h + jax.nn.relu(h @ w) @ w.T, None

    h, _ = lax.scan(layer, batch["x"].astype(jnp.bfloat16), params)
    value = jnp.sum(h.astype(jnp.float32) ** 2)
    rows = jax.random.key_data(keys)[:, 0] >= 0
    return value, (model_state, {"examples": rows.sum(dtype=jnp.int32), "loss": value})

  tx = optax.sgd(0.1)
  state = abstract_state(init, tx, mesh, averaged)
  return make_train_step(loss, tx, mesh, averaged).lower(
    state, {"x": shape(mesh, (65536, 1024), AXES)}
  )


def layers(mesh):
  """4 layers in a scan, their weights sharded over `data` and gathered in it."""

  def loss(weights, x):
    def layer(h, w):
      up, down = (lax.all_gather(p.astype(jnp.bfloat16), "data", tiled=True) for p in w)
      return h + jax.nn.relu(h @ up) @ down, None

    h, _ = lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), weights)
    return jnp.sum(h.astype(jnp.float32) ** 2)

  def update(weights, x):
    own = jax.tree.map(lambda w: lax.pcast(w, "replica", to="varying"), weights)
    grads = lax.psum(jax.grad(loss)(own, x), "replica")
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads)

  sharded = (None, "data")
  weights = tuple(shape(mesh, dims, *sharded) for dims in ((4, 2048, 8192), (4, 8192, 2048)))
  mapped = jax.shard_map(update, mesh=mesh, in_specs=(P(*sharded), P(AXES)), out_specs=P(*sharded))
  return jax.jit(mapped, donate_argnums=0).lower(weights, shape(mesh, (8192, 2048), AXES))


def kinds(mesh):
  """Compute a permute, reduce-scatter, all-reduce, all-gather and all-to-all."""

  def f(x):
    x = lax.ppermute(x @ x, "data", [(i, (i + 1) % 4) for i in range(4)])
    x = lax.psum(lax.psum_scatter(x, "data", tiled=True), "replica")
    x = lax.all_gather(x, "data", tiled=True)
    return lax.all_to_all(x @ x, "data", 0, 1, tiled=True)

  mapped = jax.shard_map(f, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES))
  return jax.jit(mapped).lower(shape(mesh, (8192, 1024), AXES))


def shape(mesh, dims, *spec):
  return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def gradient(mesh):
  """One matrix's gradient, summed over both axes: between slices and within."""

  def f(w, x):
    grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(lax.pcast(w, AXES, to="varying"))
    return w - 0.1 * lax.psum(grad, AXES)

  mapped = jax.shard_map(f, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P())
  return jax.jit(mapped).lower(shape(mesh, (1024, 1024)), shape(mesh, (8192, 1024), AXES))


def shortened(text):
  """Without what the reader never looks at."""
  lines = []
  for line in text.split("\n"):
    if line.startswith("HloModule"):
      keep = re.findall(r"is_scheduled=\w+|num_partitions=\d+", line)
      line = ", ".join([line.split(",")[0], *keep])
    elif not line.startswith(("%", "ENTRY", "  ", "}")):
      continue
    config = line.find(", backend_config=")
    if config >= 0:
      kept = ",".join(KEPT.findall(line[config:]))
      line = line[:config] + (f", backend_config={{{kept}}}" if kept else "")
    line = re.sub(r', metadata=\{(?:"[^"]*"|[^}"])*\}', "", line)
    line = re.sub(r", sharding=\{[^}]*\}+", "", line)
    lines.append(line)
  return "\n".join(lines) + "\n"


def main():
  here = Path(__file__).parent
  tpu = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x2")
  slices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2)
  gpu = topologies.get_topology_desc(
    platform="cuda", target_config=target_config("h100"), topology="1x2x4"
  )
  programs = {
    f"{chip}_{function.__name__}": (topology, function)
    for chip, topology in (("tpu", tpu), ("gpu", gpu))
    for function in (step, layers, kinds)
  }
  programs |= {"tpu_slices": (slices, gradient)}
  programs |= {"tpu_in_backward": (slices, scanned), "gpu_in_backward": (gpu, scanned)}
  for name in sys.argv[1:] or programs:
    topology, function = programs[name]
    grid = np.array(topology.devices).reshape(2, 4)
    mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)
    text = function(mesh).compile().as_text()
    (here / f"{name}.txt").write_text(shortened(text))
    print(name, len(text), len(shortened(text)))


if __name__ == "__main__":
  main()
