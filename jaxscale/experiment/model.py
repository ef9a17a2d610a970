"""Model of an experiment: BatchNorm span, pure functions, and imported parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale import config as cfg
from jaxscale import data, models, weights
from jaxscale.config.bases import snake_case
from jaxscale.config.choice import is_built_in
from jaxscale.errors import invalid
from jaxscale.experiment.derive import Derived
from jaxscale.experiment.loss import AnyLoss, abstract_rows, sum_notes, trace_steps
from jaxscale.experiment.own_classes import build, guarded, guarded_parts, user_errors
from jaxscale.experiment.parametrization import Factors, base_config, leaf_factors, with_init
from jaxscale.experiment.phases import Phase
from jaxscale.experiment.row_mixing import mixes_rows
from jaxscale.mesh import BN_AXIS, BatchNormSpan, batch_norm_span, mesh_shape
from jaxscale.metrics.log import logger
from jaxscale.models import float8, lora
from jaxscale.models.adapters.calls import Setting
from jaxscale.models.adapters.convert import KINDS, convert, library_of
from jaxscale.models.model_fns import notes_of
from jaxscale.models.stack import is_packed, stack_logits
from jaxscale.optim.tree_paths import path_name
from jaxscale.training.contract import one_line
from jaxscale.training.custom_loss import state_of_model
from jaxscale.training.losses import Objective
from jaxscale.training.metrics import Metric
from jaxscale.training.state import check_keys
from jaxscale.training.types import TrainState
from jaxscale.weights.check import check_source

Model = models.ModelFns | models.Stack


def bn_span(config: cfg.Config, derived: Derived, phase: Phase) -> BatchNormSpan:
  """Return the devices and rows that share BatchNorm statistics in a phase."""
  span: Any = config.model.bn_span if config.model.batch_norm else "device"
  shape = mesh_shape(derived.num_devices, **dataclasses.asdict(config.mesh))
  replicas, data_size = shape.replica, shape.data * shape.fsdp
  spread = batch_norm_span(span, rows_of_device(derived, phase), replica=replicas, data=data_size)
  if shape.fsdp > 1 and spread.axis_name is not None:
    return spread._replace(axis_name=(*spread.axis_name, "fsdp"))
  return spread


def rows_of_device(derived: Derived, phase: Phase) -> int:
  """Return the number of examples in a device's micro-batch."""
  return phase.batch_size // (derived.row_blocks * phase.accumulate_steps)


def _bn_options(span: BatchNormSpan, mesh: Mesh) -> dict[str, Any]:
  """Return the BatchNorm fields of a model; a different phase may have split the mesh."""
  names = span.axis_name
  if names is not None and "data" in names and BN_AXIS in mesh.axis_names:
    names = (*names, BN_AXIS)
  if span.bn_devices not in (1, mesh.shape.get(BN_AXIS, 1)):
    problem = f"needs statistics over {span.bn_devices} devices in one phase and over "
    problem += f"{mesh.shape.get(BN_AXIS, 1)} in another"
    fix = "choose batch sizes so that all phases use the same number of BatchNorm devices"
    raise invalid("bn_span", ..., problem, fix)
  return {"bn_axis_name": names, "bn_group_size": span.group_size}


def make_model(
  config: cfg.Config,
  info: data.DatasetInfo | data.TextInfo,
  mesh: Mesh | None = None,
  span: BatchNormSpan | None = None,
  *,
  train: bool = True,
) -> Model:
  """Build the model as pure functions, with the standard parametrization.

  Args:
    config: the config, with the settings of the model.
    info: description of the data.
    mesh: the mesh of all devices; None means that nothing is synchronised.
    span: the result of `bn_span`.
    train: use label smoothing, which only training has.

  Raises:
    ConfigError: the model does not fit the data, or its build failed or returned
      something else.
  """
  dtype, info = jnp.dtype(config.activations), _seen_by_loss(config, info)
  smoothing = config.loss.label_smoothing if train else 0.0
  bn = {} if span is None or mesh is None else _bn_options(span, mesh)
  context = cfg.ModelContext(info=info, dtype=dtype, label_smoothing=smoothing, **bn)
  model = build(config.model, context, kind=_is_model, expected=KINDS)
  adapted = functools.partial(_adapted, config)
  if isinstance(model, models.Stack):
    if not config.loss.is_cross_entropy:
      problem = f"does not work with {type(config.model).__name__}, which computes cross entropy"
      fix = "use CrossEntropy or a different model"
      raise invalid("Config.loss", type(config.loss).__name__, problem, fix)
    has_weights = config.loss.class_weights or "weight" in info.arrays
    if has_weights or config.metrics:
      field = "weights of examples or classes" if has_weights else "Config.metrics"
      problem = f"does not work with {type(config.model).__name__}, which computes its own totals"
      raise invalid(field, ..., problem, "remove it, or use a different model")
    return adapted(model._replace(in_float8=config.dtype == "float8"))
  shapes = data.batch_shapes(info, 1).items()
  arrays = {name: (shape[1:], dtype) for name, (shape, dtype) in shapes}
  own = config.model.inputs if callable(config.model.inputs) else None
  norm: Any = context.bn_axis_name, context.bn_group_size, config.model.batch_norm
  setting = Setting(arrays, own, *norm)
  if isinstance(info, data.DatasetInfo):
    setting = setting._replace(mean=info.mean, std=info.std)
  with user_errors(config.model, ".build"):
    return adapted(guarded_parts(config.model, " ({})", convert(model, setting)))


