"""The gradient-noise scale against a quadratic whose noise is known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.mesh import make_mesh
from jaxscale.training import noise_scale
from support.steps import on_mesh, training

DIM, SIGMA, ROWS = 20, 0.5, 64
# loss_i = |w - x_i|^2 / 2 with x_i ~ N(0, SIGMA^2): the gradient of an example
# is w - x_i, so |G|^2 = |w|^2 and S = DIM SIGMA^2, exactly.
W = np.linspace(-0.3, 0.5, DIM).astype(np.float32)
ANALYTIC = DIM * SIGMA**2 / float((W.astype(np.float64) ** 2).sum())


def quadratic(params, model_state, batch, keys):
  del keys
  losses = 0.5 * jnp.square(params["w"] - batch["x"]).sum(-1)
  loss = jnp.where(batch["counts"], losses, 0.0).sum()
  examples = batch["counts"].sum(dtype=jnp.int32)
  return loss, (model_state, {"loss": loss, "examples": examples})


def run(batches, num_devices, micros):
  """Metrics after steps of rate 0."""
  mesh = make_mesh(devices=jax.devices()[:num_devices])
  init = lambda key: ({"w": jnp.array(W)}, {})  # noqa: E731
  options = dict(num_microbatches=micros, measure_noise_scale=True)
  (state, step), metrics = training(quadratic, init, optax.sgd(0.0), mesh, **options), {}
  for batch in batches:
    state, metrics = step(state, on_mesh(mesh, batch))
  return {k: v.item() for k, v in metrics.items()}


def measure(num_devices, micros, steps=400):
  rng = np.random.default_rng(0)
  draws = (rng.standard_normal((ROWS, 1, DIM)).astype(np.float32) for _ in range(steps))
  one = np.ones((ROWS, 1), bool)
  return run(({"x": SIGMA * x, "counts": one} for x in draws), num_devices, micros)


@pytest.mark.parametrize(("num_devices", "micros"), [(8, 1), (4, 2), (1, 8), (2, 1)])
def test_within_ten_percent_of_the_analytic_value(num_devices, micros):
  got = measure(num_devices, micros)
  assert got["noise_scale"] == pytest.approx(ANALYTIC, rel=0.1)
  assert got["gradient_noise"] == pytest.approx(DIM * SIGMA**2, rel=0.1)
  assert got["gradient_signal"] == pytest.approx((W**2).sum(), rel=0.1)


def test_devices_and_micro_batches_are_alike():
  """Small batches give the same on devices and one after another."""
  a, b = measure(8, 1, steps=5), measure(1, 8, steps=5)
  assert a["noise_scale"] == pytest.approx(b["noise_scale"], rel=1e-5)


# Rows of up to TOKENS tokens: that of a row are x_rt = a_r + z_rt, so that they go
# together. The summed gradient of n tokens is n w less n a_r and the sum of n z.
TOKENS, WITHIN = 6, 0.8


def windows(rng, unequal):
  x = SIGMA * rng.standard_normal((ROWS, 1, DIM))
  x = x + WITHIN * rng.standard_normal((ROWS, TOKENS, DIM))
  least = 1 if unequal else TOKENS
  counts = np.arange(TOKENS) < rng.integers(least, TOKENS + 1, (ROWS, 1))
  return {"x": x.astype(np.float32), "counts": counts}


def pairs(sums, counts, rows):
  """(signal, noise) by their definition, from all pairs of micro-batches, float64."""
  sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
  others = ~np.eye(len(counts), dtype=bool)
  signal = (sums @ sums.T)[others].sum() / np.outer(counts, counts)[others].sum()
  rest = np.square(sums).sum() - np.square(counts).sum() * signal
  return signal, rest / rows / (counts.sum() / rows) ** 2


@pytest.mark.parametrize(("num_devices", "micros"), [(4, 1), (2, 4)])
def test_of_tokens_it_is_what_the_definition_says(num_devices, micros):
  """Micro-batches that count different numbers of tokens; one of them counts none."""
  batch, parts = windows(np.random.default_rng(3), unequal=True), num_devices * micros
  batch["counts"][: ROWS // parts] = False
  got = run([batch], num_devices, micros)
  each = np.where(batch["counts"][..., None], W - batch["x"].astype(np.float64), 0.0)
  sums = each.sum(1).reshape(parts, -1, DIM).sum(1)
  counts = batch["counts"].reshape(parts, -1).sum(-1)
  assert counts[0] == 0 and len(set(counts)) > 2
  signal, noise = pairs(sums, counts, ROWS)
  assert got["gradient_signal"] == pytest.approx(signal, rel=1e-5)
  assert got["gradient_noise"] == pytest.approx(noise, rel=1e-5)
  assert got["noise_scale"] == pytest.approx(noise / signal, rel=1e-5)


@pytest.mark.parametrize("unequal", [False, True])
def test_of_tokens_it_is_near_the_analytic_value_in_rows(unequal):
  rng = np.random.default_rng(4)
  got = run((windows(rng, unequal) for _ in range(400)), 2, 4)
  n = np.arange(1 if unequal else TOKENS, TOKENS + 1)
  noise = DIM * (n**2 * SIGMA**2 + n * WITHIN**2).mean() / n.mean() ** 2
  assert got["gradient_signal"] == pytest.approx((W**2).sum(), rel=0.1)
  assert got["gradient_noise"] == pytest.approx(noise, rel=0.1)
  assert got["noise_scale"] == pytest.approx(noise / (W**2).sum(), rel=0.15)


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


@pytest.mark.parametrize("steps", [20, 600])
@pytest.mark.parametrize("times", [1 / 18, 1.0, 20.0, 66.5])
def test_the_interval_covers_the_true_scale(times, steps):
  """95 % in 400 runs each, whose batch the scale is some times as large as."""
  big, micros, dim, runs = 256, 4, 60, 400
  truth, small = times * big, big // micros
  mean = np.full(dim, np.sqrt(dim / truth / dim))  # S = dim, |G|^2 = dim / truth
  rng = np.random.default_rng(7)

  @jax.jit
  @jax.vmap
  def run(small_sq, big_sq):
    def step(state, squares):
      return noise_scale.update(state, squares[0], squares[1], small, big), None

    state, _ = jax.lax.scan(step, noise_scale.init(), (small_sq, big_sq))
    return noise_scale.metrics(state)

  covered, infinite = [], []
  for _ in range(runs // 50):
    grads = mean + rng.standard_normal((50, steps, micros, dim)) / np.sqrt(small)
    big_sq = (grads.mean(2) ** 2).sum(-1)
    got = run((grads**2).sum(-1).mean(-1).astype("f4"), big_sq.astype("f4"))
    low, high = np.asarray(got["noise_scale_low"]), np.asarray(got["noise_scale_high"])
    covered += [*((low <= truth) & (truth <= high))]
    infinite += [*np.isinf(high)]
    assert (low >= 0).all() and (low <= got["noise_scale"]).all()
    assert (got["noise_scale"] <= high).all()
  assert 0.92 <= np.mean(covered) <= 0.99
  if steps == 600:  # it is known where the batch is large, and not where it is small
    assert np.mean(infinite) == 0 if times < 1 else np.mean(infinite) > 0.5 or times < 60


def test_one_step_has_no_interval():
  state = noise_scale.update(noise_scale.init(), 2.0, 1.5, 1, 4)
  got = noise_scale.read(state)
  assert got["noise_scale"] is not None
  assert (got["noise_scale_low"], got["noise_scale_high"]) == (0.0, None)
  assert set(noise_scale.read(noise_scale.init()).values()) == {None}


def test_pure_noise_has_an_infinite_scale():
  state = noise_scale.update(noise_scale.init(), 1.0, 0.05, 1, 16)
  assert np.isinf(noise_scale.metrics(state)["noise_scale"])


def test_what_it_means_is_reported():
  reported = noise_scale.describe(1024.0, 600.0, 2048.0, 256)
  assert "1.02e+03 (95 %: 600 to 2.05e+03)" in reported
  assert "5 times the minimum number of steps" in reported
  assert "1.25 times the minimum number of examples" in reported
  for scale in (1024.0, np.inf):
    reported = noise_scale.describe(scale, 600.0, np.inf, 256)
    assert "above 600 (95 %)" in reported and "times the minimum" not in reported
