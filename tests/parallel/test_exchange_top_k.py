"""The largest elements with error feedback against numpy from the equations."""

import math

import jax
import numpy as np

from support.exchanges import AXES, N, gradients, run
from support.recipes import top_k

SHARE = 0.05


def reference(grads, share=SHARE):
  """Means of every step and the residuals, gradients [steps, N, elements]."""
  k = math.ceil(share * grads.shape[-1])
  residual, means = np.zeros(grads.shape[1:]), []
  for g in grads.astype(np.float64):
    x = g + residual
    sent = np.zeros_like(x)
    for i in range(len(x)):
      places = np.argsort(-np.abs(x[i]), kind="stable")[:k]
      sent[i, places] = x[i, places]
    residual = x - sent
    means.append(sent.mean(0))
  return np.stack(means), residual


def assert_close(got, wanted):
  got = np.asarray(got).reshape(wanted.shape)
  scale = 1e-6 * np.abs(wanted).max()
  np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=scale)


def test_three_steps_are_the_reference():
  grads = gradients(3)
  means, state = run(top_k(AXES, share=SHARE), grads)
  for name in ("conv", "dense", "vector", "wide"):
    wanted, residual = reference(grads[name].reshape(3, N, -1))
    assert_close(means[name], wanted)
    assert_close(state["residual"][name], residual)
    sent = np.count_nonzero(means[name][0])
    assert sent <= N * math.ceil(SHARE * residual.shape[-1])
  for name in ("bias", "scalar"):  # 8 devices' k are as many as there are
    assert_close(means[name], grads[name].mean(1, dtype=np.float64))
    assert not np.any(state["residual"][name])


def test_the_largest_of_a_bucket_may_all_lie_in_one_tensor():
  grads = gradients(3)
  exchange = top_k(AXES, share=SHARE, per="bucket")
  means, state = run(exchange, grads)
  names = sorted(grads, reverse=True)  # the last leaf first
  flat = np.concatenate([grads[n].reshape(3, N, -1) for n in names], axis=-1)
  wanted, residual = reference(flat)
  sent = [np.asarray(means[n]).reshape(3, -1) for n in names]
  assert_close(np.concatenate(sent, axis=-1), wanted)
  left = [np.asarray(state["residual"][n]).reshape(N, -1) for n in names]
  assert_close(np.concatenate(left, axis=-1), residual)
  assert np.any(means["wide"]) and not np.any(means["bias"])


def test_the_share_is_counted_without_rounding_errors():
  """0.07 of 100 is 7, though the float product is a little more."""
  grads = {"w": np.random.default_rng(0).standard_normal((1, N, 100))}
  grads = jax.tree.map(lambda g: g.astype(np.float32), grads)
  _, state = run(top_k(AXES, share=0.07), grads)
  assert (np.asarray(state["residual"]["w"]) == 0).sum(-1).tolist() == [7] * N
