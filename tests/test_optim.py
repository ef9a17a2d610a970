"""Optimizers against golden vectors, float64 numpy and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import optim

# One layer of three weights, three steps: gradients, rates, and the settings
# that research on six LARS forms used for its float64 vectors.
W0 = [1.0, -2.0, 3.0]
GRADS = [[0.1, 0.2, -0.3], [-0.2, 0.1, 0.4], [0.3, -0.1, 0.2]]
RATES = [1.0, 2.0, 4.0]
LARS_GOLDEN = {
  1: [0.99, -2.006666666667, 3.01],
  3: [0.913293627721, -1.964773501163, 2.813361955594],
}


def run(tx, params, grads):
  """Parameters after every step."""
  state, out = tx.init(params), []
  for g in grads:
    updates, state = tx.update(g, state, params)
    params = optax.apply_updates(params, updates)
    out.append(params)
  return out


def test_lars_golden_vectors():
  with jax.enable_x64(True):
    rates = jnp.array(RATES)
    tx = optim.lars(
      lambda step: rates[step], weight_decay=0.05, trust_coefficient=0.01, mask=None
    )
    steps = run(tx, jnp.array(W0), [jnp.array(g) for g in GRADS])
  for step, golden in LARS_GOLDEN.items():
    np.testing.assert_allclose(steps[step - 1], golden, rtol=0, atol=1e-12)


def test_lars_is_not_optax_lars():
  """The reason to have our own: the other's denominator is |g + wd w|."""
  tx = optax.lars(1.0, weight_decay=0.05, trust_coefficient=0.01)
  (after,) = run(tx, jnp.array(W0), [jnp.array(GRADS[0])])
  assert abs(float(after[0]) - LARS_GOLDEN[1][0]) > 0.01


def numpy_lars(w, grads, lr, m, wd, eta, nesterov):
  v = np.zeros_like(w)
  for g in grads:
    ratio = 1.0
    if w.ndim > 1:
      if np.linalg.norm(w) > 0 and np.linalg.norm(g) > 0:
        ratio = eta * np.linalg.norm(w) / (np.linalg.norm(g) + wd * np.linalg.norm(w))
      g = g + wd * w
    u = lr * ratio * g
    v = m * v + u
    w = w - (m * v + u if nesterov else v)
  return w


def numpy_sgd(w, grads, lr, m, wd, nesterov):
  v = np.zeros_like(w)
  for g in grads:
    g = g + wd * w if w.ndim > 1 else g
    v = m * v + g
    w = w - lr * (g + m * v if nesterov else v)
  return w


def numpy_adam(w, grads, lr, b1, b2, eps, wd, layerwise):
  mean, var = np.zeros_like(w), np.zeros_like(w)
  for t, g in enumerate(grads, 1):
    mean, var = b1 * mean + (1 - b1) * g, b2 * var + (1 - b2) * g * g
    r = (mean / (1 - b1**t)) / (np.sqrt(var / (1 - b2**t)) + eps)
    ratio = 1.0
    if w.ndim > 1:
      r = r + wd * w
      if layerwise:
        ratio = np.linalg.norm(w) / np.linalg.norm(r)
    w = w - lr * ratio * r
  return w


