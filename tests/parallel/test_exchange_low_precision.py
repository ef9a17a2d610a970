"""16 and 8 bits on the wire against numpy written from the equations."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxscale.exchange.low_precision import decode_int8, encode_int8, half_precision, int8
from support.exchanges import AXES, N, gradients, run

BLOCK = 64
SHAPE = {"w": (9, 143)}  # 1,287 elements: 21 blocks, 3 of each device's chunk


def assert_one_ulp(got, wanted, ulp):
  """Assert that values differ by one unit in the last place at most, and 99 % are equal."""
  assert np.all(np.abs(got - wanted) <= ulp * np.abs(wanted))
  assert np.mean(got == wanted) > 0.99


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_roundings_whatever_the_number_of_devices(dtype):
  payload = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
  grads = gradients(2, shapes=SHAPE)
  means, _ = run(half_precision(AXES, dtype), grads)
  for t in range(2):
    g = grads["w"][t].astype(np.float64)
    k = 0
    if dtype == "float16":
      k = 14 - 3 - int(np.floor(np.log2(np.abs(g).max())))
    total = (g * 2.0**k).astype(payload).astype(np.float64).sum(0)
    wanted = total.astype(payload).astype(np.float64) * 2.0**-k / N
    assert_one_ulp(means["w"][t], wanted, 2**-7 if dtype == "bfloat16" else 2**-10)


@pytest.mark.parametrize("sum_in", ["float32", "payload"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_float16_neither_overflows_nor_vanishes(sum_in, size):
  """All devices at the largest magnitude there is: the sum is N times it."""
  g = np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(size)
  grads = {"w": np.broadcast_to(g, (1, N, 64)).copy()}
  means, _ = run(half_precision(AXES, "float16", sum_in=sum_in), grads)
  np.testing.assert_allclose(means["w"][0], g, rtol=4e-3)


def test_sums_in_the_payload_err_by_a_rounding_a_term():
  grads = gradients(1, shapes=SHAPE)
  wanted = grads["w"].mean(1, dtype=np.float64)
  for dtype, ulp in (("bfloat16", 2**-8), ("float16", 2**-11)):
    means, _ = run(half_precision(AXES, dtype, sum_in="payload"), grads)  # pyright: ignore
    bound = N * ulp * np.abs(grads["w"]).mean(1)
    assert np.all(np.abs(means["w"] - wanted) <= bound)


def int8_reference(g, key_of):
  """One step in float64 from the equations; g [N, elements], whole blocks a chunk.

  key_of: device -> (key of its first, key of its second rounding).
  """

  def rounded(x, key):
    blocks = x.reshape(len(x), -1, BLOCK)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    bits = np.asarray(jax.random.bits(key, blocks.shape, jnp.uint16), np.float64)
    q = np.floor(blocks / np.where(scale == 0, 1, scale) + (bits + 0.5) / 65536)
    return (np.clip(q, -127, 127) * scale).reshape(x.shape)

  sent = [rounded(g[i].reshape(N, -1), key_of(i)[0]) for i in range(N)]
  owned = np.sum(sent, axis=0)  # [chunk's owner, elements]
  passed = [rounded(owned[d : d + 1], key_of(d)[1]) for d in range(N)]
  return np.concatenate(passed).reshape(-1) / N


def test_int8_is_the_reference_with_the_keys_it_says():
  grads = gradients(2, shapes=SHAPE)
  means, state = run(int8(AXES, block=BLOCK, seed=5), grads)
  assert state["step"].tolist() == [2] * N
  size = 9 * 143
  for t in range(2):
    g = np.zeros((N, 3 * BLOCK * N))
    g[:, :size] = grads["w"][t].reshape(N, -1)

    def key_of(device, t=t):
      key = jax.random.fold_in(jax.random.key(5), t)
      key = jax.random.fold_in(key, device)
      return jax.random.split(jax.random.fold_in(key, 0))

    wanted = int8_reference(g, key_of)[:size].reshape(9, 143)
    # A float32 quotient at an edge may round to the other side.
    assert np.mean(np.isclose(means["w"][t], wanted, rtol=1e-5, atol=1e-7)) > 0.995
    step = np.abs(g).max() / 127
    assert np.abs(means["w"][t] - wanted).max() <= 2.01 * step


def test_int8_keeps_blocks_within_tensors():
  """A bias next to weights a million times larger keeps its own scale."""
  rng = np.random.default_rng(0)
  grads = {
    "bias": rng.standard_normal((1, N, 7)).astype(np.float32) * np.float32(1e-6),
    "kernel": rng.standard_normal((1, N, 50)).astype(np.float32),
  }
  means, _ = run(int8(AXES, block=BLOCK), grads)
  for name, g in grads.items():
    wanted = g.mean(1, dtype=np.float64)
    assert np.abs(means[name] - wanted).max() <= 2 * np.abs(g).max() / 127


def test_int8_codes_whole_numbers_of_steps_exactly():
  """127 steps either way, a block of zeros, and the ends of the range."""
  steps = np.array([[127, -127, 5, 0], [0, 0, 0, 0]], np.float32).reshape(1, 8)
  payload = encode_int8(jnp.asarray(steps * 0.25), 4, jax.random.key(0))
  assert payload.dtype == jnp.int8 and payload.shape == (1, 8 + 2 * 4)
  assert payload[0, :8].tolist() == steps[0].tolist()
  np.testing.assert_array_equal(decode_int8(payload, 4), steps * 0.25)
