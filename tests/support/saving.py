"""Checkpoints that are saved and restored immediately."""

import jax
import numpy as np

from jaxscale.checkpoint.manager import Checkpoints
from support.states import at_step


def save(directory, *states, **options):
  """Save states in a folder, one after another."""
  with Checkpoints(directory, **options) as checkpoints:
    for state in states:
      checkpoints.save(state)


def restore(directory, abstract, resize=None, **options):
  """Return the newest intact state of a folder."""
  with Checkpoints(directory, **options) as checkpoints:
    return checkpoints.restore(abstract, resize)


def save_steps(checkpoints, state, *steps, **options):
  """Save `at_step` of a state for each step, and wait for each to be committed."""
  for step in steps:
    checkpoints.save(at_step(state, step), **options)
    checkpoints.wait()


def filled(abstract, step=4):
  """Return a state of random numbers; its integers are the step."""
  rng = np.random.default_rng(0)

  def fill(x):
    is_float = x.dtype == np.float32
    value = (
      rng.standard_normal(x.shape, np.float32) if is_float else np.full(x.shape, step, x.dtype)
    )
    return jax.device_put(value, x.sharding)

  return jax.tree.map(fill, abstract)
