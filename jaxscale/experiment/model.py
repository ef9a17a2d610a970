"""From a Config to the model: BatchNorm's span, the functions, the parameters given."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import config as cfg
from jaxscale import data, models, weights
from jaxscale.collectives import vary
from jaxscale.config.choice import is_built_in
from jaxscale.errors import ConfigError, invalid
from jaxscale.experiment.derive import Derived
from jaxscale.experiment.own_classes import build, guarded_parts
from jaxscale.experiment.phases import Phase
from jaxscale.experiment.row_mixing import mixes_rows
from jaxscale.mesh import BN_AXIS, BatchNormSpan, batch_axes, batch_norm_span, mesh_shape
from jaxscale.metrics.log import logger
from jaxscale.models.stack import stack_logits
from jaxscale.optim.tree_paths import path_name
from jaxscale.training import losses
from jaxscale.training.contract import check_sums, one_line
from jaxscale.training.losses import Objective, inputs_of
from jaxscale.training.types import TrainState
from jaxscale.weights.check import check_source

Model = models.ModelFns | models.Stack


def bn_span(config: cfg.Config, derived: Derived, phase: Phase) -> BatchNormSpan:
  """How devices share BatchNorm statistics in a phase."""
  span: Any = config.model.bn_span if config.model.batch_norm else "device"
  shape = mesh_shape(derived.num_devices, **dataclasses.asdict(config.mesh))
  rows = rows_of_device(derived, phase)
  replicas, data_size = shape.replica, shape.data * shape.fsdp
  found = batch_norm_span(span, rows, replica=replicas, data=data_size)
  if shape.fsdp > 1 and found.axis_name is not None:
    return found._replace(axis_name=(*found.axis_name, "fsdp"))
  return found


def rows_of_device(derived: Derived, phase: Phase) -> int:
  """Examples that a device has at a time."""
  return phase.batch_size // (derived.row_blocks * phase.accumulate_steps)


def _bn_options(span: BatchNormSpan, mesh: Mesh) -> dict[str, Any]:
  """The fields of a model that say so; another phase may have split the mesh."""
  names = span.axis_name
  if names is not None and "data" in names and BN_AXIS in mesh.axis_names:
    names = (*names, BN_AXIS)
  if span.bn_devices not in (1, mesh.shape.get(BN_AXIS, 1)):
    raise ConfigError(
      f"bn_span: the phases' batch sizes ask for statistics over {span.bn_devices} "
      f"and over {mesh.shape.get(BN_AXIS, 1)} devices; choose batch sizes for which "
      "it is one number, or 1"
    )
  return {"bn_axis_name": names, "bn_group_size": span.group_size}


def make_model(
  config: cfg.Config,
  info: data.DatasetInfo | data.TextInfo,
  mesh: Mesh | None = None,
  span: BatchNormSpan | None = None,
  *,
  train: bool = True,
) -> Model:
  """The model as pure functions.

  Args:
    config: whose `model` it is.
    info: of the data.
    mesh: of all devices; None: of no matter, as nothing is synchronised.
    span: of `bn_span`.
    train: with what only training has, the smoothing of labels.

  Raises:
    ConfigError: the model does not fit the data, is not for such data, or its build
      failed or returned something else.
  """
  dtype, info = jnp.dtype(config.dtype), _seen_by_loss(config, info)
  smoothing = config.loss.label_smoothing if train else 0.0
  bn = {} if span is None or mesh is None else _bn_options(span, mesh)
  context = cfg.ModelContext(info=info, dtype=dtype, label_smoothing=smoothing, **bn)
  wanted = "a Flax module, a models.ModelFns or a models.Stack"
  kinds = models.Stack, nn.Module, models.ModelFns
  made = build(config.model, context, kind=kinds, wanted=wanted)
  if isinstance(made, models.Stack):
    if not config.loss.is_cross_entropy:
      why = f"is not the cross entropy that {type(config.model).__name__} computes"
      fix = "use CrossEntropy, or another model"
      raise invalid("Config.loss", type(config.loss).__name__, why, fix)
    return made
  if isinstance(made, nn.Module):
    if isinstance(info, data.TextInfo):
      made = models.functions(made, (info.sequence_length,), dtype="int32")
    else:
      made = models.functions(
        made, info.image_shape, mean=info.mean, std=info.std, dtype=info.dtype
      )
  return guarded_parts(config.model, ", called by {}", made)


def _seen_by_loss(config: cfg.Config, info: Any) -> Any:
  """The data as a model is to predict it: one output where targets are numbers."""
  is_class = hasattr(info, "num_classes") and not info.label_shape
  return info._replace(num_classes=1) if config.loss.takes_numbers and is_class else info


def make_objective(config: cfg.Config, info: Any) -> Objective:
  """Loss and metrics of each example, by `Config.loss`.

  Raises:
    ConfigError: its build failed or returned something else.
  """
  wanted = "a training.losses.Objective, loss and metrics of each example"
  objective = build(config.loss, info, kind=Objective, wanted=wanted)
  return guarded_parts(config.loss, ", its {}", objective)


def check_model(
  config: cfg.Config,
  model: Model,
  objective: Objective,
  info: data.DatasetInfo | data.TextInfo,
  mesh: Mesh,
  rows: int,
  *,
  compute: bool = True,
) -> list[str]:
  """Call a model or a loss of the user's own as steps do.

  Args:
    config: whose `model` it is.
    model: of `make_model`.
    objective: of `make_objective`.
    info: of the data.
    mesh: whose axes it may name.
    rows: of a device, a call.
    compute: also compute a few rows, on one device.

  Returns:
    What of it depends on the number of devices, one line each.

  Raises:
    ConfigError: it cannot be called so, or has fewer outputs than the data classes.
  """
  kind, info = type(config.model), _seen_by_loss(config, info)
  is_own = not (is_built_in(kind) and is_built_in(type(config.loss)))
  mixing = functools.partial(_mixing_notes, config.dtype, mesh, rows)
  if is_own and compute and isinstance(model, models.Stack):
    notes = _model_notes(mixing, _stack_functions(model), info, rows)
    return [f"{kind.__name__}: {line}" for line in notes]
  if not is_own or not isinstance(model, models.ModelFns):
    return []
  batch, outputs, found = _called_as_steps(model, objective, info, mesh, rows)
  notes: list[str] = []
  if compute and not is_built_in(type(config.loss)):
    notes = _loss_notes(objective, {"outputs": outputs, **batch}, mesh, mixing)
    notes = [f"{type(config.loss).__name__}: {line}" for line in notes]
  is_tested = is_built_in(kind) or found or config.model.batch_norm or not compute
  if not is_tested:
    found += _model_notes(mixing, model, info, rows)
  found += _class_notes(config, outputs, info)
  return notes + [f"{kind.__name__}: {line}" for line in found]


def _called_as_steps(
  model: models.ModelFns, objective: Objective, info: Any, mesh: Mesh, rows: int
) -> tuple[dict[str, Any], Any, list[str]]:
  """Trace a training and an evaluation step of a model.

  Returns:
    (shapes of the batch, shapes of the outputs, what depends on the number of devices).

  Raises:
    ConfigError: the model state has a typed key, or the model cannot be called.
  """
  axes = batch_axes(mesh)
  whole = rows * math.prod(mesh.shape[axis] for axis in axes)
  shapes = data.batch_shapes(info, whole).items()
  batch = {name: jax.ShapeDtypeStruct(*array) for name, array in shapes}
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), whole))

  def call(state: Any, batch: Any, keys: Any):
    params, own = vary(state, axes)
    outputs, _ = model.apply(params, own, inputs_of(batch), True, keys)
    losses.training_loss(lambda *_: (outputs, own), objective)(params, own, batch, keys)
    mask = jnp.ones(rows, bool)
    losses.eval_totals(model.apply, objective)(params, own, batch | {"mask": mask})
    return outputs

  specs = P(), P(axes), P(axes)
  called = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(axes))
  state = models.init_shapes(model.init)
  for path, leaf in jax.tree.leaves_with_path(state[1]):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      field = f"model state {path_name(path)}"
      why, fix = "is a typed key, which no checkpoint holds", "keep its "
      raise invalid(field, ..., why, fix + "jax.random.key_data")
  trace = functools.partial(jax.eval_shape, called, state, batch, keys)
  return batch, *models.by_device(trace, rows)


def _class_notes(config: cfg.Config, outputs: Any, info: Any) -> list[str]:
  """Compare the outputs of a model with the classes of its cross entropy.

  Raises:
    ConfigError: there are fewer outputs than classes.
  """
  if not config.loss.is_cross_entropy:
    return []
  count, classes = getattr(outputs, "shape", (0,))[-1], num_classes(info)
  if count < classes:
    field, why = f"{type(config.model).__name__}.build", f"gives {count} outputs, "
    why += f"and {type(config.data).__name__} has {classes} classes"
    fix = "let the last layer have context.info.num_classes"
    raise invalid(field, ..., why, fix)
  return [f"{count} outputs for {classes} classes"] * (count > classes)


def _loss_notes(
  objective: Objective, inputs: Any, mesh: Mesh, mixing: Callable[..., list[str]]
) -> list[str]:
  """Compute a loss and list what is found, of batches with "outputs"."""
  reason = check_sums(_of_outputs(objective), {}, {}, inputs, mesh, name="Config.loss")
  notes = [f"not tested whether its loss is a sum over rows: {reason}"] if reason else []

  def loss_of(_, batch: Any, keys: Any):
    return objective.loss(batch["outputs"], batch)

  return notes + mixing("its loss", loss_of, lambda key: ({}, {}), inputs)


def _of_outputs(objective: Objective) -> Any:
  """The sums of an objective as a `step.LossFn`, of batches with "outputs"."""

  def loss_fn(params: Any, model_state: Any, batch: Any, keys: Any):
    batch = dict(batch)
    outputs = batch.pop("outputs")
    loss = losses.training_loss(lambda *_: (outputs, model_state), objective)
    return loss(params, model_state, batch, keys)

  return loss_fn


def _stack_functions(stack: models.Stack) -> models.ModelFns:
  """A stack as functions of its inputs, to compare outputs."""

  def apply(params: Any, model_state: Any, inputs: Any, train: Any, keys: Any):
    batch = {"image": inputs, "tokens": inputs}
    return stack_logits(stack, params, batch), model_state

  return models.ModelFns(init_fn(stack), apply)


def _model_notes(
  mixing: Callable[..., list[str]], model: models.ModelFns, info: Any, rows: int
) -> list[str]:
  """List what `mixing` finds of a model, of rows like the data's."""
  shapes = data.batch_shapes(info, rows)
  batch: Any = {name: jax.ShapeDtypeStruct(*array) for name, array in shapes.items()}

  def outputs_of(state: Any, inputs: Any, keys: Any):
    return model.apply(*state, inputs, True, keys)[0]

  return mixing("its model", outputs_of, model.init, inputs_of(batch))


