"""ConvNeXt and U-Net: training on 8 devices equals that on one; a field as the target."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxscale import config as cfg
from jaxscale import data, models
from jaxscale.models.convolution import convolve
from jaxscale.models.layers import max_pool_2
from support.errors import config_error
from support.libraries import made_of, trained
from support.trees import worst_leaf

RNG = np.random.default_rng(0)
PHOTOS = RNG.integers(0, 256, (32, 16, 16, 3)).astype(np.uint8)
CLASSES = RNG.integers(0, 3, 32)
PLANES = RNG.normal(size=(32, 10, 8, 2)).astype("float32")
VOLUMES = RNG.normal(size=(32, 4, 6, 8, 1)).astype("float32")
CONVNEXT = cfg.ConvNeXt(depths=(1, 2), dims=(8, 16), layer_scale=1.0, drop_path=0.5)
UNET = cfg.UNet(features=(8, 16), groups=4)
NORMED = cfg.UNet(features=(8, 16), groups=0, bn_span="global")
LOSS = cfg.SquaredError()
# Model, inputs, targets, loss.
CASES = {
  "convnext": (CONVNEXT, PHOTOS, CLASSES, cfg.CrossEntropy()),
  "u-net": (UNET, PLANES, PLANES[..., :1] ** 2, LOSS),
  "u-net, batch norm": (NORMED, PLANES, PLANES[..., 0] ** 2, LOSS),
  "u-net, 3-D": (UNET, VOLUMES, np.concatenate([VOLUMES, VOLUMES**2], -1), LOSS),
}
LAYOUTS = {
  "data": {"mesh": cfg.Mesh(data=8)},
  "fsdp": {"mesh": cfg.Mesh(data=2, fsdp=4), "layout": cfg.Layout(shard="fsdp")},
}


def run(name, num_devices, **layout):
  model, x, y, loss = CASES[name]
  arrays = cfg.Arrays(x=x, y=y, x_eval=x[:8], y_eval=y[:8])
  options = {"optimizer": cfg.AdamW(lr=1e-3), "schedule": cfg.Steps(), "loss": loss, **layout}
  return trained(made_of(model, num_devices, data=arrays, **options), 4)


one_device = functools.cache(lambda name: run(name, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_eight_devices_train_as_one(name, layout):
  losses, state = one_device(name)
  assert losses[0] > losses[-1] > 0
  found, there = run(name, 8, **LAYOUTS[layout])
  np.testing.assert_allclose(found, losses, rtol=2e-5)
  assert worst_leaf(there.params, state.params) < 2e-3
  if layout == "fsdp":
    assert any("fsdp" in str(x.sharding.spec) for x in jax.tree.leaves(there.params))


def context(image_shape, label_shape=(), **fields):
  info = data.DatasetInfo("x", image_shape, 3, label_shape=label_shape, **fields)
  return cfg.ModelContext(info, jnp.dtype("float32"))


def test_a_dropped_branch_depends_on_the_example_alone():
  fns = models.functions(CONVNEXT.build(context((16, 16, 3))), (16, 16, 3))
  params, _ = jax.jit(fns.init)(jax.random.key(0))
  params["stem_0"]["kernel"] *= 50
  keys = jax.random.split(jax.random.key(1), 32)
  apply = jax.jit(lambda x, train, keys: fns.apply(params, {}, x, train, keys)[0], static_argnums=1)
  whole = apply(PHOTOS, True, keys)
  halves = jnp.concatenate([apply(PHOTOS[i : i + 16], True, keys[i : i + 16]) for i in (0, 16)])
  np.testing.assert_allclose(whole, halves, rtol=1e-5, atol=1e-6)
  # The last block's branch is dropped for half of the examples, and twice as large for others.
  differs = np.abs(whole - apply(PHOTOS, False, None)).max(-1) > 1e-4
  assert differs.all()
  without = {**params, "stages_1_blocks_1_gamma": params["stages_1_blocks_1_gamma"] * 0}
  plain = fns.apply(without, {}, PHOTOS, True, keys)[0]
  dropped = np.abs(whole - plain).max(-1) < 1e-5
  assert 8 <= dropped.sum() <= 24


def test_fields_of_odd_sizes_end_with_copies_of_their_border():
  x = jnp.asarray(PLANES[:2, :9, :7])
  module = UNET.build(context((9, 7, 2), (9, 7, 3)))
  params = jax.jit(functools.partial(module.init, train=False))(jax.random.key(0), x)
  apply = jax.jit(lambda x: module.apply(params, x, False))
  padded = jnp.concatenate([x, x[:, -1:]], axis=1)
  padded = jnp.concatenate([padded, padded[:, :, -1:]], axis=2)
  assert apply(x).shape == (2, 9, 7, 3)
  np.testing.assert_array_equal(apply(x), apply(padded)[:, :9, :7])


def test_a_periodic_field_that_moves_moves_its_output():
  x = jnp.asarray(PLANES[:2, :8])
  module = cfg.UNet(features=(8, 16), periodic=True).build(context((8, 8, 2), (8, 8)))
  params = jax.jit(functools.partial(module.init, train=False))(jax.random.key(0), x)
  apply = jax.jit(lambda x: module.apply(params, x, False))
  moved = jnp.roll(apply(x), (2, 4), axis=(1, 2))
  np.testing.assert_allclose(apply(jnp.roll(x, (2, 4), axis=(1, 2))), moved, atol=2e-5)


REFUSED = {
  "is no field": (
    UNET,
    (8, 8, 1),
    (),
    "needs a target at each point of [8, 8], but x has targets ()",
  ),
  "another size": (UNET, (8, 8, 1), (4, 4, 1), "has targets (4, 4, 1); use CNN"),
  "4-D": (UNET, (4, 4, 4, 4, 1), (4,) * 4, "takes images [n, (depth,) height, width, channels]"),
  "groups": (cfg.UNet(features=(6,)), (8, 8, 1), (8, 8), "UNet.groups=8 does not divide all"),
  "periodic": (
    cfg.UNet(periodic=True),
    (12, 8, 1),
    (12, 8),
    "needs sizes that 8 divides, not [12, 8]",
  ),
  "stages": (cfg.ConvNeXt(dims=(8, 8)), (64, 64, 3), (), "has 2 stages, but depths=(3, 3, 9, 3)"),
  "small": (cfg.ConvNeXt(), (28, 28, 3), (), "need images of 32x32 or more; not 28x28"),
  "volume": (CONVNEXT, (16, 16, 16, 1), (), "takes images [n, height, width, channels], not"),
}


@pytest.mark.parametrize("model, shape, label, says", REFUSED.values(), ids=REFUSED)
def test_sizes_that_do_not_fit_are_refused(model, shape, label, says):
  with config_error(says):
    model.build(context(shape, label))


# Convolutions of theirs that XLA is slow at on CPUs.

# Kernel, its channels, stride, padding.
DEPTHWISE = [(7, 6, 1, "SAME"), (3, 6, 1, "VALID"), (5, 6, 1, ((0, 3), (2, 1)))]
OTHERS = [(7, 6, 2, "SAME"), (3, 12, 1, "SAME")]


@pytest.mark.parametrize("size, channels, stride, padding", DEPTHWISE + OTHERS)
def test_a_depthwise_convolution_is_that_of_xla(size, channels, stride, padding):
  x = jax.random.normal(jax.random.key(0), (2, 9, 8, 6))
  kernel = 0.1 * jax.random.normal(jax.random.key(1), (size, size, 1, channels))
  numbers = "NHWC", "HWIO", "NHWC"
  options = dict(padding=padding, feature_group_count=6, dimension_numbers=numbers)
  assert_alike(x, kernel, (stride, stride), options)


@pytest.mark.parametrize("size, stride, padding", [(3, 1, "SAME"), (3, 2, "SAME"), (2, 2, "VALID")])
def test_a_convolution_in_3d_is_that_of_xla(size, stride, padding):
  x = jax.random.normal(jax.random.key(0), (2, 5, 6, 7, 3))
  kernel = 0.1 * jax.random.normal(jax.random.key(1), (size, size, size, 3, 4))
  numbers = "NDHWC", "DHWIO", "NDHWC"
  assert_alike(x, kernel, (stride,) * 3, dict(padding=padding, dimension_numbers=numbers))


def assert_alike(x, kernel, strides, options):
  """Assert that outputs and gradients are those of XLA, also where devices have parts."""

  def both(function):
    def results(x, kernel):
      return function(x, kernel, strides, **options)

    out, backward = jax.vjp(results, x, kernel)
    return out, *backward(jnp.sin(out))

  plain = jax.jit(both, static_argnums=0)(lax.conv_general_dilated)
  for a, b in zip(plain, jax.jit(both, static_argnums=0)(convolve), strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

  def by_kernel(x, kernel):
    return jax.grad(lambda k: (convolve(x, k, strides, **options) ** 2).sum())(kernel)

  spread = jax.shard_map(by_kernel, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P())
  wanted = jax.jit(by_kernel)(x, kernel)
  np.testing.assert_allclose(jax.jit(spread)(x, kernel), wanted, rtol=1e-4, atol=1e-4)


def test_bfloat16_depthwise_sums_are_float32():
  x = jax.random.normal(jax.random.key(0), (2, 9, 8, 6), jnp.bfloat16)
  kernel = jax.random.normal(jax.random.key(1), (7, 7, 1, 6), jnp.bfloat16)
  options: dict = dict(feature_group_count=6, dimension_numbers=("NHWC", "HWIO", "NHWC"))
  wide = [v.astype(jnp.float32) for v in (x, kernel)]
  found = jax.jit(lambda x, k: convolve(x, k, (1, 1), "SAME", **options))(x, kernel)
  wanted = lax.conv_general_dilated(wide[0], wide[1], (1, 1), "SAME", **options)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_max_pool_equals_numpy_in_any_number_of_dims(dims):
  sizes = (7, 6, 5)[:dims]
  x = RNG.normal(size=(2, *sizes, 3)).astype(np.float32)
  whole = x[(slice(None), *(slice(n // 2 * 2) for n in sizes))]
  shape = [2, *(n for size in sizes for n in (size // 2, 2)), 3]
  wanted = whole.reshape(shape).max(axis=tuple(2 + 2 * i for i in range(dims)))
  np.testing.assert_array_equal(max_pool_2(jnp.array(x)), wanted)


def test_a_u_net_counts_its_parameters():
  module = cfg.UNet(features=(8, 16)).build(context((8, 8, 2), (8, 8, 5)))
  fns = models.functions(module, (8, 8, 2), dtype="float32")
  params, _ = models.init_shapes(fns.init)
  kernels = 9 * (2 * 8 + 8 * 8 + 8 * 16 + 16 * 16 + 16 * 8 + 8 * 8)
  norms, ups = 2 * (8 + 8 + 16 + 16 + 8 + 8), 16 * 4 * 8
  total = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  assert total == kernels + norms + ups + 8 * 5 + 5
