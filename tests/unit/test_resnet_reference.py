"""ResNet v1.5 against float64 numpy, with the paddings, strides and epsilon of it.

The reference is written from He et al. (arXiv:1512.03385, table 1 and figure 5) and
the conventions that all released ResNet-50 v1.5 share: the stem pads 3 and its pool
1 on each side, every 3x3 pads 1, and a block's stride is in its 3x3 convolution and
in the 1x1 of its shortcut. On images of even size each of them differs from "SAME".
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import models

SIZE, WIDTH, STAGES = 32, 4, (2, 1)
EPSILON = 1e-5  # torchvision's, and MLPerf's


def np_conv(x, kernel, stride=1, pad=0):
  """x: [n, h, w, c], kernel: [size, size, c, out]."""
  x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  n, rows, columns = (len(x), *((s - len(kernel)) // stride + 1 for s in x.shape[1:3]))
  out = np.zeros((n, rows, columns, kernel.shape[3]))
  for i, j in np.ndindex(kernel.shape[:2]):
    seen = x[:, i : i + stride * rows : stride, j : j + stride * columns : stride]
    out += seen @ kernel[i, j]
  return out


def np_max_pool(x):
  """3x3, stride 2, padded by 1 with what is less than all."""
  x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
  rows, columns = ((s - 3) // 2 + 1 for s in x.shape[1:3])
  shifted = [x[:, i : i + 2 * rows : 2, j : j + 2 * columns : 2] for i, j in np.ndindex(3, 3)]
  return np.max(shifted, axis=0)


def np_layers(params, stats, train):
  """(conv, norm, running): the next layer of its kind; what the norms have seen."""
  convs, norms, running = itertools.count(), itertools.count(), {}

  def conv(x, size, out, stride=1, pad=0):
    kernel = params[f"Conv_{next(convs)}"]["kernel"]
    assert kernel.shape == (size, size, x.shape[3], out)
    return np_conv(x, kernel, stride, pad)

  def norm(x):
    name = f"BatchNorm_{next(norms)}"
    p, old = params[name]["bn"], stats[name]["bn"]
    seen = {"mean": x.mean((0, 1, 2)), "var": x.var((0, 1, 2))}  # the biased one
    running[name] = {"bn": {k: 0.9 * old[k] + 0.1 * seen[k] for k in seen}}
    s = seen if train else old
    return (x - s["mean"]) / np.sqrt(s["var"] + EPSILON) * p["scale"] + p["bias"]

  return conv, norm, running


def relu(x):
  return np.maximum(x, 0)


def np_block(conv, norm, x, width, stride, bottleneck):
  if bottleneck:
    out = 4 * width
    y = relu(norm(conv(x, 1, width)))
    y = relu(norm(conv(y, 3, width, stride, 1)))
    y = norm(conv(y, 1, out))
  else:
    out = width
    y = relu(norm(conv(x, 3, width, stride, 1)))
    y = norm(conv(y, 3, out, 1, 1))
  if stride > 1 or x.shape[3] != out:
    x = norm(conv(x, 1, out, stride))
  return relu(x + y)


def np_resnet(x, params, stats, *, bottleneck, stem, train):
  """(logits, running statistics after it)."""
  conv, norm, running = np_layers(params, stats, train)
  if stem == "imagenet":
    x = np_max_pool(relu(norm(conv(x, 7, WIDTH, 2, 3))))
    assert x.shape[1] == SIZE // 4
  else:
    x = relu(norm(conv(x, 3, WIDTH, 1, 1)))
  for stage, blocks in enumerate(STAGES):
    for i in range(blocks):
      stride = 2 if stage and not i else 1
      x = np_block(conv, norm, x, WIDTH * 2**stage, stride, bottleneck)
  head = params["Dense_0"]
  assert len(params) == 2 * len(running) + 1  # a norm for each convolution
  return x.mean((1, 2)) @ head["kernel"] + head["bias"], running


@functools.cache
def tiny(bottleneck, stem):
  sizes = dict(num_classes=5, stage_sizes=STAGES, width=WIDTH)
  model = models.ResNetModule(**sizes, bottleneck=bottleneck, stem=stem)
  fns = models.functions(model, (SIZE, SIZE, 3), mean=(100.0,), std=(50.0,))
  params, state = jax.jit(fns.init)(jax.random.key(0))
  rng = np.random.default_rng(0)

  def stirred(path, x):
    """No value as it starts; variances so small that epsilon counts."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name.endswith("kernel"):
      return 10 * x if "Dense" in name else x
    low, high = (1e-5, 1e-4) if name.endswith("var") else (0.2, 1.0)
    return jnp.array(rng.uniform(low, high, x.shape), jnp.float32)

  return fns, *jax.tree.map_with_path(stirred, (params, state))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("bottleneck", "stem"), [(True, "imagenet"), (False, "small")])
def test_the_network_equals_float64(bottleneck, stem, train):
  fns, params, state = tiny(bottleneck, stem)
  images = np.random.default_rng(1).integers(0, 256, (2, SIZE, SIZE, 3))
  apply = jax.jit(fns.apply, static_argnums=3)
  logits, new = apply(params, state, images.astype(np.uint8), train, None)
  params, state = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, state))
  options = dict(bottleneck=bottleneck, stem=stem, train=train)
  wanted, running = np_resnet((images - 100.0) / 50.0, params, state["batch_stats"], **options)
  spread = np.abs(wanted[0] - wanted[1]).max()
  assert spread > 1e-2 * np.abs(wanted).max()
  np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
  if train:
    for a, b in zip(jax.tree.leaves(new["batch_stats"]), jax.tree.leaves(running), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
