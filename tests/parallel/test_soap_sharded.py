"""SOAP under layouts: equal to one device, no collective inside, checkpoints of other layouts."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import hlo, optim
from jaxscale.checkpoint import checksum
from jaxscale.checkpoint.reshard import dealt_before
from jaxscale.exchange import plain
from jaxscale.optim.matrices import dealt_by, saved_rows
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel import placement, stack_loss
from jaxscale.parallel.deal import make_dealer
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.run.fit import fit
from jaxscale.training.state import abstract_state
from support.cases import all_slow_except
from support.configs import small_config
from support.leaves import assert_like
from support.saving import restore, save
from support.stack_layouts import stack_layout
from support.steps import training
from support.tiny_stack import batch
from support.trees import relative_distance, worst_leaf

PARAMETERS = {"shard": "fsdp"}
LAYOUTS = {
  "replicated": (8, {"replica": 2, "data": 4}, {}),
  "zero-1": (8, {"data": 1, "fsdp": 8}, {"shard": "zero1"}),
  "zero-2": (8, {"data": 1, "fsdp": 8}, {"shard": "zero2"}),
  "fsdp": (8, {"data": 1, "fsdp": 8}, PARAMETERS),
  "replica x fsdp": (8, {"replica": 2, "data": 1, "fsdp": 4}, PARAMETERS),
  "data x fsdp x model": (8, {"data": 2, "fsdp": 2, "model": 2}, PARAMETERS),
  "data x stage": (8, {"data": 2, "stage": 4}, {}),
  "four of fsdp": (4, {"data": 1, "fsdp": 4}, PARAMETERS),
  "one": (1, {}, {}),
}
STACKED, OUTER = optim.matching("^layers/"), optim.matching("^(embed|head)/")
SOAP = optim.soap(3e-3, precondition_frequency=3, stacked=STACKED, by_adam=OUTER)
EVERYWHERE = optim.soap(3e-3, precondition_frequency=4, max_precond_dim=16, stacked=STACKED)
STEPS = 10


@functools.cache
def gradients():
  """Return the parameters and gradients of ten steps, without a null space in any mean."""
  _, stack, _ = stack_layout({}, count=1)
  params = jax.device_get(stack.init(jax.random.key(0)))
  rng = np.random.default_rng(0)
  draw = lambda x: rng.standard_normal(x.shape, np.float32)  # noqa: E731
  return params, [jax.tree.map(draw, params) for _ in range(STEPS)]


@functools.cache
def trained(name, everywhere):
  """Return the parameters after ten steps of SOAP on given gradients under a layout."""
  count, sizes, options = LAYOUTS[name]
  _, _, layout = stack_layout(sizes, options, count=count)
  tx = EVERYWHERE if everywhere else SOAP
  where = placement.shardings(layout, layout.opt_specs)

  def step(params, grads, state):
    with dealt_by(make_dealer(layout)):
      updates, state = tx.update(grads, state, params)
    return jax.tree.map(lambda w, u: w + u, params, updates), state

  params, grads = gradients()
  params = jax.device_put(params, where)
  shardings = placement.opt_state_shardings(layout, tx)
  init = functools.partial(placement.init_opt_state, layout, tx)
  state = jax.jit(init, out_shardings=shardings)(params)
  update = jax.jit(step, out_shardings=(where, shardings))
  for g in grads:
    params, state = update(params, jax.device_put(g, where), state)
  return jax.device_get(params)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", all_slow_except(LAYOUTS, "fsdp", "data x fsdp x model"))
def test_equal_gradients_move_parameters_as_on_one_device(name, everywhere):
  found, wanted = trained(name, everywhere), trained("one", everywhere)
  assert relative_distance(found, wanted) <= 1e-6 and worst_leaf(found, wanted) <= 2e-6


@functools.cache
def parts(name):
  """Return a layout's abstract state, initial state and step."""
  count, sizes, options = LAYOUTS[name]
  mesh, stack, layout = stack_layout(sizes, options, count=count)
  init = lambda key: (stack.init(key), {})  # noqa: E731
  arguments = init, SOAP, mesh, plain(exchange_axes(layout))
  state, step = training(stack_loss(stack, layout), *arguments, layout=layout, seed=1)
  abstract = abstract_state(*arguments, layout=layout)
  return SimpleNamespace(mesh=mesh, abstract=abstract, state=state, step=step)


