"""Losses on the outputs of all rows: equal on any number of devices and micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.mesh import batch_axes, make_mesh
from jaxscale.training.gathered import GatheredObjective, gathered_loss
from support.leaves import assert_close
from support.steps import on_mesh, training

RNG = np.random.default_rng(0)
BATCH = {
  "a": RNG.normal(size=(32, 6)).astype("float32"),
  "b": RNG.normal(size=(32, 6)).astype("float32"),
}


def init(key):
  return {"w": 0.3 * jax.random.normal(key, (6, 5))}, {}


def apply(params, state, batch, train, keys):
  noise = jax.vmap(lambda k: jax.random.uniform(k, (6,)))(keys) if train else jnp.ones(())
  return (jnp.tanh(batch["a"] * noise @ params["w"]), jnp.tanh(batch["b"] @ params["w"])), state


def info_nce(outputs, batch, everyone):
  a, b = outputs
  loss = optax.softmax_cross_entropy_with_integer_labels
  return loss(a @ everyone.outputs[1].T, everyone.rows) + loss(
    b @ everyone.outputs[0].T, everyone.rows
  )


def barlow(outputs, batch, everyone):
  """The same value for every row."""
  a, b = ((x - x.mean(0)) / x.std(0) for x in everyone.outputs)
  c = a.T @ b / len(a)
  return jnp.full(len(everyone.rows), ((c - jnp.eye(5)) ** 2).sum())


@pytest.mark.parametrize("objective", [info_nce, barlow])
def test_x(objective):
  def run(n, micros, **mesh):
    mesh = make_mesh(devices=jax.devices()[:n], **mesh)
    loss = gathered_loss(apply, GatheredObjective(objective), batch_axes(mesh))
    state, step = training(loss, init, optax.sgd(0.3), mesh, num_microbatches=micros)
    for _ in range(3):
      state, metrics = step(state, on_mesh(mesh, BATCH))
    return jax.device_get((state.params, metrics))

  one = run(1, 1)
  for n, m in ((1, 4), (4, 1), (8, 4)):
    assert_close(run(n, m), one, rtol=1e-6, atol=1e-6)
