"""Range test of the learning rate: train a few steps while it grows, and look at the loss.

A short run with a growing learning rate shows where the loss falls fastest and where it
diverges (Smith, arXiv:1506.01186, section 3.3, which raises it linearly). The ramp here is
exponential, so that it covers orders of magnitude.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxscale import cluster
from jaxscale.config import Config, Log, Phases, Schedule, ScheduleContext
from jaxscale.config.bounds import Positive
from jaxscale.experiment import build
from jaxscale.files import output_path
from jaxscale.metrics.plot import CURVES, IDEAL, POINTS, figure, titled
from jaxscale.run.train_phases import train_batches
from jaxscale.training import loop

_DECAY = 0.8  # of the weight of a loss in the smoothed loss, per step
_DIVERGED = 4.0  # The test ends after three losses above this many times the smallest one.
_SKIPPED = 5  # The first steps say little: the averages there are of few losses.


class LearningRates(NamedTuple):
  """Result of a range test.

  Attributes:
    rates: [steps], the learning rate of each step.
    losses: [steps], its training loss, clipped at 1.5 times the first one.
    smoothed: [steps], averages of neighboring losses.
    suggestion: the learning rate at which the smoothed loss falls fastest per decade of the
      learning rate, before its minimum; None if it does not fall.
  """

  rates: np.ndarray
  losses: np.ndarray
  smoothed: np.ndarray
  suggestion: float | None


class _Ramp(Schedule):
  """Exponential rise from `low` to the peak."""

  low: Positive

  def build(self, peak: float, context: ScheduleContext):
    growth = math.log(peak / self.low) / max(context.total_steps - 1, 1)
    return lambda step: self.low * jnp.exp(growth * jnp.asarray(step, "float32"))


def find_learning_rate(
  config: Config,
  *,
  steps: int = 100,
  low: float = 1e-6,
  high: float = 10.0,
  at: Callable[[int, str], None] = lambda step, activity: None,
) -> LearningRates:
  """Train with a growing learning rate, from the initial parameters; save nothing.

  All processes call it. Model, data, batch size, optimizer, exchange and devices are those
  of the config.

  Args:
    config: the config, whose schedule, `lr`, `lr_scaling`, phases and length are replaced.
    steps: the number of steps; fewer if the loss diverges before.
    low: the learning rate of the first step.
    high: the learning rate of the last step.
    at: a function of the step and the activity, as `LoopControl.at`.
  """
  ramp: dict[str, Any] = {"schedule": _Ramp(low=low), "lr_scaling": "none"}
  ramp |= {"optimizer": dataclasses.replace(config.optimizer, lr=high)}
  ramp |= {"steps": steps, "epochs": None, "phases": Phases(), "log": Log(), "callbacks": ()}
  experiment = build.experiment(dataclasses.replace(config, **ramp))
  rates: list[float] = []
  losses: list[float] = []

  def log(step: int, metrics: loop.Values) -> None:
    rates.append(metrics["learning_rate"])
    losses.append(metrics["loss"])

  def has_diverged(step: int) -> bool:
    bound = _DIVERGED * abs(min(losses, default=0.0))
    return len(losses) > _SKIPPED and not np.min(losses[-3:]) <= bound  # also for NaN

  control = loop.LoopControl(
    is_logged=lambda step: True, log=log, should_stop=has_diverged, skipped=lambda bad: None, at=at
  )
  at(1, "compiling")
  step, batches = experiment.compile_train_step(), train_batches(experiment, 0)
  loop.train(experiment.init_state(), step, batches, control, start=0, total_steps=steps)
  end = int(np.argmin([*np.isfinite(losses), False]))  # the first NaN or Inf, or the end
  # A loss that explodes would hide the minimum of the averages.
  most = [loss + abs(loss) / 2 for loss in losses[:1]]
  clipped, tried = np.array([min(x, *most) for x in losses[:end]]), np.array(rates[:end])
  smoothed = _smooth(clipped)
  return LearningRates(tried, clipped, smoothed, suggest(tried, smoothed))


def _smooth(losses: np.ndarray) -> np.ndarray:
  """Return averages of the losses whose weights fall exponentially to both sides.

  A moving average of past losses alone would lag behind, and suggest a rate that is too high.
  """
  steps = np.arange(len(losses))
  weights = _DECAY ** np.abs(steps[:, None] - steps)
  return weights @ losses / weights.sum(1)


def suggest(rates: np.ndarray, smoothed: np.ndarray) -> float | None:
  """Return the learning rate at which a loss falls fastest, before its minimum.

  Args:
    rates: [steps], increasing learning rates.
    smoothed: [steps], the smoothed loss at each.

  Example:
    >>> rates = np.geomspace(1e-4, 1.0, 50)
    >>> f"{suggest(rates, np.tanh(-4 * (np.log10(rates) + 2))):.0e}"   # steepest at 10^-2
    '1e-02'
  """
  window = slice(_SKIPPED, int(np.argmin(smoothed)) + 1) if len(smoothed) else slice(0)
  if len(rates[window]) < 2:
    return None
  slopes = np.gradient(smoothed[window], np.log10(rates[window]))
  return float(rates[window][slopes.argmin()]) if slopes.min() < 0 else None


def plot_learning_rates(tried: LearningRates, path: str | Path) -> str:
  """Draw the loss against the learning rate; return the suggestion as a line.

  All processes call it, and process 0 writes the picture.
  """
  line = f"tried lr {tried.rates[0]:.3g} to {tried.rates[-1]:.3g}; see {path}"
  has_fallen, label = tried.suggestion is not None, f"steepest at {tried.suggestion or 0:.3g}"
  if cluster.is_leader():
    with figure(output_path(path), 1, 1, (7, 4)) as axes:
      axis = axes[0, 0]
      axis.plot(tried.rates, tried.losses, ".", ms=3, color=IDEAL, label="loss")
      axis.plot(tried.rates, tried.smoothed, color=CURVES, label="smoothed")
      if has_fallen:
        axis.axvline(tried.suggestion, color=POINTS, label=label)
      axis.set_xscale("log")
      titled(axis, "Range test", "learning rate", "training loss")
      axis.legend(frameon=False)
  text = f"suggested lr: {tried.suggestion:.3g}" if has_fallen else "the loss does not fall"
  return f"{text} ({line})"
