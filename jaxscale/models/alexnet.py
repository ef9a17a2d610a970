"""AlexNet as in Caffe, and a variant with BatchNorm instead of LRN.

Layers, groups, initial values and dropout follow
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

from jaxscale.errors import ConfigError
from jaxscale.models.convolution import Conv
from jaxscale.models.layers import ImageModule, Keys, dropout, local_response_norm

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

  Example:
    >>> fns = functions(AlexNetModule(num_classes=1000), (227, 227, 3))
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
      x = dropout(x, self.dropout, keys if train else None, layer)
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
