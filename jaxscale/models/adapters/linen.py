"""Flax Linen modules as `ModelFns`."""

from __future__ import annotations

import inspect
from typing import Any

import flax.linen as nn
import jax

from jaxscale.models.adapters.calls import Call, Setting
from jaxscale.models.adapters.rows import drop_rows, during_call, has_rows
from jaxscale.models.model_fns import ModelFns, note_layer

# RNG stream that is the same on all devices. Flax folds a layer's path and call count into
# it, which distinguishes the dropout layers of a model.
_LAYERS = "jaxscale_layers"


def convert(model: nn.Module, setting: Setting) -> ModelFns:
  """Convert a Linen module.

  Inside `nn.scan` and `nn.vmap`, and for other users of the stream "dropout", random
  numbers come from the key of the device's first row.
  """
  name, function = f"{type(model).__name__}.__call__", type(model).__call__
  call = Call(name, function, setting, skip=1, given=("keys",))

  def init(key):
    args, options = call.arguments(call.example(), False, keys=None)
    variables = dict(model.init(key, *args, **options))
    return variables.pop("params", {}), variables

  def apply(params, model_state, inputs, train, keys):
    variables = {"params": params, **model_state}
    args, options = call.arguments(inputs, train, keys=keys)
    if not train:
      return model.apply(variables, *args, **options), model_state
    rngs = {} if keys is None else {"dropout": keys[0], _LAYERS: jax.random.key(0)}
    with nn.intercept_methods(_interceptor(setting)), during_call(keys):
      options |= {"rngs": rngs, "mutable": list(model_state)}
      outputs, updates = model.apply(variables, *args, **options)
    return outputs, dict(updates)

  return ModelFns(init, apply, call.inputs)


def _interceptor(setting: Setting) -> Any:
  """Return an interceptor of Flax's methods in training.

  It draws dropout masks per row, and shares statistics of BatchNorm or notes the layer.
  """

  def intercept(call, args, kwargs, context):
    module = context.module
    if context.method_name != "__call__":
      return call(*args, **kwargs)
    given = inspect.signature(type(module).__call__).bind(module, *args, **kwargs).arguments
    name = "/".join(module.path) or type(module).__name__
    if isinstance(module, nn.BatchNorm) and module.axis_name is None:
      if not _chosen(module, given, "use_running_average"):
        axes = setting.shared_axes("nn.BatchNorm", name)
        object.__setattr__(module, "axis_name", axes)  # a frozen module, new in each call
    elif isinstance(module, nn.Dropout) and _drops(module, given):
      dims = module.broadcast_dims
      if module.has_rng(_LAYERS) and has_rows(given["inputs"], dims):
        return drop_rows(given["inputs"], module.rate, module.make_rng(_LAYERS), dims)
      note_layer(name, "nn.Dropout on inputs without the batch's rows")
    return call(*args, **kwargs)

  return intercept


def _chosen(module: nn.Module, arguments: dict[str, Any], name: str) -> Any:
  """Return an argument of a call, or the module's field if the argument is None."""
  value = arguments.get(name)
  return getattr(module, name) if value is None else value


def _drops(module: nn.Dropout, arguments: dict[str, Any]) -> bool:
  """Return whether a call is an active dropout that uses the stream "dropout"."""
  is_own = arguments.get("rng") is None and module.rng_collection == "dropout"
  return is_own and not _chosen(module, arguments, "deterministic") and 0 < module.rate < 1
