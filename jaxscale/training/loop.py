"""The loop, on one screen: train, check, report, evaluate, save.

The host never waits for the step it has just started. Metrics are read when
their step is `IN_FLIGHT` steps old, which also bounds how far the host runs
ahead; every step's loss and gradient norm are looked at, so a loss that is no
number is found within that many steps, and always before a checkpoint. The step
itself has refused it by then (`non_finite`), and what followed began from a state
that is good.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jaxscale.errors import EXIT_CRASH
from jaxscale.training.nan_guard import SEEN
from jaxscale.training.state import TrainState
from jaxscale.training.step import Batch, EvalStep, TrainStep

IN_FLIGHT = 4  # steps started and not yet looked at


class NonFiniteError(FloatingPointError):
  """A step whose loss or gradient is not a number.

  Attributes:
    step: which.
    good_until: what was saved up to this step is good.
    advice: what to do, for the end of the line.
  """

  exit_code = EXIT_CRASH
  advice = (
    "lower optimizer.lr or set clip_norm, in a new --workdir, or go on without such "
    "steps by --config.checks.non_finite=skip"
  )

  def __init__(self, step: int, what: str):
    super().__init__(f"{what} at step {step}")
    self.step = self.good_until = step


class BadStep(NamedTuple):
  """A step that was refused.

  Attributes:
    step: which.
    what: was found, e.g. "loss is nan".
    seen: the metric `non_finite.SEEN`, if the step has it.
    state: the newest.
    now: the step after which it is looked at.
  """

  step: int
  what: str
  seen: jax.Array | None
  state: TrainState
  now: int


def stop_at(bad: BadStep) -> None:
  """What follows a bad step where nobody says otherwise."""
  raise NonFiniteError(bad.step, bad.what)


class Events(NamedTuple):
  """What the loop calls, and when. A step is counted once it is done.

  Attributes:
    is_logged: step -> whether its metrics are reported.
    is_evaluated: step -> whether an evaluation follows it.
    is_saved: step -> whether a checkpoint follows it.
    log: (step, metrics as floats).
    evaluate: (step, state) -> metrics of the evaluation; None if it was left off
      to stop.
    save: (step, state, metrics of an evaluation at this step or None).
    should_stop: step -> whether to save and stop after it.
    is_checked: step -> whether a check of the state follows it.
    check: (step, state); raises if it finds a fault, before anything is saved.
    at: (step, activity): the host goes on to this part of the step, by the names of
      `cluster.verdict.ACTIVITIES`.
    refused: what follows a step whose loss or gradient is no number; raises
      `NonFiniteError`, or returns to go on. In every process at the same step.
  """

  is_logged: Callable[[int], bool]
  is_evaluated: Callable[[int], bool]
  is_saved: Callable[[int], bool]
  log: Callable[[int, dict[str, float]], None]
  evaluate: Callable[[int, TrainState], dict[str, float] | None]
  save: Callable[[int, TrainState, dict[str, float] | None], None]
  should_stop: Callable[[int], bool]
  is_checked: Callable[[int], bool] = lambda step: False
  check: Callable[[int, TrainState], None] = lambda step, state: None
  at: Callable[[int, str], None] = lambda step, activity: None
  refused: Callable[[BadStep], None] = stop_at


def train(
  state: TrainState,
  train_step: TrainStep,
  batches: Iterator[Batch],
  events: Events,
  *,
  start: int,
  total_steps: int,
) -> tuple[TrainState, int]:
  """Run steps `start` + 1 … `total_steps`, or until asked to stop.

  Args:
    state: after step `start`; donated.
    train_step: (state, batch) -> (state, metrics on the devices).
    batches: global batches from step `start` on.
    events: what to do on the way.
    start: steps done already.
    total_steps: of the whole run.

  Returns:
    The state and the number of steps done, saved if it stopped early.

  Raises:
    NonFiniteError: by `events.refused`; nothing was saved since.
  """
  unread: deque[tuple[int, dict[str, jax.Array]]] = deque()

  def read(keep: int) -> None:
    """Look at every step but the newest `keep`."""
    while len(unread) > keep:
      newest, (step, metrics) = unread[-1][0], unread.popleft()
      seen = metrics.pop(SEEN, None)
      for name in ("loss", "grad_norm"):
        # item(), not float(): a fifth of the host's time on a fresh CPU scalar.
        if not math.isfinite(value := metrics[name].item()):
          events.refused(BadStep(step, f"{name} is {value}", seen, state, newest))
          break
      if events.is_logged(step):
        events.log(step, {name: value.item() for name, value in metrics.items()})

  for step in range(start + 1, total_steps + 1):
    events.at(step, "input")
    batch = next(batches)
    events.at(step, "step")
    state, metrics = train_step(state, batch)
    unread.append((step, metrics))
    read(keep=IN_FLIGHT)

    if events.is_checked(step):
      read(keep=0)
      events.check(step, state)
    evaluation = None
    if events.is_evaluated(step):
      read(keep=0)
      evaluation = events.evaluate(step, state)
    stop = events.should_stop(step)
    if events.is_saved(step) or stop:
      read(keep=0)
      events.save(step, state, evaluation)
    if stop:
      return state, step
  read(keep=0)
  return state, total_steps


def evaluate(
  eval_step: EvalStep, params: Any, model_state: Any, batches: Iterator[Batch]
) -> dict[str, float]:
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
