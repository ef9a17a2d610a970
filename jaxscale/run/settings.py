"""Settings of the built-in callbacks and growth rules of the batch. Imports no JAX."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from jaxscale import run  # Lazy: its names load on first use.
from jaxscale.config import bases
from jaxscale.config.bases import Callback, CallbackContext, Growth
from jaxscale.config.bounds import Count, NonNegative, Positive
from jaxscale.errors import invalid
from jaxscale.metrics.plot import check_matplotlib
from jaxscale.metrics.text import listed, plural

# The names for --config.callbacks= and phases.when= (HOMES in config/choice.py lists this).
__all__ = ["AtExamples", "ByBranch", "ByNoiseScale", "BySchedule"]
__all__ += ["EarlyStopping", "LearningRateFinder", "SampleWriter"]
DECISIONS = "growth.jsonl"  # in the workdir: one line per decision on the batch size


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


class BySchedule(Growth):
  """Growth wherever the schedule has divided the learning rate by `Growing.factor` again."""

  why = "the schedule has divided its learning rate by phases.factor again"

  def build(self, context: bases.GrowthContext) -> tuple[float, ...]:
    rates, steps = context.schedule(), []
    top = int(rates.argmax())
    if (rises := rates[top + 1 :] > rates[top:-1] * (1 + 1e-5)).any():
      step = top + int(rises.argmax()) + 1
      problem = f"needs a schedule that only falls after its peak; this one rises at step {step:,}"
      raise invalid("Growing.when", "BySchedule", problem, "use AtExamples")
    for power in range(1, 64):
      # The tolerance keeps a rate that is exactly a half, but for rounding, at its step.
      is_below = rates[top:] <= rates[top] / float(context.factor) ** power * (1 + 1e-5)
      steps += [top + int(is_below.argmax())] if is_below.any() else []
    return tuple(float(step * context.batch_size) for step in dict.fromkeys(steps))


class AtExamples(Growth):
  """Growth at given numbers of examples or epochs.

  Attributes:
    examples: the numbers of examples after which the batch grows.
    epochs: the numbers of epochs after which the batch grows, in addition to `examples`.
  """

  examples: Annotated[tuple[int, ...], ">= 1"] = ()
  epochs: Annotated[tuple[float, ...], "> 0"] = ()

  def build(self, context: bases.GrowthContext) -> tuple[float, ...]:
    points = {*map(float, self.examples), *(epoch * context.num_train for epoch in self.epochs)}
    return tuple(sorted(points))


class _Measured(Growth):
  every_epochs: Positive = 1.0

  def build(self, context: bases.GrowthContext) -> tuple[float, ...]:
    interval = self.every_epochs * context.num_train
    return tuple(i * interval for i in range(1, math.ceil(context.total_examples / interval)))


class ByNoiseScale(_Measured):
  """Growth once the gradient noise scale is surely above the larger batch size.

  The batch grows if the lower end of the 95 % interval of the noise scale, which averages about
  200 steps, is at least `ratio` times the larger batch size. Only the interval decides: that of
  a scale that is not measured yet is 0 to infinity, at which the batch stays.

  Attributes:
    every_epochs: the number of epochs between two decisions.
    ratio: the lower end of the noise scale's interval, as a multiple of the larger batch size,
      from which on the batch grows. At 1 a run takes about twice the least number of examples
      (arXiv:1812.06162, eq. 2.11); higher values waste fewer.
  """

  ratio: Positive = 1.0

  reads_noise_scale = True

  def decide(self, point: bases.GrowthPoint) -> tuple[bool, str, dict[str, float]]:
    _, low, high = point.noise_scale
    low, high, bound = low or 0.0, math.inf if high is None else high, self.ratio * point.larger
    values = {"noise_scale_low": low, "noise_scale_high": high, "bound": bound}
    within = f"above {low:,.4g}" if high == math.inf else f"{low:,.4g} to {high:,.4g}"
    within = f"{within} examples (95 %)" if low or high < math.inf else "not measured yet"
    need = f"its lower end {'is' if low >= bound else 'must be'} at least {bound:,.4g}"
    return low >= bound, f"the noise scale is {within}; {need}", values


class ByBranch(_Measured):
  """Growth if a short branch at the larger batch size loses little on the same examples.

  Copies of the state train at both batch sizes on the same next examples; the run itself does
  not change. The batch grows if the training loss over the second half of these examples is
  at most `margin` above that at the current size, standard error included. Measuring by
  branches from a checkpoint follows arXiv:2505.23971 (abstract). Needs memory for a second
  training state, and computation: the run does not count the steps of its copies.

  Attributes:
    every_epochs: the number of epochs between two decisions.
    steps: the number of steps at the larger batch size; both branches take as many examples.
    margin: the allowed increase of the loss, as a share of the loss at the current batch size.
  """

  steps: Annotated[int, ">= 4"] = 20
  margin: NonNegative = 0.01

  def decide(self, point: bases.GrowthPoint) -> tuple[bool, str, dict[str, float]]:
    found = run.compare_branches(point.branch(self.steps))
    loss, larger, off, error = found
    bound = self.margin * abs(loss)
    grows = off + error <= bound
    side = "at most" if grows else "above" if off - error > bound else "perhaps above"
    why = (
      f"copies trained on the same {self.steps * point.larger:,} examples end at loss {larger:.4f} "
      f"with {point.larger:,} and {loss:.4f} with {point.batch_size:,}; {off:+.4f} ± {error:.4f} "
      f"(standard error) is {side} the allowed {bound:+.4f}"
    )
    return grows, why, found._asdict() | {"bound": bound}
