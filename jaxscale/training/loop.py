"""The loop, on one screen: train, log, and what is due between two steps.

The host never waits for the step it has just started. Metrics are read when
their step is `IN_FLIGHT` steps old, which also bounds how far the host runs
ahead; every step's loss and gradient norm are checked, so a NaN is found within
that many steps, and always before a checkpoint. The step itself has skipped it by
then (`nan_guard`), and what followed began from a state that is good.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxscale.errors import NonFiniteError
from jaxscale.training.nan_guard import CODES
from jaxscale.training.types import Batch, EvalStep, Metrics, TrainState, TrainStep

Values = dict[str, float]  # of metrics, by name
IN_FLIGHT = 4  # steps started whose metrics are not read yet


class BadStep(NamedTuple):
  """A step that was skipped.

  Attributes:
    step: which.
    what: was found, e.g. "loss is nan".
    codes: the metric `nan_guard.CODES`, if the step has it.
    state: the newest.
    newest: the step that has just been started.
  """

  step: int
  what: str
  codes: jax.Array | None
  state: TrainState
  newest: int


class Hook(NamedTuple):
  """Something to do between two steps, once no step is in flight.

  Attributes:
    every: its number of steps, or a function that takes a step and returns whether the
      hook runs after it. All processes must decide alike.
    run: called with the step that is done and the state after it, which it must not
      donate. An error that it raises ends the run, before anything is saved.

  Example:
    >>> norms = Hook(100, lambda step, state: print(step, optax.tree.norm(state.params)))
    >>> norms.is_due(200), norms.is_due(250)
    (True, False)
  """

  every: int | Callable[[int], bool]
  run: Callable[[int, TrainState], Any]

  def is_due(self, step: int) -> bool:
    """Return whether the hook runs after this step."""
    return self.every(step) if callable(self.every) else step % self.every == 0


class Callbacks:
  """What the loop tells and asks its caller; by default it only trains.

  A step is counted once it is done. All processes must answer alike. A subclass
  overrides methods, or functions are given by their names.

  Example:
    >>> callbacks = Callbacks(is_logged=lambda step: step % 10 == 0, log=print)
  """

  def __init__(self, **functions: Callable[..., Any]):
    vars(self).update(functions)

  def at(self, step: int, activity: str) -> None:
    """The host begins an activity: one of `cluster`'s `ACTIVITIES`."""

  def is_traced(self, step: int) -> bool:
    """Whether a trace begins or ends before this step; asked once per step."""
    return False

  def trace(self, step: int) -> None:
    """Begin a trace with this step, or end one; no step is in flight."""

  def is_logged(self, step: int) -> bool:
    """Whether this step's metrics are logged."""
    return False

  def log(self, step: int, metrics: Values) -> None:
    """Called with the metrics of a step that is logged, some steps later."""

  def should_stop(self, step: int) -> bool:
    """Whether to end after this step; asked once per step, after the hooks."""
    return False

  def skipped(self, bad: BadStep) -> None:
    """Called after a step with NaN or Inf; returns to continue training.

    Raises:
      NonFiniteError: the run ends; nothing was saved since.
    """
    raise NonFiniteError(bad.step, bad.what)


def train(
  state: TrainState,
  train_step: TrainStep,
  batches: Iterator[Batch],
  callbacks: Callbacks,
  hooks: Sequence[Hook] = (),
  *,
  start: int,
  total_steps: int,
) -> tuple[TrainState, int]:
  """Run steps `start` + 1 … `total_steps`, or until asked to stop.

  Args:
    state: after step `start`; donated.
    train_step: (state, batch) -> (state, metrics on the devices).
    batches: global batches from step `start` on.
    callbacks: what the loop tells and asks.
    hooks: run in this order after the steps for which they are due.
    start: steps done already.
    total_steps: of the whole run.

  Returns:
    The state and the number of steps done.

  Raises:
    NonFiniteError: by `callbacks.skipped`.
  """
  unread: deque[tuple[int, Metrics]] = deque()

  def read(keep: int) -> None:
    """Read the metrics of every step but the newest `keep`."""
    while len(unread) > keep:
      newest, (step, metrics) = unread[-1][0], unread.popleft()
      codes = metrics.pop(CODES, None)
      for name in ("loss", "grad_norm"):
        # item(), not float(): a fifth of the host's time on a fresh CPU scalar.
        if not math.isfinite(value := metrics[name].item()):
          callbacks.skipped(BadStep(step, f"{name} is {value}", codes, state, newest))
          break
      if callbacks.is_logged(step):
        callbacks.log(step, {name: x.item() for name, x in metrics.items()})

  for step in range(start + 1, total_steps + 1):
    if callbacks.is_traced(step):
      read(keep=0)
      callbacks.trace(step)
    callbacks.at(step, "input")
    batch = next(batches)
    callbacks.at(step, "step")
    state, metrics = train_step(state, batch)
    unread.append((step, metrics))
    read(keep=IN_FLIGHT)

    for hook in hooks:
      if hook.is_due(step):
        read(keep=0)
        hook.run(step, state)
    if callbacks.should_stop(step):
      read(keep=0)
      return state, step
  read(keep=0)
  return state, total_steps


def evaluate(
  eval_step: EvalStep, params: Any, model_state: Any, batches: Iterator[Batch]
) -> Values:
  """Means over every example of the batches, each counted once.

  Totals are added up on the host, in Python's integers and doubles.

  Args:
    eval_step: (params, model_state, batch with "mask") -> totals.
    params: to evaluate.
    model_state: to evaluate.
    batches: global batches.
  """
  sums: dict[str, Any] = {}
  pending: deque[dict[str, jax.Array]] = deque()

  def add(keep: int) -> None:
    while len(pending) > keep:
      for name, total in pending.popleft().items():
        sums[name] = sums.get(name, 0) + total.item()

  for batch in batches:
    pending.append(eval_step(params, model_state, batch))
    add(keep=IN_FLIGHT)
  add(keep=0)
  examples = sums.pop("examples")
  return {name: total / examples for name, total in sums.items()}
