"""Check before the first step that a model or loss processes each row separately."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import models
from jaxscale.collectives import vary
from jaxscale.training.contract import compiled, example_values, too_large


def mixes_rows(
  function: Any, init: Any, rows: Any, mesh: Mesh, tolerance: float, count: int = 2
) -> bool | str:
  """Return whether a row's training result depends on other rows or on its position.

  The function is computed twice on one device. The second time, the first row with its
  key is at the second position, and the other rows are different. Parameters are random,
  because a last layer that is initialised to 0 would hide the layers before it, and
  initializers take long to compile.

  Args:
    function: the user's function (state, rows, keys) -> results of each row.
    init: key -> (params, model_state), the state.
    rows: shapes and dtypes of the rows.
    mesh: the mesh, whose axis names the function may use.
    tolerance: allowed difference, as a share of the largest result.
    count: number of rows per call, 2 or more.

  Returns:
    True or False, or the reason why it could not be checked.
  """
  params, state = models.init_shapes(init)
  if reason := too_large((params, state)):
    return reason
  axes = mesh.axis_names
  one = np.array(jax.local_devices()[:1]).reshape((1,) * len(axes))

  @jax.shard_map(mesh=Mesh(one, axes), in_specs=(P(), P(axes), P(axes)), out_specs=P(axes))
  def results_of(state: Any, rows: Any, keys: Any):
    return function(vary(state, axes), rows, keys)

  params, _, rows, keys = example_values(params, {}, rows, 2 * count - 1)
  if jax.tree.leaves(state):
    key = jax.random.key(0)
    state = compiled(lambda key: init(key)[1], key)(key)
  orders = np.arange(count), np.array([count, 0, *range(count + 1, 2 * count - 1)])
  arguments = [
    ((params, state), jax.tree.map(lambda x, at=at: x[at], rows), keys[at]) for at in orders
  ]
  call = compiled(results_of, *arguments[0])
  first, second = (jax.tree.leaves(call(*each)) for each in arguments)

  def differs(a: Any, b: Any):
    a, b = np.asarray(a[0], float), np.asarray(b[1], float)
    return bool((np.abs(a - b) > tolerance * np.abs(a).max(initial=0.0)).any())

  if any(map(differs, first, second)):
    return True
  is_finite = all(np.isfinite(np.asarray(x, float)).all() for x in first)
  return False if is_finite else "its outputs for random parameters are not finite"
