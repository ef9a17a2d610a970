"""U-Net (arXiv:1505.04597; arXiv:1606.06650 in 3-D): fields in, fields out.

Levels of two 3x3 convolutions each; between them a max-pool of 2 on the way down, and an
up-convolution of 2 on the way up, whose output is joined with the level's own on the way
down. Convolutions keep the size of a field, where the papers' lose its border, and
GroupNorm (arXiv:1803.08494) replaces the BatchNorm of the paper in 3-D, so that examples
do not depend on each other. Kernels start He-normal (arXiv:1502.01852), as in the paper.
"""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.convolution import Conv
from jaxscale.models.layers import ImageModule, Keys, max_pool_2
from jaxscale.models.linear import PRODUCT
from jaxscale.models.remat import INPUT

_init = nn.initializers.he_normal()


class UNetModule(ImageModule):
  """A U-Net on fields [n, (depth,) height, width, channels].

  An up-convolution has a stride as large as its kernel, and is therefore a matrix product
  with 4 (in 3-D: 8) times as many outputs, which are then arranged as a square (a cube).

  Attributes:
    num_classes: number of outputs at each point.
    features: number of channels of each level, from the top; each further level halves all
      sizes.
    groups: number of groups of GroupNorm, a divisor of all `features`; 0 means BatchNorm.
    periodic: continue a field periodically beyond its border, instead of with zeros.
    dtype: dtype of activations; parameters and outputs are float32.

  Example:
    >>> from jaxscale import models
    >>> fns = models.functions(UNetModule(num_classes=2), (30, 40, 50, 1), dtype="float32")
    >>> params, _ = models.init_shapes(fns.init)
    >>> field = jax.ShapeDtypeStruct((4, 30, 40, 50, 1), "float32")
    >>> apply = lambda params, x: fns.apply(params, {}, x, False, None)[0]
    >>> jax.eval_shape(apply, params, field).shape
    (4, 30, 40, 50, 2)
  """

  features: tuple[int, ...] = (32, 64, 128, 256)
  groups: int = 8
  periodic: bool = False

  @nn.compact
  def __call__(self, images: jax.Array, train: bool, keys: Keys = None) -> jax.Array:
    # `keys` are not used, because there is no dropout.
    sizes, dims = images.shape[1:-1], images.ndim - 2

    def level(x, width):
      """Apply two convolutions with norms and ReLUs."""
      for _ in range(2):
        padding = "CIRCULAR" if self.periodic else "SAME"
        options = {"use_bias": False, "kernel_init": _init, "dtype": self.dtype}
        x = Conv(width, (3,) * dims, padding=padding, **options)(x)
        if self.groups:
          norm = nn.GroupNorm(self.groups, use_fast_variance=False)
          x = norm(x.astype(jnp.float32)).astype(self.dtype)
        else:
          x = self.norm()(x, train)
        x = nn.relu(x)
      return checkpoint_name(x, INPUT)  # of further levels

    def up(x, width):
      """Double all sizes of [n, ..., in]; return [n, ..., width]."""
      n, *small = x.shape[:-1]
      options = {"use_bias": False, "kernel_init": _init, "dtype": self.dtype}
      x = checkpoint_name(nn.Dense(2**dims * width, **options)(x), PRODUCT)
      x = x.reshape(n, *small, *(2,) * dims, width)
      pairs = itertools.chain.from_iterable((1 + i, 1 + dims + i) for i in range(dims))
      return x.transpose(0, *pairs, 1 + 2 * dims).reshape(n, *(2 * s for s in small), width)

    # Fields end with copies of their border, up to sizes that can be halved at every level.
    more = [(0, -size % 2 ** (len(self.features) - 1)) for size in sizes]
    x = jnp.pad(images.astype(self.dtype), ((0, 0), *more, (0, 0)), mode="edge")
    levels = []
    for width in self.features:
      x = level(max_pool_2(x) if levels else x, width)
      levels.append(x)
    for width, across in zip(self.features[-2::-1], levels[-2::-1], strict=True):
      x = level(jnp.concatenate([across, up(x, width)], axis=-1), width)
    x = x[(slice(None), *map(slice, sizes))]
    return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype(jnp.float32)
