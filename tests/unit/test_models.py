"""Models: published sizes, options, dtypes, and the functions made of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal

from jaxscale import models
from jaxscale.models.layers import dropout, max_pool_2x2
from jaxscale.training.losses import smoothed_cross_entropy

# torchvision's table of models, 1,000 classes.
PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize("depth, size", PUBLISHED.items())
def test_parameter_counts(depth, size):
  model = models.make_resnet(depth, num_classes=1000)
  fns = models.functions(model, (224, 224, 3))
  params, _ = jax.eval_shape(fns.init, jax.random.key(0))
  assert sum(x.size for x in jax.tree.leaves(params)) == size
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


def tiny_resnet(**options):
  return models.ResNetModule(
    num_classes=10, stage_sizes=(1, 1), bottleneck=True, width=8, stem="small", **options
  )


def test_resnet101_for_imagenet_22k():
  """Convolutions, two numbers a normalised channel, and a head of 21,841."""
  size = 7 * 7 * 3 * 64 + 2 * 64
  wide = 64  # channels that enter a stage
  for width, blocks in ((64, 3), (128, 4), (256, 23), (512, 3)):
    for inputs in (wide, *[4 * width] * (blocks - 1)):
      size += inputs * width + 9 * width * width + width * 4 * width
      size += 2 * (width + width + 4 * width)
    size += wide * 4 * width + 2 * 4 * width  # the shortcut of the first block
    wide = 4 * width
  size += (2048 + 1) * 21_841
  assert size == PUBLISHED[101] + (2048 + 1) * (21_841 - 1000)
  fns = models.functions(models.make_resnet(101, num_classes=21_841), (64, 64, 3))
  params, _ = jax.eval_shape(fns.init, jax.random.key(0))
  assert sum(x.size for x in jax.tree.leaves(params)) == size
  assert params["Dense_0"]["kernel"].shape == (2048, 21_841)


@pytest.mark.parametrize("options, std", [({}, 0.01), ({"head_init": normal(0.1)}, 0.1)])
def test_the_head_starts_as_asked(options, std):
  fns = models.functions(tiny_resnet(**options), (8, 8, 3))
  head = jax.jit(lambda key: fns.init(key)[0]["Dense_0"])(jax.random.key(0))
  assert float(head["kernel"].std()) == pytest.approx(std, rel=0.1)  # 640 values
  assert not head["bias"].any()


@pytest.mark.parametrize(
  "make",
  [
    functools.partial(models.CNNModule, num_classes=3, features=(4, 8), batch_norm=True),
    pytest.param(tiny_resnet, marks=pytest.mark.slow),
  ],
  ids=["cnn", "resnet"],
)
def test_groups_are_normalised_apart(make):
  """A batch in two groups is two batches; running statistics are their mean."""
  fns, halves = (models.functions(make(bn_group_size=size), (8, 8, 3)) for size in (4, None))
  params, state = jax.jit(fns.init)(jax.random.key(0))
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
  params, state = jax.jit(fns.init)(jax.random.key(0))
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


def test_the_stride_is_in_the_3x3():
  """v1.5: the first 1x1 of a stage still sees the full resolution."""
  fns = models.functions(tiny_resnet(), (8, 8, 3))
  params, state = jax.eval_shape(fns.init, jax.random.key(0))
  jaxpr = jax.make_jaxpr(lambda p, s, x: fns.apply(p, s, x, False, None)[0])(
    params, state, jnp.zeros((1, 8, 8, 3))
  )
  strided = [
    eqn.invars[1].aval.shape[:2]
    for eqn in jaxpr.eqns
    if eqn.primitive.name == "conv_general_dilated" and eqn.params["window_strides"] == (2, 2)
  ]
  assert sorted(strided) == [(1, 1), (3, 3)]  # the shortcut's, and the 3x3


@pytest.mark.parametrize(
  "model",
  [
    models.MLPModule(num_classes=10, dtype=jnp.bfloat16),
    models.CNNModule(num_classes=10, batch_norm=True, dtype=jnp.bfloat16),
    tiny_resnet(dtype=jnp.bfloat16),
  ],
  ids=["mlp", "cnn", "resnet"],
)
def test_bfloat16_compute_keeps_float32_parameters_and_logits(model):
  fns = models.functions(model, (8, 8, 1), mean=(8.0,), std=(4.0,))
  params, state = jax.jit(fns.init)(jax.random.key(0))
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
  params, state = jax.jit(fns.init)(jax.random.key(0))
  images = jax.random.normal(jax.random.key(1), (16, 8, 8, 1)) + 5
  keys = jax.random.split(jax.random.key(0), 16)
  apply = jax.jit(fns.apply, static_argnums=3)
  _, trained = apply(params, state, images, True, keys)
  _, evaluated = apply(params, state, images, False, None)
  same = jax.tree.map(lambda a, b: bool((a == b).all()), state, trained)
  assert not any(jax.tree.leaves(same))
  same = jax.tree.map(lambda a, b: bool((a == b).all()), state, evaluated)
  assert all(jax.tree.leaves(same))


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
  np.testing.assert_array_equal(max_pool_2x2(jnp.array(x)), blocks.max(axis=(2, 4)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_float64_numpy(smoothing):
  rng = np.random.default_rng(0)
  logits, labels = rng.standard_normal((9, 5)) * 3, rng.integers(0, 5, 9)
  target = np.eye(5)[labels] * (1 - smoothing) + smoothing / 5
  log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
  got = smoothed_cross_entropy(jnp.array(logits, jnp.float32), jnp.array(labels), smoothing)
  np.testing.assert_allclose(got, -(target * log_p).sum(1), rtol=2e-6)
