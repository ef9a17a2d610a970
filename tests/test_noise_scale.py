"""The gradient-noise scale against a quadratic whose noise is known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import noise_scale
from jaxscale.exchange import plain
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.state import init_state
from jaxscale.step import make_train_step

DIM, SIGMA, ROWS = 20, 0.5, 64
# loss_i = |w - x_i|^2 / 2 with x_i ~ N(0, SIGMA^2): the gradient of an example
# is w - x_i, so |G|^2 = |w|^2 and S = DIM SIGMA^2, exactly.
W = np.linspace(-0.3, 0.5, DIM).astype(np.float32)
ANALYTIC = DIM * SIGMA**2 / float((W.astype(np.float64) ** 2).sum())


def quadratic(params, model_state, batch, keys):
  del keys
  loss = 0.5 * jnp.square(params["w"] - batch["x"]).sum()
  examples = (batch["x"][:, 0] < jnp.inf).sum(dtype=jnp.int32)
  return loss, (model_state, {"loss": loss, "examples": examples})


def measure(num_devices, accumulate_steps, steps=400, lr=0.0):
  """Metrics after some steps that leave w where it is, if lr is 0."""
  mesh = make_mesh(devices=jax.devices()[:num_devices])
  tx, exchange = optax.sgd(lr), plain(mesh.axis_names)
  state = init_state(
    lambda key: ({"w": jnp.array(W)}, {}), tx, mesh, exchange, noise_scale=True
  )
  step = make_train_step(
    quadratic, tx, mesh, exchange, accumulate_steps=accumulate_steps, noise_scale=True
  )
  rng, metrics = np.random.default_rng(0), {}
  for _ in range(steps):
    x = SIGMA * rng.standard_normal((ROWS, DIM)).astype(np.float32)
    state, metrics = step(state, jax.device_put({"x": x}, batch_sharding(mesh)))
  return {k: v.item() for k, v in metrics.items()}


@pytest.mark.parametrize(("num_devices", "micros"), [(8, 1), (4, 2), (1, 8), (2, 1)])
def test_within_ten_percent_of_the_analytic_value(num_devices, micros):
  got = measure(num_devices, micros)
  assert got["noise_scale"] == pytest.approx(ANALYTIC, rel=0.1)
  assert got["gradient_noise"] == pytest.approx(DIM * SIGMA**2, rel=0.1)
  assert got["gradient_signal"] == pytest.approx((W**2).sum(), rel=0.1)


def test_devices_and_micro_batches_are_alike():
  """The same small batches, on devices or one after another."""
  a, b = measure(8, 1, steps=5), measure(1, 8, steps=5)
  assert a["noise_scale"] == pytest.approx(b["noise_scale"], rel=1e-5)


def test_the_estimates_are_unbiased():
  """Mean over many draws against closed forms, in float64 numpy."""
  rng, small, big = np.random.default_rng(1), 4, 32
  draws = []
  for _ in range(4000):
    grads = W - SIGMA * rng.standard_normal((big, DIM))
    small_sq = (grads.reshape(-1, small, DIM).mean(1) ** 2).sum(-1).mean()
    draws.append(noise_scale.estimate(small_sq, (grads.mean(0) ** 2).sum(), small, big))
  signal, noise = np.mean(draws, axis=0)
  assert signal == pytest.approx((W**2).sum(), rel=0.02)
  assert noise == pytest.approx(DIM * SIGMA**2, rel=0.02)


def test_pure_noise_has_an_infinite_scale():
  state = noise_scale.update(noise_scale.init(), 1.0, 0.05, 1, 16)
  assert np.isinf(noise_scale.metrics(state)["noise_scale"])


def test_averages_are_corrected_for_their_start():
  state = noise_scale.update(noise_scale.init(), 2.0, 1.5, 1, 4)
  signal, noise = noise_scale.estimate(2.0, 1.5, 1, 4)
  got = noise_scale.metrics(state)
  np.testing.assert_allclose(got["gradient_signal"], signal, rtol=1e-6)
  np.testing.assert_allclose(got["gradient_noise"], noise, rtol=1e-6)


def test_what_it_means_is_said():
  said = noise_scale.describe(1024.0, 256)
  assert "1,024" in said and "5 times the fewest steps" in said
  assert "1.25 times the fewest examples" in said
