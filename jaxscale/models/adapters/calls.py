"""Arguments of a model's call, chosen by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxscale.errors import ConfigError
from jaxscale.models.model_fns import inputs_of, note_layer

_MODES = ("train", "training", "is_training")
_EVALUATES = ("deterministic", "use_running_average")
_ANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Setting(NamedTuple):
  """Data and BatchNorm of a run, for which a model is converted.

  Attributes:
    arrays: the shape of an example and the dtype of each array of a batch, by name.
    inputs: a function from a batch, whose "image" is normalised, to the arguments of the
      model; None chooses arrays by the names of parameters.
    norm_axes: mesh axes whose devices share BatchNorm statistics; None means no sharing.
    norm_group: number of rows that share statistics if a device has more.
    spans: the settings have a `bn_span`, which decides about the library's BatchNorm.
    mean: the mean that is subtracted from "image", one value per channel or one for all.
    std: the standard deviation by which "image" is divided, in the same form.
  """

  arrays: Mapping[str, tuple[tuple[int, ...], str]]
  inputs: Callable[[dict[str, Any]], Any] | None = None
  norm_axes: tuple[str, ...] | None = None
  norm_group: int | None = None
  spans: bool = False
  mean: tuple[float, ...] = (0.0,)
  std: tuple[float, ...] = (1.0,)

  def shared_axes(self, kind: str, name: str) -> tuple[str, ...] | None:
    """Return the axes over which a library's BatchNorm averages statistics, or note it.

    Args:
      kind: the class of the layer.
      name: the path of the layer.

    Raises:
      ConfigError: statistics are of a part of a device's rows.
    """
    if not self.spans:
      note_layer(name, f"{kind}; set batch_norm and bn_span in the settings class")
    if self.norm_group is not None:
      problem = f"bn_span: {kind} cannot normalise groups of {self.norm_group} rows of a device"
      raise ConfigError(f"{problem}; use 'device', 'global' or a multiple of a device's rows")
    return self.norm_axes


class Call:
  """Conversion of a batch to the arguments of a model's call.

  Args:
    name: the name of the call for errors.
    function: the function, or any callable with its signature.
    setting: the arrays, and how they are chosen.
    skip: number of leading parameters that are no inputs, such as self.
    given: names of parameters that the adapter passes itself.

  Raises:
    ConfigError: a parameter is no array of a batch and has no default.
  """

  def __init__(
    self, name: str, function: Any, setting: Setting, *, skip: int = 0, given: tuple[str, ...] = ()
  ):
    self.setting, arrays = setting, setting.arrays
    parameters = dict(list(inspect.signature(function).parameters.items())[skip:])
    parameters = {n: p for n, p in parameters.items() if p.kind not in _ANY}
    self.needed = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    self.given = {n for n in (*_MODES, *_EVALUATES, *given) if n in parameters}
    self.names = [n for n in parameters if n not in self.given]
    unknown = [n for n in self.names if n in self.needed and n not in arrays]
    self.by_name = [n for n in self.names if n in arrays]
    if setting.inputs is None and unknown and (len(unknown) > 1 or self.by_name):
      fix = "give it a default or the name of an array, or write the settings' inputs(batch)"
      problem = f"requires {unknown[-1]!r}, but the data has {', '.join(arrays)}"
      raise ConfigError(f"{name} {problem}; {fix}")

  def inputs(self, batch: dict[str, Any]) -> Any:
    """Return the inputs of `arguments` from a batch."""
    if self.setting.inputs is not None:
      return self.setting.inputs(self._normalised(batch))
    return {n: batch[n] for n in self.by_name} if self.by_name else inputs_of(batch)

  def arguments(self, inputs: Any, train: bool, **given: Any) -> tuple[tuple, dict[str, Any]]:
    """Return the positional arguments and the keywords of a call, for rows or one example.

    Args:
      inputs: an array or tree for the first parameter, a tuple for several, or a dict by
        their names.
      train: the mode, for `train`, `training` and `is_training`, and its inverse for
        `deterministic` and `use_running_average`.
      given: arguments of the adapter; parameters that the call lacks are left out.
    """
    given |= dict.fromkeys(_MODES, train) | dict.fromkeys(_EVALUATES, not train)
    keywords = {n: x for n, x in given.items() if n in self.given}
    if self.setting.inputs is None:
      is_image = not isinstance(inputs, dict) and self.by_name in ([], ["image"])
      named = self._normalised({"image": inputs} if is_image else inputs)
      inputs = named["image"] if is_image else named
    if isinstance(inputs, dict) and inputs and inputs.keys() <= {*self.names}:
      return (), inputs | keywords
    return inputs if type(inputs) is tuple else (inputs,), keywords

  def example(self) -> Any:
    """Return inputs of one row, zeros, to initialise parameters."""
    arrays = self.setting.arrays.items()
    return self.inputs({n: jnp.zeros((1, *shape), dtype) for n, (shape, dtype) in arrays})

  def _normalised(self, batch: Any) -> Any:
    """Normalise the "image" of floats or uint8 in a batch; tokens are unchanged."""
    dtype = self.setting.arrays.get("image", ((), "int32"))[1]
    is_number = dtype == "uint8" or jnp.issubdtype(dtype, jnp.floating)
    if not (is_number and isinstance(batch, dict) and "image" in batch):
      return batch
    mean, std = (jnp.array(x, jnp.float32) for x in (self.setting.mean, self.setting.std))
    return batch | {"image": (batch["image"].astype(jnp.float32) - mean) / std}
