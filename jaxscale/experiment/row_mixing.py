"""A test before the first step: whether a model computes each row by itself."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import models
from jaxscale.collectives import vary
from jaxscale.training.contract import compiled, example_values, too_large
from jaxscale.training.losses import inputs_of


def mixes_rows(
  model: models.ModelFns, batch: Any, mesh: Mesh, tolerance: float, rows: int = 2
) -> bool | str:
  """True if a row's output in training changes with the other rows, or its place.

  The rows are computed twice on one device: the first row stays with its key, comes
  second, and the others are other ones. Parameters are random: a last layer that
  starts at 0 would hide all before it, and initializers take long to compile.

  Args:
    model: of the user.
    batch: shapes and dtypes of a batch.
    mesh: whose axes the model may name.
    tolerance: of a difference, as a share of the largest output.
    rows: at a time, two or more.

  Returns:
    Or why it was not tested.
  """
  params, state = models.init_shapes(model.init)
  if reason := too_large((params, state)):
    return reason
  axes = mesh.axis_names
  one = np.array(jax.local_devices()[:1]).reshape((1,) * len(axes))

  @jax.shard_map(
    mesh=Mesh(one, axes), in_specs=(P(), P(axes), P(axes)), out_specs=P(axes)
  )
  def outputs_of(state, inputs, keys):
    return model.apply(*vary(state, axes), inputs, True, keys)[0]

  inputs = inputs_of(batch)
  params, _, inputs, keys = example_values(params, {}, inputs, 2 * rows - 1)
  if jax.tree.leaves(state):
    key = jax.random.key(0)
    state = compiled(lambda key: model.init(key)[1], key)(key)
  places = np.arange(rows), np.array([rows, 0, *range(rows + 1, 2 * rows - 1)])
  arguments = [((params, state), inputs[at], keys[at]) for at in places]
  call = compiled(outputs_of, *arguments[0])
  first, second = (jax.tree.leaves(call(*each)) for each in arguments)

  def differs(a, b):
    a, b = np.asarray(a[0], float), np.asarray(b[1], float)
    return bool((np.abs(a - b) > tolerance * np.abs(a).max(initial=0.0)).any())

  if any(map(differs, first, second)):
    return True
  is_finite = all(np.isfinite(np.asarray(x, float)).all() for x in first)
  return False if is_finite else "its outputs for random parameters are not finite"
