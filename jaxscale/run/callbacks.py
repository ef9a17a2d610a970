"""Callbacks: functions of the user that a run calls, and their state in its checkpoints.

`config.Callback` has the settings, and its `build` returns a `Callback`. All processes make
the same calls in the same order. A changed state and a request to stop are checked here, so
that a mistake is one line and all processes stop after the same step.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale import cluster
from jaxscale.config.choice import Choice
from jaxscale.config.plain import class_name, to_plain
from jaxscale.config.validation import nearest
from jaxscale.errors import ConfigError, invalid
from jaxscale.experiment.own_classes import guarded
from jaxscale.files import mismatch
from jaxscale.metrics.log import logger
from jaxscale.metrics.text import listed
from jaxscale.optim.tree_paths import path_name
from jaxscale.training.loop import Values
from jaxscale.training.types import TrainState

_STOPPED = {"step": int, "callback": str, "reason": str}
_SAVED = {"stopped": (_STOPPED, None), "settings": {str: {}}, "states": {str: {}}}


class Stop(NamedTuple):
  """Result of a callback that ends the run after the current step.

  Attributes:
    reason: the reason for the log and summary.json, e.g. "loss has not improved".
  """

  reason: str


class Callback:
  """Functions that a run calls in all processes; the defaults do nothing.

  A function returns None, or a changed `TrainState` to train on, or `Stop(reason)`. A
  changed state has the same step, structure, shapes, dtypes and shardings. A function must
  not donate the state, and copies what it keeps, as the next step reuses the memory.
  `on_start` cannot stop the run, and the result of `on_end` is not used. Override methods
  in a subclass, or pass functions by keyword.

  Attributes:
    every: the interval of `on_step` in steps, or a function that takes a step and returns
      whether `on_step` is called after it; equal in all processes.

  Example:
    >>> losses = []
    >>> def log(step, state, metrics):
    ...   losses.append(metrics["loss"])
    >>> callback = Callback(every=100, on_step=log)   # for fit(..., callbacks=[callback])
    >>> callback.on_step(100, None, {"loss": 0.5})
    >>> losses
    [0.5]
  """

  every: int | Callable[[int], bool] = 1

  def __init__(self, **functions: Any):
    _check_names("Callback", functions)
    vars(self).update(functions)

  def on_start(self, step: int, state: TrainState) -> Any:
    """Handle a start of training: at step 0, and again after a resume or a rollback."""

  def on_step(self, step: int, state: TrainState, metrics: Values) -> Any:
    """Handle the end of a step, every `every` steps, with the metrics of the step."""

  def on_evaluation(self, step: int, state: TrainState, values: Values) -> Any:
    """Handle an evaluation; the names of values are those of summary.json."""

  def on_save(self, step: int, state: TrainState) -> Any:
    """Handle a checkpoint, before the state is saved."""

  def on_end(self, step: int, state: TrainState) -> Any:
    """Handle the end of a run that is done; an interrupted run does not call it."""

  def state_dict(self) -> dict[str, Any]:
    """Return the callback's own state for a checkpoint: JSON, equal in all processes."""
    return {}

  def load_state_dict(self, saved: dict[str, Any]) -> None:
    """Restore the own state from a checkpoint, or that of the start of the run."""


