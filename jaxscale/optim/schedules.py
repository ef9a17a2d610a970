"""Learning rate schedules, and scaling of the learning rate with the batch size.

A schedule is a pure function of the step, which may be a number or traced. The step need
not be an integer: if the batch size grows during a run, steps are counted in units of the
first batch size. Learning rates are float32.

Every schedule warms up from `start` (0 in the MLPerf references) and reaches `peak` at
step `warmup_steps`, called I below, by one of three ramps in f = step / I:

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
  """Return a schedule with a warm-up and a polynomial decay to `end`.

      restart=True     end + (peak - end) (1 - (step - I) / D)^power
      restart=False    end + (peak - end) (1 - step / total)^power

  With restart=True this is MLPerf's ResNet-50 schedule, with D = total - I + 1 as in
  Google's JAX submission to v0.7. With restart=False and end = 0 it is Intel Caffe's: the
  decay also runs during the warm-up, so that the learning rate drops at its end, e.g. at
  step 400 of 4,000 from 32 to 25.92.

  Args:
    peak: learning rate at the end of the warm-up.
    warmup_steps: steps I of the warm-up.
    total_steps: steps of the run.
    end: learning rate at the end.
    power: exponent of the polynomial.
    restart: count the decay from the end of the warm-up.
    decay_steps: steps D of the decay; None means total - I + 1. MLPerf's logs contain it as
      `lars_opt_learning_rate_decay_steps`, with fractions.
    warmup: shape of the warm-up: "linear", "quadratic" or "exponential".
    start: learning rate of step 0, if there is a warm-up.

  Raises:
    ValueError: an argument is out of range.

  Example:
    >>> rate = warmup_polynomial(32, 400, 4000, end=0.0, restart=False)
    >>> round(float(rate(400)), 4)
    25.92
  """
  _need(power > 0, f"power={power} is out of range; give a number > 0")
  is_usable = decay_steps is None or (restart and decay_steps > 0)
  _need(is_usable, f"decay_steps={decay_steps} needs restart=True and a number > 0")
  span = total_steps - warmup_steps + 1 if decay_steps is None else decay_steps

  last, span = (warmup_steps + span, span) if restart else (total_steps, total_steps)

  def decay(step: Any):
    # Unlike 1 - step / span, the difference of integers is exact, also near the end. The
    # share exceeds 1 only during the warm-up, which does not use it.
    return end + (peak - end) * jnp.clip((last - step) / span, 0.0, 1.0) ** power

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
  """Return a schedule with a warm-up and a cosine decay to `end`.

  In step s of S of the decay it is end + (peak - end) (1 + cos(pi s / S)) / 2, with

      restart=True     s = step - I, S = total - I
      restart=False    s = step, S = total

  This is one cycle of arXiv:1608.03983. With restart=False the learning rate drops at the
  end of the warm-up, as in timm's CosineLRScheduler (1.0.31) without `warmup_prefix`.

  Args:
    peak: learning rate at the end of the warm-up.
    warmup_steps: steps I of the warm-up.
    total_steps: steps of the run.
    end: learning rate at the end.
    restart: count the decay from the end of the warm-up.
    warmup: shape of the warm-up: "linear", "quadratic" or "exponential".
    start: learning rate of step 0, if there is a warm-up.

  Raises:
    ValueError: an argument is out of range.

  Example:
    >>> schedule = warmup_cosine(0.1, 20, 200)
  """
  first = warmup_steps if restart else 0
  span = max(total_steps - first, 1e-9)

  def decay(step: Any):
    # sin^2 equals (1 + cos(pi done)) / 2, which in float32 is 0 long before the end.
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
  """Return a schedule with a warm-up, multiplied by `factor` at each boundary.

  Goyal et al. (arXiv:1706.02677, §5.1) multiply by 0.1 at epochs 30, 60 and 80, after a
  warm-up of 5 epochs from the learning rate of one worker.

  Args:
    peak: learning rate at the end of the warm-up.
    warmup_steps: steps of the warm-up.
    boundaries: steps from the start of the run, in increasing order.
    factor: factor at each boundary.
    warmup: shape of the warm-up: "linear", "quadratic" or "exponential".
    start: learning rate of step 0, if there is a warm-up.

  Raises:
    ValueError: an argument is out of range.

  Example:
    >>> goyal = warmup_steps(3.2, 780, (4680, 9360, 12480), start=0.1)
  """
  _need(factor > 0, f"factor={factor} is out of range; give a number > 0")
  rises = all(a <= b for a, b in pairwise([0, *boundaries]))
  _need(rises, f"boundaries={list(boundaries)} are invalid; give increasing steps >= 0")

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
  """Return a schedule that ramps from `start` to `peak`, then follows `decay`."""
  ramps, bounds = get_args(Warmup), f"0 <= warmup_steps <= total_steps={total_steps}"
  _need(0 < peak < math.inf, f"peak={peak} is out of range; give a learning rate > 0")
  _need(end >= 0, f"end={end} is out of range; give a learning rate >= 0")
  is_within = 0 <= warmup_steps <= total_steps
  _need(is_within, f"warmup_steps={warmup_steps} is out of range; give {bounds}")
  _need(total_steps > 0, f"total_steps={total_steps} is out of range; give a number > 0")
  _need(0 <= start <= peak, f"start={start} is out of range; give 0 <= start <= peak={peak}")
  _need(warmup in ramps, f"warmup={warmup!r} is unknown; use one of {', '.join(ramps)}")
  has_start = warmup != "exponential" or start
  _need(has_start, "start=0 does not work with an exponential warm-up; give start > 0")

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
  """Scale a learning rate from a reference batch size to another batch size.

  Args:
    rate: learning rate at `reference_batch_size`.
    batch_size: examples per step.
    reference_batch_size: the batch size for which `rate` was tuned.
    rule: "linear" (arXiv:1706.02677, §2.1), "sqrt" (arXiv:1404.5997) or "none".

  Raises:
    ValueError: the rule is unknown.

  Example:
    >>> scale_learning_rate(0.1, 8192, 256, "linear")
    3.2
  """
  ratio = batch_size / reference_batch_size
  factors = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
  _need(rule in factors, f"rule={rule!r} is unknown; use one of {', '.join(factors)}")
  return rate * factors[rule]
