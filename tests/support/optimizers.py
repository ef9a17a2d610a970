"""Optimizers applied to given gradients."""

import jax
import numpy as np
import optax


def optimize(tx, params, grads):
  """Return the parameters after every step of an optimizer, and its last state."""
  state, out = tx.init(params), []
  for g in grads:
    updates, state = tx.update(g, state, params)
    params = optax.apply_updates(params, updates)
    out.append(params)
  return out, state


def optimize64(tx, params, grads):
  """Return the last parameters in float64, as numpy arrays."""
  with jax.enable_x64(True):
    params, *grads = jax.tree.map(jax.numpy.array, [params, *grads])
    return jax.tree.map(np.asarray, optimize(tx, params, grads)[0][-1])
