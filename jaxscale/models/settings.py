"""Settings of the built-in models. Imports no JAX."""

import dataclasses
import inspect
from typing import Annotated, Any, Literal

from jaxscale import models  # Lazy: its names load on first use.
from jaxscale.config.bases import Model, ModelContext
from jaxscale.config.bounds import Count, Fraction, Positive
from jaxscale.errors import ConfigError, invalid
from jaxscale.models import sizes

# The names for --config.model= (HOMES in config/choice.py lists this module).
__all__ = ["CNN", "MLP", "ConvNeXt", "Module", "ResNet", "Transformer", "UNet", "ViT"]

# Examples that share BatchNorm statistics: a number, "device" (a device's micro-batch) or
# "global" (the micro-batches of all devices).
Span = Annotated[int | Literal["device", "global"], ">= 2"]


def _images(model: Model, context: ModelContext) -> dict[str, Any]:
  """Return the fields that every built-in Flax module of images or fields has."""
  if (shape := getattr(context.info, "image_shape", None)) is None:
    other = "is text" if hasattr(context.info, "vocab_size") else "has no 'image'"
    reason = f"needs images, but {context.info.name} {other}; use another model or other data"
    raise ConfigError(f"Config.model={type(model).__name__} {reason}")
  is_field = isinstance(model, UNet)
  if len(shape) != 3 and not isinstance(model, MLP) and not (is_field and len(shape) == 4):
    name = f"Config.model={type(model).__name__}"
    form = "[n, (depth,) height, width, channels]" if is_field else "[n, height, width, channels]"
    problem = f"takes images {form}, not {['n', *shape]}"
    raise invalid(name, ..., problem.replace("'", ""), "use MLP, or reshape the inputs")
  return {"num_classes": context.info.num_classes, "dtype": context.dtype}


def image_options(model: Any, context: ModelContext) -> dict[str, Any]:
  """Return the arguments of an `ImageModule`: the settings, and how BatchNorm shares statistics.

  Args:
    model: the settings, a class of fields that the module has, and of `bn_span`.
    context: the argument of `Model.build`.

  Raises:
    ConfigError: the data have no images.
  """
  own = {k: v for k, v in dataclasses.asdict(model).items() if k != "bn_span"}
  spans = {"bn_axis_name": context.bn_axis_name, "bn_group_size": context.bn_group_size}
  return own | spans | _images(model, context)


class MLP(Model):
  """Multi-layer perceptron with ReLU.

  Attributes:
    hidden: the number of units of each hidden layer.
  """

  hidden: Annotated[tuple[int, ...], ">= 1"] = (256, 256)

  def build(self, context: ModelContext) -> Any:
    return models.MLPModule(hidden=self.hidden, **_images(self, context))


class CNN(Model):
  """Small convolutional network: 3x3 convolutions with one max-pool per stage.

  Attributes:
    features: the number of channels of each stage; each stage halves height and width.
    convs_per_stage: the number of convolutions per stage.
    dense: the number of units of the hidden layer before the classifier; 0 omits this layer.
    batch_norm: whether to use BatchNorm after every convolution.
    bn_span: the number of examples (>= 2) that share BatchNorm statistics; "device" is a
      device's micro-batch, "global" is the micro-batches of all devices.
    dropout: the probability of dropping a unit of the layer before the classifier; 0 disables
      it. The masks do not depend on the number of devices.
  """

  features: Annotated[tuple[int, ...], ">= 1"] = (32, 64)
  convs_per_stage: Count = 1
  dense: Annotated[int, ">= 0"] = 128
  batch_norm: bool = False
  bn_span: Span = "device"
  dropout: Fraction = 0.0

  def build(self, context: ModelContext) -> Any:
    options, pixels = image_options(self, context), min(context.info.image_shape[:2])
    if pixels >> len(self.features) == 0:
      text = f"each stage halves the {pixels} pixels; use at most {pixels.bit_length() - 1} stages"
      raise ConfigError(f"CNN.features={self.features}: {text}")
    return models.CNNModule(**options)


