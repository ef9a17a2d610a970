"""A Flax module as the two pure functions that the state and the step take."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp


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
  and not on the number of devices). Flax's own `nn.Dropout` gets its key from the
  first row's.

  Args:
    model: the module.
    image_shape: of one example, without the batch.
    mean: per channel (or one for all), subtracted from the inputs.
    std: per channel, the inputs are divided by it. Images can so cross to the
      device as uint8, a quarter of the bytes.
    dtype: of the inputs; integers other than uint8 (tokens) are left as they are.

  Example:
    >>> fns = functions(MLPModule(num_classes=10), (8, 8, 1))
    >>> params, model_state = fns.init(jax.random.key(0))
  """
  is_number = jnp.issubdtype(dtype, jnp.floating) or dtype == "uint8"
  named = inspect.signature(type(model).__call__).parameters

  def call(variables, inputs, train, keys, **options):
    if is_number:
      inputs = inputs.astype(jnp.float32) - jnp.array(mean, jnp.float32)
      inputs = inputs / jnp.array(std, jnp.float32)
    given = {name: v for name, v in (("train", train), ("keys", keys)) if name in named}
    if keys is not None and "keys" not in named:
      options["rngs"] = {"dropout": keys[0]}
    return model.apply(variables, inputs, **given, **options)

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


def init_shapes(init: Callable[[jax.Array], Any]) -> Any:
  """Shapes and dtypes of what `init(key)` makes; not even a key is computed.

  Example:
    >>> init_shapes(jax.random.normal).shape
    ()
  """
  return jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
