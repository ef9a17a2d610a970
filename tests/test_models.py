"""Models: published sizes, options, dtypes, and the functions made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import models
from jaxscale.losses import smoothed_cross_entropy
from jaxscale.models.layers import dropout, max_pool_2x2

# torchvision's table of models, 1,000 classes.
PUBLISHED = {
  "ResNet18": 11_689_512,
  "ResNet34": 21_797_672,
  "ResNet50": 25_557_032,
  "ResNet101": 44_549_160,
  "ResNet152": 60_192_808,
}


@pytest.mark.parametrize("name, size", PUBLISHED.items())
def test_parameter_counts(name, size):
  model = getattr(models, name)(num_classes=1000)
  fns = models.functions(model, (224, 224, 3))
  params, _ = jax.eval_shape(fns.init, jax.random.key(0))
  assert sum(x.size for x in jax.tree.leaves(params)) == size
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))


def tiny_resnet(**options):
  return models.ResNet(
    num_classes=10,
    stage_sizes=(1, 1),
    bottleneck=True,
    width=8,
    stem="small",
    **options,
  )


def test_zero_init_makes_each_block_its_shortcut():
  """With the last scales at 0, no 3x3 kernel of a block can matter."""
  fns = models.functions(tiny_resnet(), (8, 8, 3))
  params, state = fns.init(jax.random.key(0))
  images = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
  before, _ = fns.apply(params, state, images, False, None)
  changed = dict(params)
  # Conv_0 is the stem; the first block is Conv_1 … Conv_3.
  changed["Conv_2"] = jax.tree.map(lambda x: x + 1, params["Conv_2"])
  after, _ = fns.apply(changed, state, images, False, None)
  np.testing.assert_array_equal(before, after)
  scales = [v["bn"]["scale"] for k, v in params.items() if k.startswith("BatchNorm")]
  assert sum(bool((s == 0).all()) for s in scales) == 2  # one a block


def test_the_stride_is_in_the_3x3():
  """v1.5: the first 1x1 of a stage still sees the full resolution."""
  fns = models.functions(tiny_resnet(), (8, 8, 3))
  params, state = fns.init(jax.random.key(0))
  jaxpr = jax.make_jaxpr(lambda p, x: fns.apply(p, state, x, False, None)[0])(
    params, jnp.zeros((1, 8, 8, 3))
  )
  strided = [
    eqn.invars[1].aval.shape[:2]
    for eqn in jaxpr.eqns
    if eqn.primitive.name == "conv_general_dilated"
    and eqn.params["window_strides"] == (2, 2)
  ]
  assert sorted(strided) == [(1, 1), (3, 3)]  # the shortcut's, and the 3x3


@pytest.mark.parametrize(
  "model",
  [
    models.MLP(num_classes=10, dtype=jnp.bfloat16),
    models.CNN(num_classes=10, batch_norm=True, dtype=jnp.bfloat16),
    tiny_resnet(dtype=jnp.bfloat16),
  ],
  ids=["mlp", "cnn", "resnet"],
)
@jax.numpy_dtype_promotion("standard")  # Flax's BatchNorm mixes bf16 and f32
def test_bfloat16_compute_keeps_float32_parameters_and_logits(model):
  fns = models.functions(model, (8, 8, 1), mean=(8.0,), std=(4.0,))
  params, state = fns.init(jax.random.key(0))
  images = np.zeros((4, 8, 8, 1), np.uint8)
  keys = jax.random.split(jax.random.key(0), 4)
  logits, new_state = fns.apply(params, state, images, True, keys)
  for leaf in jax.tree.leaves((params, new_state, logits)):
    assert leaf.dtype == jnp.float32
  jaxpr = str(jax.make_jaxpr(lambda p: fns.apply(p, state, images, True, keys))(params))
  assert "bf16" in jaxpr


def test_batch_norm_updates_its_statistics_in_training_only():
  fns = models.functions(models.CNN(num_classes=3, batch_norm=True), (8, 8, 1))
  params, state = fns.init(jax.random.key(0))
  images = jax.random.normal(jax.random.key(1), (16, 8, 8, 1)) + 5
  keys = jax.random.split(jax.random.key(0), 16)
  _, trained = fns.apply(params, state, images, True, keys)
  _, evaluated = fns.apply(params, state, images, False, None)
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
  got = smoothed_cross_entropy(
    jnp.array(logits, jnp.float32), jnp.array(labels), smoothing
  )
  np.testing.assert_allclose(got, -(target * log_p).sum(1), rtol=2e-6)
