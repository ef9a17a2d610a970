"""Vision Transformer (arXiv:2010.11929): an image as a sequence of patches.

    z = [class token; patches E] + positions                      (eq. 1)
    z = z + o(attention(q(x), k(x), v(x)))      x = layer_norm(z)   (eq. 2)
    z = z + down(gelu(up(x)))                   x = layer_norm(z)   (eq. 3)
    y = head(layer_norm(z)[class token])                            (eq. 4)

The published sizes, as (width, num_layers, num_heads): Ti (192, 12, 3) and S (384,
12, 6) of arXiv:2012.12877, table 1; B (768, 12, 12) and L (1024, 24, 16) of
arXiv:2010.11929, table 1. There is no dropout: with augmentation or large data it is
left out (arXiv:2106.10270, §4.6).
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
from jaxscale.models.stack import Ops, Stack, at_least_float32, rejoin, sum_totals

# How a layout splits each parameter: path, axis of each dim (parallel/rules.py).
SHARDING = (
  ("embed/patch/kernel", (None, "fsdp")),
  ("embed/(patch/bias|class_token)", (None,)),
  ("embed/position", (None, None)),
  ("layers/(q|k|v|up)/kernel", ("stage", "fsdp", "model")),
  ("layers/(q|k|v|up)/bias", ("stage", "model")),
  ("layers/(o|down)/kernel", ("stage", "model", "fsdp")),
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
  """An image classifier as pure functions of its parts.

  A batch is {"image": uint8 [rows, height, width, channels], "label": int32
  [rows]}, and may have "mask", bool [rows]: which rows count.

  Args:
    image_shape: (height, width, channels) of an image.
    num_classes: labels are 0 … num_classes - 1.
    patch: height and width of a patch, in pixels.
    width: of the residual stream.
    num_layers: layers of attention and MLP.
    num_heads: heads of attention.
    hidden: units of the MLP; None: 4 * width.
    mean: per channel or one for all, subtracted from the images.
    std: likewise; the images are divided by it.
    pool: what is classified: a token of its own, or the mean over the patches,
      which then has no such token (arXiv:2205.01580).
    norm_eps: added to the variance by LayerNorm: 1e-6 in Flax, with which the
      published weights were trained; 1e-12 in Hugging Face's.
    pad_classes_to: the head has a multiple of this many classes, so that it can be
      split evenly on any layout. Those behind the last are 0 and stay it.
    label_smoothing: share of the target spread over all classes; 0 for evaluation.
    dtype: of activations; parameters are float32, and so are norms, softmax and
      loss inside.

  Raises:
    ConfigError: sizes that do not go together.

  Example:
    >>> stack = make_vit(image_shape=(224, 224, 3), num_classes=1000)
    >>> params = jax.eval_shape(stack.init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    22050664
  """
  _check_sizes(image_shape, patch, width, num_heads)
  norm, dtype = functools.partial(layer_norm, eps=norm_eps), jnp.dtype(dtype)
  layer = functools.partial(_layer, norm=norm, head_width=width // num_heads)

  def embed(p, batch, ops):
    # Images are whole on a device: `ops` are not used.
    images = batch["image"].astype(jnp.float32)
    images = (images - jnp.array(mean, jnp.float32)) / jnp.array(std, jnp.float32)
    h = dense(patches(images.astype(dtype), patch), p["patch"])
    if "class_token" in p:
      token = p["class_token"].astype(h.dtype)
      token = jnp.broadcast_to(token, (len(h), 1, h.shape[-1]))
      h = jnp.concatenate([token, h], axis=1)
    return h + p["position"].astype(h.dtype)

  def pooled(p, h):
    """[rows, width] of what is classified."""
    if pool == "token":
      return norm(h[:, 0], p["norm"])
    return norm(h, p["norm"]).mean(axis=1)

  def finish(p, h, batch, ops):
    x, labels = ops.enter(pooled(p, h)), batch["label"]
    options = {"num_classes": num_classes, "label_smoothing": label_smoothing, "dtype": h.dtype}
    losses, hits = ops.classify(x, p["kernel"], p["bias"], labels, **options)
    # From the rows, so that it varies over devices as they do.
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

  return Stack(init, embed, layer, finish, logits, num_layers)


def _layer(
  p: Any, h: jax.Array, ops: Ops, *, norm: Callable[..., jax.Array], head_width: int
) -> jax.Array:
  """Attention and MLP of one layer on [rows, tokens, width]."""
  # A bias behind `rejoin` counts once, on however many devices the heads are.
  x = ops.enter(norm(h, p["attn_norm"]))
  q, k, v = (split_heads(dense(x, p[name], h.dtype), head_width) for name in "qkv")
  y = join_heads(ops.attend(q, k, v, causal=False))
  h = h + shift(rejoin(y, p["o"]["kernel"], ops), p["o"]["bias"])
  x = ops.enter(norm(h, p["mlp_norm"]))
  y = gelu(dense(x, p["up"], h.dtype))
  return h + shift(rejoin(y, p["down"]["kernel"], ops), p["down"]["bias"])


def _check_sizes(image_shape: tuple[int, int, int], patch: int, width: int, num_heads: int) -> None:
  """Refuse images that patches do not fill, and heads that do not fill the width."""
  height, columns, _ = image_shape
  if height % patch or columns % patch:
    why = f"does not divide images of {height}x{columns} pixels"
    raise invalid("vit.patch", patch, why, "give a divisor or another image size")
  if width % num_heads:
    why = f"does not divide width={width}"
    raise invalid("vit.num_heads", num_heads, why, "give a divisor")


def layer_norm(x: jax.Array, p: Any, *, eps: float) -> jax.Array:
  """LayerNorm (arXiv:1607.06450): (x - mean) / sqrt(var + eps) * scale + bias.

  Args:
    x: [..., width].
    p: {"scale": float32 [width], "bias": float32 [width]}.
    eps: added to the variance.

  Returns:
    float32 [..., width].
  """
  wide = at_least_float32(x)
  centred = wide - wide.mean(axis=-1, keepdims=True)
  variance = jnp.square(centred).mean(axis=-1, keepdims=True)
  return centred * jax.lax.rsqrt(variance + eps) * p["scale"] + p["bias"]


def patches(images: jax.Array, size: int) -> jax.Array:
  """[n, height, width, channels] -> [n, patches, size * size * channels], by rows.

  With a matrix behind it that is the convolution of stride `size`, as a plain
  matrix product.
  """
  n, height, width, channels = images.shape
  x = images.reshape(n, height // size, size, width // size, size, channels)
  x = x.transpose(0, 1, 3, 2, 4, 5)
  return x.reshape(n, height * width // size**2, size * size * channels)


def _init(
  key, patch_size, num_patches, width, hidden, num_layers, num_classes, *, has_token
) -> Any:
  """As the paper's own code (google-research/vision_transformer, models_vit.py).

  Uniform numbers of Glorot and Bengio (2010, eq. 16) in the layers, biases of the
  MLP of deviation 1e-6; patches as LeCun's normal numbers; positions of deviation
  0.02; class token and head 0.
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
    heads = zip("qkvo", attend, strict=True)
    layers = {name: biased(key, width, width) for name, key in heads}
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
  """The normal distribution's function of x, times x (arXiv:1606.08415), exactly.

  By erf, as PyTorch computes it: XLA's erfc, in `jax.nn.gelu`, takes three times as
  long on CPUs. Its derivative is given, for JAX 0.12 cannot take that of erf where
  `shard_map` checks types.
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
  """The share of the standard normal distribution that is below x."""
  return (1 + lax.erf(x * jnp.array(0.5**0.5, x.dtype))) / 2
