"""Initial state of a run, created on the devices, and its shardings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.collectives.cpu_workarounds import one_at_a_time
from jaxscale.errors import invalid
from jaxscale.exchange import Exchange, fragments
from jaxscale.exchange.local_updates import LocalUpdate, reset_momentum
from jaxscale.mesh import on_cpu, replicated
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel import placement, specs
from jaxscale.parallel.layout_exchange import make_layout_exchange
from jaxscale.parallel.specs import Layout
from jaxscale.parallel.trainable import trainable_layout, trainable_part
from jaxscale.training import loss_scale as loss_scales
from jaxscale.training import noise_scale as noise_scales
from jaxscale.training import rounds
from jaxscale.training.custom_loss import LossState
from jaxscale.training.types import TrainState, WorkerState


def state_shardings(
  mesh: Mesh,
  layout: Layout | None = None,
  tx: optax.GradientTransformation | None = None,
  *,
  average: bool = False,
  trainable: str | None = None,
) -> TrainState:
  """Return the shardings of a train state.

  `exchange_state` is sharded over the devices. Parameters, their averages and the
  optimizer state are sharded by the layout, and everything else is replicated.

  Args:
    mesh: the mesh of the state.
    layout: the layout of the parameters; None means that everything is replicated.
    tx: the optimizer; needed with a layout.
    average: whether the state has averages.
    trainable: pattern of the trainable parameters, as for `trainable_part`.
  """
  everywhere = replicated(mesh)
  parts: dict[str, Any] = dict.fromkeys(TrainState._fields, everywhere)
  parts["exchange_state"] = NamedSharding(mesh, P(mesh.axis_names))
  if layout is not None and layout.shapes is not None:
    assert tx is not None
    parts["params"] = placement.shardings(layout, layout.param_specs)
    parts["opt_state"] = placement.opt_state_shardings(trainable_layout(layout, trainable), tx)
    if average:
      parts["average"] = (trainable_part(parts["params"], trainable), everywhere)
  return TrainState(**parts)


def init_state(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange | None = None,
  *,
  seed: int = 0,
  given: Mapping[str, jax.Array] | None = None,
  **options: Any,
) -> TrainState:
  """Create the state before the first step, in place on every device.

  Args:
    init_fn: key -> (params, model_state).
    tx: the optimizer.
    mesh: the mesh of the state.
    exchange: the gradient exchange; None means `plain`, which has no state.
    seed: seed of the parameters, which are the same on every mesh.
    given: leaves that replace initialised ones, such as imported weights, by path: "0/..."
      for params and "1/..." for model_state.
    options: layout, trainable, average, noise_scale, loss_scale, local and loss_state, as in
      `make_init`.
  """
  return run_init(make_init(init_fn, tx, mesh, exchange, **options), mesh, seed, given)


def run_init(
  init: Any,
  mesh: Mesh,
  seed: int,
  given: Mapping[str, jax.Array] | None = None,
  turn: contextlib.AbstractContextManager[Any] | None = None,
) -> TrainState:
  """Create the state before the first step with a function from `make_init`.

  Args:
    init: (seed, given leaves) -> the state.
    mesh: the mesh of the state.
    seed: seed of the parameters.
    given: leaves that replace initialised ones, as in `init_state`.
    turn: context manager entered for the compilation; None means no context.
  """
  # A sharded init may have collectives, so that no step may start while it runs.
  init = one_at_a_time(init, mesh)
  arguments = np.int64(seed), given or {}  # as jax.random.key takes an int
  lowered = init.lower(*arguments)
  with turn or contextlib.nullcontext():
    compiled = one_at_a_time(lowered.compile(), mesh)
  return compiled(*arguments)


def abstract_state(*parts: Any, **options: Any) -> TrainState:
  """Return the shapes, dtypes and shardings of `init_state` without computing it.

  The arguments are those of `make_init`.
  """
  return shapes_of(make_init(*parts, **options))


def shapes_of(init: Any) -> TrainState:
  """Return the abstract state for a function from `make_init`."""
  return init.eval_shape(np.int64(0), {})


def check_keys(what: str, state: Any) -> None:
  """Raise before the first step if a state cannot be checkpointed.

  Args:
    what: the owner of the state, "optimizer" or "model".
    state: arrays, or their shapes and dtypes.

  Raises:
    ConfigError: the state has a typed key.
  """
  for path, leaf in jax.tree.leaves_with_path(state):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      problem = "is a typed key, which a checkpoint cannot store"
      field = f"{what} state {path_name(path)}"
      raise invalid(field, ..., problem, "store its jax.random.key_data")


def _local_states(
  local: LocalUpdate, exchange_state: Callable[[Any], Any], part: Any, model_state: Any, inner: Any
) -> tuple[Any, WorkerState]:
  """Return the outer optimizer's state and a worker's state; `inner` is its optimizer's."""
  states = fragments.states(exchange_state, part, local.fragments)
  if local.worker_steps:
    states = rounds.init(), states
  if local.reset_momentum:
    reset_momentum(inner)  # raises the step's error before the first step
  outer = fragments.states(local.outer.init, part, local.fragments)
  return outer, WorkerState(part, model_state, inner, states)


