"""Early stopping: end a run once a metric of its evaluations no longer improves."""

from __future__ import annotations

import math
from typing import Any

from jaxscale.errors import invalid
from jaxscale.metrics.text import listed, plural
from jaxscale.run.callbacks import Callback, Stop
from jaxscale.training.loop import Values


class EarlyStopper(Callback):
  """Callback that counts evaluations without improvement.

  Example:
    >>> stopper = EarlyStopper("loss", patience=2)
    >>> [stopper.on_evaluation(i, None, {"loss": loss}) for i, loss in enumerate([2.0, 1.5, 1.6])]
    [None, None, None]
    >>> stopper.on_evaluation(3, None, {"loss": 1.5}).reason
    'loss has not improved for 2 evaluations; best 1.5 at step 1'
  """

  def __init__(self, metric: str, *, patience: int, min_delta: float = 0.0, mode: str = "min"):
    """Start without an evaluation; `config.EarlyStopping` documents the arguments."""
    super().__init__()
    self._metric, self._patience, self._min_delta = metric, patience, min_delta
    self._sign = 1 if mode == "max" else -1
    self._state: dict[str, Any] = {"best": None, "best_step": 0, "waited": 0}

  def on_evaluation(self, step: int, state: Any, values: Values) -> Stop | None:
    """Compare the metric with its best value; NaN is no improvement.

    Raises:
      ConfigError: evaluations have no such metric.
    """
    if self._metric not in values:
      problem = "is not a metric of this run's evaluations"
      raise invalid("EarlyStopping.metric", self._metric, problem, f"use {listed(values, 'or')}")
    value, state = values[self._metric], self._state
    best = -self._sign * math.inf if state["best"] is None else state["best"]
    if self._sign * (value - best) > self._min_delta:
      self._state = {"best": value, "best_step": step, "waited": 0}
      return None
    self._state = state | {"waited": state["waited"] + 1}
    if self._state["waited"] < self._patience:
      return None
    by = f" by more than {self._min_delta:g}" if self._min_delta else ""
    waited = plural(self._state["waited"], "evaluation")
    reason = f"{self._metric} has not improved{by} for {waited}"
    return Stop(f"{reason}; best {best:.6g} at step {state['best_step']}")

  def state_dict(self) -> dict[str, Any]:
    """Return the best value, its step and the number of evaluations since."""
    return self._state

  def load_state_dict(self, saved: dict[str, Any]) -> None:
    """Restore the state of a checkpoint."""
    self._state = saved