REFERENCES = {
  "lars": (
    optim.lars(0.5, momentum=0.8, weight_decay=0.1, trust_coefficient=0.02),
    lambda w, g: numpy_lars(w, g, 0.5, 0.8, 0.1, 0.02, False),
  ),
  "lars nesterov": (
    optim.lars(0.5, weight_decay=0.1, trust_coefficient=0.02, nesterov=True),
    lambda w, g: numpy_lars(w, g, 0.5, 0.9, 0.1, 0.02, True),
  ),
  "sgd": (
    optim.sgd(0.1, weight_decay=0.01),
    lambda w, g: numpy_sgd(w, g, 0.1, 0.9, 0.01, True),
  ),
  "sgd heavy ball": (
    optim.sgd(0.1, nesterov=False, weight_decay=0.01),
    lambda w, g: numpy_sgd(w, g, 0.1, 0.9, 0.01, False),
  ),
  "adamw": (
    optim.adamw(0.01, weight_decay=0.1),
    lambda w, g: numpy_adam(w, g, 0.01, 0.9, 0.999, 1e-8, 0.1, False),
  ),
  "lamb": (
    optim.lamb(0.01, weight_decay=0.1),
    lambda w, g: numpy_adam(w, g, 0.01, 0.9, 0.999, 1e-6, 0.1, True),
  ),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("shape", [(5, 7), (7,), (3, 3, 4, 2)])
def test_against_numpy(name, shape):
  tx, reference = REFERENCES[name]
  rng = np.random.default_rng(0)
  w, *grads = rng.standard_normal((6, *shape))
  # optax's own bias correction mixes float32 into float64 under strict rules.
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    got = run(tx, jnp.array(w), [jnp.array(g) for g in grads])[-1]
  np.testing.assert_allclose(got, reference(w, grads), rtol=1e-10)


def test_zero_norms_have_ratio_one():
  tx = optim.lars(0.5, momentum=0.0, weight_decay=0.0, trust_coefficient=0.001)
  zero, one = jnp.zeros((2, 2)), jnp.ones((2, 2))
  (moved,) = run(tx, zero, [one])  # a zero layer can leave zero
  np.testing.assert_array_equal(moved, -0.5 * one)
  (stayed,) = run(tx, one, [zero])
  np.testing.assert_array_equal(stayed, one)


def test_norms_are_float32_for_bfloat16():
  """256 ones: their squares' running sum in bfloat16 would stop at 256."""
  w = jnp.ones((64, 64), jnp.bfloat16)
  tx = optim.lars(1.0, momentum=0.0, weight_decay=0.0, trust_coefficient=0.25)
  (after,) = run(tx, w, [w])
  np.testing.assert_array_equal(after, 0.75 * w)


def test_masks():
  params = {
    "a": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
    "scale": jnp.ones(()),
  }
  mask = optim.kernels(params)
  assert mask == {"a": {"kernel": True, "bias": False}, "scale": False}
  mask = optim.matching(r"^a/")(params)
  assert mask == {"a": {"kernel": True, "bias": True}, "scale": False}
  # An excluded leaf moves by the bare rate: no ratio, no decay.
  grads = jax.tree.map(jnp.ones_like, params)
  (after,) = run(optim.lars(0.5, weight_decay=0.1), params, [grads])
  np.testing.assert_array_equal(after["a"]["bias"], [0.5, 0.5])
  with jax.numpy_dtype_promotion("standard"):  # for optax's bias correction
    (after,) = run(optim.lamb(0.5, weight_decay=0.1), params, [grads])
  np.testing.assert_allclose(after["a"]["bias"], [0.5, 0.5], rtol=1e-5)


def test_schedules_at_their_corners():
  poly = optim.warmup_polynomial(10.0, 5, 20, end=1e-4, power=2)
  assert float(poly(0)) == 0.0
  assert float(poly(1)) == pytest.approx(2.0)
  assert float(poly(5)) == pytest.approx(10.0)
  # end + (peak - end) (1 - 15/16)^2, the last value of Google's schedule
  assert float(poly(20)) == pytest.approx(1e-4 + (10 - 1e-4) / 256, rel=1e-5)
  cosine = optim.warmup_cosine(2.0, 4, 12, end=0.5)
  values = [float(cosine(s)) for s in (0, 2, 4, 8, 12, 99)]
  assert values == pytest.approx([0, 1.0, 2.0, 1.25, 0.5, 0.5])
  steps = optim.warmup_steps(1.0, 2, (4, 6), factor=0.1)
  values = [float(steps(s)) for s in range(8)]
  assert values == pytest.approx([0, 0.5, 1, 1, 0.1, 0.1, 0.01, 0.01])
  for schedule in (poly, cosine, steps):
    # Pure functions of a traced step as well.
    np.testing.assert_allclose(
      jax.vmap(schedule)(jnp.arange(12)),
      [float(schedule(s)) for s in range(12)],
      rtol=1e-6,
    )
  assert float(optim.warmup_cosine(1.0, 0, 10)(0)) == 1.0


def test_scaling_rules():
  # Goyal et al.: 0.1 at 256 is 3.2 at 8192.
  assert optim.scale_learning_rate(0.1, 8192, 256, "linear") == pytest.approx(3.2)
  assert optim.scale_learning_rate(0.1, 1024, 256, "sqrt") == pytest.approx(0.2)
  assert optim.scale_learning_rate(0.1, 1024, 256, "none") == 0.1
