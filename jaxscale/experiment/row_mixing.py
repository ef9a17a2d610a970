"""A test before the first step: whether a model computes each row by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import models
from jaxscale.collectives import vary
from jaxscale.training.losses import inputs_of

_ELEMENTS = 2**28  # of parameters: 1 GiB; larger models are not computed twice


def mixes_rows(
  model: models.ModelFns, batch: Any, mesh: Mesh, tolerance: float
) -> bool:
  """True if a row's output in training changes with the other rows, or its place.

  Two rows are computed twice on one device: the first row stays with its key, comes
  second, and the other row is another one.

  Args:
    model: of the user.
    batch: shapes and dtypes of a batch.
    mesh: whose axes the model may name.
    tolerance: of a difference, as a share of the largest output.
  """
  if sum(x.size for x in jax.tree.leaves(models.init_shapes(model.init))) > _ELEMENTS:
    return False
  axes, rng = mesh.axis_names, np.random.default_rng(0)
  one = np.array(jax.local_devices()[:1]).reshape((1,) * len(axes))

  @jax.jit
  @jax.shard_map(
    mesh=Mesh(one, axes), in_specs=(P(), P(axes), P(axes)), out_specs=P(axes)
  )
  def outputs_of(state, inputs, keys):
    return model.apply(*vary(state, axes), inputs, True, keys)[0]

  def moved(x):  # a last layer that starts at 0 would hide all before it
    if not jnp.issubdtype(x.dtype, jnp.floating) or np.ptp(x):
      return x
    return x + (0.1 * rng.standard_normal(x.shape)).astype(x.dtype)

  params, model_state = jax.jit(model.init)(jax.random.key(0))
  state = jax.tree.map(moved, params), model_state
  inputs, keys = inputs_of(batch), jax.random.split(jax.random.key(1), 3)
  shape = 3, *inputs.shape[1:]
  if jnp.issubdtype(inputs.dtype, jnp.floating):
    rows = rng.standard_normal(shape).astype(inputs.dtype)
  else:
    high = 256 if inputs.dtype == np.uint8 else 2
    rows = rng.integers(0, high, shape).astype(inputs.dtype)
  places = np.array([0, 1]), np.array([2, 0])
  first, second = (outputs_of(state, rows[at], keys[at]) for at in places)

  def differs(a, b):
    a, b = np.asarray(a[0], float), np.asarray(b[1], float)
    return bool((np.abs(a - b) > tolerance * np.abs(a).max(initial=0.0)).any())

  return any(jax.tree.leaves(jax.tree.map(differs, first, second)))
