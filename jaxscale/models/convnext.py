"""ConvNeXt (arXiv:2201.03545): a residual network of depthwise 7x7 convolutions.

    x = x + gamma * fc2(gelu(fc1(layer_norm(depthwise(x)))))     (§2.6, figure 4)

with a layer scale gamma (arXiv:2103.17239), which starts at 1e-6, and stochastic depth
(arXiv:1603.09382), whose probability grows linearly over the blocks. Modules have timm's
names. Kernels start from N(0, 0.02²), as in the paper's code (facebookresearch/ConvNeXt,
convnext.py), whose truncation at ±2 never occurs.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.adapters.rows import drop
from jaxscale.models.convolution import Conv
from jaxscale.models.layers import Keys
from jaxscale.models.linear import PRODUCT
from jaxscale.models.remat import INPUT
from jaxscale.models.vision_transformer import gelu

_start = nn.initializers.normal(0.02)


class ConvNeXtModule(nn.Module):
  """ConvNeXt on NHWC images.

  Attributes:
    num_classes: width of the output.
    depths: number of blocks of each stage.
    dims: number of channels of each stage.
    layer_scale: initial scale of a block's branch.
    drop_path: probability of dropping the last block's branch for an example; block i of n
      has i / (n - 1) times this probability.
    norm_eps: term added to the variance in LayerNorm.
    dtype: dtype of activations; parameters and logits are float32.

  Example:
    >>> from jaxscale import models
    >>> fns = models.functions(ConvNeXtModule(num_classes=1000), (224, 224, 3))
    >>> params, _ = models.init_shapes(fns.init)
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    28589128
  """

  num_classes: int
  depths: tuple[int, ...] = (3, 3, 9, 3)
  dims: tuple[int, ...] = (96, 192, 384, 768)
  layer_scale: float = 1e-6
  drop_path: float = 0.0
  norm_eps: float = 1e-6
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images: jax.Array, train: bool, keys: Keys = None) -> jax.Array:
    options = {"kernel_init": _start, "dtype": self.dtype}
    conv, layer = functools.partial(Conv, **options), 0

    def dense(x, width, name):
      return checkpoint_name(nn.Dense(width, name=name, **options)(x), PRODUCT)

    def norm(x, name):
      """Apply LayerNorm in float32."""
      # E[x^2] - E[x]^2, the fast variance, cancels where the mean is large.
      module = nn.LayerNorm(self.norm_eps, use_fast_variance=False, name=name)
      return module(x.astype(jnp.float32)).astype(self.dtype)

    def block(x, name):
      """Add a block's branch to [n, h, w, width]."""
      x, width = checkpoint_name(x, INPUT), x.shape[-1]
      y = conv(width, (7, 7), feature_group_count=width, name=f"{name}_conv_dw")(x)
      y = dense(norm(y, f"{name}_norm"), 4 * width, f"{name}_mlp_fc1")
      y = dense(gelu(y), width, f"{name}_mlp_fc2")
      scale = nn.initializers.constant(self.layer_scale)
      y = y * self.param(f"{name}_gamma", scale, (width,), jnp.float32).astype(y.dtype)
      rate = self.drop_path * layer / max(sum(self.depths) - 1, 1)
      if train and keys is not None and rate:
        y = drop(y, rate, keys, layer, (1, 1, 1))
      return x + y

    x = images.astype(self.dtype)
    x = norm(conv(self.dims[0], (4, 4), (4, 4), "VALID", name="stem_0")(x), "stem_1")
    for stage, (depth, width) in enumerate(zip(self.depths, self.dims, strict=True)):
      if stage:
        x = norm(x, f"stages_{stage}_downsample_0")
        x = conv(width, (2, 2), (2, 2), "VALID", name=f"stages_{stage}_downsample_1")(x)
      for i in range(depth):
        x, layer = block(x, f"stages_{stage}_blocks_{i}"), layer + 1
    x = norm(x.mean(axis=(1, 2)), "head_norm")
    return dense(x, self.num_classes, "head_fc").astype(jnp.float32)
