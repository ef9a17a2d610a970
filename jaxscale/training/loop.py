"""Training loop: run steps, read their metrics, and run hooks between steps.

The host never waits for the step it has just started. Metrics are read `IN_FLIGHT`
steps late, which also limits how far the host runs ahead. The loss and gradient norm of
every step are checked, so a NaN is found within that many steps and always before a
checkpoint. By then the step itself has skipped its update (`nan_guard`), so that the
steps after it started from a good state.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.errors import NonFiniteError, invalid
from jaxscale.training.metrics import ROWS, SUMS, Metric, results, wide
from jaxscale.training.nan_guard import CODES
from jaxscale.training.types import LOSS_WEIGHT, Batch, EvalStep, Metrics, TrainState, TrainStep

Values = dict[str, float]  # values of metrics by name
IN_FLIGHT = 4  # number of started steps whose metrics have not been read


class BadStep(NamedTuple):
  """A step that was skipped.

  Attributes:
    step: number of the step.
    what: reason for skipping, e.g. "loss is nan".
    codes: the metric `nan_guard.CODES`, or None if the step does not report it.
    state: the state after the newest step.
    newest: number of the newest started step.
  """

  step: int
  what: str
  codes: jax.Array | None
  state: TrainState
  newest: int


class Hook(NamedTuple):
  """Function to run between two steps, when no step is in flight.

  Attributes:
    every: interval in steps, or a function that takes a step and returns whether the
      hook runs after it. It must return the same in all processes.
    run: function that takes the finished step's number and the state after it, which it
      must not donate. It may return a changed `TrainState` to train on. If it raises, the
      run ends before anything is saved.
    takes_metrics: whether `run` also takes the metrics of the step.

  Example:
    >>> norms = Hook(100, lambda step, state: print(step, optax.tree.norm(state.params)))
    >>> norms.is_due(200), norms.is_due(250)
    (True, False)
  """

  every: int | Callable[[int], bool]
  run: Callable[..., Any]
  takes_metrics: bool = False

  def is_due(self, step: int) -> bool:
    """Return whether the hook runs after this step."""
    return self.every(step) if callable(self.every) else step % self.every == 0


class LoopControl:
  """Decisions and records of the training loop; the defaults do nothing.

  Step numbers count from 1. Every method must return the same in all processes. Override
  methods in a subclass, or pass functions by keyword.

  Example:
    >>> control = LoopControl(is_logged=lambda step: step % 10 == 0, log=print)
  """

  def __init__(self, **functions: Callable[..., Any]):
    vars(self).update(functions)

  def at(self, step: int, activity: str) -> None:
    """Handle the start of an activity of the host, one of `cluster`'s `ACTIVITIES`."""

  def is_traced(self, step: int) -> bool:
    """Return whether a trace starts or ends before this step; called once per step."""
    return False

  def trace(self, step: int) -> None:
    """Start or end a trace before this step, when no step is in flight."""

  def is_logged(self, step: int) -> bool:
    """Return whether to log this step's metrics."""
    return False

  def log(self, step: int, metrics: Values) -> None:
    """Log the metrics of a step; called some steps later."""

  def should_stop(self, step: int) -> bool:
    """Return whether to stop after this step; called once per step, after the hooks."""
    return False

  def skipped(self, bad: BadStep) -> None:
    """Handle a step with NaN or Inf: return to continue training, or raise.

    Raises:
      NonFiniteError: the default; ends the run. Nothing was saved since the bad step.
    """
    raise NonFiniteError(bad.step, bad.what)