def make_init(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange | None = None,
  *,
  layout: Layout | None = None,
  trainable: str | None = None,
  average: bool = False,
  noise_scale: bool = False,
  loss_scale: bool = False,
  local: LocalUpdate | None = None,
  loss_state: Callable[[Any, jax.Array], Any] | None = None,
) -> jax.stages.Wrapped:
  """Return a jitted function (seed, given leaves) -> the state before the first step.

  Args:
    init_fn: key -> (params, model_state).
    tx: the optimizer.
    mesh: the mesh of the state. To lower the function, its devices need not exist on this
      machine.
    exchange: the gradient exchange; None means `plain`, which has no state.
    layout: the layout of the parameters; None means that everything is replicated. Each device
      creates only the part that it holds.
    trainable: pattern of the trainable parameters, as for `parallel.trainable.trainable_part`;
      None means that all are. Only these have optimizer state, exchange state and averages.
    average: also keep averages of parameters and model state.
    noise_scale: also keep running averages of the gradient-noise scale.
    loss_scale: also keep a dynamic loss scale, for `StepOptions.scale_loss`.
    local: method of local updates, for `make_local_train_step`. All workers start from
      the same parameters, `tx` is their inner optimizer, and `exchange`, which is then
      required, is the exchange of the pseudo-gradients.
    loss_state: `CustomLoss.init_state`; the model state is then a `LossState`. None means
      that the loss has no state.

  Raises:
    ConfigError: `local` resets a momentum that `tx` does not have, or the state of
      `tx` has a typed key.
  """

  def exchange_state(params: Any):
    if exchange is None:
      return ()
    if layout is None or layout.shapes is None:
      return exchange.init(params)
    trained = trainable_layout(layout, trainable)
    grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), specs.local_grad_shapes(trained))
    return make_layout_exchange(exchange, trained).init(grads)

  def init_opt_state(params: Any):
    if local is not None:
      return tx.init(params)
    whole = layout or specs.replicated_layout(mesh)
    return placement.init_opt_state(trainable_layout(whole, trainable), tx, params)

  def init(seed: Any, given: Mapping[str, jax.Array]):
    # Creating the key inside avoids compiling a separate program for it.
    initial = init_fn(jax.random.key(seed))
    params, model_state = jax.tree.map_with_path(
      lambda path, x: given.get(path_name(path), x), initial
    )
    if loss_state is not None:  # After `given`, since a teacher starts as a copy.
      of_loss = loss_state(params, jax.random.fold_in(jax.random.key(seed), 1))
      model_state = LossState(model_state, jax.tree.map(jnp.copy, of_loss))
    part = trainable_part(params, trainable)
    opt_state = init_opt_state(part)
    check_keys("optimizer", opt_state)
    if local is None:
      device_state = exchange_state(part)
    else:
      opt_state, device_state = _local_states(local, exchange_state, part, model_state, opt_state)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      model_state=model_state,
      opt_state=opt_state,
      exchange_state=jax.tree.map(lambda x: jnp.stack([x] * mesh.size), device_state),
      average=jax.tree.map(jnp.copy, (part, model_state)) if average else (),
      noise=noise_scales.init() if noise_scale else (),
      loss_scale=loss_scales.init() if loss_scale else (),
    )

  # The program runs once, so a third of the compile time is worth more than its speed. A
  # level in XLA_FLAGS has precedence.
  level = "xla_backend_optimization_level"
  is_set = level in os.environ.get("XLA_FLAGS", "")
  options = {level: 1} if on_cpu(mesh) and not is_set else None
  where: Any = state_shardings(mesh, layout, tx, average=average, trainable=trainable)
  return jax.jit(init, out_shardings=where, compiler_options=options)
