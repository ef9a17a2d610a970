"""A Flax module as the two pure functions that the state and the step take.

Flax's own `nn.Dropout` would draw one mask for all the rows of a device, and results
would depend on the number of devices. Here each row's mask comes from its own key.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxscale.errors import ConfigError

# A stream of random numbers that is the same on all devices: Flax folds a layer's path
# and its calls into it, which tells the dropout layers of a model apart.
_LAYERS = "jaxscale_layers"


_ANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class ModelFns(NamedTuple):
  """A model as two pure functions.

  Attributes:
    init: key -> (params, model_state), float32.
    apply: (params, model_state, images, train, keys) -> (outputs, model_state).
  """

  init: Any
  apply: Any


def functions(
  model: nn.Module,
  image_shape: tuple[int, ...],
  *,
  mean: tuple[float, ...] = (0.0,),
  std: tuple[float, ...] = (1.0,),
  dtype: str = "uint8",
) -> ModelFns:
  """The pure functions of a Flax module.

  The module is called with the inputs and, where its `__call__` has them, `train`
  (bool) and `keys` (one per row, which depend on the row's place in the global batch
  and not on the number of devices). `nn.Dropout` draws each row's mask from its key,
  but inside `nn.scan` and `nn.vmap`; there, as in whatever else asks for the stream
  "dropout", random numbers are those of the device's first row (`by_device`).

  Args:
    model: the module.
    image_shape: of one example, without the batch.
    mean: per channel (or one for all), subtracted from the inputs.
    std: per channel, the inputs are divided by it. Images can so cross to the
      device as uint8, a quarter of the bytes.
    dtype: of the inputs; integers other than uint8 (tokens) are left as they are.

  Raises:
    ConfigError: the module must be given something else as well.

  Example:
    >>> fns = functions(MLPModule(num_classes=10), (8, 8, 1))
    >>> params, model_state = fns.init(jax.random.key(0))
  """
  is_number = jnp.issubdtype(dtype, jnp.floating) or dtype == "uint8"
  named = inspect.signature(type(model).__call__).parameters
  for name, parameter in list(named.items())[2:]:
    has_default = parameter.default is not parameter.empty
    if not (has_default or parameter.kind in _ANY or name in ("train", "keys")):
      fix = "it is called with the inputs and, by name, `train` and `keys`"
      raise ConfigError(f"{type(model).__name__}.__call__: nothing gives it {name!r}; {fix}")

  def call(variables, inputs, train, keys, **options):
    if is_number:
      inputs = inputs.astype(jnp.float32) - jnp.array(mean, jnp.float32)
      inputs = inputs / jnp.array(std, jnp.float32)
    given = {name: v for name, v in (("train", train), ("keys", keys)) if name in named}
    if keys is None:
      return model.apply(variables, inputs, **given, **options)
    rngs = {"dropout": keys[0], _LAYERS: jax.random.key(0)}
    with nn.intercept_methods(_dropout_by_row(keys)):
      return model.apply(variables, inputs, **given, **options, rngs=rngs)

  def init(key):
    inputs = jnp.zeros((1, *image_shape), jnp.float32 if is_number else dtype)
    given: Any = {"train": False} if "train" in named else {}
    variables = dict(model.init(key, inputs, **given))
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
  """An interceptor of Flax's methods: dropout by a key of each row."""

  def intercept(call, args, kwargs, context):
    module, given = context.module, _given(context, args, kwargs)
    if not (_drops(context, given) and _has_rows(module, given, len(keys))):
      return call(*args, **kwargs)
    layer = jax.random.bits(module.make_rng(_LAYERS))
    inputs, keep = given["inputs"], 1 - module.rate
    shape = list(inputs.shape)
    for dim in module.broadcast_dims:
      shape[dim] = 1

    def mask(key):
      return jax.random.bernoulli(jax.random.fold_in(key, layer), keep, shape[1:])

    return jnp.where(jax.vmap(mask)(keys), inputs / keep, 0).astype(inputs.dtype)

  return intercept


def by_device(trace: Callable[[], Any], rows: int) -> tuple[Any, list[str]]:
  """What a call gives, and what in it takes the rows of a device together.

  Through the latter results depend on the number of devices.

  Args:
    trace: calls a model in training.
    rows: that it is called with.

  Example:
    >>> norm = nn.BatchNorm(use_running_average=False)
    >>> x = jnp.ones((4, 2))
    >>> _, found = by_device(lambda: norm.init(jax.random.key(0), x), rows=4)
    >>> found[0].partition(" ")[0]
    'BatchNorm'
  """
  found: dict[str, str] = {}

  def intercept(call, args, kwargs, context):
    module, given = context.module, _given(context, args, kwargs)
    if what := _together(context, given, rows):
      found["/".join(module.path) or type(module).__name__] = what
    return call(*args, **kwargs)

  with nn.intercept_methods(intercept):
    outputs = trace()
  why = "the rows of each device by themselves: results depend on how many there are"
  return outputs, [f"{name} ({what}) takes {why}" for name, what in found.items()]


def _together(context: Any, given: dict[str, Any], rows: int) -> str:
  """What a call is that takes the rows of a device together; "": it does not."""
  module = context.module
  if context.method_name != "__call__":
    return ""
  if isinstance(module, nn.BatchNorm) and module.axis_name is None:
    is_fixed = _chosen(module, given, "use_running_average")
    return "" if is_fixed else "nn.BatchNorm; take models.BatchNorm"
  if isinstance(module, nn.MultiHeadDotProductAttention) and module.dropout_rate:
    is_fixed = _chosen(module, given, "deterministic")
    return "" if is_fixed else "dropout of attention's weights"
  if _drops(context, given) and not _has_rows(module, given, rows):
    return "nn.Dropout, whose input has not a row for each of the batch"
  return ""


def _given(context: Any, args: Any, kwargs: Any) -> dict[str, Any]:
  """The arguments of a call, by name; of other methods than `__call__` none."""
  if context.method_name != "__call__":
    return {}
  method = inspect.signature(type(context.module).__call__)
  return method.bind(context.module, *args, **kwargs).arguments


def _chosen(module: nn.Module, given: dict[str, Any], name: str) -> Any:
  """A field of a module, or what a call has in its place."""
  value = given.get(name)
  return getattr(module, name) if value is None else value


def _drops(context: Any, given: dict[str, Any]) -> bool:
  """Whether a call is of a dropout, at random, by the stream of its name."""
  module = context.module
  if not isinstance(module, nn.Dropout) or context.method_name != "__call__":
    return False
  is_own = given.get("rng") is None and module.rng_collection == "dropout"
  return is_own and not _chosen(module, given, "deterministic") and 0 < module.rate < 1


def _has_rows(module: Any, given: dict[str, Any], rows: int) -> bool:
  """Whether its input has a first dim of the batch's rows, each to have a mask."""
  inputs = given["inputs"]
  shares = any(dim % max(inputs.ndim, 1) == 0 for dim in module.broadcast_dims)
  return inputs.shape[:1] == (rows,) and not shares and module.has_rng(_LAYERS)


def init_shapes(init: Callable[[jax.Array], Any]) -> Any:
  """Shapes and dtypes of what `init(key)` makes; not even a key is computed.

  Example:
    >>> init_shapes(jax.random.normal).shape
    ()
  """
  return jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
