"""A test before the first step: whether a model or loss takes each row by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import models
from jaxscale.collectives import vary

_ELEMENTS = 2**28  # of parameters: 1 GiB; larger models are not computed twice


def mixes_rows(
  function: Any, init: Any, rows: Any, mesh: Mesh, tolerance: float
) -> bool:
  """True if a row's result in training changes with the other rows, or its place.

  Two rows are computed twice on one device: the first row stays with its key, comes
  second, and the other row is another one.

  Args:
    function: (state, rows, keys) -> results of each row, of the user's.
    init: key -> (params, model_state), the state.
    rows: shapes and dtypes of its rows.
    mesh: whose axes the function may name.
    tolerance: of a difference, as a share of the largest result.
  """
  if sum(x.size for x in jax.tree.leaves(models.init_shapes(init))) > _ELEMENTS:
    return False
  axes, rng = mesh.axis_names, np.random.default_rng(0)
  one = np.array(jax.local_devices()[:1]).reshape((1,) * len(axes))

  @jax.jit
  @jax.shard_map(
    mesh=Mesh(one, axes), in_specs=(P(), P(axes), P(axes)), out_specs=P(axes)
  )
  def results_of(state, rows, keys):
    return function(vary(state, axes), rows, keys)

  def moved(x):  # a last layer that starts at 0 would hide all before it
    if not jnp.issubdtype(x.dtype, jnp.floating) or np.ptp(x):
      return x
    return x + (0.1 * rng.standard_normal(x.shape)).astype(x.dtype)

  def some(x):
    shape = 3, *x.shape[1:]
    if jnp.issubdtype(x.dtype, jnp.floating):
      return rng.standard_normal(shape).astype(x.dtype)
    return rng.integers(0, 256 if x.dtype == np.uint8 else 2, shape).astype(x.dtype)

  params, model_state = jax.jit(init)(jax.random.key(0))
  state = jax.tree.map(moved, params), model_state
  keys, rows = jax.random.split(jax.random.key(1), 3), jax.tree.map(some, rows)
  first, second = (
    results_of(state, jax.tree.map(lambda x, at=at: x[at], rows), keys[at])
    for at in (np.array([0, 1]), np.array([2, 0]))
  )

  def differs(a, b):
    a, b = np.asarray(a[0], float), np.asarray(b[1], float)
    return bool((np.abs(a - b) > tolerance * np.abs(a).max(initial=0.0)).any())

  return any(jax.tree.leaves(jax.tree.map(differs, first, second)))
