"""Optimizers: optax transformations of whole (global) arrays.

They see global gradients and parameters, never a mesh axis, so their norms
are right under every sharding. Each builder takes the learning rate as a
number or a schedule and masks the leaves that no decay and no trust ratio
belong to: biases and normalisation scales (`kernels`).
"""

from jaxscale.optim.layerwise import lamb, lars, scale_by_lars_trust_ratio
from jaxscale.optim.masks import kernels, matching
from jaxscale.optim.schedules import (
  scale_learning_rate,
  warmup_cosine,
  warmup_polynomial,
  warmup_steps,
)
from jaxscale.optim.standard import adamw, sgd

__all__ = [
  "adamw", "kernels", "lamb", "lars",
  "matching", "scale_by_lars_trust_ratio", "scale_learning_rate", "sgd",
  "warmup_cosine", "warmup_polynomial", "warmup_steps",
]  # fmt: skip
