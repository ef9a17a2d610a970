"""Settings of the built-in callbacks. Imports no JAX."""

from __future__ import annotations

import math
from typing import Any, Literal

from jaxscale import run  # Lazy: its names load on first use.
from jaxscale.config.bases import Callback, CallbackContext
from jaxscale.config.bounds import Count, NonNegative, Positive
from jaxscale.errors import invalid
from jaxscale.metrics.plot import check_matplotlib
from jaxscale.metrics.text import listed, plural

# The names for --config.callbacks= (HOMES in config/choice.py lists this module).
__all__ = ["EarlyStopping", "LearningRateFinder", "SampleWriter"]


class EarlyStopping(Callback):
  """Stop of the run once a metric of its evaluations no longer improves.

  Attributes:
    metric: the name of the metric as in summary.json, e.g. "loss", "accuracy" or "val/f1".
    patience: the number of consecutive evaluations without improvement after which the run
      stops; the run evaluates and saves, and stays stopped if it is started again.
    min_delta: the difference to the best value above which a value counts as an improvement.
    mode: the direction of improvement, "min" or "max"; None uses that of
      `Checkpoint.best_metric`.
  """

  metric: str = "loss"
  patience: Count = 3
  min_delta: NonNegative = 0.0
  mode: Literal["min", "max"] | None = None

  def build(self, context: CallbackContext) -> Any:
    name = context.signed(self.metric, "EarlyStopping.metric")
    sign, metric = -1 if name.startswith("-") else 1, name.removeprefix("-")
    sign = {"min": -1, "max": 1, None: sign}[self.mode]
    own: dict[str, Any] = {"best": None, "best_step": 0, "waited": 0}

    def on_evaluation(step: int, state: Any, values: dict[str, float]) -> run.Stop | None:
      if metric not in values:
        problem = "is not a metric of this run's evaluations"
        raise invalid("EarlyStopping.metric", self.metric, problem, f"use {listed(values, 'or')}")
      own["waited"] += 1
      best = -sign * math.inf if own["best"] is None else own["best"]
      if sign * (values[metric] - best) > self.min_delta:  # False for NaN.
        own.update(best=values[metric], best_step=step, waited=0)
      if own["waited"] < self.patience:
        return None
      by = f" by more than {self.min_delta:g}" if self.min_delta else ""
      text = f"{metric} has not improved{by} for {plural(own['waited'], 'evaluation')}"
      return run.Stop(f"{text}; best {best:.6g} at step {own['best_step']}")

    functions = {"state_dict": lambda: own, "load_state_dict": own.update}
    return run.Callback(on_evaluation=on_evaluation, **functions)


class LearningRateFinder(Callback):
  """Range test of the learning rate before the first step; `jaxscale lr-find` runs it alone.

  Trains a copy of the model from its initial parameters, while the learning rate grows
  exponentially, and writes `learning_rates.png` and a line with a suggestion. The run itself
  does not change. Needs memory for a second training state.

  Attributes:
    steps: the number of steps of the test.
    low: the learning rate of its first step.
    high: the learning rate of its last step.
  """

  steps: Count = 100
  low: Positive = 1e-6
  high: Positive = 10.0

  def __post_init__(self):
    if self.low >= self.high:
      fix = f"use less than high={self.high:g}"
      raise invalid("LearningRateFinder.low", self.low, "is not below the end of the ramp", fix)

  def build(self, context: CallbackContext) -> Any:
    check_matplotlib("LearningRateFinder", ...)

    def on_start(step: int, state: Any) -> None:
      if step == 0:
        tried = run.find_learning_rate(context.config, **vars(self))
        context.note(run.plot_learning_rates(tried, context.workdir / "learning_rates.png"))

    return run.Callback(on_start=on_start)


class SampleWriter(Callback):
  """Samples at every evaluation, in `samples/` of the workdir.

  For images with classes, `STEP.png` shows validation images with their class and the
  predicted class. For text, `STEP.txt` has continuations of prompts by the language model.

  Attributes:
    count: the number of images.
    prompts: the texts to continue; "" begins a new document.
    num_tokens: the largest number of tokens per continuation.
    temperature: the temperature of sampling; 0 takes the most likely token.
  """

  count: Count = 16
  prompts: tuple[str, ...] = ("",)
  num_tokens: Count = 64
  temperature: NonNegative = 1.0

  def build(self, context: CallbackContext) -> Any:
    return run.write_samples(context, **vars(self))
