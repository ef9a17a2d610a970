"""AlexNet-BN on ImageNet by LARS at batch 32,768: ImageNet in minutes.

Command    srun jaxscale train --config configs/alexnet_bn_32k.py
Hardware   not run here: needs ImageNet and a cluster. Published: 512 KNL in 24
           minutes, 1,024 Skylake in 11 (arXiv:1709.05011)
Result     published: 58.5 % and 58.6 % top-1 after 100 epochs (as recalled from
           the paper's table, not read in it)

The solver is that of Intel Caffe (models/intel_optimized_models/multinode/
alexnet_bn_64nodes/solver.prototxt, 64 nodes of 512 examples): rate 1 to 32 in
400 steps, then 32 (1 - step / 4000)^2 of the absolute step, so it drops to 25.92
there; momentum corrected during the warm-up only; LARS and decay for every
parameter, biases and BatchNorm included. The input differs: the prototxt crops 227
pixels at random out of images stored at 256x256, mirrors them and subtracts a mean
image; here it is the Inception-style crop, mirrored, with a mean for each channel.

The model is one of a config file's own: AlexNet as in Caffe. Layers, groups, initial values and
dropout follow
- without BatchNorm: BVLC/caffe models/bvlc_alexnet/train_val.prototxt, a replication of
  Krizhevsky et al. (NIPS 2012) with the groups of its two GPUs;
- with BatchNorm: intel/caffe (commit 44d53638)
  models/intel_optimized_models/multinode/alexnet_bn_64nodes/train_val2.prototxt,
  the network of the 32K recipe of arXiv:1709.05011.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxscale import models
from jaxscale.config import LARS, TFDS, Config, Evaluation, Fraction, Model, Polynomial
from jaxscale.errors import ConfigError
from jaxscale.models.convolution import Conv
from jaxscale.models.layers import ImageModule, Keys
from jaxscale.models.settings import Span, image_options

# For this size conv1 (11, stride 4) and three pools of 3 with stride 2 leave one position.
MIN_IMAGE_SIZE = 67


class AlexNetModule(ImageModule):
  """Five convolutions and three dense layers, for NHWC images of 227 x 227.

  With 1,000 classes it has 60,965,224 parameters, and 2,240 more with BatchNorm.
  BatchNorm has a learned scale and shift, as in Intel Caffe's MKL-DNN layer
  (`use_weight_bias`, true by default). NVIDIA/caffe's file of the same network
  (models/alexnet_bn/train_val2.prototxt) has `scale_bias: false`.

  Caffe rounds the sizes of pooled images up, and this module rounds down, which makes no
  difference at 227. The recipes subtract the mean from the images, and for BatchNorm also
  divide them by 256 (`scale: 0.00390625`).

  Attributes:
    num_classes: width of the output.
    batch_norm: use BatchNorm on the inputs of conv2 to conv5, instead of LRN on those of
      conv2 and conv3.
    bn_axis_name: mesh axes whose devices share BatchNorm statistics.
    bn_group_size: number of examples that share statistics, if a device holds more.
    bn_momentum: decay of the running statistics.
    bn_epsilon: term added to the variance.
    hidden: width of the two hidden dense layers.
    dropout: probability of dropping a unit of the hidden dense layers.
    dtype: dtype of activations; parameters and logits are float32.

  Raises:
    ConfigError: images are smaller than 67 x 67, so that the last pool leaves nothing.
  """

  batch_norm: bool = False
  bn_epsilon: float = 1e-4
  hidden: int = 4096
  dropout: float = 0.5

  @nn.compact
  def __call__(self, images: jax.Array, train: bool, keys: Keys = None) -> jax.Array:
    if min(images.shape[1:3]) < MIN_IMAGE_SIZE:
      problem = "is too small for AlexNet's pools"
      fix = f"give {MIN_IMAGE_SIZE} or more (published: 227)"
      raise ConfigError(f"image_size={min(images.shape[1:3])} {problem}; {fix}")
    x = self._features(images.astype(self.dtype), train)
    x = x.reshape(len(x), -1)
    for layer, name in enumerate(("fc6", "fc7")):
      x = nn.relu(self._dense(name, self.hidden, std=0.005, bias=0.1)(x))
      x = models.dropout(x, self.dropout, keys if train else None, layer)
    head_bias = 0.01 if self.batch_norm else 0.0
    return self._dense("fc8", self.num_classes, std=0.01, bias=head_bias)(x).astype(jnp.float32)

  def _features(self, x: jax.Array, train: bool) -> jax.Array:
    """Map [n, h, w, channels] to [n, h', w', 256], e.g. 227 x 227 to 6 x 6."""

    def norm_and_pool(x, name):
      if self.batch_norm:
        return self.norm(name=name)(_max_pool(x), train)
      return _max_pool(local_response_norm(x))

    conv = self._conv
    x = nn.relu(conv("conv1", 96, 11, bias=0.0, strides=4, padding="VALID")(x))
    x = norm_and_pool(x, "bn2")
    x = nn.relu(conv("conv2", 256, 5, bias=0.1, feature_group_count=2)(x))
    x = norm_and_pool(x, "bn3")
    x = nn.relu(conv("conv3", 384, 3, bias=0.0)(x))
    x = self.norm(name="bn4")(x, train) if self.batch_norm else x
    x = nn.relu(conv("conv4", 384, 3, bias=0.1, feature_group_count=2)(x))
    x = self.norm(name="bn5")(x, train) if self.batch_norm else x
    x = nn.relu(conv("conv5", 256, 3, bias=0.1, feature_group_count=2)(x))
    return _max_pool(x)

  def _conv(self, name, width, size, bias, **options) -> nn.Conv:
    """Return a convolution initialised from N(0, 0.01²).

    `bias` is the initial bias without BatchNorm.
    """
    options |= self._options(name, 0.01, 0.01 if self.batch_norm else bias)
    return Conv(width, (size, size), **options)

  def _dense(self, name, width, std, bias) -> nn.Dense:
    return nn.Dense(width, **self._options(name, std, bias))

  def _options(self, name, std, bias) -> dict[str, Any]:
    """Return the options of a layer initialised from N(0, std²) and a constant bias."""
    kernel, bias = nn.initializers.normal(std), nn.initializers.constant(bias)
    return {"kernel_init": kernel, "bias_init": bias, "dtype": self.dtype, "name": name}


def _max_pool(x: jax.Array) -> jax.Array:
  return nn.max_pool(x, (3, 3), strides=(2, 2), padding="VALID")


def local_response_norm(
  x: jax.Array, size: int = 5, alpha: float = 1e-4, k: float = 1.0
) -> jax.Array:
  """Local response normalisation across channels (Krizhevsky et al. 2012, §3.3).

  y_c = x_c / (k + alpha / size * sum of x_i^2 over |i - c| <= size / 2)^(3/4).

  Form and defaults are Caffe's (lrn_layer.cpp, models/bvlc_alexnet): alpha is divided by
  the window size, and k is 1. The paper has k = 2 and alpha = 1e-4 without the division.
  The computation is in float32 for any dtype of x.

  Args:
    x: inputs, [..., channels].
    size: number of channels in the window, odd.
    alpha: weight of the mean square.
    k: constant term of the denominator.
  """
  wide = x.astype(jnp.float32)
  window = (1,) * (x.ndim - 1) + (size,)
  squares = lax.reduce_window(jnp.square(wide), 0.0, lax.add, window, (1,) * x.ndim, "SAME")
  # Two roots for d^(-3/4) are 4 times faster than a power on CPU in the forward pass.
  root = lax.rsqrt(k + alpha / size * squares)
  return (wide * root * jnp.sqrt(root)).astype(x.dtype)


class AlexNet(Model):
  """AlexNet (NeurIPS 2012), with local response normalization or BatchNorm.

  Attributes:
    batch_norm: whether to replace local response normalization by BatchNorm (AlexNet-BN,
      the network of the batch-32K recipes).
    bn_span: the number of examples (>= 2) that share BatchNorm statistics; "device" is a
      device's micro-batch, "global" is the micro-batches of all devices.
    dropout: the probability of dropping a unit of the two hidden dense layers; 0
      disables it.
  """

  batch_norm: bool = False
  bn_span: Span = "device"
  dropout: Fraction = 0.5

  def build(self, context: Any) -> Any:
    module = AlexNetModule(**image_options(self, context))
    # Caffe's files subtract the mean and, with BatchNorm, also divide by 256.
    std = (256.0,) if self.batch_norm else (1.0,)
    info = context.info
    return models.functions(module, info.image_shape, mean=info.mean, std=std)


def get_config() -> Config:
  return Config(
    model=AlexNet(batch_norm=True, bn_span=512, dropout=0.5),
    data=TFDS(name="imagenet2012", eval_split="validation", image_size=227, augment="crop"),
    optimizer=LARS(
      lr=32.0,
      momentum=0.9,
      weight_decay=5e-4,
      trust_coefficient=1e-3,
      momentum_correction="warmup",
      include="all",
    ),
    schedule=Polynomial(warmup_steps=400, warmup_lr=1.0, power=2.0, end_lr=0.0, restart=False),
    batch_size=32_768,
    steps=4000,
    dtype="bfloat16",
    evaluation=Evaluation(every_epochs=5, batch_size=2000),
    target_accuracy=0.585,
  )
