"""Exchanges run on random gradients of eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxscale.exchange import plain
from jaxscale.exchange.buckets import bucketed
from jaxscale.exchange.low_precision import half_precision, int8
from jaxscale.exchange.one_bit import one_bit
from jaxscale.exchange.wrappers import delayed, warm_start
from jaxscale.mesh import make_mesh
from support.recipes import power_sgd, top_k

N = 8
AXES = ("replica", "data")
# No size divides by devices, blocks or eight bits.
SHAPES = dict(bias=(3,), conv=(3, 3, 5, 17), dense=(5, 7), scalar=(), vector=(1001,))
SHAPES["wide"] = 37, 130
SMALL = dict(bucket_bytes=8192)  # buckets that cut tensors, and several of them
TOP = dict(share=0.05, **SMALL)
EXCHANGES = {
  "plain": lambda n=N: plain(AXES),
  "bucketed": lambda n=N: bucketed(AXES, **SMALL),
  "bf16": lambda n=N: half_precision(AXES, **SMALL),
  "bf16 psum": lambda n=N: half_precision(AXES, sum_in="payload"),
  "fp16": lambda n=N: half_precision(AXES, "float16", **SMALL),
  "fp16 psum": lambda n=N: half_precision(AXES, "float16", sum_in="payload"),
  "int8": lambda n=N: int8(AXES, block=32, **SMALL),
  "one bit": lambda n=N: one_bit(AXES, num_devices=n, **SMALL),
  "two bit": lambda n=N: one_bit(AXES, num_devices=n, bits=2, **SMALL),
  "top k": lambda n=N: top_k(AXES, **TOP),
  "top k of buckets": lambda n=N: top_k(AXES, per="bucket", **TOP),
  "power sgd": lambda n=N: power_sgd(AXES, rank=2, **SMALL),
  "delayed": lambda n=N: delayed(plain(AXES)),
  "delayed one bit": lambda n=N: delayed(one_bit(AXES, num_devices=n)),
  "warm one bit": lambda n=N: warm_start(one_bit(AXES, num_devices=n), AXES, steps=5),
}
# Those that send later what they leave out.
FEEDBACK = ["one bit", "two bit", "top k", "top k of buckets", "power sgd", "delayed"]
FEEDBACK += ["delayed one bit", "warm one bit"]


def gradients(steps, seed=0, devices=N, shapes=SHAPES):
  """Return random gradients [steps, devices, ...] of a different scale in each tensor."""
  rng, grads = np.random.default_rng(seed), {}
  for i, (name, shape) in enumerate(shapes.items()):
    normal = rng.standard_normal((steps, devices, *shape)) + 0.1
    grads[name] = (10.0 ** (i - 2) * normal).astype(np.float32)
  return grads


def program(exchange, mesh):
  """Return a jitted (gradients [steps, devices, ...], state) -> (means [steps, ...], state)."""
  axes = mesh.axis_names

  def steps(grads, state):
    grads = jax.tree.map(lambda g: g[:, 0], grads)
    state = jax.tree.map(lambda x: x[0], state)

    def one(state, g):
      mean, state = exchange.exchange(g, state)
      return state, mean

    state, means = lax.scan(one, state, grads)
    return means, jax.tree.map(lambda x: x[None], state)

  specs = dict(in_specs=(P(None, axes), P(axes)), out_specs=(P(), P(axes)))
  mapped = jax.shard_map(steps, mesh=mesh, check_vma=True, **specs)
  # A third of the time to compile; the collectives are the same.
  return jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 1})


def first_state(exchange, devices=N, shapes=SHAPES):
  own = exchange.init({k: jnp.zeros(s, jnp.float32) for k, s in shapes.items()})
  return jax.tree.map(lambda x: np.stack([x] * devices), own)


def run(exchange, grads, mesh=None):
  """Return the means of every step and the last state, as jax arrays."""
  mesh = mesh or make_mesh(replica=2)
  shapes = {name: g.shape[2:] for name, g in grads.items()}
  state = first_state(exchange, mesh.size, shapes)
  return program(exchange, mesh)(grads, state)


@functools.cache
def compiled(name):
  """Return an exchange on 2 x 4 devices, compiled once for all tests that only run it."""
  exchange = EXCHANGES[name]()
  return program(exchange, make_mesh(replica=2)), first_state(exchange)


@functools.cache
def fifty(name):
  """Return the means of fifty steps of an exchange and its last state, as numpy arrays."""
  steps, state = compiled(name)
  return jax.device_get(steps(gradients(50), state))


def unsent(state, name):
  """Return the sum in float64, over all devices, of the gradients still to be sent of a tensor."""
  total = np.zeros(SHAPES[name])
  if "inner" in state:
    total = total + unsent(state["inner"], name)
  for part in ("grads", "residual"):
    if part in state:
      total = total + np.sum(state[part][name], axis=0, dtype=np.float64)
  if "stripe" in state:
    stripes = np.asarray(state["stripe"][name], np.float64)
    whole = joined(stripes, total.size // stripes.shape[1])
    total = total + whole.reshape(total.shape)
  return total


def joined(stripes, count):
  """Return the columns of 1-bit stripes [devices, rows, own] side by side."""
  return np.moveaxis(stripes, 0, 1).reshape(stripes.shape[1], -1)[:, :count]
