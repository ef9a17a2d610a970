"""One small model under compressed exchanges, with all optimizers at once."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxscale import collectives, optim
from jaxscale.exchange import Exchange, plain, planned
from jaxscale.exchange.low_precision import half_precision, int8
from jaxscale.exchange.one_bit import one_bit
from jaxscale.exchange.wrappers import delayed
from jaxscale.mesh import AXES, batch_sharding, make_mesh
from jaxscale.training.state import init_state
from jaxscale.training.step import make_train_step
from jaxscale.training.types import StepOptions
from support.compiling import fast_compile_options
from support.recipes import power_sgd, top_k

N, STEPS, ROWS, SEED = 8, 10, 64, 7
RATE, MOMENTUM, DECAY = 0.05, 0.9, 1e-3
OPTIMIZERS = {
  "sgd": optim.sgd(RATE, momentum=MOMENTUM, nesterov=False, weight_decay=DECAY),
  "lars": optim.lars(RATE, trust_coefficient=0.05),
  "lamb": optim.lamb(3e-3),
  "adamw": optim.adamw(1e-3, weight_decay=1e-2),
}
CLASSES, BLOCK = 10, 64
SHAPES = dict(conv=(3, 3, 2, 8), dense=(32, 24), head=(24, CLASSES))
SHAPES |= dict(head_bias=(CLASSES,), scale=(32,))


def by(algorithm: str) -> Exchange:
  """Return the mean by one of the collectives, as planned for the mesh of the step."""
  sizes = {"replica": 2, "data": 4}
  dims = [("data", 4), ("replica", 2)] if algorithm == "torus" else None
  return planned(collectives.plan(sizes, 0, algorithm, dims=dims))


def of_device(place: int) -> Exchange:
  """Return a broken exchange: the gradients of one device in place of the mean."""

  def exchange(grads, state):
    chosen = lax.axis_index(AXES) == place
    own = jax.tree.map(lambda g: jnp.where(chosen, g, jnp.zeros_like(g)), grads)
    return lax.psum(own, AXES), state

  return Exchange(lambda params: (), exchange)


def forgetting(inner: Exchange, part: str) -> Exchange:
  """Return a broken exchange: a part of its state stays that of the first step."""

  def exchange(grads, state):
    means, new = inner.exchange(grads, state)
    return means, new | {part: state[part]}

  return Exchange(inner.init, exchange)


ROUNDED = {
  "bf16": lambda: half_precision(AXES),
  "fp16": lambda: half_precision(AXES, "float16"),
  "int8": lambda: int8(AXES, block=BLOCK),
}
FEEDBACK = {
  "1-bit": lambda: one_bit(AXES, num_devices=N),
  "top-k": lambda: top_k(AXES, share=0.1),
  "PowerSGD": lambda: power_sgd(AXES, rank=2),
}
BROKEN = {
  "one device's": lambda: of_device(3),
  "1-bit without residual": lambda: forgetting(FEEDBACK["1-bit"](), "residual"),
  "1-bit without stripe": lambda: forgetting(FEEDBACK["1-bit"](), "stripe"),
  "top-k without residual": lambda: forgetting(FEEDBACK["top-k"](), "residual"),
  "PowerSGD without residual": lambda: forgetting(FEEDBACK["PowerSGD"](), "residual"),
}
UNROUNDED = {"plain": lambda: plain(AXES), "delayed": lambda: delayed(plain(AXES))}
EXCHANGES = UNROUNDED | ROUNDED | FEEDBACK | BROKEN


def recorded(inner: Exchange) -> Exchange:
  """Wrap an exchange so that its state has the inputs of each device."""

  def init(params):
    return {"own": jax.tree.map(jnp.zeros_like, params), "inner": inner.init(params)}

  def exchange(grads, state):
    means, new = inner.exchange(grads, state["inner"])
    return means, {"own": grads, "inner": new}

  return Exchange(init, exchange)


def side_by_side(optimizers: dict) -> optax.GradientTransformation:
  """Return an optimizer that applies one to each subtree; its state has the mean gradients too."""

  def init(params):
    states = {n: tx.init(params[n]) for n, tx in optimizers.items()}
    return states, jax.tree.map(jnp.zeros_like, params)

  def update(updates, state, params=None):
    assert params is not None
    done = {n: tx.update(updates[n], state[0][n], params[n]) for n, tx in optimizers.items()}
    states = {n: state for n, (_, state) in done.items()}
    return {n: moves for n, (moves, _) in done.items()}, (states, updates)

  return optax.GradientTransformation(init, update)


def first_params():
  rng = np.random.default_rng(SEED)
  params = {}
  for name, shape in SHAPES.items():
    fan = np.prod(shape[:-1]) if len(shape) > 1 else 16
    params[name] = (rng.normal(size=shape) / np.sqrt(fan)).astype(np.float32)
  params["scale"] += np.float32(1)
  return params


def init(key):
  del key
  return {n: jax.tree.map(jnp.asarray, first_params()) for n in OPTIMIZERS}, {}


@functools.cache
def batches():
  """Return noisy copies of ten images, sorted by class: a device sees two of the classes.

  The gradients of one device are far from the mean, so that a fault of an exchange shows
  in a few steps.
  """
  rng = np.random.default_rng(SEED)
  centres = rng.normal(size=(CLASSES, 4, 4, 2)) + 1.0
  made = []
  for _ in range(STEPS):
    label = np.sort(rng.integers(0, CLASSES, ROWS)).astype(np.int32)
    noise = rng.normal(size=(ROWS, 4, 4, 2))
    image = (centres[label] + 0.5 * noise).astype(np.float32)
    made.append({"image": image, "label": label})
  return made


def loss_of(p, batch, noise):
  """Return the summed losses of one model, in the dtype of its parameters."""
  dtype = p["head"].dtype
  x = (batch["image"] + 0.1 * noise).astype(dtype)
  taps = [[x[:, i : i + 2, j : j + 2] for j in range(3)] for i in range(3)]
  patches = jnp.stack([jnp.stack(row, axis=1) for row in taps], axis=1)
  h = jnp.tanh(jnp.einsum("bijyxc,ijcf->byxf", patches, p["conv"]))
  h = jnp.tanh((h.reshape(len(x), -1) * p["scale"]) @ p["dense"])
  logits = h @ p["head"] + p["head_bias"]
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
  return losses.sum()


def noise_of(keys):
  """Return the noise for the keys of rows, the same on any mesh."""
  return jax.vmap(lambda key: jax.random.normal(key, (4, 4, 2), jnp.float32))(keys)


def loss_fn(params, model_state, batch, keys):
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *params.values())
  losses = jax.vmap(loss_of, in_axes=(0, None, None))(stacked, batch, noise_of(keys))
  totals = dict(zip(params, losses, strict=True))
  totals["examples"] = jnp.sum(batch["label"] >= 0, dtype=jnp.int32)
  return losses.sum(), (model_state, totals)


class Run(NamedTuple):
  """Results of every step, by optimizer: numpy arrays.

  Attributes:
    losses: the losses before the step.
    own: the gradients [devices, ...] that went into the exchange.
    means: the gradients that came out of it.
    params: the parameters after the last step.
    kept: the state of the exchange after it.
  """

  losses: list[dict[str, float]]
  own: list[Any]
  means: list[Any]
  params: Any
  kept: Any


@functools.cache
def run(name: str, devices: int = N) -> Run:
  replica = 2 if devices == N else 1
  mesh = make_mesh(replica=replica, devices=jax.devices()[:devices])
  tx, exchange = side_by_side(OPTIMIZERS), recorded(EXCHANGES[name]())
  state = init_state(init, tx, mesh, exchange, seed=SEED)
  given = [jax.device_put(b, batch_sharding(mesh)) for b in batches()]
  step: Any = make_train_step(loss_fn, tx, mesh, exchange, options=StepOptions(seed=SEED))
  step = step.lower(state, given[0]).compile(compiler_options=fast_compile_options())
  losses, own, means = [], [], []
  for batch in given:
    state, metrics = jax.block_until_ready(step(state, batch))
    losses.append({n: float(metrics[n]) for n in OPTIMIZERS})
    own.append(jax.device_get(state.exchange_state["own"]))
    means.append(jax.device_get(state.opt_state[1]))
  kept = jax.device_get(state.exchange_state["inner"])
  return Run(losses, own, means, jax.device_get(state.params), kept)
