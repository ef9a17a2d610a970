"""Loss of an experiment: of each example, of all rows, or a function of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import config as cfg
from jaxscale import data, models
from jaxscale.collectives import vary
from jaxscale.errors import invalid
from jaxscale.experiment.own_classes import build, guarded_parts
from jaxscale.mesh import batch_axes, row_blocks
from jaxscale.optim.tree_paths import path_name
from jaxscale.training import losses
from jaxscale.training.contract import check_sums, checked, compiled, example_values, one_line
from jaxscale.training.custom_loss import CustomLoss, LossState, state_of_model
from jaxscale.training.gathered import Everyone, GatheredObjective, gathered_loss, gathered_totals
from jaxscale.training.losses import Objective
from jaxscale.training.metrics import Metric
from jaxscale.training.types import EvalFn, LossFn

AnyLoss = Objective | GatheredObjective | CustomLoss


def make_objective(config: cfg.Config, info: Any, model: Any, mesh: Mesh) -> AnyLoss:
  """Build the loss and the metrics from `Config.loss`.

  Args:
    config: the config, with the settings of the loss.
    info: description of the data.
    model: the model from `model.make_model`.
    mesh: the mesh of all devices.

  Raises:
    ConfigError: the build failed or returned something else, or the loss does not work
      with other settings.
  """
  axes = batch_axes(mesh)
  context = cfg.LossContext(model, axes, row_blocks(mesh), jnp.dtype(config.activations))
  expected = "a training.Objective, GatheredObjective or CustomLoss"
  arguments = config.loss.arguments(info, context)
  objective = build(config.loss, *arguments, kind=_is_loss, expected=expected)
  if config.sync.is_local_sgd and not isinstance(objective, Objective):
    problem = f"does not work with Config.loss={type(config.loss).__name__}, "
    problem += f"a {type(objective).__name__} of all devices, whose parameters differ"
    raise invalid("Config.sync", type(config.sync).__name__, problem, "train synchronously")
  return guarded_parts(config.loss, " ({})", objective)


def _is_loss(part: Any) -> bool:
  kinds = Objective, GatheredObjective
  if not isinstance(part, CustomLoss):
    return isinstance(part, kinds)
  is_evaluation = isinstance(part.evaluation, kinds) or callable(part.evaluation)
  return callable(part.loss_fn) and is_evaluation


def loss_state(objective: AnyLoss) -> Any:
  """Return `CustomLoss.init_state`, or None."""
  return objective.init_state if isinstance(objective, CustomLoss) else None


def loss_of(
  model: models.ModelFns,
  objective: AnyLoss,
  mesh: Mesh,
  sharded: Callable[[Any], Any] = lambda function: function,
) -> LossFn:
  """Return the loss function of a train step.

  Args:
    model: the model.
    objective: the result of `make_objective`.
    mesh: the mesh of all devices.
    sharded: wrapper for parameters that are split, as in `training.gathered_loss`.
  """
  if isinstance(objective, GatheredObjective):
    loss = gathered_loss(model.apply, objective, batch_axes(mesh), model.inputs, sharded)
  elif isinstance(objective, CustomLoss):
    loss = sharded(checked(objective.loss_fn))
  else:
    loss = sharded(losses.training_loss(model.apply, objective, model.inputs))
  setattr(loss, losses.IS_SUM, True)  # `model.check_model` has checked the user's own
  return loss


def totals_of(
  model: models.ModelFns, objective: AnyLoss, mesh: Mesh, metrics: Mapping[str, Metric] = {}
) -> EvalFn:
  """Return the function of an eval step's totals.

  Args:
    model: the model.
    objective: the result of `make_objective`.
    mesh: the mesh of all devices.
    metrics: further metrics by name.

  Raises:
    ConfigError: there are metrics of outputs, but the evaluation is a function.
  """
  if isinstance(objective, GatheredObjective):
    return gathered_totals(model.apply, objective, batch_axes(mesh), model.inputs, metrics)
  if isinstance(objective, Objective):
    return losses.eval_totals(model.apply, objective, model.inputs, metrics)
  if not isinstance(objective.evaluation, Objective | GatheredObjective):
    if metrics:
      problem, fix = "need an evaluation by outputs", "give CustomLoss an Objective"
      raise invalid("Config.metrics", ..., problem, fix)
    return objective.evaluation
  totals = totals_of(model, objective.evaluation, mesh, metrics)
  return lambda params, state, batch: totals(params, state_of_model(state), batch)


def abstract_rows(info: Any, rows: int, sharding: Any = None) -> dict[str, Any]:
  """Return the shapes, dtypes and shardings of a batch's arrays."""
  abstract = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
  return {name: abstract(*array) for name, array in data.batch_shapes(info, rows).items()}


def trace_steps(
  model: models.ModelFns, objective: AnyLoss, info: Any, mesh: Mesh, rows: int
) -> tuple[Callable[[], Any], Any, dict[str, Any]]:
  """Return a function that traces a training and an evaluation step of a model.

  Args:
    model: the model.
    objective: the result of `make_objective`.
    info: description of the data.
    mesh: the mesh of all devices.
    rows: number of rows per device.

  Returns:
    A function that returns the shapes of the outputs (of a `CustomLoss` none), and the
    shapes of (params, model_state) and of the batch.
  """
  axes = batch_axes(mesh)
  whole = rows * row_blocks(mesh)
  batch = abstract_rows(info, whole)
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), whole))
  state = models.init_shapes(model.init)
  if (init_state := loss_state(objective)) is not None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = state[0], LossState(state[1], jax.eval_shape(init_state, state[0], key))

  def call(state: Any, batch: Any, keys: Any):
    params, own = vary(state, axes)
    outputs, called = (), model
    if not isinstance(objective, CustomLoss):
      outputs, _ = model.apply(params, own, model.inputs(batch), True, keys)
      _check_rows(outputs, rows)
      called = model._replace(apply=lambda *_: (outputs, own))
    loss_of(called, objective, mesh)(params, own, batch, keys)
    totals_of(model, objective, mesh)(params, own, batch | {"mask": jnp.ones(rows, bool)})
    return outputs

  specs = P(), P(axes), P(axes)
  called = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(axes))
  return functools.partial(jax.eval_shape, called, state, batch, keys), state, batch


