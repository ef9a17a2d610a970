"""Conversion of a model of any kind to `ModelFns`."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Collection
from typing import Any

import flax.linen as nn

from jaxscale.models.adapters.calls import Setting
from jaxscale.models.model_fns import ModelFns

KINDS = (
  "a Flax Linen module, an NNX module or a function of `rngs` that makes one, an Equinox module "
  "or a function of `key` that makes one, a transformed Haiku function, a pair (init, apply) of "
  "functions, a models.ModelFns or a models.Stack"
)


def library_of(model: Any) -> str:
  """Return the library of a model: the name of its adapter, "functions", or "".

  A library that is not imported made no model, and is not imported here.

  Example:
    >>> library_of(nn.Dense(3)), library_of((len, max)), library_of(3)
    ('linen', 'functions', '')
  """
  first = model[0] if type(model) is tuple and len(model) == 2 else model
  if _is_instance(first, "equinox", "Module"):
    return "equinox"
  if isinstance(model, ModelFns) or (first is not model and callable(first) and callable(model[1])):
    return "functions"
  if isinstance(model, nn.Module):
    return "linen"
  if _is_instance(model, "flax.nnx", "Module"):
    return "nnx"
  if _is_instance(model, "haiku", "Transformed", "TransformedWithState"):
    return "haiku"
  names = _parameters(model)
  return "nnx" if "rngs" in names else "equinox" if "key" in names else ""


def _is_instance(model: Any, package: str, *names: str) -> bool:
  home = sys.modules.get(package)
  return home is not None and isinstance(model, tuple(getattr(home, name) for name in names))


def _parameters(function: Any) -> Collection[str]:
  """Return the names of a function's parameters, also of a class or a `functools.partial`."""
  while isinstance(function, functools.partial):
    function = function.func
  if isinstance(function, type):  # a metaclass may hide the signature
    function = function.__init__
  try:
    return inspect.signature(function).parameters if callable(function) else ()
  except ValueError:  # a function in C
    return ()


def convert(model: Any, setting: Setting) -> ModelFns:
  """Convert a model for which `library_of` is not empty.

  Raises:
    ConfigError: the model's call does not fit the data.
  """
  library = library_of(model)
  if library == "functions":
    fns = ModelFns(*model)
    return fns if setting.inputs is None else fns._replace(inputs=setting.inputs)
  return importlib.import_module(f"jaxscale.models.adapters.{library}").convert(model, setting)


def functions(
  model: Any,
  image_shape: tuple[int, ...],
  *,
  mean: tuple[float, ...] = (0.0,),
  std: tuple[float, ...] = (1.0,),
  dtype: str = "uint8",
) -> ModelFns:
  """Turn a model of Flax, Equinox or Haiku into pure functions.

  The model is called with the inputs and, where its call has these parameters, with
  `train` (a bool) and `keys` (one key per row, which depends on the row's position in the
  global batch and not on the number of devices). Dropout draws each row's mask from the
  row's key. Equinox modules are called for each row, with its `key`.

  Args:
    model: a Linen module, an NNX module or a function of `rngs`, an Equinox module or a
      function of `key`, or a transformed Haiku function.
    image_shape: shape of one example, without the batch dim.
    mean: mean that is subtracted from the inputs, one value per channel or one for all.
    std: standard deviation by which the inputs are divided, one value per channel or one
      for all. Images can thus be sent to the device as uint8, a quarter of the bytes.
    dtype: dtype of the inputs; integers other than uint8 (tokens) are not normalised.

  Raises:
    ConfigError: the model's call requires further arguments.

  Example:
    >>> from jaxscale import models
    >>> fns = functions(models.MLPModule(num_classes=10), (8, 8, 1))
    >>> params, model_state = fns.init(jax.random.key(0))
  """
  return convert(model, Setting({"image": (image_shape, dtype)}, mean=mean, std=std))
