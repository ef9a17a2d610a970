"""1-bit SGD against numpy written from CNTK's equations, one column at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxscale.errors import ConfigError
from jaxscale.exchange.one_bit import dequantise_columns, one_bit, quantise_columns, shrinks
from jaxscale.exchange.wrappers import warm_start
from jaxscale.mesh import make_mesh
from support.exchanges import AXES, EXCHANGES, SHAPES, N, compiled, gradients, joined, run


def quantised(column):
  """Q of one column, in float64."""
  high = column >= 0
  mean = {
    side: column[high == side].mean() if np.any(high == side) else 0.0 for side in (False, True)
  }
  return np.array([mean[bool(h)] for h in high])


def reference(grads):
  """Means of every step of one tensor, gradients [steps, N, rows, columns]."""
  _, n, rows, count = grads.shape
  residual, owner = np.zeros((n, rows, count)), np.zeros((rows, count))
  means = []
  for g in grads.astype(np.float64):
    x = g + residual
    sent = np.stack(
      [np.stack([quantised(x[i, :, j]) for j in range(count)], axis=1) for i in range(n)]
    )
    residual = x - sent
    y = sent.sum(0) + owner
    passed = np.stack([quantised(y[:, j]) for j in range(count)], axis=1)
    owner = y - passed
    means.append(passed / n)
  return np.stack(means), residual, owner


@functools.cache
def three():
  """Three steps: gradients, means, state."""
  return gradients(3), *jax.device_get(run(EXCHANGES["one bit"](), gradients(3)))


def test_three_steps_are_the_reference():
  grads, means, state = three()
  for name in ("conv", "dense", "wide"):
    rows, count = np.prod(SHAPES[name][:-1], dtype=int), SHAPES[name][-1]
    wanted, residual, owner = reference(grads[name].reshape(3, N, rows, count))
    scale = np.abs(grads[name]).max()
    got = np.asarray(means[name]).reshape(wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * scale)
    got = np.asarray(state["residual"][name]).reshape(residual.shape)
    np.testing.assert_allclose(got, residual, rtol=1e-5, atol=1e-5 * scale)
    got = joined(state["stripe"][name], count)
    np.testing.assert_allclose(got, owner, rtol=1e-5, atol=1e-5 * scale)


def test_a_vector_is_one_column_and_tiny_tensors_go_whole():
  grads, means, _ = three()
  wanted, _, _ = reference(grads["vector"][..., None])
  np.testing.assert_allclose(means["vector"], wanted[..., 0], rtol=1e-5, atol=1e-6)
  for name in ("bias", "scalar"):
    assert not shrinks(SHAPES[name], N)
    np.testing.assert_allclose(means[name], grads[name].mean(1), rtol=1e-6, atol=1e-8)


def test_the_payload_is_the_bits_and_two_means():
  x = np.array([3, -1, 0, -2, 5, -0.5, 0.25, -0.25, -9, 1], np.float32)
  payload = np.asarray(quantise_columns(x[:, None]))[:, 0]
  assert payload.dtype == np.uint8 and payload.shape == (2 + 8,)
  np.testing.assert_array_equal(payload[:2], np.packbits(x >= 0))
  low, high = x[x < 0].mean(), x[x >= 0].mean()
  np.testing.assert_allclose(payload[2:].view(np.float32), [low, high], rtol=1e-6)
  wanted = np.where(x >= 0, high, low)
  np.testing.assert_allclose(dequantise_columns(payload[:, None], 10)[:, 0], wanted, rtol=1e-6)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_half_without_elements_is_zero(sign):
  x = jnp.full((5,), sign, jnp.float32)
  payload = quantise_columns(x[:, None])
  np.testing.assert_array_equal(dequantise_columns(payload, 5)[:, 0], x)
  values = np.asarray(payload[1:, 0]).view(np.float32)
  assert sorted(values) == sorted([0.0, sign])


def test_the_residual_of_either_half_sums_to_zero():
  """So that the sum of a column arrives in the same step."""
  x = np.random.default_rng(0).standard_normal((1000, 6)).astype(np.float32)
  left = x - np.asarray(dequantise_columns(quantise_columns(x), 1000))
  for half in (x >= 0, x < 0):
    np.testing.assert_allclose(np.where(half, left, 0).sum(0), 0, atol=2e-3)


def test_the_residual_stays_bounded():
  """After 50 steps it is no larger than a few gradients, not 50 of them."""
  steps, state = compiled("one bit")
  _, state = steps(gradients(50), state)
  for name in ("conv", "dense", "wide"):
    largest = np.abs(gradients(50)[name]).max()
    assert np.abs(state["residual"][name]).max() < 5 * largest


@pytest.mark.slow
def test_the_warm_start_is_plain_then_one_bit_from_nothing():
  grads = gradients(50)
  steps, state = compiled("warm one bit")
  means, state = jax.device_get(steps(grads, state))
  one_bit_steps, first = compiled("one bit")
  later = {name: np.roll(g, -5, axis=0) for name, g in grads.items()}
  cold, _ = one_bit_steps(later, first)
  for name in SHAPES:
    wanted = grads[name][:5].mean(1, dtype=np.float64)
    close = {"rtol": 1e-5, "atol": 1e-6 * np.abs(grads[name]).max()}
    np.testing.assert_allclose(means[name][:5], wanted, **close)
    np.testing.assert_allclose(means[name][5:], cold[name][:-5], **close)
  assert state["step"].tolist() == [50] * N
  assert warm_start(exchange := one_bit(AXES, num_devices=N), AXES, steps=0) == exchange


def test_another_number_of_devices_is_refused_before_compiling():
  mesh = make_mesh(devices=jax.devices()[:4])
  exchange = one_bit(AXES, num_devices=N)
  g = {"w": jnp.zeros((64, 20))}
  state = exchange.init(g)

  def step(g):
    g = lax.pcast(g, AXES, to="varying")
    return exchange.exchange(g, lax.pcast(state, AXES, to="varying"))[0]

  with pytest.raises(ConfigError, match=r"one_bit.num_devices=8: the axes.*have 4"):
    jax.eval_shape(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P()), g)


def test_tensors_of_equal_columns_stay_apart():
  """They are one array inside."""
  shapes = {"a": (3, 3, 5, 17), "b": (45, 17), "c": (1, 45, 17), "d": (40,), "e": (40,)}
  grads = gradients(2, shapes=shapes)
  means, state = run(one_bit(AXES, num_devices=N), grads)
  for name, shape in shapes.items():
    count = shape[-1] if len(shape) > 1 else 1
    wanted, residual, owner = reference(grads[name].reshape(2, N, -1, count))
    close = {"rtol": 1e-5, "atol": 1e-5 * np.abs(grads[name]).max()}
    np.testing.assert_allclose(np.reshape(means[name], wanted.shape), wanted, **close)
    left = np.reshape(state["residual"][name], residual.shape)
    np.testing.assert_allclose(left, residual, **close)
    np.testing.assert_allclose(joined(state["stripe"][name], count), owner, **close)
