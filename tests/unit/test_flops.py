"""FLOPs of models against published counts and against XLA's own."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxscale import data, models
from jaxscale.metrics.chips import peak_flops
from jaxscale.training import flops
from support.tables import columns, literal


def of_images(model, side=224, classes=1000):
  info = data.DatasetInfo("x", (side, side, 3), classes, (0.0,) * 3, (1.0,) * 3)
  if not isinstance(model, models.Stack):
    model = models.functions(model, info.image_shape)
  return flops.training_flops(model, shapes(info))


def shapes(info, rows=1):
  found = data.batch_shapes(info, rows)
  return {name: jax.ShapeDtypeStruct(*array) for name, array in found.items()}


# Multiply-adds of one image: torchvision's table of its weights.
@pytest.mark.parametrize("depth, giga", [(18, 1.814), (50, 4.089)])
def test_a_resnet_has_its_published_count(depth, giga):
  found = of_images(models.make_resnet(depth, num_classes=1000))
  assert found == pytest.approx(3 * 2 * giga * 1e9, rel=0.002)


@pytest.mark.parametrize(
  "depths, width, giga", [((3, 3, 9, 3), 96, 4.46), ((3, 3, 27, 3), 128, 15.36)]
)
def test_a_convnext_has_its_published_count(depths, width, giga):
  dims = tuple(width * 2**i for i in range(4))
  found = of_images(models.ConvNeXtModule(num_classes=1000, depths=depths, dims=dims))
  assert found == pytest.approx(3 * 2 * giga * 1e9, rel=0.002)


def test_a_u_net_in_3d_counts_convolutions_and_products():
  model = models.UNetModule(num_classes=1, features=(8, 16))
  fns = models.functions(model, (4, 6, 8, 2), dtype="float32")
  image = jax.ShapeDtypeStruct((1, 4, 6, 8, 2), "float32")
  top, bottom = 4 * 6 * 8, 2 * 3 * 4
  kernels = 27 * (top * (2 * 8 + 8 * 8 + 16 * 8 + 8 * 8) + bottom * (8 * 16 + 16 * 16))
  found = flops.training_flops(fns, {"image": image})
  assert found == 3 * 2 * (kernels + bottom * 16 * 8 * 8 + top * 8)


def test_a_vit_has_its_published_count():
  sizes = {"patch": 16, "width": 768, "num_layers": 12, "num_heads": 12}
  vit = models.make_vit(image_shape=(224, 224, 3), num_classes=1000, **sizes)
  # ViT-B/16, 17.56e9 multiply-adds, and L/16 with 61.55e9: torchvision's table.
  assert of_images(vit) == pytest.approx(3 * 2 * 17.56e9, rel=0.002)


def test_a_language_model_has_palm_s_count():
  tokens, layers, width, vocabulary = 2048, 22, 2048, 32_000
  info = data.TextInfo("text", vocabulary, tokens)
  heads = dict(num_heads=32, num_kv_heads=4, hidden=5632)
  stack = models.make_transformer(vocab_size=vocabulary, num_layers=layers, width=width, **heads)
  found = flops.training_flops(stack, shapes(info))
  params = jax.eval_shape(stack.init, jax.random.key(0))
  weights = sum(x.size for x in jax.tree.leaves(params)) - vocabulary * width  # table
  # arXiv:2204.02311, appendix B: 6 N + 12 L H Q T a token.
  assert found == pytest.approx(tokens * (6 * weights + 12 * layers * width * tokens), rel=1e-3)


DILATED = [dict(window_strides=(2, 1), rhs_dilation=(1, 2))]
DILATED += [dict(window_strides=(1, 1), lhs_dilation=(2, 2))]  # as transposed ones have it


@pytest.mark.parametrize("options", DILATED)
def test_a_convolution_has_xla_s_count(options):
  x, kernel = jnp.ones((2, 9, 8, 4)), jnp.ones((3, 3, 2, 6))
  names = lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))

  options = options | dict(dimension_numbers=names, feature_group_count=2)
  convolve = functools.partial(lax.conv_general_dilated, padding=((0, 0), (0, 0)), **options)
  assert flops.count_flops(convolve, x, kernel) == count_by_xla(convolve, x, kernel)


def count_by_xla(function, *args):
  return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def test_loops_branches_and_devices_count():
  x = jnp.ones((4, 4))
  one = 2 * 4**3

  def loop(x):
    return lax.scan(lambda h, _: (h @ x, None), x, length=5)[0]

  def branch(x):
    return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

  mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
  specs = dict(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
  spread = jax.shard_map(lambda x: x @ jnp.ones((4, 4)), **specs)
  assert flops.count_flops(loop, x) == 5 * one
  assert flops.count_flops(branch, x) == 2 * one
  assert flops.count_flops(jax.checkpoint(jax.jit(loop)), x) == 5 * one
  assert flops.count_flops(spread, jnp.ones((32, 4))) == 8 * one


def test_peaks_are_of_the_chip_and_not_of_its_relatives():
  kinds = columns(str, literal)("""
    NVIDIA H100 80GB HBM3 | 989.4
    NVIDIA H100 PCIe | 756.0
    NVIDIA H200 | 989.4
    NVIDIA A100-SXM4-80GB | 312.0
    TPU v5 lite | 197.0
    TPU v5p | 459.0
    NVIDIA A10 | 125.0
    NVIDIA A1000 | None
    cpu | None
""")
  for kind, tflops in kinds:
    assert peak_flops(kind) == (tflops and tflops * 1e12), kind
