"""Conversion of a Flax module to the pure functions for state and step.

Flax's own `nn.Dropout` draws one mask for all rows of a device, so that results would
depend on the number of devices. Here each row's mask is drawn from its own key.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxscale.errors import ConfigError

# RNG stream that is the same on all devices. Flax folds a layer's path and call count into
# it, which distinguishes the dropout layers of a model.
_LAYERS = "jaxscale_layers"


_ANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


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
  """

  init: Any
  apply: Any
  inputs: Callable[[dict[str, Any]], Any] = inputs_of


def functions(
  model: nn.Module,
  image_shape: tuple[int, ...],
  *,
  mean: tuple[float, ...] = (0.0,),
  std: tuple[float, ...] = (1.0,),
  dtype: str = "uint8",
) -> ModelFns:
  """Turn a Flax module into pure functions.

  The module is called with the inputs and, if its `__call__` accepts them, with `train`
  (bool) and `keys` (one key per row, which depends on the row's position in the global
  batch and not on the number of devices). `nn.Dropout` draws each row's mask from the
  row's key. Inside `nn.scan` and `nn.vmap`, and for other users of the stream "dropout",
  random numbers come from the key of the device's first row; see `by_device`.

  Args:
    model: the module.
    image_shape: shape of one example, without the batch dim.
    mean: mean that is subtracted from the inputs, one value per channel or one for all.
    std: standard deviation by which the inputs are divided, one value per channel or one
      for all. Images can thus be sent to the device as uint8, a quarter of the bytes.
    dtype: dtype of the inputs; integers other than uint8 (tokens) are not normalised.

  Raises:
    ConfigError: the module's `__call__` requires further arguments.

  Example:
    >>> fns = functions(MLPModule(num_classes=10), (8, 8, 1))
    >>> params, model_state = fns.init(jax.random.key(0))
  """
  is_number = jnp.issubdtype(dtype, jnp.floating) or dtype == "uint8"
  named = inspect.signature(type(model).__call__).parameters
  for name, parameter in list(named.items())[2:]:
    has_default = parameter.default is not parameter.empty
    if not (has_default or parameter.kind in _ANY or name in ("train", "keys")):
      fix = "give it a default; only the inputs, `train` and `keys` are passed"
      raise ConfigError(f"{type(model).__name__}.__call__ requires {name!r}; {fix}")

  def call(variables, inputs, train, keys, **options):
    if is_number:
      inputs = inputs.astype(jnp.float32) - jnp.array(mean, jnp.float32)
      inputs = inputs / jnp.array(std, jnp.float32)
    arguments = {name: v for name, v in (("train", train), ("keys", keys)) if name in named}
    if keys is None:
      return model.apply(variables, inputs, **arguments, **options)
    rngs = {"dropout": keys[0], _LAYERS: jax.random.key(0)}
    with nn.intercept_methods(_dropout_by_row(keys)):
      return model.apply(variables, inputs, **arguments, **options, rngs=rngs)

  def init(key):
    inputs = jnp.zeros((1, *image_shape), jnp.float32 if is_number else dtype)
    arguments: Any = {"train": False} if "train" in named else {}
    variables = dict(model.init(key, inputs, **arguments))
    params = variables.pop("params")
    return params, variables

  def apply(params, model_state, inputs, train, keys):
    variables = {"params": params, **model_state}
    if not train:
      return call(variables, inputs, False, None), model_state
    outputs, updates = call(variables, inputs, True, keys, mutable=list(model_state))
    return outputs, dict(updates)

  return ModelFns(init, apply)


def _dropout_by_row(keys: jax.Array) -> Any:
  """Return an interceptor of Flax's methods that draws dropout masks per row."""

  def intercept(call, args, kwargs, context):
    module, arguments = context.module, _given(context, args, kwargs)
    if not (_drops(context, arguments) and _has_rows(module, arguments, len(keys))):
      return call(*args, **kwargs)
    layer = jax.random.bits(module.make_rng(_LAYERS))
    inputs, keep = arguments["inputs"], 1 - module.rate
    shape = list(inputs.shape)
    for dim in module.broadcast_dims:
      shape[dim] = 1

    def mask(key):
      return jax.random.bernoulli(jax.random.fold_in(key, layer), keep, shape[1:])

    return jnp.where(jax.vmap(mask)(keys), inputs / keep, 0).astype(inputs.dtype)

  return intercept


