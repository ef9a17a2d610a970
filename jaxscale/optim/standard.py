"""The baselines, from optax's own parts, with our mask as their default."""

from __future__ import annotations

import optax

from jaxscale.optim.masks import Mask, kernels


def sgd(
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.9,
  nesterov: bool = True,
  weight_decay: float = 0.0,
  mask: Mask | None = kernels,
) -> optax.GradientTransformation:
  """Momentum SGD: v = m v + g + wd w; w = w - lr v (or lr (g + wd w + m v)).

  Args:
    learning_rate: a number or a function of the step.
    momentum: m.
    nesterov: the form in brackets (Sutskever et al., ICML 2013).
    weight_decay: wd, an L2 term in the gradient.
    mask: params -> bool per leaf, where to decay. None: everywhere.
  """
  return optax.chain(
    optax.add_decayed_weights(weight_decay, mask),
    optax.trace(momentum, nesterov),
    optax.scale_by_learning_rate(learning_rate),
  )


def adamw(
  learning_rate: optax.ScalarOrSchedule,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 1e-4,
  mask: Mask | None = kernels,
) -> optax.GradientTransformation:
  """`optax.adamw` (arXiv:1711.05101), decaying kernels only by default."""
  return optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)