def _check_rows(outputs: Any, rows: int) -> None:
  """Raise if an output of a model has no leading dim of rows."""
  for path, x in jax.tree.leaves_with_path(outputs):
    if jnp.shape(x)[:1] != (rows,):
      field, shape = f"the model's output {path_name(path)}".rstrip(), list(jnp.shape(x))
      problem = f"has shape {shape} for {rows} rows"
      raise invalid(field, ..., problem, f"return one value per row, [{rows}, ...]")


def sum_notes(objective: AnyLoss, state: Any, outputs: Any, batch: Any, mesh: Mesh) -> list[str]:
  """Compute a loss of a few rows, and return notes on it.

  Args:
    objective: the result of `make_objective`.
    state: shapes of (params, model_state).
    outputs: shapes of the model's outputs.
    batch: shapes of the batch.
    mesh: the mesh, whose axis names the loss may use.

  Raises:
    ConfigError: a total is not a sum over the rows.
  """
  if isinstance(objective, GatheredObjective):
    # Repeated rows change correct results, such as the position of the most similar row.
    return _split_notes(objective, outputs, batch)
  if isinstance(objective, CustomLoss):
    reason = check_sums(objective.loss_fn, state[0], state[1], batch, mesh)
  else:

    def of_outputs(params: Any, model_state: Any, batch: Any, keys: Any):
      batch = dict(batch)
      outputs = batch.pop("outputs")
      fixed = models.ModelFns(None, lambda *_: (outputs, model_state))
      return loss_of(fixed, objective, mesh)(params, model_state, batch, keys)

    reason = check_sums(of_outputs, {}, {}, {"outputs": outputs, **batch}, mesh, name="Config.loss")
  notes = [f"cannot check that its loss sums over rows: {reason}"] if reason else []
  if isinstance(objective, CustomLoss):
    notes.append("its loss_fn is not tested for results that depend on the number of devices")
  return notes


def metric_notes(metrics: Mapping[str, Metric], outputs: Any, batch: Any) -> list[str]:
  """Compute metrics of random rows, and return notes on those that could not be checked.

  Args:
    metrics: metrics by name.
    outputs: shapes of the model's outputs.
    batch: shapes of the batch.

  Raises:
    ConfigError: a metric's result for all rows is not the sum of those for two halves, or
      has one entry per row.
  """
  notes, rows = [], example_values({}, {}, {"outputs": outputs, **batch}, rows=64)[2]
  for name, metric in metrics.items():
    if metric.gathers:
      continue
    try:
      parts = _halved(functools.partial(_sums_of, metric), rows)
    except Exception as e:  # The metric may be written for one batch size.
      notes.append(f"cannot check that the metric {name} is made of sums: {one_line(e)}")
      continue
    leaves = [*zip(*map(jax.tree.leaves, parts), strict=True)]
    if any(x.shape != y.shape for x, y, _ in leaves):
      problem, fix = "returns one entry per row", "return sums over the rows, or pass gathers=True"
      raise invalid("Config.metrics", name, problem, fix)
    if not all(np.allclose(x, y + z, rtol=1e-3, equal_nan=True) for x, y, z in leaves):
      problem = "returns a value for all rows that is not the sum of those for parts of them"
      raise invalid("Config.metrics", name, problem, "return sums, and divide in `compute`")
  return notes


def _sums_of(metric: Metric, outputs: Any, batch: Any, rows: jax.Array) -> Any:
  mask = jnp.ones(len(rows), bool)
  return metric.update(outputs, batch | {"mask": mask}, mask.astype(jnp.int32))


def _halved(function: Callable[..., Any], values: Any) -> list[Any]:
  """Compute function(outputs, batch, positions) for all rows, and for each half of them."""
  rows = jnp.arange(len(jax.tree.leaves(values)[0]), dtype=jnp.int32)

  def of(rows: jax.Array) -> Any:
    part = jax.tree.map(lambda x: jnp.asarray(x)[rows], values)
    return function(part.pop("outputs"), part, rows)

  return compiled(lambda: [*map(of, (rows, *jnp.split(rows, 2)))])()


def _split_notes(objective: GatheredObjective, outputs: Any, batch: Any) -> list[str]:
  """Return notes on a loss and metrics that change when rows are split over two devices."""
  values = example_values({}, {}, {"outputs": outputs, **batch}, rows=4)[2]

  def results(outputs: Any, batch: Any, rows: jax.Array) -> dict[str, Any]:
    every = jax.tree.map(jnp.asarray, values)
    parts = outputs, batch, Everyone(every.pop("outputs"), every, rows, jnp.ones(4, bool))
    named = {f"metric {k!r}": x for k, x in objective.metrics(*parts).items()}
    return {"loss": objective.loss(*parts)} | named

  try:
    whole, *halves = _halved(results, values)
  except Exception as e:  # the loss may be written for one batch size
    return [f"cannot check whether its loss depends on the number of devices: {one_line(e)}"]
  return [
    f"its {name} depends on the rows of each device: results depend on the number of devices; "
    "use `everyone` for what concerns the whole batch"
    for name, x in whole.items()
    if not np.allclose(x, np.concatenate([y[name] for y in halves]), rtol=1e-3, equal_nan=True)
  ]
