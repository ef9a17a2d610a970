"""Models that know nothing of meshes: Flax modules, and stacks of alike layers.

Of the modules only a synchronised BatchNorm knows the names of the axes it averages
over. `functions(model, shape)` turns one into the pure functions that the state and
the step take. A `Stack` (stack.py) is pure functions already.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from jaxscale.models.alexnet import AlexNet, AlexNetBN
from jaxscale.models.cnn import CNN, MLP
from jaxscale.models.decoder import transformer
from jaxscale.models.resnet import (
  ResNet,
  ResNet18,
  ResNet34,
  ResNet50,
  ResNet101,
  ResNet152,
)
from jaxscale.models.stack import Ops, Stack
from jaxscale.models.vision_transformer import ViT_B16, ViT_L16, ViT_S16, ViT_Ti16, vit

__all__ = [
  "CNN", "MLP", "AlexNet", "AlexNetBN", "ModelFns", "Ops", "ResNet", "ResNet18",
  "ResNet34", "ResNet50", "ResNet101", "ResNet152", "Stack", "ViT_B16", "ViT_L16",
  "ViT_S16", "ViT_Ti16", "functions", "transformer", "vit",
]  # fmt: skip


class ModelFns(NamedTuple):
  """A model as two pure functions.

  Attributes:
    init: key -> (params, model_state), float32.
    apply: (params, model_state, images, train, keys) -> (logits, model_state).
  """

  init: Any
  apply: Any


def functions(
  model: nn.Module,
  image_shape: tuple[int, int, int],
  *,
  mean: tuple[float, ...] = (0.0,),
  std: tuple[float, ...] = (1.0,),
) -> ModelFns:
  """The pure functions of a Flax module `(images, train, keys) -> logits`.

  Args:
    model: the module.
    image_shape: (height, width, channels) of one example.
    mean: per channel (or one for all), subtracted from the images.
    std: per channel, the images are divided by it. Images can so cross to the
      device as uint8, a quarter of the bytes.

  Example:
    >>> fns = functions(MLP(num_classes=10), (8, 8, 1))
    >>> params, model_state = fns.init(jax.random.key(0))
  """

  def normalise(images):
    images = images.astype(jnp.float32)
    return (images - jnp.array(mean, jnp.float32)) / jnp.array(std, jnp.float32)

  def init(key):
    images = jnp.zeros((1, *image_shape), jnp.float32)
    variables = dict(model.init(key, images, train=False))
    params = variables.pop("params")
    return params, variables

  def apply(params, model_state, images, train, keys):
    variables = {"params": params, **model_state}
    images = normalise(images)
    if not train:
      return model.apply(variables, images, train=False), model_state
    logits, updates = model.apply(
      variables, images, train=True, keys=keys, mutable=list(model_state)
    )
    return logits, dict(updates)

  return ModelFns(init, apply)
