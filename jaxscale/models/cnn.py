"""Small models for the quickstart: an MLP and a convolutional network."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.convolution import Conv
from jaxscale.models.layers import ImageModule, Keys, dropout, max_pool_2
from jaxscale.models.remat import INPUT


class MLPModule(nn.Module):
  """Dense layers with ReLU on the flattened image.

  Attributes:
    num_classes: width of the output.
    hidden: width of each hidden layer.
    dtype: dtype of activations; parameters and logits are float32.
  """

  num_classes: int
  hidden: tuple[int, ...] = (256, 256)
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images: jax.Array, train: bool, keys: Keys = None) -> jax.Array:
    # `train` and `keys` are not used: training and evaluation are the same.
    x = images.reshape(len(images), -1).astype(self.dtype)
    for width in self.hidden:
      x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
    return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype(jnp.float32)


class CNNModule(ImageModule):
  """Stages of 3x3 convolutions with ReLU and a max-pool at the end of each stage.

  Attributes:
    num_classes: width of the output.
    features: number of channels of each stage.
    convs_per_stage: number of convolutions per stage.
    dense: width of the hidden layer before the classifier; 0 means no hidden layer.
    batch_norm: use BatchNorm after every convolution.
    bn_axis_name: mesh axes whose devices share BatchNorm statistics.
    bn_group_size: number of examples that share statistics, if a device holds more.
    dropout: probability of dropping a unit before the classifier.
    dtype: dtype of activations; parameters and logits are float32.
  """

  features: tuple[int, ...] = (32, 64)
  convs_per_stage: int = 1
  dense: int = 128
  batch_norm: bool = False
  dropout: float = 0.0

  @nn.compact
  def __call__(self, images: jax.Array, train: bool, keys: Keys = None) -> jax.Array:
    x = images.astype(self.dtype)
    for width in self.features:
      for i in range(self.convs_per_stage):
        x = Conv(width, (3, 3), use_bias=not self.batch_norm, dtype=self.dtype)(x)
        if i == self.convs_per_stage - 1:
          # Pooling first leaves a quarter of the values for normalisation and ReLU.
          x = max_pool_2(x)
        if self.batch_norm:
          x = self.norm()(x, train)
        x = nn.relu(x)
      x = checkpoint_name(x, INPUT)  # of the next stage
    x = x.reshape(len(x), -1)
    if self.dense:
      x = nn.relu(nn.Dense(self.dense, dtype=self.dtype)(x))
    x = dropout(x, self.dropout, keys if train else None, layer=0)
    return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype(jnp.float32)
