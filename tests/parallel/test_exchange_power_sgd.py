"""PowerSGD against numpy from its equations, and what its algebra promises."""

import jax.numpy as jnp
import numpy as np

from support.exchanges import AXES, N, gradients, run
from support.recipes import exchange_power_sgd, power_sgd

RANK = 3
SHAPES = {"bias": (31,), "conv": (3, 3, 5, 17), "tiny": (5, 3), "wide": (37, 130)}


def projector(p):
  """Onto the columns of p: not Gram-Schmidt, and no sign or order to agree on."""
  u, _, _ = np.linalg.svd(p, full_matrices=False)
  return u @ u.T


def reference(grads, q):
  """Means and residuals of every step, gradients [steps, N, n, m], in float64.

  With P^ any orthonormal basis, result = P^ P^T mean x, and the next Q spans
  (mean x)^T P^; only the span of Q counts.
  """
  residual, means = np.zeros(grads.shape[1:]), []
  q = q.astype(np.float64)
  for g in grads.astype(np.float64):
    x = g + residual
    onto = projector(x.mean(0) @ q)
    means.append(onto @ x.mean(0))
    residual = x - onto @ x
    basis = np.linalg.svd(onto)[0][:, : q.shape[1]]
    q = x.mean(0).T @ basis
  return np.stack(means), residual


def test_four_steps_are_the_reference():
  grads = gradients(4, shapes=SHAPES)
  exchange = power_sgd(AXES, rank=RANK, seed=3)
  means, state = run(exchange, grads)
  first = exchange.init({k: jnp.zeros(s) for k, s in SHAPES.items()})["q"]
  for name, q in zip(("conv", "wide"), first, strict=True):
    shape = exchange_power_sgd.matrix_shape(SHAPES[name], RANK)
    assert shape and q.shape == (shape[1], RANK)
    wanted, residual = reference(grads[name].reshape(4, N, *shape), np.asarray(q))
    tolerance = 1e-4 * np.abs(grads[name]).max()
    got = np.asarray(means[name]).reshape(wanted.shape)
    np.testing.assert_allclose(got, wanted, atol=tolerance)
    left = np.asarray(state["residual"][name]).reshape(residual.shape)
    np.testing.assert_allclose(left, residual, atol=tolerance)
  for name in ("bias", "tiny"):  # as small as their P and Q
    wanted = grads[name].mean(1, dtype=np.float64)
    np.testing.assert_allclose(means[name], wanted, rtol=1e-5, atol=1e-6)


def low_rank(rank, seed, n=40, m=30):
  rng = np.random.default_rng(seed)
  left, right = rng.standard_normal((n, rank)), rng.standard_normal((rank, m))
  return (left @ right).astype(np.float32)


def test_a_gradient_of_low_rank_goes_whole_also_after_one_of_lower_rank():
  """A direction that found nothing is not lost: rank 1, 0, then 3 at rank 3."""
  steps = [low_rank(1, 0), np.zeros((40, 30), np.float32), low_rank(3, 1)]
  grads = {"w": np.stack([np.stack([g] * N) for g in steps])}
  means, state = run(power_sgd(AXES, rank=3), grads)
  for mean, g in zip(means["w"], steps, strict=True):
    np.testing.assert_allclose(mean, g, atol=5e-4)  # of numbers up to 6
  assert np.abs(state["residual"]["w"]).max() < 5e-4
