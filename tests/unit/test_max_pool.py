"""The max-pool of ResNet's stem: values and gradients, also of equal maxima and NaN."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.models.layers import max_pool_3


def by_numpy(x, g):
  """Return outputs and the gradient by x, window by window, in float64."""
  x, by_x = x.astype(np.float64), np.zeros(x.shape)
  y = np.zeros(g.shape)
  for n, p, q, c in np.ndindex(*g.shape):
    window = x[n, 2 * p : 2 * p + 3, 2 * q : 2 * q + 3, c]
    i, j = np.unravel_index(window.argmax(), window.shape)
    y[n, p, q, c] = window[i, j]
    by_x[n, 2 * p + i, 2 * q + j, c] += g[n, p, q, c]
  return y, by_x


@pytest.mark.parametrize(("height", "width"), [(7, 9), (8, 6), (3, 4)])
def test_values_and_gradients_equal_numpy(height, width):
  rng = np.random.default_rng(height)
  x = np.maximum(rng.normal(size=(2, height, width, 3)), 0).astype(np.float32)  # equal zeros
  y, pull = jax.vjp(max_pool_3, jnp.array(x))
  g = rng.normal(size=y.shape).astype(np.float32)
  wanted, by_x = by_numpy(x, g)
  np.testing.assert_array_equal(y, wanted)
  np.testing.assert_allclose(pull(jnp.array(g))[0], by_x, rtol=1e-6, atol=1e-6)


def test_it_is_flax_in_bfloat16_with_a_gradient_rounded_once():
  x = jax.random.normal(jax.random.key(0), (2, 8, 8, 4), jnp.bfloat16)

  def flax(x):
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding="VALID")

  (y, pull), (wanted, pull_wide) = jax.vjp(max_pool_3, x), jax.vjp(flax, x.astype(jnp.float32))
  np.testing.assert_array_equal(y.astype(jnp.float32), wanted)
  by_x, wide = pull(jnp.ones_like(y) / 3)[0], pull_wide(jnp.full_like(wanted, 1 / 3))[0]
  assert by_x.dtype == jnp.bfloat16
  np.testing.assert_allclose(by_x.astype(jnp.float32), wide, rtol=2**-7)


def test_every_window_with_nan_is_nan():
  for i, j in itertools.product(range(3), repeat=2):
    x = jnp.zeros((1, 3, 3, 1)).at[0, i, j, 0].set(jnp.nan)
    assert jnp.isnan(max_pool_3(x)).all()
