"""Models: published sizes, options, dtypes, and the functions made of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn.initializers import normal

from jaxscale import models
from jaxscale.models import convolution
from jaxscale.models.convolution import Conv, convolve
from jaxscale.models.layers import dropout, max_pool_2

# torchvision's table of models, 1,000 classes.
PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


SIZES = [(depth, 1000, size) for depth, size in PUBLISHED.items()]
SIZES += [(101, 21_841, PUBLISHED[101] + (2048 + 1) * (21_841 - 1000))]  # ImageNet-22k


@pytest.mark.parametrize("depth, classes, size", SIZES)
def test_parameter_counts(depth, classes, size):
  fns = models.functions(models.make_resnet(depth, num_classes=classes), (224, 224, 3))
  params, _ = jax.eval_shape(fns.init, jax.random.key(0))
  assert sum(x.size for x in jax.tree.leaves(params)) == size
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
  "depths, width, size", [((3, 3, 9, 3), 96, 28_589_128), ((3, 3, 27, 3), 128, 88_591_464)]
)
def test_convnext_counts(depths, width, size):  # T and B of torchvision's table
  dims = tuple(width * 2**i for i in range(4))
  module = models.ConvNeXtModule(num_classes=1000, depths=depths, dims=dims)
  params, _ = jax.eval_shape(models.functions(module, (224, 224, 3)).init, jax.random.key(0))
  assert sum(x.size for x in jax.tree.leaves(params)) == size
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


def tiny_resnet(**options):
  options |= dict(bottleneck=True, width=8, stem="small")
  return models.ResNetModule(num_classes=10, stage_sizes=(1, 1), **options)


def initialized(fns):
  return jax.jit(fns.init)(jax.random.key(0))


@pytest.mark.parametrize("options, std", [({}, 0.01), ({"head_init": normal(0.1)}, 0.1)])
def test_the_head_starts_as_asked(options, std):
  fns = models.functions(tiny_resnet(**options), (8, 8, 3))
  head = jax.jit(lambda key: fns.init(key)[0]["Dense_0"])(jax.random.key(0))
  assert float(head["kernel"].std()) == pytest.approx(std, rel=0.1)  # 640 values
  assert not head["bias"].any()


def grouped_cnn(**options):
  return models.CNNModule(num_classes=3, features=(4, 8), batch_norm=True, **options)


RESNET = pytest.param(tiny_resnet, marks=pytest.mark.slow)


@pytest.mark.parametrize("make", [grouped_cnn, RESNET], ids=["cnn", "resnet"])
def test_groups_are_normalised_apart(make):
  """A batch in two groups is two batches; running statistics are their mean."""
  fns, halves = (models.functions(make(bn_group_size=size), (8, 8, 3)) for size in (4, None))
  params, state = initialized(fns)
  params = jax.tree.map(lambda x: x + 0.1, params)  # no scale at 0 hides a layer
  images = np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype(np.float32)
  images *= np.arange(1, 9, dtype=np.float32)[:, None, None, None]
  whole, apart = (
    jax.jit(lambda x, apply=f.apply: apply(params, state, x, True, None)) for f in (halves, fns)
  )
  logits, new = apart(images)
  parts = [whole(images[i : i + 4]) for i in (0, 4)]
  joined = jnp.concatenate([part[0] for part in parts])
  np.testing.assert_allclose(logits, joined, rtol=2e-5, atol=2e-5)
  mean = jax.tree.map(lambda a, b: (a + b) / 2, parts[0][1], parts[1][1])
  for a, b in zip(*map(jax.tree.leaves, (new, mean)), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
  assert np.abs(whole(images)[0] - logits).max() > 1e-2


@pytest.mark.slow
def test_zero_init_makes_each_block_its_shortcut():
  """With the last scales at 0, no 3x3 kernel of a block can matter."""
  fns = models.functions(tiny_resnet(), (8, 8, 3))
  params, state = initialized(fns)
  images = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
  evaluate = jax.jit(lambda params: fns.apply(params, state, images, False, None)[0])
  before = evaluate(params)
  changed = dict(params)
  # Conv_0 is the stem; the first block is Conv_1 … Conv_3.
  changed["Conv_2"] = jax.tree.map(lambda x: x + 1, params["Conv_2"])
  after = evaluate(changed)
  np.testing.assert_array_equal(before, after)
  scales = [v["bn"]["scale"] for k, v in params.items() if k.startswith("BatchNorm")]
  assert sum(bool((s == 0).all()) for s in scales) == 2  # one per block


HALF = {
  "mlp": models.MLPModule(num_classes=10, dtype=jnp.bfloat16),
  "cnn": models.CNNModule(num_classes=10, batch_norm=True, dtype=jnp.bfloat16),
  "resnet": tiny_resnet(dtype=jnp.bfloat16),
  "convnext": models.ConvNeXtModule(num_classes=10, depths=(1,), dims=(8,), dtype=jnp.bfloat16),
  "unet": models.UNetModule(num_classes=2, features=(8, 8), dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("model", HALF.values(), ids=HALF)
def test_bfloat16_compute_keeps_float32_parameters_and_logits(model):
  fns = models.functions(model, (8, 8, 1), mean=(8.0,), std=(4.0,))
  params, state = initialized(fns)
  images = np.zeros((4, 8, 8, 1), np.uint8)
  keys = jax.random.split(jax.random.key(0), 4)
  apply = jax.jit(fns.apply, static_argnums=3)
  logits, new_state = apply(params, state, images, True, keys)
  for leaf in jax.tree.leaves((params, new_state, logits)):
    assert leaf.dtype == jnp.float32
  jaxpr = str(jax.make_jaxpr(lambda p: fns.apply(p, state, images, True, keys))(params))
  assert "bf16" in jaxpr


def test_batch_norm_updates_its_statistics_in_training_only():
  fns = models.functions(models.CNNModule(num_classes=3, batch_norm=True), (8, 8, 1))
  params, state = initialized(fns)
  images = jax.random.normal(jax.random.key(1), (16, 8, 8, 1)) + 5
  keys = jax.random.split(jax.random.key(0), 16)
  apply = jax.jit(fns.apply, static_argnums=3)
  _, trained = apply(params, state, images, True, keys)
  _, evaluated = apply(params, state, images, False, None)
  for new, stays in ((trained, False), (evaluated, True)):
    same = jax.tree.map(lambda a, b: bool((a == b).all()), state, new)
    assert {*jax.tree.leaves(same)} == {stays}


def test_dropout_depends_on_the_example_alone():
  keys = jax.random.split(jax.random.key(0), 6)
  x = jnp.ones((6, 1000))
  whole = dropout(x, 0.25, keys, layer=1)
  halves = [dropout(x[i : i + 3], 0.25, keys[i : i + 3], layer=1) for i in (0, 3)]
  np.testing.assert_array_equal(whole, jnp.concatenate(halves))
  assert float(whole.mean()) == pytest.approx(1, abs=0.03)
  assert (dropout(x, 0.25, keys, layer=2) != whole).any()
  np.testing.assert_array_equal(dropout(x, 0.25, None, layer=1), x)


def test_max_pool_equals_numpy():
  x = np.random.default_rng(0).standard_normal((2, 7, 6, 3)).astype(np.float32)
  blocks = x[:, :6].reshape(2, 3, 2, 3, 2, 3)
  np.testing.assert_array_equal(max_pool_2(jnp.array(x)), blocks.max(axis=(2, 4)))


# Convolutions.

NUMBERS = ("NHWC", "HWIO", "NHWC")


CONVOLUTIONS = [((3, 3), 1, "SAME"), ((5, 4), 2, ((0, 2), (1, 0)))]
CONVOLUTIONS += [((5, 5), 1, "VALID"), ((8, 8), 1, ((1, 1), (1, 1)))]


@pytest.mark.parametrize("size, stride, padding", CONVOLUTIONS)
def test_our_convolution_is_that_of_xla(size, stride, padding):
  x = jax.random.normal(jax.random.key(0), (2, *size, 3))
  kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))
  strides = (stride, stride)

  def plain(x, kernel):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=NUMBERS)

  ours = functools.partial(convolve, strides=strides, padding=padding)
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
  for size, platform in ((2, "cuda"), (2, "tpu"), (4, "cpu")):
    assert "dot_general" not in lowered(size, platform)
  assert "dot_general" not in lowered(2, "cpu", feature_group_count=2)


def test_our_convolution_runs_where_devices_have_parts_of_the_batch():
  mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
  x = jax.random.normal(jax.random.key(0), (8, 2, 2, 3))
  kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))

  def grads(x, kernel):
    return jax.grad(lambda k: (convolve(x, k, (1, 1), "SAME") ** 2).sum())(kernel)

  spread = jax.shard_map(grads, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P())
  np.testing.assert_allclose(jax.jit(spread)(x, kernel), grads(x, kernel), rtol=1e-5)


def test_convolutions_of_few_channels_in_parts_are_the_same():
  """Rows are independent; the kernel's gradient is a sum."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(5, 8, 8, 16)), jnp.float32)
  kernel = jnp.asarray(rng.normal(size=(3, 3, 16, 32)), jnp.float32)

  def whole(x, kernel):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=dims)

  def parts(x, kernel):
    return convolution._in_parts(whole, x, kernel)

  out, pull = jax.vjp(whole, x, kernel)
  ours, our_pull = jax.vjp(parts, x, kernel)
  np.testing.assert_allclose(ours, out, rtol=1e-5, atol=1e-5)
  for a, b in zip(our_pull(out), pull(out), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(("channels", "rows", "parts"), [(64, 5, 4), (65, 5, 1), (64, 3, 1)])
def test_convolutions_in_parts_are_those_on_one_thread(channels, rows, parts):
  x, kernel = jnp.ones((rows, 8, 8, 3)), jnp.ones((3, 3, 3, channels))
  same = functools.partial(convolve, strides=(1, 1), padding="SAME")
  text = jax.jit(same).lower(x, kernel).as_text()
  assert text.count("stablehlo.convolution") == (parts if jax.__version_info__ < (0, 11) else 1)
