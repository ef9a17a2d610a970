"""ResNet v1.5 (arXiv:1512.03385; the stride is in the 3x3 convolution).

Initialisation follows Goyal et al. (arXiv:1706.02677, §5.1): He-normal convolutions, 0
for the last BatchNorm scale of a block, and N(0, 0.01²) for the classifier by default.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.convolution import Conv
from jaxscale.models.layers import ImageModule, Keys, max_pool_3
from jaxscale.models.remat import INPUT

# He et al. (arXiv:1502.01852) for the backward pass (fan_out), as in torchvision.
_conv_init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResNetModule(ImageModule):
  """A residual network on NHWC images.

  Attributes:
    num_classes: width of the output.
    stage_sizes: number of blocks in each stage.
    bottleneck: use 1x1-3x3-1x1 blocks (50 layers and more) instead of 3x3-3x3.
    width: number of channels of the first stage.
    stem: "imagenet" (7x7 stride 2 and max-pool) or "small" (3x3 stride 1).
    bn_axis_name: mesh axes whose devices share BatchNorm statistics.
    bn_group_size: number of examples that share statistics, if a device holds more.
    bn_momentum: decay of the running statistics.
    bn_epsilon: term added to the variance.
    zero_init_residual: start the last BatchNorm scale of each block at 0.
    head_init: initialiser of the classifier's kernel; its bias starts at 0.
    dtype: dtype of activations; parameters and logits are float32.
  """

  stage_sizes: tuple[int, ...]
  bottleneck: bool
  width: int = 64
  stem: str = "imagenet"
  zero_init_residual: bool = True
  head_init: nn.initializers.Initializer = nn.initializers.normal(0.01)

  @nn.compact
  def __call__(self, images: jax.Array, train: bool, keys: Keys = None) -> jax.Array:
    # `keys` are not used, because there is no dropout.
    options = {"use_bias": False, "kernel_init": _conv_init, "dtype": self.dtype}
    conv = functools.partial(Conv, **options)
    norm, init = self.norm, nn.initializers
    last_scale = init.zeros if self.zero_init_residual else init.ones

    def block(x, width, stride):
      """Map [n, h, w, c] to [n, h/stride, w/stride, width (x 4)]."""
      y = x = checkpoint_name(x, INPUT)
      if self.bottleneck:
        y = nn.relu(norm()(conv(width, (1, 1))(y), train))
      y = conv(width, (3, 3), (stride, stride), padding=[(1, 1), (1, 1)])(y)
      y = nn.relu(norm()(y, train))
      y = (conv(4 * width, (1, 1)) if self.bottleneck else conv(width, (3, 3)))(y)
      y = norm(scale_init=last_scale)(y, train)
      if x.shape != y.shape:
        x = norm()(conv(y.shape[-1], (1, 1), (stride, stride))(x), train)
      return nn.relu(x + y)

    x = images.astype(self.dtype)
    if self.stem == "imagenet":
      x = conv(self.width, (7, 7), (2, 2), padding=[(3, 3), (3, 3)])(x)
      x = nn.relu(norm()(x, train))
      x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # 0 never exceeds a ReLU's output
      x = max_pool_3(x)
    else:
      x = nn.relu(norm()(conv(self.width, (3, 3))(x), train))
    for stage, num_blocks in enumerate(self.stage_sizes):
      for i in range(num_blocks):
        x = block(x, self.width * 2**stage, 2 if stage and not i else 1)
    x = x.mean(axis=(1, 2))
    x = nn.Dense(self.num_classes, kernel_init=self.head_init, dtype=self.dtype)(x)
    return x.astype(jnp.float32)


# Number of blocks per stage, and whether they are bottlenecks (arXiv:1512.03385, table 1).
DEPTHS = {
  18: ((2, 2, 2, 2), False),
  34: ((3, 4, 6, 3), False),
  50: ((3, 4, 6, 3), True),
  101: ((3, 4, 23, 3), True),
  152: ((3, 8, 36, 3), True),
}


def make_resnet(depth: int, **options: Any) -> ResNetModule:
  """Return a ResNet of 18, 34, 50, 101 or 152 layers; pass other fields by name.

  Example:
    >>> make_resnet(50, num_classes=1000).stage_sizes
    (3, 4, 6, 3)
  """
  stage_sizes, bottleneck = DEPTHS[depth]
  return ResNetModule(stage_sizes=stage_sizes, bottleneck=bottleneck, **options)
