"""A model as two pure functions, and notes on it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

_NOTES: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("notes", default=None)


def inputs_of(batch: dict[str, Any]) -> Any:
  """Return a batch's "image", else its "tokens", else the whole batch.

  Example:
    >>> inputs_of({"image": 1, "label": 2}), inputs_of({"state": 1, "action": 2})
    (1, {'state': 1, 'action': 2})
  """
  return next((batch[name] for name in ("image", "tokens") if name in batch), batch)


class ModelFns(NamedTuple):
  """A model as two pure functions.

  Attributes:
    init: key -> (params, model_state) in float32.
    apply: (params, model_state, inputs, train, keys) -> (outputs, model_state). Outputs are
      a tree of arrays [rows, ...].
    inputs: batch -> inputs of `apply`, an array or a tree of arrays.
    out_first: whether kernels are [out, in] instead of [in, out].
  """

  init: Any
  apply: Any
  inputs: Callable[[dict[str, Any]], Any] = inputs_of
  out_first: bool = False


def init_shapes(init: Callable[[jax.Array], Any]) -> Any:
  """Return the shapes and dtypes of `init(key)` without computing anything.

  Example:
    >>> init_shapes(jax.random.normal).shape
    ()
  """
  return jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))


def notes_of(trace: Callable[[], Any]) -> tuple[Any, list[str]]:
  """Call a function and return its result with the notes that models make meanwhile.

  Example:
    >>> notes_of(lambda: note("BatchNorm_0 depends on the number of devices"))
    (None, ['BatchNorm_0 depends on the number of devices'])
  """
  token = _NOTES.set(notes := [])
  try:
    return trace(), notes
  finally:
    _NOTES.reset(token)


def note(line: str) -> None:
  """Add a line to the notes that `notes_of` returns."""
  notes = _NOTES.get()
  if notes is not None and line not in notes:
    notes.append(line)


def note_layer(name: str, what: str) -> None:
  """Note a layer whose results depend on the number of devices."""
  problem = "the rows of each device separately: results depend on the number of devices"
  note(f"{name} ({what}) processes {problem}")


def note_given(name: str, argument: str) -> None:
  """Note a model that already has its initial parameters.

  Args:
    name: the name of the model.
    argument: the parameter of a function that would make the model from a key.
  """
  fix = f"return a function of `{argument}` that makes the module"
  note(f"{name} has its own initial parameters, which do not depend on Config.seed; {fix}")