def train(
  state: TrainState,
  train_step: TrainStep,
  batches: Iterator[Batch],
  control: LoopControl,
  hooks: Sequence[Hook] = (),
  *,
  start: int,
  total_steps: int,
) -> tuple[TrainState, int]:
  """Run steps `start` + 1 to `total_steps`, or until `control.should_stop`.

  Args:
    state: the state after step `start`; donated.
    train_step: (state, batch) -> (state, metrics on the devices).
    batches: global batches, beginning with the batch of step `start` + 1.
    control: functions for logging, tracing, stopping and skipped steps.
    hooks: hooks, run in this order after each step for which they are due.
    start: number of steps already done.
    total_steps: number of steps of the whole run.

  Returns:
    The state and the number of steps done.

  Raises:
    NonFiniteError: raised by `control.skipped`.
  """
  unread: deque[tuple[int, Metrics]] = deque()

  def read(keep: int) -> None:
    """Read the metrics of every step but the newest `keep`."""
    while len(unread) > keep:
      newest, (step, metrics) = unread[-1][0], unread.popleft()
      codes = metrics.pop(CODES, None)
      # A step that scales its loss marks faults by the loss: an overflow is none.
      for name in ("loss",) if "loss_scale" in metrics else ("loss", "grad_norm"):
        # item() takes a fifth of the host time that float() takes for a new CPU scalar.
        if not math.isfinite(value := metrics[name].item()):
          control.skipped(BadStep(step, f"{name} is {value}", codes, state, newest))
          break
      if control.is_logged(step):
        control.log(step, {name: x.item() for name, x in metrics.items()})

  for step in range(start + 1, total_steps + 1):
    if control.is_traced(step):
      read(keep=0)
      control.trace(step)
    control.at(step, "input")
    batch = next(batches)
    control.at(step, "step")
    state, metrics = train_step(state, batch)
    unread.append((step, metrics))
    read(keep=IN_FLIGHT)

    for hook in hooks:
      if hook.is_due(step):
        read(keep=0)
        values = [{name: x.item() for name, x in metrics.items()}] if hook.takes_metrics else []
        if isinstance(changed := hook.run(step, state, *values), TrainState):
          state = changed
    if control.should_stop(step):
      read(keep=0)
      return state, step
  read(keep=0)
  return state, total_steps


def evaluate(
  eval_step: EvalStep,
  params: Any,
  model_state: Any,
  batches: Iterator[Batch],
  metrics: Mapping[str, Metric] = MappingProxyType({}),
) -> dict[str, Any]:
  """Return the means of metrics over all examples, each counted once.

  Totals are added on the host, as 64-bit integers and doubles.

  Args:
    eval_step: (params, model_state, batch with "mask") -> totals.
    params: the parameters to evaluate.
    model_state: the model state to evaluate.
    batches: global batches.
    metrics: the metrics of `losses.eval_totals`; their values, which can be NaN, and their
      arrays are added to the means.

  Raises:
    ConfigError: the weights of all examples are 0, or two metrics report the same name.
  """
  sums: dict[str, Any] = {}
  rows: list[Any] = []
  pending: deque[dict[str, Any]] = deque()

  def add(keep: int) -> None:
    while len(pending) > keep:
      totals = jax.tree.map(np.asarray, pending.popleft())
      if ROWS in totals:
        mask, gathered = totals.pop(ROWS)
        rows.append(jax.tree.map(functools.partial(np.compress, mask, axis=0), gathered))
      totals = jax.tree.map(wide, totals)
      sums.update(jax.tree.map(np.add, dict(sums), totals) if sums else totals)

  for batch in batches:
    pending.append(eval_step(params, model_state, batch))
    add(keep=IN_FLIGHT)
  add(keep=0)
  examples, of_metrics = sums.pop("examples"), sums.pop(SUMS, {})
  divisors = {"loss": sums.pop(LOSS_WEIGHT, examples)}
  if not (examples and divisors["loss"]):
    fix = "give some of them a weight above 0"
    raise invalid("weight", ..., "is 0 for all validation examples", fix)
  values = {name: float(total / divisors.get(name, examples)) for name, total in sums.items()}
  for name, value in results(metrics, of_metrics, rows):
    if name in values:
      problem, fix = "is reported by two metrics", "rename or remove one"
      raise invalid("Config.metrics", name, problem, fix)
    values[name] = value
  return values
