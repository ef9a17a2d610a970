"""First state and step of a small training, and batches on its mesh."""

from typing import Any

import jax

from jaxscale.exchange import plain
from jaxscale.mesh import batch_sharding
from jaxscale.training.local_step import make_local_train_step
from jaxscale.training.state import init_state
from jaxscale.training.step import make_train_step
from jaxscale.training.types import StepOptions


def training(loss_fn, init, tx, mesh, exchange=None, *, layout=None, local=None, seed=0, **options):
  """Return the first state and the jitted step.

  Args:
    loss_fn: the loss function, as in `make_train_step`.
    init: a function key -> (params, model_state).
    tx: the optimizer.
    mesh: the mesh of the state.
    exchange: the exchange of the gradients; None: `plain`.
    layout: the layout of the parameters; None: everything on every device.
    local: a method of local updates; None: workers synchronize in every step.
    seed: the seed of the parameters.
    options: fields of `StepOptions` and keywords of the function that makes the step.
  """
  fields = {name: options.pop(name) for name in StepOptions._fields if name in options}
  kept = dict(average="ema_decay" in fields, noise_scale="measure_noise_scale" in fields)
  kept["loss_scale"] = "scale_loss" in fields
  state = init_state(init, tx, mesh, exchange, layout=layout, local=local, seed=seed, **kept)
  options["options"] = StepOptions(**fields)
  if local is None:
    return state, make_train_step(loss_fn, tx, mesh, exchange, layout=layout, **options)
  exchange = exchange or plain(mesh.axis_names)
  return state, make_local_train_step(loss_fn, tx, mesh, exchange, local, **options)


def on_mesh(mesh, batch) -> Any:
  """Return a batch whose rows are split over the devices."""
  return jax.device_put(batch, batch_sharding(mesh))
