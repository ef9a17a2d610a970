"""Initial state of a run, made in place on the devices, and how a state is sharded."""

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
from jaxscale.exchange import Exchange
from jaxscale.exchange.local_updates import LocalUpdate, reset_momentum
from jaxscale.mesh import on_cpu, replicated
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel import placement, specs
from jaxscale.parallel.layout_exchange import make_layout_exchange
from jaxscale.parallel.specs import Layout
from jaxscale.training import noise_scale as noise_scales
from jaxscale.training.types import TrainState, WorkerState


def state_shardings(
  mesh: Mesh,
  layout: Layout | None = None,
  tx: optax.GradientTransformation | None = None,
  *,
  average: bool = False,
) -> TrainState:
  """Return how a state is sharded: replicated, except each device's own and a layout's.

  Args:
    mesh: where.
    layout: of the parameters; None: everything on every device.
    tx: the optimizer, where there is a layout.
    average: whether averages are kept.
  """
  everywhere = replicated(mesh)
  parts: dict[str, Any] = dict.fromkeys(TrainState._fields, everywhere)
  parts["exchange_state"] = NamedSharding(mesh, P(mesh.axis_names))
  if layout is not None and layout.shapes is not None:
    assert tx is not None
    parts["params"] = placement.shardings(layout, layout.param_specs)
    parts["opt_state"] = placement.opt_state_shardings(layout, tx)
    if average:
      parts["average"] = (parts["params"], everywhere)
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
  """The state before the first step, made in place on every device.

  Args:
    init_fn: key -> (params, model_state).
    tx: the optimizer.
    mesh: where the state lives.
    exchange: the gradient exchange, for its state; None: `plain`, which has none.
    seed: of the parameters; the same on every mesh.
    given: leaves that are not to be initialised, e.g. imported, by path: 0/... of
      params and 1/... of model_state.
    options: layout, average, noise_scale and local, as of `make_init`.
  """
  init = make_init(init_fn, tx, mesh, exchange, **options)
  return run_init(init, mesh, seed, given)


def run_init(
  init: Any,
  mesh: Mesh,
  seed: int,
  given: Mapping[str, jax.Array] | None = None,
  turn: contextlib.AbstractContextManager[Any] | None = None,
) -> TrainState:
  """Make the state before the first step by the result of `make_init`.

  Args:
    init: (seed, leaves that are given) -> the state.
    mesh: where the state lives.
    seed: of the parameters.
    given: as of `init_state`.
    turn: entered to compile it; None: any time will do.
  """
  # Sharded, it may have collectives: no step may start while it runs.
  init = one_at_a_time(init, mesh)
  arguments = np.int64(seed), given or {}  # as jax.random.key takes an int
  lowered = init.lower(*arguments)
  with turn or contextlib.nullcontext():
    compiled = one_at_a_time(lowered.compile(), mesh)
  return compiled(*arguments)


def abstract_state(*parts: Any, **options: Any) -> TrainState:
  """Shapes, dtypes and shardings of `init_state`, without computing it.

  The arguments are those of `make_init`.
  """
  return shapes_of(make_init(*parts, **options))


def shapes_of(init: Any) -> TrainState:
  """Return shapes, dtypes and shardings of the state that `make_init` would make."""
  return init.eval_shape(np.int64(0), {})


def _check_keys(opt_state: Any) -> None:
  """Refuse what no checkpoint holds before the first step, not at the first save."""
  for path, leaf in jax.tree.leaves_with_path(opt_state):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      why = "is a typed key, which no checkpoint holds"
      fix = "keep its jax.random.key_data, or use an optimizer without random numbers"
      raise invalid(f"optimizer state {path_name(path)}", ..., why, fix)


def make_init(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange | None = None,
  *,
  layout: Layout | None = None,
  average: bool = False,
  noise_scale: bool = False,
  local: LocalUpdate | None = None,
) -> jax.stages.Wrapped:
  """(seed, leaves that are given) -> the state before the first step, jitted.

  Args:
    init_fn: key -> (params, model_state).
    tx: the optimizer.
    mesh: where the state lives; its devices need not be here to lower it.
    exchange: the gradient exchange, for its state; None: `plain`, which has none.
    layout: of the parameters; None: everything on every device. Each device makes
      the part that it holds, and never has the whole.
    average: keep averages of parameters and model state as well.
    noise_scale: keep those of the gradient-noise scale as well.
    local: for `make_local_train_step`: workers train alone by this method, all from
      the same parameters. `tx` is their own optimizer, `exchange` is that of the
      pseudo-gradients and has to be given.

  Raises:
    ConfigError: `local` resets a momentum that `tx` does not have, or the state of
      `tx` has a typed key.
  """

  def exchange_state(params: Any):
    if exchange is None:
      return ()
    if layout is None or layout.shapes is None:
      return exchange.init(params)
    shapes = specs.local_grad_shapes(layout)
    grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return make_layout_exchange(exchange, layout).init(grads)

  def init(seed: Any, given: Mapping[str, jax.Array]):
    # The key is made in here, so that it has no program of its own.
    initial = init_fn(jax.random.key(seed))
    params, model_state = jax.tree.map_with_path(
      lambda path, x: given.get(path_name(path), x), initial
    )
    opt_state, device_state = tx.init(params), exchange_state(params)
    _check_keys(opt_state)
    if local is not None:
      if local.reset_momentum:
        reset_momentum(opt_state)  # raises now what the step would raise
      device_state = WorkerState(params, model_state, opt_state, device_state)
      opt_state = local.outer.init(params)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      model_state=model_state,
      opt_state=opt_state,
      exchange_state=jax.tree.map(lambda x: jnp.stack([x] * mesh.size), device_state),
      average=jax.tree.map(jnp.copy, (params, model_state)) if average else (),
      noise=noise_scales.init() if noise_scale else (),
    )

  # It runs once: a third of the time to compile is worth more than its speed. A level
  # that is set in XLA_FLAGS counts.
  level = "xla_backend_optimization_level"
  is_set = level in os.environ.get("XLA_FLAGS", "")
  options = {level: 1} if on_cpu(mesh) and not is_set else None
  where: Any = state_shardings(mesh, layout, tx, average=average)
  return jax.jit(init, out_shardings=where, compiler_options=options)
