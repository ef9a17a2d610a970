"""AlexNet and AlexNet-BN: Caffe's files layer by layer, against float64 numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import models, optim
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.training import losses
from jaxscale.training.state import abstract_state
from jaxscale.training.step import make_train_step
from support.errors import config_error
from support.recipes import AlexNetModule, alexnet_bn_32k

# (name, kernel size, inputs per group, outputs), as the prototxt files list them.
CONVS = [("conv1", 11, 3, 96), ("conv2", 5, 96 // 2, 256), ("conv3", 3, 256, 384)]
CONVS += [("conv4", 3, 384 // 2, 384), ("conv5", 3, 384 // 2, 256)]
DENSE = [("fc6", 256 * 6 * 6, 4096), ("fc7", 4096, 4096), ("fc8", 4096, 1000)]
NORMS = [("bn2", 96), ("bn3", 256), ("bn4", 384), ("bn5", 384)]
SIZE = 67  # the least: one position reaches fc6


@pytest.mark.parametrize("batch_norm", [False, True])
def test_parameters_are_those_of_the_files(batch_norm):
  model = AlexNetModule(num_classes=1000, batch_norm=batch_norm)
  fns = models.functions(model, (227, 227, 3))
  params, _ = jax.eval_shape(fns.init, jax.random.key(0))
  kernels = {name: (size, size, width, out) for name, size, width, out in CONVS}
  kernels |= {name: (width, out) for name, width, out in DENSE}
  wanted = {name: {"kernel": kernel, "bias": kernel[-1:]} for name, kernel in kernels.items()}
  if batch_norm:
    wanted |= {n: {"bn": {"scale": (c,), "bias": (c,)}} for n, c in NORMS}
  assert jax.tree.map(lambda x: x.shape, params) == wanted
  # bvlc_alexnet.caffemodel's 60,965,224; scale and shift of 1,120 channels more.
  sizes = [x.size for x in jax.tree.leaves(params)]
  assert sum(sizes) == 60_965_224 + (2 * 1120 if batch_norm else 0)


@functools.cache
def tiny(batch_norm, **options):
  model = AlexNetModule(num_classes=5, batch_norm=batch_norm, hidden=24, **options)
  fns = models.functions(model, (SIZE, SIZE, 3), mean=(110.0,), std=(4.0,))
  params, state = jax.jit(fns.init)(jax.random.key(0))
  return fns, params, state


def images(n):
  return np.random.default_rng(0).integers(0, 256, (n, SIZE, SIZE, 3)).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", [False, True])
def test_initial_values_are_those_of_the_files(batch_norm):
  _, params, _ = tiny(batch_norm)
  plain = [0, 0.1, 0, 0.1, 0.1, 0.1, 0.1, 0]
  biases = [*[0.01] * 5, 0.1, 0.1, 0.01] if batch_norm else plain
  stds = [0.01] * 5 + [0.005, 0.005, 0.01]
  names = [n for n, *_ in CONVS + DENSE]
  for name, bias, std in zip(names, biases, stds, strict=True):
    assert (params[name]["bias"] == np.float32(bias)).all(), name
    assert float(params[name]["kernel"].std()) == pytest.approx(std, rel=0.2), name


def np_windows(x, size, stride):
  """Map [n, h, w, c] to [n, h', w', c, size, size]."""
  view = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))
  return view[:, ::stride, ::stride]


def np_conv(x, layer, stride=1, pad=0, groups=1):
  x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  parts = zip(np.split(x, groups, axis=3), np.split(layer["kernel"], groups, axis=3), strict=True)
  out = [
    np.tensordot(np_windows(p, len(k), stride), k, axes=((4, 5, 3), (0, 1, 2))) for p, k in parts
  ]
  return np.maximum(np.concatenate(out, axis=3) + layer["bias"], 0)


def np_pool(x):
  return np_windows(x, 3, 2).max((4, 5))


def np_lrn(x, size=5, alpha=1e-4, k=1.0):
  """Caffe's loop over channels (src/caffe/layers/lrn_layer.cpp), written out."""
  scale = np.full_like(x, k)
  for c in range(x.shape[-1]):
    for i in range(max(c - size // 2, 0), min(c + size // 2 + 1, x.shape[-1])):
      scale[..., c] += alpha / size * x[..., i] ** 2
  return x * scale**-0.75


def np_alexnet(x, params, stats):
  """Caffe's order: BatchNorm after the pool, LRN before it."""

  def norm(x, name):
    p, s = params[name]["bn"], stats[name]["bn"]
    return (x - s["mean"]) / np.sqrt(s["var"] + 1e-4) * p["scale"] + p["bias"]

  def first_two(x, name):
    return norm(np_pool(x), name) if stats else np_pool(np_lrn(x))

  x = first_two(np_conv(x, params["conv1"], stride=4), "bn2")
  x = first_two(np_conv(x, params["conv2"], pad=2, groups=2), "bn3")
  x = np_conv(x, params["conv3"], pad=1)
  x = norm(x, "bn4") if stats else x
  x = np_conv(x, params["conv4"], pad=1, groups=2)
  x = norm(x, "bn5") if stats else x
  x = np_pool(np_conv(x, params["conv5"], pad=1, groups=2)).reshape(len(x), -1)
  for name in ("fc6", "fc7"):
    x = np.maximum(x @ params[name]["kernel"] + params[name]["bias"], 0)
  return x @ params["fc8"]["kernel"] + params["fc8"]["bias"]


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_network_equals_float64(batch_norm):
  fns, params, state = tiny(batch_norm)

  def grown(x):  # so that no layer is lost in the biases after it
    return 5 * x if x.ndim > 1 else x + jnp.linspace(0, 0.5, len(x))

  params, state = jax.tree.map(grown, (params, state))
  logits, _ = jax.jit(fns.apply, static_argnums=3)(params, state, images(2), False, None)
  double = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, state))
  wanted = np_alexnet((images(2) - 110.0) / 4, double[0], double[1].get("batch_stats"))
  assert np.abs(wanted[0] - wanted[1]).max() > 1e-2 * np.abs(wanted).max()
  np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_local_response_norm_equals_caffes_loop(dtype):
  rng = np.random.default_rng(1)
  x, g = (jnp.array(rng.normal(0, 50, (2, 3, 3, 7)), dtype) for _ in range(2))
  y, vjp = jax.vjp(alexnet_bn_32k.local_response_norm, x)
  wide, wide_g = (np.asarray(v, np.float64) for v in (x, g))
  wanted = np_lrn(wide)
  tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
  assert y.dtype == dtype
  np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=tolerance)
  step = 1e-3 * rng.normal(size=x.shape)  # a central difference in float64
  slope = ((np_lrn(wide + step) - np_lrn(wide - step)) / 2 * wide_g).sum()
  got = (np.asarray(vjp(g)[0], np.float64) * step).sum()
  assert got == pytest.approx(slope, rel=10 * tolerance)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_bfloat16_keeps_float32_parameters_and_logits(batch_norm):
  model = AlexNetModule(num_classes=5, batch_norm=batch_norm, dtype=jnp.bfloat16)
  fns = models.functions(model, (227, 227, 3))

  def train(key, images):
    params, state = fns.init(key)
    keys = jax.random.split(key, len(images))
    return params, fns.apply(params, state, images, True, keys)

  traced = jax.jit(train).trace(jax.random.key(0), jax.ShapeDtypeStruct((2, 227, 227, 3), np.uint8))
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(traced.out_info))
  assert "bf16[2,6,6,256]" in str(traced.jaxpr)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_train_step_lowers_for_eight_devices(batch_norm):
  mesh = make_mesh(bn_devices=2)
  model = AlexNetModule(num_classes=5, batch_norm=batch_norm, bn_axis_name=("bn",))
  fns = models.functions(model, (227, 227, 3), std=(256.0,))
  tx = optim.sgd(0.1)
  step = make_train_step(losses.classification_loss(fns.apply), tx, mesh)
  rows = functools.partial(jax.ShapeDtypeStruct, sharding=batch_sharding(mesh))
  batch = {"image": rows((16, 227, 227, 3), "uint8"), "label": rows((16,), "int32")}
  state = abstract_state(fns.init, tx, mesh)
  step.lower(state, batch)
  # Pairs share statistics, along an axis of their own.
  sums = re.findall(r"psum\w*\[\s*axes=\('bn',\)", str(jax.make_jaxpr(step)(state, batch)))
  assert bool(sums) == batch_norm


def test_images_too_small_are_one_line():
  model = models.functions(AlexNetModule(num_classes=5, batch_norm=True), (66, 80, 3))
  with config_error(match=r"^image_size=66 .*; give 67 or more"):
    jax.eval_shape(model.init, jax.random.key(0))
