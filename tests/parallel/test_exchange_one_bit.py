"""1-bit SGD against numpy written from CNTK's equations, one column at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from jaxscale.exchange.one_bit import dequantise_columns, one_bit, quantise_columns, shrinks
from jaxscale.mesh import make_mesh
from support.errors import config_error
from support.exchanges import AXES, EXCHANGES, SHAPES, N, compiled, gradients, joined, run


def quantised(column):
  """Q of one column, in float64."""
  high = column >= 0
  means = [np.mean(column[high == side]) if np.any(high == side) else 0.0 for side in (0, 1)]
  return np.where(high, means[1], means[0])


def quantised_twice(column):
  """Q of one column with 2 bits, in float64: each half is split again at its mean."""
  sent = np.zeros_like(column)
  for half in (column >= 0, column < 0):
    far = half & (np.abs(column) >= np.abs(column[half].mean() if half.any() else 0.0))
    for chosen in (far, half & ~far):
      sent[chosen] = column[chosen].mean() if chosen.any() else 0.0
  return sent


Q = {"one bit": (quantised, 1), "two bit": (quantised_twice, 2)}


def reference(grads, quantised=quantised):
  """Means of every step of one tensor, gradients [steps, N, rows, columns]."""
  _, n, rows, count = grads.shape
  residual, owner = np.zeros((n, rows, count)), np.zeros((rows, count))
  means = []
  for g in grads.astype(np.float64):
    x = g + residual
    sent = np.apply_along_axis(quantised, 1, x)
    residual = x - sent
    y = sent.sum(0) + owner
    passed = np.apply_along_axis(quantised, 0, y)
    owner = y - passed
    means.append(passed / n)
  return np.stack(means), residual, owner


@pytest.mark.parametrize("kind", Q)
def test_three_steps_are_the_reference(kind):
  """A vector is one column, tiny tensors go whole; those of equal columns are one array inside."""
  quantised, bits = Q[kind]
  shapes = SHAPES | {"conv's": (45, 17), "again": (1, 45, 17), "vector's": (1001,)}
  grads = gradients(3, shapes=shapes)
  means, state = jax.device_get(run(EXCHANGES[kind](), grads))
  for name, shape in shapes.items():
    if not shrinks(shape, N, bits):
      np.testing.assert_allclose(means[name], grads[name].mean(1), rtol=1e-6, atol=1e-8)
      continue
    count = shape[-1] if len(shape) > 1 else 1
    wanted, residual, owner = reference(grads[name].reshape(3, N, -1, count), quantised)
    close = {"rtol": 1e-5, "atol": 1e-5 * np.abs(grads[name]).max()}
    mean = np.reshape(means[name], wanted.shape)
    np.testing.assert_allclose(mean, wanted, rtol=1e-5, atol=0.1 * close["atol"])
    left = np.reshape(state["residual"][name], residual.shape)
    np.testing.assert_allclose(left, residual, **close)
    np.testing.assert_allclose(joined(state["stripe"][name], count), owner, **close)
  assert not shrinks(SHAPES["bias"], N) and shrinks(SHAPES["vector"], N)


def test_the_payload_is_the_bits_and_two_means():
  x = np.array([3, -1, 0, -2, 5, -0.5, 0.25, -0.25, -9, 1], np.float32)
  payload = np.asarray(quantise_columns(x[:, None]))[:, 0]
  assert payload.dtype == np.uint8 and payload.shape == (2 + 8,)
  np.testing.assert_array_equal(payload[:2], np.packbits(x >= 0))
  low, high = x[x < 0].mean(), x[x >= 0].mean()
  np.testing.assert_allclose(payload[2:].view(np.float32), [low, high], rtol=1e-6)
  wanted = np.where(x >= 0, high, low)
  np.testing.assert_allclose(dequantise_columns(payload[:, None], 10)[:, 0], wanted, rtol=1e-6)


def test_the_payload_of_two_bits():
  x = np.random.default_rng(1).standard_normal(45).astype(np.float32)
  payload = np.asarray(quantise_columns(x[:, None], 2))[:, 0]
  assert payload.shape == (2 * 6 + 16,)
  wanted = quantised_twice(x.astype(np.float64))
  decoded = dequantise_columns(payload[:, None], 45, 2)[:, 0]
  np.testing.assert_allclose(decoded, wanted, rtol=1e-6)
  assert len(np.unique(decoded)) == 4
  # Two bits leave less than half of the error of one.
  errors = [np.square(x - q(x.astype(np.float64))).sum() for q in (quantised, quantised_twice)]
  assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_half_without_elements_is_zero(sign):
  x = jnp.full((5,), sign, jnp.float32)
  payload = quantise_columns(x[:, None])
  np.testing.assert_array_equal(dequantise_columns(payload, 5)[:, 0], x)
  values = np.asarray(payload[1:, 0]).view(np.float32)
  assert sorted(values) == sorted([0.0, sign])


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


def test_another_number_of_devices_is_refused_before_compiling():
  mesh = make_mesh(devices=jax.devices()[:4])
  exchange = one_bit(AXES, num_devices=N)
  g = {"w": jnp.zeros((64, 20))}
  state = exchange.init(g)

  def step(g):
    g = lax.pcast(g, AXES, to="varying")
    return exchange.exchange(g, lax.pcast(state, AXES, to="varying"))[0]

  with config_error(match=r"one_bit.num_devices=8 differs from the 4 devices of the axes"):
    jax.eval_shape(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P()), g)