class ConvNeXt(Model):
  """ConvNeXt, a residual network of depthwise 7x7 convolutions.

  Published sizes as (depths, dims), by timm's names: convnext_tiny ((3, 3, 9, 3), (96, 192,
  384, 768)); small, base, large and xlarge have the depths (3, 3, 27, 3) and begin with 96,
  128, 192 and 256 channels, which double at each stage.

  Attributes:
    depths: the number of blocks of each stage.
    dims: the number of channels of each stage, as many as `depths`. The first stage has a
      quarter of the image's height and width, and each further one half of those before it.
    layer_scale: the initial scale of a block's branch.
    drop_path: the probability of dropping the last block's branch for an example (stochastic
      depth), which grows linearly from 0 in the first block; 0 disables it. What is dropped does
      not depend on the number of devices.
    norm_eps: the constant that LayerNorm adds to the variance.
  """

  depths: Annotated[tuple[int, ...], ">= 1"] = (3, 3, 9, 3)
  dims: Annotated[tuple[int, ...], ">= 1"] = (96, 192, 384, 768)
  layer_scale: Positive = 1e-6
  drop_path: Fraction = 0.0
  norm_eps: Positive = 1e-6

  def build(self, context: ModelContext) -> Any:
    options, (height, width, _) = _images(self, context), context.info.image_shape
    if len(self.depths) != len(self.dims) or not self.dims:
      problem = f"has {len(self.dims)} stages, but depths={self.depths} has {len(self.depths)}"
      raise invalid("ConvNeXt.dims", self.dims, problem, "give one number per stage for both")
    if min(height, width) < (least := 2 ** (1 + len(self.dims))):
      problem = f"has {len(self.dims)} stages, which need images of {least}x{least} or more"
      raise invalid("ConvNeXt.dims", self.dims, problem, f"not {height}x{width}; use fewer stages")
    return models.ConvNeXtModule(**dataclasses.asdict(self), **options)


class Module(Model):
  """Model that is given as an object: a module of a library, or two pure functions.

  In a config file, write a class that extends `Model` instead, so that config.json records
  its settings.

  Attributes:
    module: the module, or what else `Model.build` may return.
  """

  module: Any

  holds_user_code = True

  def build(self, context: ModelContext) -> Any:
    return self.module

  @property
  def user_code(self) -> Any:
    """Code object whose file and line errors show."""
    module = getattr(self.module, "func", self.module)  # of a functools.partial
    owner = module if isinstance(module, type) else type(module)
    called = inspect.unwrap(owner.__call__)
    return getattr(module, "__code__", None) or getattr(called, "__code__", None)


class ResNet(Model):
  """Residual network, version 1.5 (the stride is in the 3x3 convolution).

  Attributes:
    depth: the number of layers with weights, e.g. 50 for ResNet-50.
    width: the number of channels of the stem and of the 3x3 convolutions in the first stage.
    stem: the first layers; "imagenet" (7x7 with stride 2, max-pool) or "small" (3x3 with
      stride 1).
    bn_span: the number of examples (>= 2) that share BatchNorm statistics; "device" is a
      device's micro-batch, "global" is the micro-batches of all devices.
    bn_momentum: the decay per step of the running BatchNorm statistics (1 minus the momentum in
      PyTorch).
    bn_epsilon: the constant that BatchNorm adds to the variance.
    zero_init_residual: whether to initialize the scale of the last BatchNorm in each block to
      0, so that the block starts as the identity.
  """

  depth: Literal[18, 34, 50, 101, 152] = 50
  width: Count = 64
  stem: Literal["imagenet", "small"] = "imagenet"
  bn_span: Span = "device"
  bn_momentum: Annotated[float, "in (0, 1)"] = 0.9
  bn_epsilon: Positive = 1e-5
  zero_init_residual: bool = True

  batch_norm = True
  not_shared = ("width",)

  def build(self, context: ModelContext) -> Any:
    return models.make_resnet(**image_options(self, context))