def by_device(trace: Callable[[], Any], rows: int) -> tuple[Any, list[str]]:
  """Call a model and list the layers whose results depend on the number of devices.

  These are layers that process the rows of a device jointly.

  Args:
    trace: function that calls the model in training mode.
    rows: number of rows that it is called with.

  Returns:
    The result of `trace`, and one line per layer.

  Example:
    >>> norm = nn.BatchNorm(use_running_average=False)
    >>> x = jnp.ones((4, 2))
    >>> _, found = by_device(lambda: norm.init(jax.random.key(0), x), rows=4)
    >>> found[0].partition(" ")[0]
    'BatchNorm'
  """
  calls: dict[str, str] = {}

  def intercept(call, args, kwargs, context):
    module, arguments = context.module, _given(context, args, kwargs)
    if what := _together(context, arguments, rows):
      calls["/".join(module.path) or type(module).__name__] = what
    return call(*args, **kwargs)

  with nn.intercept_methods(intercept):
    outputs = trace()
  problem = "the rows of each device separately: results depend on the number of devices"
  return outputs, [f"{name} ({what}) processes {problem}" for name, what in calls.items()]


def _together(context: Any, arguments: dict[str, Any], rows: int) -> str:
  """Describe a call that processes the rows of a device jointly; "" if it does not."""
  module = context.module
  if context.method_name != "__call__":
    return ""
  if isinstance(module, nn.BatchNorm) and module.axis_name is None:
    is_fixed = _chosen(module, arguments, "use_running_average")
    return "" if is_fixed else "nn.BatchNorm; use models.BatchNorm"
  if isinstance(module, nn.MultiHeadDotProductAttention) and module.dropout_rate:
    is_fixed = _chosen(module, arguments, "deterministic")
    return "" if is_fixed else "dropout of attention weights"
  if _drops(context, arguments) and not _has_rows(module, arguments, rows):
    return "nn.Dropout on inputs without the batch's rows"
  return ""


def _given(context: Any, args: Any, kwargs: Any) -> dict[str, Any]:
  """Return the arguments of a `__call__` by name; {} for other methods."""
  if context.method_name != "__call__":
    return {}
  method = inspect.signature(type(context.module).__call__)
  return method.bind(context.module, *args, **kwargs).arguments


def _chosen(module: nn.Module, arguments: dict[str, Any], name: str) -> Any:
  """Return an argument of a call, or the module's field if the argument is None."""
  value = arguments.get(name)
  return getattr(module, name) if value is None else value


def _drops(context: Any, arguments: dict[str, Any]) -> bool:
  """Return whether a call is an active dropout that uses the stream "dropout"."""
  module = context.module
  if not isinstance(module, nn.Dropout) or context.method_name != "__call__":
    return False
  is_own = arguments.get("rng") is None and module.rng_collection == "dropout"
  return is_own and not _chosen(module, arguments, "deterministic") and 0 < module.rate < 1


def _has_rows(module: Any, arguments: dict[str, Any], rows: int) -> bool:
  """Return whether a dropout's input has a row, with its own mask, per row of the batch."""
  inputs = arguments["inputs"]
  shares = any(dim % max(inputs.ndim, 1) == 0 for dim in module.broadcast_dims)
  return inputs.shape[:1] == (rows,) and not shares and module.has_rng(_LAYERS)


def init_shapes(init: Callable[[jax.Array], Any]) -> Any:
  """Return the shapes and dtypes of `init(key)` without computing anything.

  Example:
    >>> init_shapes(jax.random.normal).shape
    ()
  """
  return jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
