"""Optimizers: optax transformations of whole (global) arrays.

They see global gradients and parameters, never a mesh axis, so their norms
are right under every sharding. Each builder takes the learning rate as a
number or a schedule and masks the leaves that no decay and no trust ratio
belong to: biases and normalisation scales (`kernels`). `trust_ratios` reads
the last ratios of LARS and LAMB out of a state.
"""

from jaxscale.optim.adam import AdamState, adamw, lamb
from jaxscale.optim.depth import layerwise_rate_decay
from jaxscale.optim.lars_variants import LarsVariant, lars
from jaxscale.optim.layers import TrustRatios, trust_ratios
from jaxscale.optim.masks import Mask, kernels, matching
from jaxscale.optim.momentum import MomentumState
from jaxscale.optim.schedules import (
  Warmup,
  scale_learning_rate,
  warmup_cosine,
  warmup_polynomial,
  warmup_steps,
)
from jaxscale.optim.standard import muon, sgd

__all__ = [
  "AdamState", "LarsVariant", "Mask", "MomentumState", "TrustRatios", "Warmup",
  "adamw", "kernels", "lamb", "lars", "layerwise_rate_decay", "matching", "muon",
  "scale_learning_rate", "sgd", "trust_ratios", "warmup_cosine",
  "warmup_polynomial", "warmup_steps",
]  # fmt: skip
