"""Flax NNX modules as `ModelFns`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxscale.models.adapters.calls import Call, Setting
from jaxscale.models.adapters.rows import drop_rows, during_call, has_rows
from jaxscale.models.adapters.trees import Leaves, group_of
from jaxscale.models.model_fns import ModelFns, note_given
from jaxscale.optim.tree_paths import path_name


def convert(model: nnx.Module | Callable[..., nnx.Module], setting: Setting) -> ModelFns:
  """Convert an NNX module, or a function of `rngs` that makes one.

  Args:
    model: the module, whose parameters are the initial ones; or a function, called with
      `rngs=nnx.Rngs(key)`.
    setting: the data, and the span of BatchNorm.
  """
  is_given = isinstance(model, nnx.Module)

  def make(key: jax.Array) -> Any:
    return model if is_given else model(rngs=nnx.Rngs(key))

  abstract = model if is_given else nnx.eval_shape(lambda: make(jax.random.key(0)))
  graph, state = nnx.split(abstract)
  found = jax.tree.leaves_with_path(state)
  leaves = Leaves([(_name(path), x) for path, x in found], jax.tree.leaves(_groups(state)))
  name = type(abstract).__name__
  call = Call(f"{name}.__call__", type(abstract).__call__, setting, skip=1, given=("keys",))

  def init(key):
    return leaves.pack(jax.tree.leaves(nnx.state(make(key))))

  def apply(params, model_state, inputs, train, keys):
    arrays = leaves.unpack(params, model_state)
    net = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), arrays), copy=True)
    args, options = call.arguments(inputs, train, keys=keys)
    if not train:
      net.eval()
      return net(*args, **options), model_state
    net.train()
    _prepare(net, setting)
    if is_given:
      note_given(name, "rngs")
    with during_call(keys):
      outputs = net(*args, **options)
    # A call may add variables (`sow`), which are no state of the model.
    after = dict(jax.tree.leaves_with_path(nnx.state(net)))
    return outputs, leaves.pack([after[path] for path, _ in found])[1]

  return ModelFns(init, apply, call.inputs)


def _name(path: tuple[Any, ...]) -> str:
  """Return the path of an array without the variable's attribute `value`."""
  return path_name(tuple(key for key in path if key != jax.tree_util.GetAttrKey("value")))


def _groups(state: Any) -> Any:
  """Return the group of each array of a state, by the type of its variable."""

  def of_variable(variable: Any):
    kinds = {"is_param": nnx.Param, "is_statistic": nnx.BatchStat}
    flags = {name: isinstance(variable, kind) for name, kind in kinds.items()}
    return jax.tree.map(lambda x: group_of(x, **flags), variable)

  return jax.tree.map(of_variable, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _prepare(net: nnx.Module, setting: Setting) -> None:
  """Draw dropout masks per row, and share statistics of BatchNorm or note the layer."""
  for path, module in nnx.iter_modules(net):
    if type(module) is nnx.Dropout:
      module.__class__ = _RowDropout
    elif isinstance(module, nnx.BatchNorm) and not (module.axis_name or module.use_running_average):
      axes: Any = setting.shared_axes("nnx.BatchNorm", "/".join(map(str, path)) or "BatchNorm")
      module.axis_name = axes


class _RowDropout(nnx.Dropout):
  """Dropout with the key of each row; the module's own stream distinguishes layers."""

  @functools.wraps(nnx.Dropout.__call__)
  def __call__(self, inputs, *, deterministic=None, rngs=None):
    is_off = self.deterministic if deterministic is None else deterministic
    source: Any = self.rngs if rngs is None else rngs
    drops = not is_off and source is not None and 0 < self.rate < 1
    if not (drops and has_rows(inputs, self.broadcast_dims)):
      return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
    source = source[self.rng_collection] if isinstance(source, nnx.Rngs) else source
    key = source if isinstance(source, jax.Array) else source()
    return drop_rows(inputs, self.rate, key, self.broadcast_dims)
