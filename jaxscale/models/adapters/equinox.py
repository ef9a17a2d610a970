"""Equinox modules as `ModelFns`; a module is called for each example, under `jax.vmap`."""

from __future__ import annotations

import functools
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxscale.errors import ConfigError
from jaxscale.models.adapters.calls import Call, Setting
from jaxscale.models.adapters.rows import during_call, of_call
from jaxscale.models.adapters.trees import Leaves, group_of
from jaxscale.models.model_fns import ModelFns, note_given
from jaxscale.optim.tree_paths import path_name


def convert(model: Any, setting: Setting) -> ModelFns:
  """Convert an Equinox module, (module, state), or a function of `key` that makes either.

  Args:
    model: the module, whose parameters are the initial ones; or a function, called with
      `key=key`.
    setting: the data, and the span of BatchNorm.
  """
  is_given = isinstance(model, eqx.Module | tuple)

  def make(key: Any) -> tuple[Any, Any]:
    made = model if is_given else model(key=key)
    return made if isinstance(made, tuple) else eqx.nn.make_with_state(lambda: made)()

  abstract, state = eqx.filter_eval_shape(make, jax.eval_shape(jax.random.key, 0))
  static = eqx.filter(abstract, _is_array, inverse=True)
  leaves, structure = _leaves_of(abstract, state)
  axis = _axis_of(abstract)
  name, function = type(abstract).__name__, type(abstract).__call__
  call = Call(f"{name}.__call__", function, setting, skip=1, given=("key", "keys", "state"))
  has_state = "state" in call.needed or ("state" in call.given and jax.tree.leaves(state) != [])

  def init(key):
    module, own = make(key)
    return leaves.pack(jax.tree.leaves((eqx.filter(module, _is_array), own)))

  def apply(params, model_state, inputs, train, keys):
    arrays, own = jax.tree.unflatten(structure, leaves.unpack(params, model_state))
    module = eqx.nn.inference_mode(eqx.combine(arrays, static), value=not train)
    axes: Any = ()
    if train and is_given:
      note_given(name, "key")
    for path, norm in _found(module, eqx.nn.BatchNorm) if train else ():
      object.__setattr__(norm, "__class__", _RowBatchNorm)  # a frozen module, new in each call
      axes = setting.shared_axes("eqx.nn.BatchNorm", path) or ()

    def one(inputs, key, row):
      options: dict[str, Any] = {"state": own} if has_state else {}
      args, options = call.arguments(inputs, train, key=key, keys=key, **options)
      with during_call(row, axes):
        results = module(*args, **options)
      return results if has_state else (results, own)

    in_axes = 0, 0 if train else None, 0
    rows = jnp.arange(len(jax.tree.leaves(inputs)[0]))
    mapped = jax.vmap(one, in_axes, (0, None), axis_name=axis)
    outputs, own = mapped(inputs, keys if train else None, rows)
    return outputs, leaves.pack(jax.tree.leaves((arrays, own)))[1] if train else model_state

  return ModelFns(init, apply, call.inputs, out_first=True)


def _is_array(x: Any) -> bool:
  return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _found(module: Any, kind: type) -> list[tuple[str, Any]]:
  """Return the paths and nodes of a class in a module."""
  nodes = jax.tree.leaves_with_path(module, is_leaf=lambda x: isinstance(x, kind))
  return [(path_name(path) or kind.__name__, x) for path, x in nodes if isinstance(x, kind)]


def _leaves_of(module: Any, state: Any) -> tuple[Leaves, Any]:
  """Return the arrays of a module and its state, and the structure of both."""
  arrays = eqx.filter(module, _is_array)
  pairs = [(path_name(path), x) for path, x in jax.tree.leaves_with_path(arrays)]
  groups = [group_of(x, is_param=True, is_statistic=False) for _, x in pairs]
  averaged = set()
  for _, norm in _found(module, eqx.nn.BatchNorm):
    indices = norm.ema_state_index, norm.batch_state_index
    averaged |= {index.marker for index in indices if index is not None}
  names = {index.marker: path for path, index in _found(module, eqx.nn.StateIndex)}
  values, markers = state.tree_flatten()
  for marker, value in zip(markers, values, strict=True):
    for path, x in jax.tree.leaves_with_path(value):
      pairs.append(("/".join(filter(None, (names[marker], path_name(path)))), x))
      groups.append(group_of(x, is_param=False, is_statistic=marker in averaged))
  return Leaves(pairs, groups), jax.tree.structure((arrays, state))


def _axis_of(module: Any) -> Any:
  """Return the name of the vmapped axis, which a module's BatchNorms give."""
  names = {x.axis_name for _, x in _found(module, eqx.nn.BatchNorm)}
  if len(names) > 1 or not all(isinstance(name, str) for name in names):
    problem = f"eqx.nn.BatchNorm has axis_name {', '.join(map(repr, names))}"
    raise ConfigError(f"{problem}; give all of them the same one name, such as 'batch'")
  return next(iter(names), None)


@custom_vmap
def _mean_of_rows(x: jax.Array, row: jax.Array) -> jax.Array:
  """Return the mean of x over the rows of a device.

  `lax.pmean` over the vmapped axis fails inside `jax.shard_map` with check_vma.
  """
  del row
  return x


@_mean_of_rows.def_vmap
def _(size: int, is_mapped: Any, x: jax.Array, row: jax.Array) -> Any:
  del size
  of_x, of_row = is_mapped
  if not of_row:  # a vmap inside of the model: x keeps this dim
    return _mean_of_rows(x, row), of_x
  return (x.mean(0) if of_x else x), False


class _RowBatchNorm(eqx.nn.BatchNorm):
  """`eqx.nn.BatchNorm` over the rows of the adapter's vmap and of several devices."""

  @functools.wraps(eqx.nn.BatchNorm.__call__)
  def __call__(self, x, state, *, key=None, inference=None):
    if self.inference if inference is None else inference:
      return super().__call__(x, state, inference=True)
    row, axes = of_call()

    def mean_of(y: jax.Array) -> jax.Array:
      return lax.pmean(_mean_of_rows(y.reshape(len(y), -1).mean(1), row), axes)

    def per_channel(y: jax.Array) -> jax.Array:
      return y.reshape(-1, *[1] * (x.ndim - 1))

    mean = mean_of(x)
    stats = mean, mean_of(jnp.square(jnp.abs(x - per_channel(mean))))
    index: Any = self.ema_state_index if self.mode == "ema" else self.batch_state_index
    m, other = self.momentum, cast(Any, self.batch_counter or self.ema_first_time_index)
    new = [a * m + b * (1 - m) for a, b in zip(state.get(index), stats, strict=True)]
    number = state.get(other)
    if self.mode == "ema":  # which normalises by the running statistics
      stats = new = [jnp.where(number, b, a) for a, b in zip(new, stats, strict=True)]
    state = state.set(other, number & False if self.mode == "ema" else number + 1)
    state = state.set(index, tuple(new))
    mean, var = map(per_channel, stats)
    y = (x - mean) / jnp.sqrt(var + self.eps)
    if self.weight is not None and self.bias is not None:
      y = y * per_channel(self.weight) + per_channel(self.bias)
    return y, state
