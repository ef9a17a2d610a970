"""Vision Transformer (arXiv:2010.11929): an image as a sequence of patches.

    z = [class token; patches E] + positions                      (eq. 1)
    z = z + o(attention(q(x), k(x), v(x)))      x = layer_norm(z)   (eq. 2)
    z = z + down(gelu(up(x)))                   x = layer_norm(z)   (eq. 3)
    y = head(layer_norm(z)[class token])                            (eq. 4)

The published sizes, as (width, num_layers, num_heads), are Ti (192, 12, 3) and S (384,
12, 6) from arXiv:2012.12877, table 1, and B (768, 12, 12) and L (1024, 24, 16) from
arXiv:2010.11929, table 1. There is no dropout, which does not help with augmentation or
large data sets (arXiv:2106.10270, §4.6).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.errors import invalid
from jaxscale.models.attention import join_heads, split_heads
from jaxscale.models.linear import dense, linear, shift
from jaxscale.models.norms import layer_norm
from jaxscale.models.sizes import check_heads
from jaxscale.models.stack import Ops, Stack, at_least_float32, rejoin, split_of_last, sum_totals

# Sharding rules: path pattern and mesh axis of each dim, or a function that returns the axes
# (parallel/rules.py).
SHARDING = (
  ("embed/patch/kernel", (None, "fsdp")),
  ("embed/(patch/bias|class_token)", (None,)),
  ("embed/position", (None, None)),
  ("layers/(q|k|v|up)/kernel", ("stage", "fsdp", "model")),
  ("layers/(q|k|v|up)/bias", ("stage", "model")),
  ("layers/(o|down)/kernel", split_of_last),
  ("layers/(o|down)/bias", ("stage", None)),
  ("layers/.*norm/(scale|bias)", ("stage", None)),
  ("head/norm/(scale|bias)", (None,)),
  ("head/kernel", ("fsdp", "model")),
  ("head/bias", ("model",)),
)


def make_vit(
  *,
  image_shape: tuple[int, int, int],
  num_classes: int,
  patch: int = 16,
  width: int = 384,
  num_layers: int = 12,
  num_heads: int = 6,
  hidden: int | None = None,
  mean: tuple[float, ...] = (0.0,),
  std: tuple[float, ...] = (1.0,),
  pool: Literal["token", "mean"] = "token",
  norm_eps: float = 1e-6,
  pad_classes_to: int = 1,
  label_smoothing: float = 0.0,
  dtype: Any = jnp.float32,
) -> Stack:
  """Return a Vision Transformer as a `Stack`.

  A batch is {"image": uint8 [rows, height, width, channels], "label": int32 [rows]}. An
  optional "mask", bool [rows], is False for rows that do not count.

  Args:
    image_shape: (height, width, channels) of an image.
    num_classes: number of classes.
    patch: height and width of a patch in pixels.
    width: width of the residual stream.
    num_layers: number of layers of attention and MLP.
    num_heads: number of attention heads.
    hidden: number of hidden units of the MLP; None means 4 * width.
    mean: mean that is subtracted from the images, one value per channel or one for all.
    std: standard deviation by which the images are divided, one value per channel or one
      for all.
    pool: input of the classifier: "token" for a class token, or "mean" for the mean over
      the patches, without a class token (arXiv:2205.01580).
    norm_eps: term added to the variance in LayerNorm: 1e-6 in Flax, with which the
      published weights were trained; 1e-12 in Hugging Face's ViTs.
    pad_classes_to: pad the classes of the head to a multiple of this, so that every
      layout can split them evenly. Padding stays 0.
    label_smoothing: share of the target that is spread over all classes; use 0 for
      evaluation.
    dtype: dtype of activations. Parameters, norms, softmax and loss are float32.

  Raises:
    ConfigError: sizes do not fit each other.

  Example:
    >>> stack = make_vit(image_shape=(224, 224, 3), num_classes=1000)
    >>> params = jax.eval_shape(stack.init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    22050664
  """
  if any(size % patch for size in image_shape[:2]):
    problem = f"does not divide images of {image_shape[0]}x{image_shape[1]} pixels"
    raise invalid("ViT.patch", patch, problem, "give a divisor or another image size")
  check_heads("ViT", width, num_heads)
  norm, dtype = functools.partial(_layer_norm, eps=norm_eps), jnp.dtype(dtype)
  layer = functools.partial(_layer, norm=norm, head_width=width // num_heads)

  def embed(p, batch, ops):
    # `ops` are not used, because every device has whole images.
    images = batch["image"].astype(jnp.float32)
    images = (images - jnp.array(mean, jnp.float32)) / jnp.array(std, jnp.float32)
    h = dense(patches(images.astype(dtype), patch), p["patch"])
    if "class_token" in p:
      token = p["class_token"].astype(h.dtype)
      token = jnp.broadcast_to(token, (len(h), 1, h.shape[-1]))
      h = jnp.concatenate([token, h], axis=1)
    return h + p["position"].astype(h.dtype)

  def pooled(p, h):
    """Return the classifier's input, [rows, width]."""
    if pool == "token":
      return norm(h[:, 0], p["norm"])
    return norm(h, p["norm"]).mean(axis=1)

  def finish(p, h, batch, ops):
    x, labels = ops.enter(pooled(p, h)), batch["label"]
    options = {"num_classes": num_classes, "label_smoothing": label_smoothing, "dtype": h.dtype}
    losses, hits = ops.classify(x, p["kernel"], p["bias"], labels, **options)
    # The default mask is computed from the labels, so that it varies over devices too.
    return sum_totals(losses, hits, batch.get("mask", labels >= 0))

  def logits(p, h):
    logits = at_least_float32(linear(pooled(p, h), p["kernel"], h.dtype))
    return (logits + p["bias"])[..., :num_classes]

  def init(key):
    patch_size, pixels = patch * patch * image_shape[2], math.prod(image_shape[:2])
    units = 4 * width if hidden is None else hidden
    classes = -(-num_classes // pad_classes_to) * pad_classes_to
    sizes = pixels // patch**2, width, units, num_layers, classes
    return _init(key, patch_size, *sizes, has_token=pool == "token")

  return Stack(init, embed, layer, finish, logits, num_layers, has_lora=True)


def _layer(
  p: Any, h: jax.Array, ops: Ops, *, norm: Callable[..., jax.Array], head_width: int
) -> jax.Array:
  """Run attention and MLP of one layer on [rows, tokens, width]."""
  # A bias added after `rejoin` counts once for any number of devices.
  x = ops.enter(norm(h, p["attn_norm"]))
  q, k, v = (split_heads(dense(x, p[name], h.dtype), head_width) for name in "qkv")
  y = join_heads(ops.attend(q, k, v, causal=False))
  h = h + shift(rejoin(y, p["o"], ops), p["o"]["bias"])
  x = ops.enter(norm(h, p["mlp_norm"]))
  up = dense(x, p["up"], h.dtype)
  return h + shift(rejoin((up,), p["down"], ops, gelu), p["down"]["bias"])


def _layer_norm(x: jax.Array, p: Any, *, eps: float) -> jax.Array:
  """Apply `layer_norm` with the parameters {"scale", "bias"}."""
  return layer_norm(x, p["scale"], p["bias"], eps=eps)


def patches(images: jax.Array, size: int) -> jax.Array:
  """Cut images [n, height, width, channels] into [n, patches, size * size * channels].

  Patches are in row order. Multiplied by a matrix they give a convolution of stride
  `size`, as a plain matrix product.
  """
  n, height, width, channels = images.shape
  x = images.reshape(n, height // size, size, width // size, size, channels)
  x = x.transpose(0, 1, 3, 2, 4, 5)
  return x.reshape(n, height * width // size**2, size * size * channels)


def _init(
  key, patch_size, num_patches, width, hidden, num_layers, num_classes, *, has_token
) -> Any:
  """Initialise parameters as the paper's code does.

  The code is google-research/vision_transformer, models_vit.py. Layers are Glorot uniform
  (Glorot and Bengio, 2010, eq. 16), biases of the MLP have a standard deviation of 1e-6,
  the patch embedding is LeCun normal, positions have a standard deviation of 0.02, and
  class token and head are 0.
  """
  glorot = jax.nn.initializers.glorot_uniform()
  lecun = jax.nn.initializers.lecun_normal()

  def normal(key, shape, std):
    return std * jax.random.normal(key, shape, jnp.float32)

  def norm():
    return {"scale": jnp.ones(width, jnp.float32), "bias": jnp.zeros(width)}

  def biased(key, inputs, outputs, bias_std=0.0):
    key, bias_key = jax.random.split(key)
    kernel = glorot(key, (inputs, outputs), jnp.float32)
    return {"kernel": kernel, "bias": normal(bias_key, (outputs,), bias_std)}

  def layer(key):
    *attend, up, down = jax.random.split(key, 6)
    layers = {name: biased(key, width, width) for name, key in zip("qkvo", attend, strict=True)}
    layers["up"] = biased(up, width, hidden, 1e-6)
    layers["down"] = biased(down, hidden, width, 1e-6)
    return layers | {"attn_norm": norm(), "mlp_norm": norm()}

  def zeros(*shape):
    return jnp.zeros(shape, jnp.float32)

  patch_key, position_key, layers_key = jax.random.split(key, 3)
  kernel = lecun(patch_key, (patch_size, width), jnp.float32)
  patch = {"kernel": kernel, "bias": zeros(width)}
  position = normal(position_key, (num_patches + has_token, width), 0.02)
  embed = {"class_token": zeros(width)} if has_token else {}
  layers = jax.vmap(layer)(jax.random.split(layers_key, num_layers))
  kernel, bias = zeros(width, num_classes), zeros(num_classes)
  embed |= {"patch": patch, "position": position}
  head = {"norm": norm(), "kernel": kernel, "bias": bias}
  return {"embed": embed, "layers": layers, "head": head}


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
  """Exact GELU (arXiv:1606.08415): x times the standard normal distribution function.

  It uses erf, as PyTorch does, because XLA's erfc in `jax.nn.gelu` takes three times as
  long on CPU. The derivative is custom, because JAX 0.12 cannot differentiate erf inside
  a `shard_map` that checks types.
  """
  wide = at_least_float32(x)
  return (wide * _normal_share(wide)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals: Any, tangents: Any) -> Any:
  (x,), (tangent,) = primals, tangents
  wide = at_least_float32(x)
  density = jnp.exp(-wide * wide / 2) * jnp.array((2 * jnp.pi) ** -0.5, wide.dtype)
  slope = _normal_share(wide) + wide * density
  return gelu(x), tangent * slope.astype(x.dtype)


def _normal_share(x: jax.Array) -> jax.Array:
  """Return the standard normal distribution function of x."""
  return (1 + lax.erf(x * jnp.array(0.5**0.5, x.dtype))) / 2
