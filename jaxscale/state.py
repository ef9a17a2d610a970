"""What a train step carries from one step to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale import noise_scale as noise_scales
from jaxscale.exchange import Exchange
from jaxscale.mesh import replicated


class TrainState(NamedTuple):
  """A tree of global arrays, all that a checkpoint has to keep of them.

  Attributes:
    step: int32 [], optimizer steps done; also the position in the data.
    params: float32 parameters.
    model_state: what the model updates itself, e.g. BatchNorm statistics.
    opt_state: optax's state (momenta, average of parameters).
    exchange_state: a leading dim of one entry a device, sharded over them.
    average: exponential averages of (params, model_state), or () without.
    noise: running averages of the gradient-noise scale, or () without.
  """

  step: Any
  params: Any
  model_state: Any
  opt_state: Any
  exchange_state: Any
  average: Any
  noise: Any = ()

  def evaluated(self) -> tuple[Any, Any]:
    """(params, model_state) to evaluate: the averages where there are some."""
    return self.average or (self.params, self.model_state)


def state_shardings(mesh: Mesh) -> TrainState:
  """The layout of a state: replicated, but for what is a device's own."""
  everywhere = replicated(mesh)
  own = NamedSharding(mesh, P(mesh.axis_names))
  parts = dict.fromkeys(TrainState._fields, everywhere)
  return TrainState(**parts | {"exchange_state": own})


def init_state(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange,
  *,
  seed: int = 0,
  average: bool = False,
  noise_scale: bool = False,
) -> TrainState:
  """The state before the first step, made in place on every device.

  Args:
    init_fn: key -> (params, model_state).
    tx: the optimizer.
    mesh: where the state lives.
    exchange: the gradient exchange, for its state.
    seed: of the parameters; the same on every mesh.
    average: keep averages of parameters and model state as well.
    noise_scale: keep those of the gradient-noise scale as well.
  """

  init = _initialiser(init_fn, tx, mesh, exchange, average, noise_scale)
  on_cpu = mesh.devices.flat[0].platform == "cpu"
  # It runs once: a third of the time to compile is worth more than its speed.
  options = {"xla_backend_optimization_level": 1} if on_cpu else None
  jitted = jax.jit(init, out_shardings=state_shardings(mesh), compiler_options=options)
  return jitted(jax.random.key(seed))


def _initialiser(init_fn, tx, mesh, exchange, average, noise):
  """The function of a key that makes a state."""

  def init(key):
    params, model_state = init_fn(key)
    own = exchange.init(params)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * mesh.size), own)
    step = jnp.zeros((), jnp.int32)
    averages = jax.tree.map(jnp.copy, (params, model_state)) if average else ()
    return TrainState(
      step, params, model_state, tx.init(params), stacked, averages,
      noise_scales.init() if noise else (),
    )  # fmt: skip

  return init


def abstract_state(
  init_fn: Callable[[jax.Array], tuple[Any, Any]],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  exchange: Exchange,
  *,
  average: bool = False,
  noise_scale: bool = False,
) -> TrainState:
  """Shapes, dtypes and shardings of `init_state`, without computing it."""
  init = _initialiser(init_fn, tx, mesh, exchange, average, noise_scale)
  return abstract_on(mesh, init)


def abstract_on(mesh: Mesh, init: Callable[[jax.Array], TrainState]) -> TrainState:
  """Shapes, dtypes and shardings of the state that a function of a key makes."""
  shapes = jax.eval_shape(init, jax.random.key(0))
  layout = state_shardings(mesh)
  return TrainState(
    *(
      jax.tree.map(
        lambda x, s=sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        part,
      )
      for part, sharding in zip(shapes, layout, strict=True)
    )
  )
