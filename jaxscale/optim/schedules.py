"""Learning rates as pure functions of the step, and how they grow with batch.

A step may be a number or traced, and need not be whole: a batch that grows in
mid-run is at a fraction of a step of the first size. Rates are float32.

Every schedule warms up from `start` (0: as in the MLPerf references) and reaches
`peak` at step `warmup_steps`, I below, by one of three ramps of f = step / I:

    linear       start + (peak - start) f        Intel Caffe, MLPerf, Goyal et al.
    quadratic    start + (peak - start) f^2      NVCaffe
    exponential  start (peak / start)^f

Sources: intel/caffe 44d53638 and NVIDIA/caffe 87a25543, solvers/sgd_solver.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import jax.numpy as jnp
import optax

Warmup = Literal["linear", "quadratic", "exponential"]
Scaling = Literal["none", "linear", "sqrt"]


def warmup_polynomial(
  peak: float,
  warmup_steps: float,
  total_steps: float,
  *,
  end: float = 1e-4,
  power: float = 2.0,
  restart: bool = True,
  decay_steps: float | None = None,
  warmup: Warmup = "linear",
  start: float = 0.0,
) -> optax.Schedule:
  """Warm-up, then a polynomial down to `end`.

      restart    end + (peak - end) (1 - (step - I) / D)^power    after the warm-up
      else       end + (peak - end) (1 - step / total)^power      on all steps

  With restart it is MLPerf's ResNet-50 schedule, D = total - I + 1, as in Google's
  JAX submission to v0.7. Without, it is Intel Caffe's, with end = 0: the decay has
  run during the warm-up, and the rate drops where that ends: at step 400 of
  4,000 from 32 to 25.92.

  Args:
    peak: rate at the end of the warm-up.
    warmup_steps: I.
    total_steps: of the run.
    end: rate at the end.
    power: of the polynomial.
    restart: count the decay from the end of the warm-up.
    decay_steps: D, if it is not total - I + 1; MLPerf's logs have it as
      `lars_opt_learning_rate_decay_steps`, with fractions.
    warmup: the ramp.
    start: rate of step 0, if there is a warm-up.

  Raises:
    ValueError: values that make no schedule.

  Example:
    >>> rate = warmup_polynomial(32, 400, 4000, end=0.0, restart=False)
    >>> round(float(rate(400)), 4)
    25.92
  """
  _need(power > 0, f"power={power}: need > 0")
  is_usable = decay_steps is None or (restart and decay_steps > 0)
  _need(is_usable, f"decay_steps={decay_steps}: need > 0, and restart=True")
  span = total_steps - warmup_steps + 1 if decay_steps is None else decay_steps

  last, span = (warmup_steps + span, span) if restart else (total_steps, total_steps)

  def decay(step: Any):
    # Not 1 - step / span: whole numbers are subtracted exactly, also near the end.
    # Above 1 only under the warm-up, where nobody asks.
    left = jnp.clip((last - step) / span, 0.0, 1.0)
    return end + (peak - end) * left**power

  return _schedule(decay, warmup, start, peak, warmup_steps, total_steps, end)


def warmup_cosine(
  peak: float,
  warmup_steps: float,
  total_steps: float,
  *,
  end: float = 0.0,
  restart: bool = True,
  warmup: Warmup = "linear",
  start: float = 0.0,
) -> optax.Schedule:
  """Warm-up, then end + (peak - end) (1 + cos(pi s / S)) / 2, s of S steps.

      restart    s = step - I, S = total - I        after the warm-up
      else       s = step, S = total                on all steps

  One cycle of arXiv:1608.03983. Without restart the rate drops where the warm-up
  ends, as in timm's CosineLRScheduler (1.0.31) without `warmup_prefix`.

  Args:
    peak: rate at the end of the warm-up.
    warmup_steps: I, steps to it.
    total_steps: of the run.
    end: rate at the end.
    restart: count the decay from the end of the warm-up.
    warmup: the ramp.
    start: rate of step 0, if there is a warm-up.

  Raises:
    ValueError: values that make no schedule.

  Example:
    >>> schedule = warmup_cosine(0.1, 20, 200)
  """
  first = warmup_steps if restart else 0
  span = max(total_steps - first, 1e-9)

  def decay(step: Any):
    # The same as (1 + cos(pi done)) / 2, which in float32 is 0 long before the end.
    left = jnp.clip((first + span - step) / span, 0.0, 1.0)
    return end + (peak - end) * jnp.sin(jnp.pi / 2 * left) ** 2

  return _schedule(decay, warmup, start, peak, warmup_steps, total_steps, end)


def warmup_steps(
  peak: float,
  warmup_steps: float,
  boundaries: Sequence[float],
  *,
  factor: float = 0.1,
  warmup: Warmup = "linear",
  start: float = 0.0,
) -> optax.Schedule:
  """Warm-up, then the peak times `factor` for every boundary that has passed.

  Goyal et al. (arXiv:1706.02677, §5.1) cut by 0.1 at epochs 30, 60 and 80, after
  5 epochs up from the rate of one worker.

  Args:
    peak: rate at the end of the warm-up.
    warmup_steps: steps to it.
    boundaries: steps from the start of the run, rising.
    factor: the cut.
    warmup: the ramp.
    start: rate of step 0, if there is a warm-up.

  Raises:
    ValueError: values that make no schedule.

  Example:
    >>> goyal = warmup_steps(3.2, 780, (4680, 9360, 12480), start=0.1)
  """
  _need(factor > 0, f"factor={factor}: need > 0")
  rises = all(a <= b for a, b in pairwise([0, *boundaries]))
  _need(rises, f"boundaries={list(boundaries)}: need steps >= 0 that rise")

  def decay(step: Any):
    passed = sum((step >= b).astype(jnp.float32) for b in boundaries)
    return peak * factor ** jnp.asarray(passed, jnp.float32)

  return _schedule(decay, warmup, start, peak, warmup_steps, math.inf)


def _need(condition: Any, message: str) -> None:
  if not condition:
    raise ValueError(message)


def _schedule(
  decay: optax.Schedule,
  warmup: Warmup,
  start: float,
  peak: float,
  warmup_steps: float,
  total_steps: float,
  end: float = 0.0,
) -> optax.Schedule:
  """A ramp from `start` before step `warmup_steps`, `decay` from there on."""
  ramps, bounds = get_args(Warmup), f"0 <= warmup_steps <= total_steps={total_steps}"
  _need(0 < peak < math.inf, f"peak={peak}: need a rate > 0")
  _need(end >= 0, f"end={end}: need a rate >= 0")
  is_within = 0 <= warmup_steps <= total_steps
  _need(is_within, f"warmup_steps={warmup_steps}: need {bounds}")
  _need(total_steps > 0, f"total_steps={total_steps}: need > 0")
  _need(0 <= start <= peak, f"start={start}: need 0 <= start <= peak={peak}")
  _need(warmup in ramps, f"warmup={warmup!r}: give one of {', '.join(ramps)}")
  has_start = warmup != "exponential" or start
  _need(has_start, "start=0: an exponential warm-up needs start > 0")

  def schedule(step: Any):
    step = jnp.asarray(step, jnp.float32)
    if not warmup_steps:
      return decay(step)
    done = jnp.clip(step / warmup_steps, 0.0, 1.0)
    if warmup == "exponential":
      ramp = start * (peak / start) ** done
    else:
      ramp = start + (peak - start) * (done if warmup == "linear" else done * done)
    return jnp.where(step < warmup_steps, ramp, decay(step))

  return schedule


def scale_learning_rate(
  rate: float, batch_size: float, reference_batch_size: float, rule: Scaling
) -> float:
  """The rate for a batch size, from the rate for a reference batch size.

  Args:
    rate: learning rate at `reference_batch_size`.
    batch_size: examples per step.
    reference_batch_size: the batch size that `rate` was tuned at.
    rule: "linear" (arXiv:1706.02677, §2.1), "sqrt" (arXiv:1404.5997) or "none".

  Raises:
    ValueError: the rule is not one of these.

  Example:
    >>> scale_learning_rate(0.1, 8192, 256, "linear")
    3.2
  """
  ratio = batch_size / reference_batch_size
  factors = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
  _need(rule in factors, f"rule={rule!r}: give one of {', '.join(factors)}")
  return rate * factors[rule]