def train(name, state, steps):
  made, losses = parts(name), []
  for _ in range(steps):
    state, metrics = made.step(state, batch(int(state.step), made.mesh))
    losses.append(metrics["loss"].item())
  return state, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  @functools.cache
  def of(name):
    directory = tmp_path_factory.mktemp("saved")
    state, _ = train(name, jax.tree.map(lambda x: x.copy(), parts(name).state), 5)
    save(directory, state)
    whole = by_name(state)
    state, losses = train(name, state, 5)
    return SimpleNamespace(
      directory=directory, whole=whole, losses=losses, end=jax.device_get(state)
    )

  return of


def by_name(state):
  """Return the arrays of every matrix in the optimizer state, by their path and its name."""
  leaves = {path_name(p): x for p, x in jax.tree.leaves_with_path(jax.device_get(state))}
  found = {}
  for path, names in saved_rows(state).items():
    for leaf, x in leaves.items():
      if leaf.startswith(f"{path}/"):
        assert len(x) == len(names)
        assert not any(x[i].any() for i, name in enumerate(names) if not name)
        found |= {(leaf, name): x[i] for i, name in enumerate(names) if name}
  return found


TRAINED = [n for n in LAYOUTS if n != "data x stage"]  # Its loss is another function.
PAIRS = [f"{a} -> {b}" for a in TRAINED for b in TRAINED]
QUICK = "fsdp -> fsdp", "fsdp -> data x fsdp x model", "data x fsdp x model -> one"


@pytest.mark.parametrize("pair", all_slow_except(PAIRS, *QUICK))
def test_any_layout_resumes_from_any_other(pair, saved):
  there, here = pair.split(" -> ")
  before = saved(there)
  state = restore(before.directory, parts(here).abstract)
  assert_like(state, parts(here).abstract)
  found = by_name(state)
  assert found.keys() == before.whole.keys() and len(found) >= 24 * 6
  jax.tree.map(np.testing.assert_array_equal, found, before.whole)
  state, losses = train(here, state, 5)
  if here == there:
    assert losses == before.losses
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before.end)
  np.testing.assert_allclose(losses, before.losses, rtol=1e-4)


def test_rows_in_another_order_are_verified(saved):
  """The checksum of the saved order fits rows in a new order, and no other."""
  before, here = saved("fsdp"), parts("one").abstract
  state = restore(before.directory, here)
  (manifest,) = before.directory.glob("*/manifest.json")
  content = json.loads(manifest.read_text())
  rows, shapes = dealt_before(content, here)
  assert rows and all(-1 not in order for order in rows.values())
  checksum.verify(state, content["leaves"], shapes, rows)
  name = next(iter(rows))
  swapped = rows | {name: [rows[name][1], rows[name][0], *rows[name][2:]]}
  with pytest.raises(checksum.DamagedError, match=name):
    checksum.verify(state, content["leaves"], shapes, swapped)


def test_a_step_sends_two_all_to_alls_more_than_adamw():
  """AdamW's bytes and at most 2 P / N; nothing inside QR and eigh."""
  count, sizes, options = LAYOUTS["fsdp"]
  mesh, stack, layout = stack_layout(sizes, options, count=count)
  found = {}
  for name, tx in {"adamw": optim.adamw(1e-3, stacked=STACKED), "soap": SOAP}.items():
    init = lambda key: (stack.init(key), {})  # noqa: E731
    arguments = stack_loss(stack, layout), init, tx, mesh, plain(exchange_axes(layout))
    state, step = training(*arguments, layout=layout)
    text = step.lower(state, batch(0, mesh)).compile().as_text()
    found[name] = hlo.collectives(text, mesh)
  sent = {name: sum(c.times * c.wire_bytes for c in of) for name, of in found.items()}
  size = sum(4 * x.size for x in jax.tree.leaves(layout.shapes))
  assert sent["adamw"] < sent["soap"] <= sent["adamw"] + 2 * size / 8
  kinds = {name: [c.kind for c in of if c.payload_bytes > 64] for name, of in found.items()}
  assert sorted(kinds["soap"]) == sorted([*kinds["adamw"], "all-to-all", "all-to-all"])


def test_workers_of_diloco_have_soap_inside(tmp_path):
  sync = cfg.DiLoCo(sync_every_steps=2)
  config = small_config(optimizer=cfg.SOAP(lr=1e-2, precondition_frequency=2), sync=sync)
  config = dataclasses.replace(config, epochs=None, steps=6, mesh=cfg.Mesh(data=8))
  result = fit(config, tmp_path)
  assert int(result.state.step) == 6 and np.isfinite(result.summary["loss"])