def parametrized(config: cfg.Config, info: Any, model: Model) -> tuple[Model, Factors]:
  """Return the model with the initial values of its parametrization, and the factors by path.

  Args:
    config: the config of the model.
    info: description of the data.
    model: the result of `make_model`.

  Raises:
    ConfigError: the parametrization has no rule for the config, or its base does not fit.
  """
  if isinstance(config.parametrization, cfg.Standard):
    return model, {}
  base = make_model(base_config(config), info)
  factors = leaf_factors(config, model, base)
  return with_init(model, base, factors), factors


def _adapted(config: cfg.Config, model: Model) -> Any:
  """Return a model with the adapters of `Config.adapter`."""
  if not isinstance(own := config.adapter, cfg.LoRA):
    return model
  return lora.adapt(model, lora.Lora(own.rank, own.scale, own.targets))


def _is_model(model: Any) -> bool:
  return isinstance(model, models.Stack) or library_of(model) != ""


def _seen_by_loss(config: cfg.Config, info: Any) -> Any:
  """Return the data's description, with one output if targets are numbers."""
  is_class = getattr(info, "label_shape", None) == ()
  return info._replace(num_classes=1) if config.loss.takes_numbers and is_class else info


def make_metrics(config: cfg.Config, info: Any) -> dict[str, Metric]:
  """Build the metrics of evaluations from `Config.metrics`, by their names in snake_case.

  Raises:
    ConfigError: a build failed or returned something else.
  """
  built = {}
  for settings in config.metrics:
    metric = build(settings, info, kind=Metric, expected="a training.metrics.Metric")
    parts = {"update": metric.update, "compute": metric.compute}
    parts = {name: guarded(settings, f" ({name})", part) for name, part in parts.items()}
    draws = {n: guarded(settings, f" ({n})", draw) for n, draw in metric.pictures.items()}
    built[snake_case(type(settings).__name__)] = metric._replace(**parts, pictures=draws)
  return built


def check_model(
  config: cfg.Config,
  model: Model,
  objective: AnyLoss,
  info: data.DatasetInfo | data.TextInfo,
  mesh: Mesh,
  rows: int,
  *,
  compute: bool = True,
) -> list[str]:
  """Check a user's model or loss by calling it as the steps do.

  Args:
    config: the config, with the settings of model and loss.
    model: the model from `make_model`.
    objective: the objective from `loss.make_objective`.
    info: description of the data.
    mesh: the mesh, whose axis names the model may use.
    rows: number of rows per device and call.
    compute: also compute a few rows on one device.

  Returns:
    Notes on results that depend on the number of devices, one line each.

  Raises:
    ConfigError: the call failed, or the model has fewer outputs than the data has classes.
  """
  kind, info = type(config.model), _seen_by_loss(config, info)
  if is_built_in(kind) and is_built_in(type(config.loss)):
    return []
  mixing = functools.partial(_mixing_notes, config.activations, mesh, rows)
  if isinstance(model, models.Stack):
    notes = _model_notes(mixing, as_functions(model), info, rows) if compute else []
    return [f"{kind.__name__}: {line}" for line in notes]
  trace, state, batch = trace_steps(model, objective, info, mesh, rows)
  check_keys("model", state[1])
  outputs, found = notes_of(trace)
  notes: list[str] = []
  if compute and not is_built_in(type(config.loss)):
    notes = sum_notes(objective, state, outputs, batch, mesh)
    if isinstance(objective, Objective):

      def loss_of(_, batch: Any, keys: Any):
        return objective.loss(batch["outputs"], batch)

      notes += mixing("its loss", loss_of, lambda key: ({}, {}), {"outputs": outputs, **batch})
    notes = [f"{type(config.loss).__name__}: {line}" for line in notes]
  if not (is_built_in(kind) or found or config.model.batch_norm or not compute):
    found += _model_notes(mixing, model, info, rows)
  found += _class_notes(config, outputs, info) + _packing_notes(model, batch)
  return notes + [f"{kind.__name__}: {line}" for line in found]


