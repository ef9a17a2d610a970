"""`models.convolution` against XLA's own convolution, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxscale.models.convolution import Conv, convolve

NUMBERS = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize(
  "size, stride, padding",
  [
    ((3, 3), 1, "SAME"),
    ((5, 4), 2, ((0, 2), (1, 0))),
    ((5, 5), 1, "VALID"),
    ((8, 8), 1, ((1, 1), (1, 1))),
  ],
)
def test_it_is_the_convolution(size, stride, padding):
  x = jax.random.normal(jax.random.key(0), (2, *size, 3))
  kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))
  strides = (stride, stride)

  def plain(x, kernel):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NUMBERS)

  def ours(x, kernel):
    return convolve(x, kernel, strides, padding)

  for a, b in zip(both(plain, x, kernel), both(ours, x, kernel), strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def both(function, x, kernel):
  out, backward = jax.vjp(function, x, kernel)
  return out, *backward(jnp.sin(out))


def lowered(size, platform, **options):
  layer = Conv(4, (3, 3), **options)
  shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, size, size, 8)))
  step = jax.jit(lambda p, x: layer.apply(p, x))
  traced = step.trace(shapes, jax.ShapeDtypeStruct((1, size, size, 8), jnp.float32))
  return traced.lower(lowering_platforms=(platform,)).as_text()


def test_only_cpus_and_small_images_are_spared_the_convolution():
  assert "convolution" not in lowered(2, "cpu")
  assert "dot_general" not in lowered(2, "cuda")
  assert "dot_general" not in lowered(2, "tpu")
  assert "dot_general" not in lowered(4, "cpu")
  assert "dot_general" not in lowered(2, "cpu", feature_group_count=2)


def test_it_runs_where_devices_have_parts_of_the_batch():
  mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
  x = jax.random.normal(jax.random.key(0), (8, 2, 2, 3))
  kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))

  @jax.shard_map(mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P())
  def grads(x, kernel):
    return jax.grad(lambda k: (convolve(x, k, (1, 1), "SAME") ** 2).sum())(kernel)

  whole = jax.grad(lambda k: (convolve(x, k, (1, 1), "SAME") ** 2).sum())(kernel)
  np.testing.assert_allclose(jax.jit(grads)(x, kernel), whole, rtol=1e-5)
