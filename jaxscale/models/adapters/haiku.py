"""Haiku's transformed functions as `ModelFns`."""

from __future__ import annotations

import functools
from typing import Any

import haiku as hk
import jax
from haiku._src import basic  # its `dropout_impl` is meant to be replaced

from jaxscale.models.adapters.calls import Call, Setting
from jaxscale.models.adapters.rows import drop_rows, during_call, has_rows
from jaxscale.models.adapters.trees import Leaves, group_of
from jaxscale.models.model_fns import ModelFns


def convert(model: hk.Transformed | hk.TransformedWithState, setting: Setting) -> ModelFns:
  """Convert the result of `hk.transform` or `hk.transform_with_state`.

  `hk.dropout` draws masks from the row's key. Other random numbers come from the key of
  the device's first row.
  """
  if isinstance(model, hk.Transformed):
    model = hk.with_empty_state(model)
  _replace_dropout()
  call = Call("the Haiku function", model.init, setting, skip=1, given=("keys",))
  norms: set[str] = set()

  def start(key):
    args, options = call.arguments(call.example(), True, keys=None)
    with hk.intercept_methods(_interceptor(norms, None)):
      return model.init(key, *args, **options)

  found, structure = jax.tree.flatten_with_path(
    jax.eval_shape(start, jax.eval_shape(jax.random.key, 0))
  )

  def group(path: Any, x: Any) -> str:
    is_of_norm = any(path[1].key.startswith(f"{name}/~/") for name in norms)
    return group_of(x, is_param=path[0].idx == 0, is_statistic=path[0].idx == 1 and is_of_norm)

  pairs = [(f"{path[1].key}/{path[2].key}", x) for path, x in found]
  leaves = Leaves(pairs, [group(path, x) for path, x in found])

  def init(key):
    return leaves.pack(jax.tree.leaves(start(key)))

  def apply(params, model_state, inputs, train, keys):
    both = jax.tree.unflatten(structure, leaves.unpack(params, model_state))
    args, options = call.arguments(inputs, train, keys=keys)
    if not train:
      return model.apply(*both, None, *args, **options)[0], model_state
    with hk.intercept_methods(_interceptor(norms, setting)), during_call(keys):
      outputs, state = model.apply(*both, None if keys is None else keys[0], *args, **options)
    return outputs, leaves.pack(jax.tree.leaves((both[0], state)))[1]

  return ModelFns(init, apply, call.inputs)


def _interceptor(norms: set[str], setting: Setting | None) -> Any:
  """Return an interceptor that shares statistics of BatchNorm or notes the layer.

  Args:
    norms: names of BatchNorm modules, to which it adds.
    setting: the span of BatchNorm; None shares nothing, without a mesh.
  """

  def intercept(call, args, kwargs, context):
    module = context.module
    if isinstance(module, hk.BatchNorm) and context.method_name == "__call__":
      norms.add(module.module_name)
      trains = kwargs.get("is_training", args[1] if len(args) > 1 else False)
      if setting is not None and trains and module.cross_replica_axis is None:
        module.cross_replica_axis = setting.shared_axes("hk.BatchNorm", module.module_name)
    return call(*args, **kwargs)

  return intercept


@functools.cache
def _replace_dropout() -> None:
  """Let `hk.dropout` draw masks per row inside of `during_call`."""
  usual = basic.dropout_impl

  def by_row(rng, rate, x, broadcast_dims=()):
    if isinstance(rate, float) and 0 < rate < 1 and has_rows(x, broadcast_dims):
      return drop_rows(x, rate, None, broadcast_dims)
    return usual(rng, rate, x, broadcast_dims=broadcast_dims)

  basic.dropout_impl = by_row