def _packing_notes(model: models.ModelFns, batch: Any) -> list[str]:
  """Return a note on a user's model that gets packed tokens without their documents."""
  if not is_packed(batch) or len(jax.tree.leaves(jax.eval_shape(model.inputs, batch))) > 1:
    return []
  fix = 'take "documents" by an argument of this name or in `inputs`'
  return [f"gets packed rows without their documents, so that tokens see other documents; {fix}"]


def _class_notes(config: cfg.Config, outputs: Any, info: Any) -> list[str]:
  """Compare the outputs of a model with the classes of its cross entropy.

  Raises:
    ConfigError: there are fewer outputs than classes.
  """
  if not config.loss.is_cross_entropy:
    return []
  count, classes = getattr(outputs, "shape", (0,))[-1], num_classes(info)
  if count < classes:
    field, problem = f"{type(config.model).__name__}.build", f"gives {count} outputs, "
    problem += f"but {type(config.data).__name__} has {classes} classes"
    fix = "use context.info.num_classes as the width of the last layer"
    raise invalid(field, ..., problem, fix)
  return [f"{count} outputs for {classes} classes"] * (count > classes)


def as_functions(model: Model) -> models.ModelFns:
  """Return `ModelFns`; of a stack, `apply` returns the logits.

  The inputs of a stack are those of `ModelFns`, or the whole batch if it has packed "documents".
  """
  if not isinstance(model, models.Stack):
    return model
  stack = model

  def apply(params: Any, model_state: Any, inputs: Any, train: Any, keys: Any):
    batch = inputs if isinstance(inputs, dict) else {"image": inputs, "tokens": inputs}
    return stack_logits(stack, params, batch, model_state), model_state

  def inputs_of(batch: Any):
    return batch if is_packed(batch) else models.inputs_of(batch)

  return models.ModelFns(init_fn(stack), apply, inputs_of)


def _model_notes(
  mixing: Callable[..., list[str]], model: models.ModelFns, info: Any, rows: int
) -> list[str]:
  """Return the notes of `mixing` on a model, for rows like the data's."""

  def outputs_of(state: Any, batch: Any, keys: Any):
    return model.apply(*state, model.inputs(batch), True, keys)[0]

  return mixing("its model", outputs_of, model.init, abstract_rows(info, rows))


def _mixing_notes(
  dtype: str, mesh: Mesh, rows: int, what: str, function: Any, init: Any, inputs: Any
) -> list[str]:
  """Return notes on a function that mixes rows; call it with two rows, or a device's number."""
  tolerance, mixes = 1e-3 if dtype == "float32" else 0.05, False
  for count in dict.fromkeys((2, max(rows, 2))):  # the function may need one batch size
    try:
      mixes = mixes_rows(function, init, inputs, mesh, tolerance, count)
      break
    except Exception as e:
      mixes = one_line(e)
  if isinstance(mixes, str):
    return [f"cannot check whether {what} mixes the rows of a device: {mixes}"]
  return mixes * [
    f"{what} mixes the rows of each device: results depend on the number of devices; "
    "draw random numbers from `keys`, and do not use statistics of the batch"
  ]


def num_classes(info: data.DatasetInfo | data.TextInfo) -> int:
  """Return the number of classes, or the size of the vocabulary for text."""
  return getattr(info, "num_classes", None) or getattr(info, "vocab_size", 0)


def init_fn(model: Model) -> Any:
  """Return a model's function key -> (params, model_state)."""
  if not isinstance(model, models.Stack):
    return model.init
  stack = model

  def init(key: jax.Array) -> Any:
    params = stack.init(key)
    return params, float8.init_state(params["layers"]) if stack.in_float8 else {}

  return init


def imported(
  config: cfg.Config, info: data.DatasetInfo | data.TextInfo, abstract: TrainState
) -> dict[str, jax.Array]:
  """Import the parameters of `Config.init_from`, for the argument `given` of `init_state`.

  Args:
    config: the config of the run.
    info: description of the data; models may have more classes or tokens as padding.
    abstract: the abstract state, with the shardings of the parameters.
  """
  path = config.init_from
  assert path is not None
  notes: list[str] = []

  def check(naming: Any, names: Any):  # before shapes, since it reports the wrong setting
    notes.extend(check_source(path, naming, names, config.model, info, init_head=config.init_head))

  # Adapters start as initialized.
  trees = lora.without_adapters(abstract.params), state_of_model(abstract.model_state)
  options: Any = {"init_head": config.init_head, "check": check}
  classes = num_classes(_seen_by_loss(config, info))
  loaded = weights.import_safetensors(path, *trees, num_classes=classes, **options)
  logger.info(loaded.summary)
  for note in notes:
    logger.warning(f"note: {note}")
  leaves = jax.tree.leaves_with_path((loaded.params, loaded.model_state))
  return {path_name(p): x for p, x in leaves if isinstance(x, jax.Array)}
