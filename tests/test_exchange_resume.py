"""A run that stops and goes on from a checkpoint is the run that did not stop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_exchange_contract import EXCHANGES

from jaxscale.checkpoint import Checkpoints
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.state import abstract_state, init_state
from jaxscale.step import make_train_step

WIDTH, OUT = 31, 9
KEEP_STATE = [
  name for name, make in EXCHANGES.items()
  if jax.tree.leaves(make().init({"w": jnp.zeros((WIDTH, OUT))}))
]  # fmt: skip


def init_fn(key):
  return {"b": jnp.zeros(OUT), "w": 0.1 * jax.random.normal(key, (WIDTH, OUT))}, ()


def loss_fn(params, model_state, batch, keys):
  del keys
  error = batch["x"] @ params["w"] + params["b"] - batch["y"]
  loss = jnp.sum(error**2)
  totals = {"loss": loss, "examples": jnp.asarray(len(batch["x"]), jnp.float32)}
  return loss, (model_state, totals)


def batch(step, mesh):
  rng = np.random.default_rng(step)
  x = rng.standard_normal((64, WIDTH)).astype(np.float32)
  y = x @ np.random.default_rng(99).standard_normal((WIDTH, OUT)).astype(np.float32)
  return jax.device_put({"x": x, "y": y}, batch_sharding(mesh))


@pytest.mark.parametrize("name", KEEP_STATE)
def test_the_state_goes_through_a_checkpoint_bit_for_bit(name, tmp_path):
  mesh, tx, exchange = make_mesh(replica=2), optax.sgd(0.005), EXCHANGES[name]()
  step = make_train_step(loss_fn, tx, mesh, exchange)
  state, losses = init_state(init_fn, tx, mesh, exchange), []
  for i in range(8):
    if i == 4:
      with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    state, metrics = step(state, batch(i, mesh))
    losses.append(metrics["loss"].item())
  with Checkpoints(tmp_path) as checkpoints:
    resumed = checkpoints.restore(abstract_state(init_fn, tx, mesh, exchange))
  assert resumed is not None and resumed.step == 4
  for i in range(4, 8):
    resumed, metrics = step(resumed, batch(i, mesh))
    assert metrics["loss"].item() == losses[i]
  jax.tree.map(np.testing.assert_array_equal, resumed, state)
  assert losses[-1] < losses[0]