def _mixing_notes(
  dtype: str, mesh: Mesh, rows: int, what: str, function: Any, init: Any, inputs: Any
) -> list[str]:
  """List what `mixes_rows` finds, with two rows or with those of a device."""
  tolerance, mixes = 1e-3 if dtype == "float32" else 0.05, False
  for count in dict.fromkeys((2, max(rows, 2))):  # shapes may be those of one size
    try:
      mixes = mixes_rows(function, init, inputs, mesh, tolerance, count)
      break
    except Exception as e:
      mixes = one_line(e)
  if isinstance(mixes, str):
    return [f"not tested whether {what} mixes the rows of a device: {mixes}"]
  return mixes * [
    f"{what} mixes the rows of each device: results depend on how many there are; "
    "draw random numbers from `keys`, and take no statistics of the batch"
  ]


def num_classes(info: data.DatasetInfo | data.TextInfo) -> int:
  """Classes of the data, or of text the size of the vocabulary."""
  return getattr(info, "num_classes", None) or getattr(info, "vocab_size", 0)


def init_fn(model: Model) -> Any:
  """The function key -> (params, model_state) of any model."""
  if isinstance(model, models.Stack):
    return lambda key: (model.init(key), {})
  return model.init


def imported(
  config: cfg.Config, info: data.DatasetInfo | data.TextInfo, abstract: TrainState
) -> dict[str, jax.Array]:
  """The parameters of `Config.init_from`, as `init_state` takes them.

  Args:
    config: of the run.
    info: of its data; models may have more classes, or words, for even parts.
    abstract: where the parameters are to lie.
  """
  path = config.init_from
  assert path is not None
  notes: list[str] = []

  def check(naming: Any, names: Any):  # before shapes: it says which setting is another
    found = check_source(path, naming, names, config.model, info, init_head=config.init_head)
    notes.extend(found)

  found = weights.import_safetensors(
    path,
    abstract.params,
    abstract.model_state,
    num_classes=num_classes(_seen_by_loss(config, info)),
    init_head=config.init_head,
    check=check,
  )
  logger.info(found.summary)
  for note in notes:
    logger.warning(f"note: {note}")
  leaves = jax.tree.leaves_with_path((found.params, found.model_state))
  return {path_name(p): x for p, x in leaves if isinstance(x, jax.Array)}
