"""A checkpoint of any layout is one of every other, on any number of devices."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale import optim
from jaxscale.checkpoint import checksum
from jaxscale.exchange import plain
from jaxscale.models.stack import split_of_last
from jaxscale.parallel import Rule, gpipe_grads, stack_loss
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.training.state import abstract_state
from support.cases import all_slow_except
from support.leaves import assert_like
from support.saving import filled, restore, save
from support.stack_layouts import stack_layout
from support.steps import training
from support.tiny_stack import RULES, batch
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
QUICK = f"replicated -> {MANY}", "replicated -> one"


IS_STACKED, IS_OUTER = optim.matching("^layers/"), optim.matching("^(embed|head)/")
OPTIMIZERS = {
  "adamw": optim.adamw(1e-2),
  "muon": optim.muon(1e-3, stacked=IS_STACKED, by_adam=IS_OUTER),
}


@functools.cache
def parts(name, optimizer="adamw"):
  """Return a layout's abstract state, initial state and step."""
  count, sizes, options = LAYOUTS[name]
  mesh, stack, layout = stack_layout(sizes, options, count=count)
  piped = "stage" in mesh.axis_names
  loss = gpipe_grads(stack, layout) if piped else stack_loss(stack, layout)
  init = lambda key: (stack.init(key), {})  # noqa: E731
  arguments = init, OPTIMIZERS[optimizer], mesh, plain(exchange_axes(layout))
  options = dict(ema_decay=0.9, num_microbatches=2 if piped else 1)
  state, step = training(loss, *arguments, layout=layout, seed=1, **options)
  abstract = abstract_state(*arguments, layout=layout, average=True)
  return SimpleNamespace(mesh=mesh, abstract=abstract, state=state, step=step)


def train(name, state, steps, optimizer="adamw"):
  """Return the state after some more steps, and their losses; the input state is donated."""
  made, losses = parts(name, optimizer), []
  for _ in range(steps):
    state, metrics = made.step(state, batch(int(state.step), made.mesh))
    losses.append(metrics["loss"].item())
  return state, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  @functools.cache
  def of(name):
    directory = tmp_path_factory.mktemp("saved")
    state = jax.tree.map(lambda x: x.copy(), parts(name).state)
    state, _ = train(name, state, SAVED_AT)
    save(directory, state)
    leaves = checksum.manifest(state)
    state, losses = train(name, state, STEPS - SAVED_AT)
    end = jax.device_get(state)
    return SimpleNamespace(directory=directory, leaves=leaves, losses=losses, end=end)

  return of


PAIRS = [f"{a} -> {b}" for a in LAYOUTS for b in LAYOUTS]


@pytest.mark.parametrize("pair", all_slow_except(PAIRS, *QUICK))
def test_any_layout_resumes_from_any_other(pair, saved):
  there, here = pair.split(" -> ")
  before = saved(there)
  state = restore(before.directory, parts(here).abstract)
  assert_like(state, parts(here).abstract)
  assert checksum.manifest(state) == before.leaves
  state, losses = train(here, state, STEPS - SAVED_AT)
  if here == there:
    assert losses == before.losses
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before.end)
  np.testing.assert_allclose(losses, before.losses, rtol=1e-6)
  assert worst_leaf(jax.device_get(state.params), before.end.params) <= 1e-5


@pytest.mark.parametrize(
  "here", [MANY, *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS)]
)
def test_muon_resumes_under_any_layout(here, tmp_path):
  """Its matrices are dealt out differently, but its state is that of the parameters."""
  state, _ = train("fsdp", jax.tree.map(jnp.copy, parts("fsdp", "muon").state), SAVED_AT, "muon")
  save(tmp_path, state)
  resumed = restore(tmp_path, parts(here, "muon").abstract)
  state, losses = train("fsdp", state, STEPS - SAVED_AT, "muon")
  resumed, found = train(here, resumed, STEPS - SAVED_AT, "muon")
  np.testing.assert_allclose(found, losses, rtol=1e-6)
  params = (jax.device_get(x.params) for x in (resumed, state))
  assert worst_leaf(*params) <= (0 if here == "fsdp" else 2e-6)


def test_a_checkpoint_of_other_rules_is_restored(tmp_path):
  """Split `o` and `down` by their last dim, as before 2026-11-27, and restore by the first."""

  def abstract(rules):
    mesh, stack, layout = stack_layout({"data": 1, "fsdp": 8}, PARAMETERS, rules=rules)
    init = lambda key: (stack.init(key), {})  # noqa: E731
    exchange = plain(exchange_axes(layout))
    return abstract_state(init, optim.adamw(1e-2), mesh, exchange, layout=layout)

  rule = Rule("layers/(o|down)", split_of_last)
  before, after = (abstract((*RULES[:2], r, *RULES[3:])) for r in (RULES[2], rule))
  specs = [x.params["layers"]["down"].sharding.spec for x in (before, after)]
  assert specs == [P(None, None, "fsdp"), P(None, "fsdp", None)]
  state = filled(before)
  save(tmp_path, state)
  found = restore(tmp_path, after)
  assert_like(found, after)
  assert checksum.manifest(found) == checksum.manifest(state)
