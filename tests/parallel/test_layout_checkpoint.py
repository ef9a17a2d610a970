"""A checkpoint of any layout is one of every other, on any number of devices."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxscale import optim
from jaxscale.checkpoint import checksum
from jaxscale.checkpoint.checkpoint_files import read_manifest
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.exchange import plain
from jaxscale.mesh import make_mesh
from jaxscale.parallel import gpipe_grads, make_layout, stack_loss
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.training.state import abstract_state, init_state
from jaxscale.training.step import make_train_step
from jaxscale.training.types import StepOptions
from support.cases import all_slow_except
from support.tiny_stack import RULES, batch, tiny_stack
from support.trees import worst_leaf

SAVED_AT, STEPS = 2, 4
PARAMETERS = {"shard": "fsdp"}
# Devices, their mesh, and what is split over it.
LAYOUTS = {
  "replicated": (8, {"replica": 2, "data": 4}, {}),
  "zero-1": (8, {"data": 1, "fsdp": 8}, {"shard": "zero1"}),
  "fsdp": (8, {"data": 1, "fsdp": 8}, PARAMETERS),
  "data x fsdp x model": (8, {"data": 2, "fsdp": 2, "model": 2}, PARAMETERS),
  "data x stage": (8, {"data": 2, "stage": 4}, {}),
  "data x ring": (8, {"data": 2, "model": 4}, {"splits": "ring"}),
  "tokens too": (8, {"data": 2, "model": 4}, {"splits": "layers_and_tokens"}),
  "four of fsdp": (4, {"data": 1, "fsdp": 4}, PARAMETERS),
  "one": (1, {}, {}),
}
MANY = "data x fsdp x model"
QUICK = "replicated", MANY


class Parts(NamedTuple):
  """A layout's state before any step, abstract and as numbers, and its step."""

  mesh: Any
  abstract: Any
  state: Any
  step: Any


@functools.cache
def parts(name) -> Parts:
  count, sizes, options = LAYOUTS[name]
  mesh = make_mesh(devices=jax.devices()[:count], **sizes)
  stack = tiny_stack()
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  layout = make_layout(mesh, shapes, RULES, **options)
  piped = "stage" in mesh.axis_names
  loss = gpipe_grads(stack, layout) if piped else stack_loss(stack, layout)
  tx, exchange = optim.adamw(1e-2), plain(exchange_axes(layout))
  made = lambda key: (stack.init(key), {}), tx, mesh, exchange
  options: Any = {"layout": layout, "average": True}
  step = make_train_step(
    loss,
    tx,
    mesh,
    exchange,
    layout=layout,
    options=StepOptions(ema_decay=0.9, num_microbatches=2 if piped else 1),
  )
  return Parts(mesh, abstract_state(*made, **options), init_state(*made, **options, seed=1), step)


def train(name, state, steps):
  """The state, which is donated, after so many steps more, and their losses."""
  made, losses = parts(name), []
  for _ in range(steps):
    state, metrics = made.step(state, batch(int(state.step), made.mesh))
    losses.append(metrics["loss"].item())
  return state, losses


class Saved(NamedTuple):
  """A run that was saved and resumed: where, fingerprints, losses and the end."""

  directory: Any
  leaves: Any
  losses: Any
  end: Any


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  @functools.cache
  def of(name):
    directory = tmp_path_factory.mktemp("saved")
    state = jax.tree.map(lambda x: x.copy(), parts(name).state)
    state, _ = train(name, state, SAVED_AT)
    with Checkpoints(directory) as checkpoints:
      checkpoints.save(state)
    leaves = checksum.manifest(state)
    state, losses = train(name, state, STEPS - SAVED_AT)
    return Saved(directory, leaves, losses, jax.device_get(state))

  return of


PAIRS = [f"{a} -> {b}" for a in LAYOUTS for b in LAYOUTS]


@pytest.mark.parametrize("pair", all_slow_except(PAIRS, " -> ".join(QUICK)))
def test_any_layout_resumes_from_any_other(pair, saved):
  there, here = pair.split(" -> ")
  before = saved(there)
  with Checkpoints(before.directory) as checkpoints:
    state = checkpoints.restore(parts(here).abstract)
  assert state is not None
  for x, a in zip(*map(jax.tree.leaves, (state, parts(here).abstract)), strict=True):
    assert (x.shape, x.dtype, x.sharding) == (a.shape, a.dtype, a.sharding)
  assert checksum.manifest(state) == before.leaves
  state, losses = train(here, state, STEPS - SAVED_AT)
  if here == there:
    assert losses == before.losses
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before.end)
  np.testing.assert_allclose(losses, before.losses, rtol=1e-6)
  assert worst_leaf(jax.device_get(state.params), before.end.params) <= 1e-5


@pytest.mark.slow
def test_the_manifest_says_the_same_of_every_layout(saved):
  """Names, shapes and dtypes: nothing in it depends on where the state lay."""
  found = []
  for name in ("replicated", MANY, "four of fsdp"):
    manifest = read_manifest(saved(name).directory / str(SAVED_AT))
    leaves = manifest.pop("leaves")
    found.append({n: (leaf["shape"], leaf["dtype"]) for n, leaf in leaves.items()})
    assert manifest == {"step": SAVED_AT, "metrics": {}}
  assert found[0] == found[1] == found[2]
