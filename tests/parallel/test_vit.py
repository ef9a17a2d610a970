"""ViT against timm's, a convolution, float64 numpy, and published sizes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.experiment.model import make_model
from jaxscale.models import make_vit
from jaxscale.models.stack import stack_logits
from jaxscale.models.vision_transformer import SHARDING, gelu
from support import golden_models
from support.configs import small_config
from support.errors import config_error
from support.leaves import assert_close
from support.split_layers import on_two_devices
from support.stacks import run_stack

# As the recorded models have it (golden/record_models.py).
SIZES = dict(
  image_shape=(8, 8, 3), num_classes=5, patch=4, width=16, num_layers=2, num_heads=2, hidden=48
)
SIZES |= dict(mean=(120.0,), std=(60.0,))


# vit_tiny_patch16_224 and vit_small_patch16_224 of timm, vit_b_16 and vit_l_16 of torchvision.
PUBLISHED = [(192, 12, 3, 5_717_416), (384, 12, 6, 22_050_664)]
PUBLISHED += [(768, 12, 12, 86_567_656), (1024, 24, 16, 304_326_632)]


@pytest.mark.parametrize("width, num_layers, num_heads, published", PUBLISHED)
def test_parameters_are_as_many_as_published(width, num_layers, num_heads, published):
  sizes = dict(width=width, num_layers=num_layers, num_heads=num_heads)
  stack = make_vit(image_shape=(224, 224, 3), num_classes=1000, **sizes)
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published
  assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


@functools.cache
def recorded(pool):
  """Return a recorded model: stack, parameters, probes, images and logits."""
  weights, probes, there = golden_models.load(f"timm_vit_{pool}")
  stack = make_vit(**SIZES, pool=pool)
  return stack, golden_models.from_vit(weights), probes, there


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_is_what_timm_computes(pool):
  stack, params, probes, there = recorded(pool)
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
  batch = {"image": there["images"], "label": np.arange(3, dtype=np.int32)}

  def loss(params):
    totals = run_stack(stack, params, batch)
    return totals["loss"] / 3.0, stack_logits(stack, params, batch)

  grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
  np.testing.assert_allclose(logits, there["logits"], rtol=1e-5, atol=1e-5)
  found = golden_models.to_vit(jax.tree.map(np.asarray, grads), (4, 4, 3))
  assert found.keys() == probes.keys()
  for key, expected in probes.items():
    probe = golden_models.probe(found[key])
    np.testing.assert_allclose(probe, expected, rtol=2e-5, atol=2e-5, err_msg=key)


def np_totals(logits, labels, counts, smoothing):
  """Cross entropy against (1 - e) onehot + e / classes (arXiv:1512.00567, §7)."""
  logits = np.asarray(logits, np.float64)
  logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  target = (1 - smoothing) * np.eye(5)[labels] + smoothing / 5
  losses = -(target * logs).sum(-1)
  return losses[counts].sum(), (logits.argmax(-1) == labels)[counts].sum()


@pytest.mark.parametrize("mask", [None, np.array([False, True, True])])
def test_totals_count_every_example_once(mask):
  _, params, _, there = recorded("token")
  # Four more classes than there are, which must not count.
  kernel = np.pad(params["head"]["kernel"], ((0, 0), (0, 3)))
  bias = np.pad(params["head"]["bias"], (0, 3), constant_values=50.0)
  params = params | {"head": params["head"] | dict(kernel=kernel, bias=bias)}
  stack = make_vit(**SIZES, pad_classes_to=8, label_smoothing=0.1)
  labels = there["logits"].argmax(-1).astype(np.int32)
  labels[2] = (labels[2] + 1) % 5
  batch = {"image": there["images"], "label": labels}
  counts = np.ones(3, bool) if mask is None else mask
  batch |= {} if mask is None else {"mask": mask}
  totals = jax.jit(functools.partial(run_stack, stack))(params, batch)
  loss, hits = np_totals(there["logits"], labels, counts, 0.1)
  np.testing.assert_allclose(totals["loss"], loss, rtol=1e-5)
  assert int(totals["accuracy"]) == hits
  assert int(totals["examples"]) == counts.sum()
  assert stack_logits(stack, params, batch).shape == (3, 5)


def test_part_of_a_layer_is_computed_with_part_of_its_parameters():
  """A bias behind a sum over devices counts once, and one before it on its own."""
  stack, params, _, there = recorded("token")
  batch = {"image": there["images"], "label": np.arange(3, dtype=np.int32)}
  _, grads = jax.jit(on_two_devices(stack, SHARDING, params))(params, batch)
  expected = jax.jit(jax.grad(lambda p: run_stack(stack, p, batch)["loss"]))(params)
  # Not each by its own size: a bias of all keys changes no softmax, its gradient is 0.
  largest = max(np.abs(b).max() for b in jax.tree.leaves(expected))
  assert_close(grads, expected, rtol=0, atol=2e-6 * largest)


def test_half_precision_is_near():
  _, params, _, there = recorded("token")
  stack = make_vit(**SIZES, dtype="bfloat16")
  logits = stack_logits(stack, params, {"image": there["images"]})
  assert logits.dtype == jnp.float32
  error = np.abs(logits - there["logits"]).max() / np.abs(there["logits"]).max()
  assert 1e-4 < error < 4e-2  # bfloat16 has 8 bits


@pytest.mark.slow
def test_initial_parameters_are_as_in_the_papers_code():
  sizes = SIZES | {"width": 128, "hidden": 512, "patch": 8, "image_shape": (64, 64, 3)}
  p = make_vit(**sizes).init(jax.random.key(0))
  layers = p["layers"]
  for name, inputs, outputs in (("q", 128, 128), ("up", 128, 512), ("down", 512, 128)):
    limit = np.sqrt(6 / (inputs + outputs))  # Glorot and Bengio 2010, eq. 16
    kernel = np.asarray(layers[name]["kernel"])
    assert 0.99 * limit < np.abs(kernel).max() <= limit
    assert abs(kernel.std() / (limit / np.sqrt(3)) - 1) < 0.02
    assert not np.array_equal(kernel[0], kernel[1])
  assert 0 < np.asarray(layers["up"]["bias"]).std() < 2e-6
  assert not np.any(layers["q"]["bias"]) and np.all(layers["attn_norm"]["scale"] == 1)
  patch = np.asarray(p["embed"]["patch"]["kernel"])
  np.testing.assert_allclose(patch.std(), 1 / np.sqrt(192), rtol=0.02)
  np.testing.assert_allclose(p["embed"]["position"].std(), 0.02, rtol=0.05)
  assert not np.any(p["embed"]["class_token"]) and not np.any(p["head"]["kernel"])


def test_sizes_that_do_not_go_together_are_refused():
  with config_error("ViT.patch=3 does not divide images of 8x8"):
    make_vit(**SIZES | {"patch": 3})
  with config_error("ViT.num_heads=3 does not divide width=16"):
    make_vit(**SIZES | {"num_heads": 3})


def test_a_model_of_other_data_is_refused():
  images, text = data.digits("test").info, data.TextInfo("words", 256, 64)
  for model, info, says in (
    (cfg.ViT(patch=3), images, "ViT.patch=3 does not divide images of 8x8 pixels"),
    (cfg.ViT(), text, "Config.model=ViT needs images, but words is text; use another model"),
    (cfg.CNN(), text, r"Config\.model=CNN needs images, but "),
    (cfg.Transformer(), images, "Config.model=Transformer needs text, but .* has images; use ViT"),
  ):
    with config_error(match=says):
      make_model(small_config(model=model), info)


def test_the_usual_hidden_width_is_llamas():
  info = data.TextInfo("words", 32_000, 64)
  stack = make_model(small_config(model=cfg.Transformer(width=4096, num_heads=32)), info)
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  assert shapes["layers"]["gate"]["kernel"].shape == (4, 4096, 11_008)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_derivative_of_gelu(dtype):
  """Against central differences of math.erf, whose own error is below 1e-9."""
  places = np.linspace(-6, 6, 41)
  value = np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2)
  wanted = (value(places + 1e-5) - value(places - 1e-5)) / 2e-5
  bound = 1e-6 if dtype == "float32" else 1e-9
  with jax.enable_x64(dtype == "float64"):
    x = jnp.array(places, dtype)
    y, slope = jax.jvp(gelu, (x,), (jnp.ones_like(x),))
    assert slope.dtype == y.dtype == dtype
    np.testing.assert_allclose(y, value(places), rtol=1e-5, atol=bound)
    np.testing.assert_allclose(slope, wanted, rtol=0, atol=bound)
