"""Layers of a model split over two devices; everything else is on both."""

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale.models.stack import Ops, hidden_states
from jaxscale.parallel.rules import Rule, partition


def on_two_devices(stack, sharding, params, **options):
  """Return a (params, batch) -> (loss, gradients).

  Args:
    stack: the model.
    sharding: the sharding rules.
    params: the parameters, for their shapes.
    options: options of `hidden_states`.
  """
  mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,))
  ops = Ops(
    enter=lambda x: lax.pcast(x, "model", to="varying"), reduce=lambda y: lax.psum(y, "model")
  )
  rules = [Rule(*rule) for rule in sharding]
  specs = jax.tree.map(lambda _: P(), params)
  specs |= partition({"layers": params["layers"]}, rules, {"model": 2})

  def loss(params, batch):
    h = hidden_states(stack, params, batch, ops, **options)
    return stack.finish(params["head"], h, batch, Ops())["loss"]

  grad = jax.value_and_grad(loss)
  return jax.shard_map(grad, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs))
