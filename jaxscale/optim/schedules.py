"""Learning rates as pure functions of the step, and how they grow with batch.

Every schedule warms up linearly, rate = peak step / warmup_steps, so the rate
of step 0 is 0 as in the MLPerf references, and reaches `peak` at step
`warmup_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import optax


def _after_warmup(
  peak: float, warmup_steps: int, decay: optax.Schedule
) -> optax.Schedule:
  """Linear to `peak`, then `decay` of the steps since the warm-up."""

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    rate = decay(jnp.maximum(step - warmup_steps, 0.0))
    if not warmup_steps:
      return rate
    return jnp.where(step < warmup_steps, peak * step / warmup_steps, rate)

  return schedule


def warmup_polynomial(
  peak: float,
  warmup_steps: int,
  total_steps: int,
  *,
  end: float = 1e-4,
  power: float = 2.0,
) -> optax.Schedule:
  """End + (peak - end) (1 - s / (S + 1))^power, s of S steps after warm-up.

  The MLPerf ResNet-50 schedule, power 2 to 1e-4, in the form of Google's JAX
  submission to v0.7.
  """
  decay_steps = total_steps - warmup_steps

  def decay(step):
    left = jnp.maximum(1 - step / (decay_steps + 1), 0.0)
    return end + (peak - end) * left**power

  return _after_warmup(peak, warmup_steps, decay)


def warmup_cosine(
  peak: float, warmup_steps: int, total_steps: int, *, end: float = 0.0
) -> optax.Schedule:
  """End + (peak - end) (1 + cos(pi s / S)) / 2 (arXiv:1608.03983, one cycle)."""
  decay_steps = total_steps - warmup_steps

  def decay(step):
    done = jnp.minimum(step / decay_steps, 1.0)
    return end + (peak - end) * (1 + jnp.cos(jnp.pi * done)) / 2

  return _after_warmup(peak, warmup_steps, decay)


def warmup_steps(
  peak: float,
  warmup_steps: int,
  boundaries: Sequence[int],
  *,
  factor: float = 0.1,
) -> optax.Schedule:
  """The peak times `factor` for every boundary (a step) that has passed.

  Goyal et al. (arXiv:1706.02677, §5.1) cut by 0.1 at epochs 30, 60 and 80.
  """

  def decay(step):  # steps since the warm-up; boundaries count from the start
    passed = sum((step + warmup_steps >= b).astype(jnp.float32) for b in boundaries)
    return peak * factor ** jnp.asarray(passed, jnp.float32)

  return _after_warmup(peak, warmup_steps, decay)


def scale_learning_rate(
  rate: float,
  batch_size: int,
  reference_batch_size: int,
  rule: Literal["none", "linear", "sqrt"],
) -> float:
  """The rate for a batch size, from the rate for a reference batch size.

  Args:
    rate: learning rate at `reference_batch_size`.
    batch_size: examples a step.
    reference_batch_size: the batch size that `rate` was tuned at.
    rule: "linear" (arXiv:1706.02677, §2.1), "sqrt" (arXiv:1404.5997) or "none".

  Example:
    >>> scale_learning_rate(0.1, 8192, 256, "linear")
    3.2
  """
  ratio = batch_size / reference_batch_size
  return rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