class Callbacks:
  """Callbacks of one run in order; every process makes the same calls.

  Attributes:
    of: each callback, with the settings or the object whose class the user may have written.
    stopped: the step, the callback and the reason of the stop; None while none has stopped
      the run.
  """

  def __init__(self, members: Sequence[tuple[Callback, Any]]):
    """Set up the callbacks, before any of them is called.

    Args:
      members: each callback with its settings; None for a callback from Python.

    Raises:
      ConfigError: an interval is not a number of steps or a function, or a method named
        on_* does not exist in `Callback`, so that it would never be called.
    """
    self.stopped: dict[str, Any] | None = None
    self.of: dict[str, tuple[Callback, Any]] = {}
    for callback, settings in members:
      name, every = class_name(type(settings or callback)), callback.every
      if not callable(every) and not (type(every) is int and every >= 1):
        raise invalid(f"{name}.every", every, "is not a number of steps", "use 1 or more")
      _check_names(name, [n for n in dir(callback) if n.startswith("on_")])
      number = 1 + sum(other.split()[0] == name for other in self.of)
      self.of[f"{name} {number}" if number > 1 else name] = callback, settings or callback
    self._settings = {
      name: json.loads(json.dumps(to_plain(owner))) if isinstance(owner, Choice) else {}
      for name, (_, owner) in self.of.items()
    }
    self._first = self._states()

  def names(self, hook: str) -> list[str]:
    """Return the names of the callbacks that have a function, e.g. "on_step"."""
    default, of = getattr(Callback, hook), self.of.items()
    return [n for n, (c, _) in of if getattr(getattr(c, hook), "__func__", None) is not default]

  def call(
    self, hook: str, names: Sequence[str], step: int, state: TrainState, *values: Values
  ) -> TrainState:
    """Call a function of callbacks in order; return the state to train on.

    Raises:
      ConfigError: a callback of the config failed, or a result is invalid. Exceptions of
        callbacks from Python keep their type and have a note with the callback's name.
    """
    request = None
    for name in names:
      callback, owner = self.of[name]
      function = getattr(callback, hook)
      by = getattr(function, "__name__", hook)
      where = f".{hook}" + f" ({by})" * (by not in (hook, "<lambda>"))
      if isinstance(owner, Choice):
        function = guarded(owner, where, function)
      try:
        result = function(step, state, *map(dict, values))
      except Exception as e:
        e.add_note(f"raised in {name}{where} at step {step}")
        raise
      if isinstance(result, TrainState):
        _check_same(f"{name}{where}", state, result)
        state = result
      elif isinstance(result, Stop) and hook not in ("on_start", "on_end"):
        request = request or [name, result.reason]
      elif result is not None:
        fix = "return None, a changed TrainState, or after a step Stop(reason)"
        raise invalid(f"{name}{where}", ..., f"returned {type(result).__name__}", fix)
    if self.stopped is None and cluster.any_process(request is not None):
      name, reason = next(filter(None, cluster.gather(request)))
      self.stopped = {"step": step, "callback": name, "reason": reason}
    return state

  def stop_text(self) -> str | None:
    """Return the callback, the step and the reason of the stop; None without one."""
    text = "{callback} at step {step}: {reason}"
    return text.format(**self.stopped) if self.stopped else None

  def saved(self) -> dict[str, Any] | None:
    """Return what a checkpoint saves, as JSON; None without callbacks. All processes call it.

    Raises:
      ConfigError: a state is not JSON, or differs between processes.
    """
    if not self.of:
      return None
    states = self._states()
    if len({json.dumps(other) for other in cluster.gather(states)}) > 1:
      fix = "compute it from the arguments of the functions, which are equal in all"
      problem = f"of {listed(states)} differs between processes"
      raise invalid("Callback.state_dict", ..., problem, fix)
    return {"stopped": self.stopped, "settings": self._settings, "states": states}

  def restore(self, saved: Mapping[str, Any] | None, step: int) -> None:
    """Load the states of a checkpoint, or those of the beginning; log a changed set.

    Args:
      saved: the result of `saved` in the checkpoint; None if it has none.
      step: the step of the checkpoint; 0 begins the run anew.

    Raises:
      ConfigError: a callback does not accept its state.
    """
    saved = saved or {"stopped": None, "settings": {}, "states": {}}
    if problem := mismatch(saved, _SAVED):
      raise ConfigError(f"callbacks of the checkpoint of step {step}: {problem}")
    self.stopped, before, now = saved["stopped"], saved["settings"], self._settings
    for name, (callback, owner) in self.of.items():
      state = copy.deepcopy({**self._first, **saved["states"]}[name])
      guarded(owner, ".load_state_dict", callback.load_state_dict)(state)
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if self.stopped and self.stopped["callback"] in changed:
      self.stopped = None
    if changed and step:
      how = dict.fromkeys(now, "is new") | dict.fromkeys(before, "is gone")
      how |= dict.fromkeys(before.keys() & now.keys(), "has changed")
      lifted = "; it no longer stops the run" * (saved["stopped"] != self.stopped)
      logger.info(f"note: callbacks: {listed(f'{n} {how[n]}' for n in changed)}{lifted}")

  def _states(self) -> dict[str, Any]:
    """Return the state of each callback, which must come back from JSON as it was."""
    states = {}
    for name, (callback, owner) in self.of.items():
      state = guarded(owner, ".state_dict", callback.state_dict)()
      with contextlib.suppress(TypeError, ValueError):
        states[name] = json.loads(json.dumps(state))
      if repr(states.get(name)) != repr(state) or not isinstance(state, dict):
        fix = "use dict, list, str, int, float, bool and None, with texts as keys"
        raise invalid(f"{name}.state_dict()", state, "is not JSON", fix)
    return states


def _check_names(owner: str, names: Iterable[str]) -> None:
  """Raise if a name is not one of `Callback`."""
  known = [name for name in vars(Callback) if not name.startswith("_")]
  for name in sorted({*names}.difference(known)):
    raise invalid(owner, name, "does not exist", nearest(name, known))


def _check_same(where: str, old: TrainState, new: TrainState) -> None:
  """Refuse a changed state that the compiled step would not accept.

  Raises:
    ConfigError: step, structure, shape, dtype or sharding differ.
  """

  def kinds(state: TrainState) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(state)
    return {path_name(p): f"{getattr(x, 'dtype', '')}{[*np.shape(x)]}" for p, x in leaves}

  before, now = map(kinds, (old, new))
  names = [n for n in {**before, **now} if before.get(n) != now.get(n)]
  problems = [f"{name} {now.get(name)}, not {before.get(name)}" for name in names]
  for name, x, y in zip(before, *map(jax.tree.leaves, (old, new)), strict=False):
    if not (hasattr(y, "sharding") and y.sharding.is_equivalent_to(x.sharding, x.ndim)):
      problems.append(f"{name} in a different sharding")
  if not problems and int(new.step) != int(old.step):
    problems.append(f"step {int(new.step)}, not {int(old.step)}")
  if problems:
    fix = "return a state like the one that it got"
    raise invalid(where, ..., f"returned a state with {problems[0]}", fix)