class Transformer(Model):
  """Decoder-only language model (Llama, Qwen2 and Qwen3 architectures).

  Attributes:
    num_layers: the number of layers, each of attention and MLP.
    width: the width of the residual stream (hidden_size in Hugging Face).
    num_heads: the number of query heads.
    num_kv_heads: the number of key and value heads, a divisor of `num_heads`; None uses
      `num_heads`.
    head_width: the width of each attention head, an even number; None uses width / num_heads.
    hidden: the number of units of the MLP (intermediate_size in Hugging Face); None uses 8/3 of
      `width`, rounded up to a multiple of 256, with which a gated MLP has about as many
      parameters as an ungated one with 4 * `width` units (arXiv:2002.05202, Llama's code).
    rope_theta: the base of rotary position embeddings (RoPE; 500,000 in Llama 3).
    rope_factor: the RoPE scaling factor for low frequencies (8 in Llama 3.1); None disables
      scaling.
    rope_low: the number of rotations in `rope_length` tokens below which the frequency of a
      RoPE pair is divided by `rope_factor` (low_freq_factor in Llama 3.1).
    rope_high: the number of rotations in `rope_length` tokens above which the frequency of a
      RoPE pair is not scaled (high_freq_factor in Llama 3.1); between `rope_low` and
      `rope_high` the scaling is interpolated.
    rope_length: the sequence length in tokens before the extension by `rope_factor`
      (original_max_position_embeddings in Llama 3.1).
    norm_eps: the constant that RMSNorm adds to the mean square.
    qk_norm: whether to normalize queries and keys per head, as in Qwen3.
    qkv_bias: whether to add biases to queries, keys and values, as in Qwen2.
    pad_vocab_to: the number to a multiple of which the vocabulary size is padded, so that
      parameter shapes do not depend on the layout; 1 adds no padding.
    tied: whether the output layer uses the embedding table (tie_word_embeddings in Hugging
      Face) instead of a matrix of its own.
    init_std: the standard deviation of initial kernels and tables (initializer_range in Hugging
      Face), which suits widths of about a thousand; narrow models learn faster with about
      1 / sqrt(width). That of kernels at the end of a branch is divided by sqrt(2 * num_layers).
  """

  num_layers: Count = 4
  width: Count = 256
  num_heads: Count = 4
  num_kv_heads: Annotated[int | None, ">= 1"] = None
  head_width: Annotated[int | None, ">= 1"] = None
  hidden: Annotated[int | None, ">= 1"] = None
  rope_theta: Positive = 10_000.0
  rope_factor: Annotated[float | None, ">= 1"] = None
  rope_low: Positive = 1.0
  rope_high: Positive = 4.0
  rope_length: Count = 8192
  norm_eps: Positive = 1e-5
  qk_norm: bool = False
  qkv_bias: bool = False
  pad_vocab_to: Count = 128
  tied: bool = False
  init_std: Positive = 0.02

  def __post_init__(self):
    sizes.transformer_heads(self.width, self.num_heads, self.num_kv_heads, self.head_width)
    if self.rope_low >= self.rope_high:
      problem = f"is not below rope_high={self.rope_high}; give a smaller number"
      raise ConfigError(f"Transformer.rope_low={self.rope_low} {problem}")

  is_stack = takes_text = True

  def sharding(self) -> Any:
    from jaxscale.models.decoder import SHARDING

    return SHARDING

  def build(self, context: ModelContext) -> Any:
    if not hasattr(context.info, "vocab_size"):
      fix = f"needs text, but {context.info.name} has images; use ViT or ResNet, or other data"
      raise ConfigError(f"Config.model=Transformer {fix}")
    options = dataclasses.asdict(self)
    if self.hidden is None:
      options["hidden"] = -(-8 * self.width // (3 * 256)) * 256
    options |= {"vocab_size": context.info.vocab_size, "dtype": context.dtype}
    fields = models.RopeScaling._fields
    scaling = models.RopeScaling(*(options.pop(f"rope_{name}") for name in fields))
    options["rope_scaling"] = None if self.rope_factor is None else scaling
    return models.make_transformer(label_smoothing=context.label_smoothing, **options)


class UNet(Model):
  """U-Net for fields in two or three dimensions: a target at every point of the input.

  Inputs are [n, (depth,) height, width, channels], and targets [n, (depth,) height, width] or
  with a last dimension of outputs. Sizes that cannot be halved at every level are padded at
  their end with copies of the border, and outputs are cropped.

  Attributes:
    features: the number of channels of each level, from the top; each further level halves
      all sizes.
    groups: the number of groups of GroupNorm, a divisor of all `features`; 0 uses BatchNorm.
    periodic: whether a field continues periodically beyond its border; otherwise it continues
      with zeros.
    bn_span: the number of examples (>= 2) that share BatchNorm statistics; "device" is a
      device's micro-batch, "global" is the micro-batches of all devices.
  """

  features: Annotated[tuple[int, ...], ">= 1"] = (32, 64, 128, 256)
  groups: Annotated[int, ">= 0"] = 8
  periodic: bool = False
  bn_span: Span = "device"

  @property
  def batch_norm(self) -> bool:
    return self.groups == 0

  def build(self, context: ModelContext) -> Any:
    options, info = image_options(self, context), context.info
    factor = 2 ** (len(self.features) - 1)
    *sizes, _ = info.image_shape
    if self.groups and any(width % self.groups for width in self.features):
      problem = f"does not divide all of features={self.features}"
      raise invalid("UNet.groups", self.groups, problem, "give a divisor, or 0 for BatchNorm")
    if self.periodic and any(size % factor for size in sizes):
      problem = f"needs sizes that {factor} divides, not {sizes}"
      raise invalid("UNet.periodic", True, problem, "use fewer features, or other sizes")
    label: Any = info.label_shape or ()
    if label not in ((*sizes,), (*sizes, *label[-1:])):
      problem = f"needs a target at each point of {sizes}, but {info.name} has targets {label}"
      raise invalid("Config.model", "UNet", problem, "use CNN, or give a field as the target")
    options["num_classes"] = 1 if len(label) == len(sizes) else label[-1]
    return models.UNetModule(**options)


class ViT(Model):
  """Vision Transformer.

  Published sizes as (width, num_layers, num_heads): Ti (192, 12, 3), S (384, 12, 6),
  B (768, 12, 12), L (1024, 24, 16).

  Attributes:
    patch: the height and width of a patch in pixels, a divisor of the image size.
    width: the width of the residual stream (hidden_size in Hugging Face).
    num_layers: the number of layers, each of attention and MLP.
    num_heads: the number of attention heads.
    hidden: the number of units of the MLP; None uses 4 times `width`.
    pool: the input of the classifier; "token" (a class token) or "mean" (the mean over
      patches).
    norm_eps: the constant that LayerNorm adds to the variance (1e-12 in Hugging Face's
      ViTs).
    pad_classes_to: the number to a multiple of which the number of classes is padded, so that
      parameter shapes do not depend on the layout; 1 adds no padding.
  """

  patch: Count = 16
  width: Count = 384
  num_layers: Count = 12
  num_heads: Count = 6
  hidden: Annotated[int | None, ">= 1"] = None
  pool: Literal["token", "mean"] = "token"
  norm_eps: Positive = 1e-6
  pad_classes_to: Count = 1

  def __post_init__(self):
    sizes.check_heads("ViT", self.width, self.num_heads)

  is_stack = True

  def sharding(self) -> Any:
    from jaxscale.models.vision_transformer import SHARDING

    return SHARDING

  def build(self, context: ModelContext) -> Any:
    info = context.info
    common = _images(self, context)
    common |= {"image_shape": info.image_shape, "mean": info.mean, "std": info.std}
    common |= dataclasses.asdict(self)
    return models.make_vit(label_smoothing=context.label_smoothing, **common)
