"""Optimizers under every layout, against one device and against Muon on whole matrices in numpy."""

import functools

import jax
import numpy as np
import optax
import pytest

from jaxscale import hlo, optim
from jaxscale.config.loading import load_config
from jaxscale.experiment import build
from jaxscale.optim.matrices import dealt_by
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel import placement
from jaxscale.parallel.deal import make_dealer
from support.dealt import MESHES, STACKED, layout_of, numbers, put
from support.trees import worst_leaf

STEPS, SAVED_AT = 10, 5
TORCH = {"variant": "torch", "adjust": "original", "nesterov": False, "adam_rate_factor": 0.5}
OPTIMIZERS = {
  "sgd": optim.sgd(0.01, momentum=0.9, weight_decay=1e-3, stacked=STACKED),
  "lars": optim.lars(0.05, trust_coefficient=0.05, stacked=STACKED),
  "lamb": optim.lamb(3e-3, stacked=STACKED),
  "adamw": optim.adamw(1e-3, weight_decay=1e-2, stacked=STACKED),
  "muon": optim.muon(1e-2, weight_decay=1e-2, stacked=STACKED, by_adam=optim.matching("^head")),
  "muon of torch": optim.muon(1e-2, **TORCH, stacked=STACKED),
}


@functools.cache
def updater(optimizer, mesh):
  """Return (step, init) of an optimizer under a layout, both jitted."""
  layout, tx = layout_of(mesh), OPTIMIZERS[optimizer]
  states = placement.opt_state_shardings(layout, tx)

  @functools.partial(jax.jit, out_shardings=(placement.shardings(layout, layout.opt_specs), states))
  def step(params, state, grads):
    with dealt_by(make_dealer(layout)):
      updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  init = jax.jit(functools.partial(placement.init_opt_state, layout, tx), out_shardings=states)
  return layout, step, init, states


def run(optimizer, mesh, resumed_on=None):
  """Return the parameters after ten steps; half of them may be under another layout."""
  layout, step, init, _ = updater(optimizer, mesh)
  params = put(numbers(layout, 0), layout)
  state = init(params)
  for i in range(STEPS):
    if resumed_on and i == SAVED_AT:
      layout, step, _, states = updater(optimizer, resumed_on)
      params = put(jax.device_get(params), layout)
      state = jax.device_put(jax.device_get(state), states)
    grads = put(numbers(layout, 1 + i), layout)
    params, state = step(params, state, grads)
  return jax.device_get(params)


@functools.cache
def one_device(optimizer):
  return run(optimizer, "one device")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "one device"])
def test_every_layout_updates_as_one_device(mesh, optimizer):
  assert worst_leaf(run(optimizer, mesh), one_device(optimizer)) <= 1e-6


@pytest.mark.parametrize(
  "pair", ["fsdp -> data x fsdp x stage", "fsdp x model -> one device", "data -> replica x fsdp"]
)
@pytest.mark.parametrize("optimizer", ["lamb", "muon", "muon of torch"])
def test_a_state_resumes_under_another_layout(pair, optimizer):
  before, after = pair.split(" -> ")
  assert worst_leaf(run(optimizer, before, after), one_device(optimizer)) <= 1e-6


def orthogonalized(u, torch):
  """Return Newton and Schulz's iteration of one whole matrix, in float64."""
  norm = np.linalg.norm(u)
  x = u / (max(norm, 1e-7) if torch else norm + 1e-8)
  a, b, c = 3.4445, -4.7750, 2.0315
  for _ in range(5):
    s = x @ x.T
    x = a * x + (b * s + c * s @ s) @ x
  return x


def slow_muon(torch):
  """Return the parameters after ten steps of Muon, matrix after matrix, in float64 numpy."""
  layout = layout_of("one device")
  result = {}
  grads_of = [jax.tree.leaves(numbers(layout, 1 + i)) for i in range(STEPS)]
  for index, (path, w) in enumerate(jax.tree.leaves_with_path(numbers(layout, 0))):
    name, leaf = path_name(path), w.astype(np.float64)
    if not torch and name == "head":
      continue  # of Adam
    flat = leaf.reshape(len(leaf) if name != "head" else 1, -1, leaf.shape[-1])
    v = np.zeros_like(flat)
    for t in range(1, STEPS + 1):
      g = grads_of[t - 1][index].astype(np.float64).reshape(flat.shape)
      v = 0.95 * v + 0.05 * g
      u = v if torch else 0.95 * v / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
      n, m = flat.shape[1:]
      size = max(1, m / n) ** 0.5 if torch else 0.2 * max(n, m) ** 0.5
      moved = np.stack([size * orthogonalized(x, torch) for x in u])
      flat = flat - 0.01 * (moved + (0.0 if torch else 0.01) * flat)
    result[name] = flat.reshape(leaf.shape)
  return result


@pytest.mark.parametrize("optimizer", ["muon", "muon of torch"])
@pytest.mark.parametrize("mesh", ["one device", "fsdp x model", "data x fsdp x stage", "data"])
def test_muon_is_that_of_whole_matrices_in_float64(mesh, optimizer):
  found = jax.tree.leaves_with_path(run(optimizer, mesh))
  found = {path_name(path): x for path, x in found}
  for name, expected in slow_muon("torch" in optimizer).items():
    distance = np.linalg.norm(found[name] - expected) / np.linalg.norm(expected)
    assert distance <= 1e-6, name


LAYOUTS = {
  "fsdp": {"mesh.data": "1", "mesh.fsdp": "8", "layout.shard": "fsdp"},
  "zero1": {"mesh.data": "1", "mesh.fsdp": "8", "layout.shard": "zero1"},
  "replica x fsdp": {"mesh.replica": "2", "mesh.data": "1", "mesh.fsdp": "4"},
  "data": {"mesh.data": "8"},
  "fsdp x model": {"mesh.data": "1", "mesh.fsdp": "2", "mesh.model": "4"},
  "fsdp x stage": {"mesh.data": "1", "mesh.fsdp": "4", "mesh.stage": "2"},
}
LAYOUTS["replica x fsdp"]["layout.shard"] = LAYOUTS["fsdp x model"]["layout.shard"] = "fsdp"
LAYOUTS["fsdp x stage"] |= {"layout.shard": "fsdp", "accumulate_steps": "2"}
SPLIT = {
  "fsdp": 8,
  "zero1": 8,
  "replica x fsdp": 4,
  "data": 1,
  "fsdp x model": 8,
  "fsdp x stage": 8,
}
# Elements of the matrices of configs/text.py: 16 of attention, 12 of MLPs.
MATRICES = 16 * 128 * 128 + 12 * 128 * 384


@functools.cache
def sent(optimizer, layout):
  """Return the bytes that a device sends in a step of configs/text.py, and calls by kind."""
  config = load_config("configs/text.py", {"optimizer": optimizer} | LAYOUTS[layout])
  experiment = build.experiment(config, datasets=config.data.abstract(config.batch_size))
  compiled = experiment.lower_train_step(experiment.abstract_state()).compile()
  calls, total = {}, 0
  for c in hlo.collectives(compiled, experiment.mesh):
    if c.wire_bytes:
      calls[c.kind] = calls.get(c.kind, 0) + c.times
      total += c.times * c.wire_bytes
  return total, calls


def test_muon_sends_its_matrices_once_each_way():
  """Nothing is gathered in Newton and Schulz's iteration (46.1 MB and 90 gathers before)."""
  (before, calls), (total, more) = sent("AdamW", "fsdp"), sent("Muon", "fsdp")
  assert more == calls | {"all-to-all": 2}
  assert before < 9.5e6 and total <= 10.3e6


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_sends_at_most_twice_its_matrices_more(layout):
  assert sent("Muon", layout)[0] - sent("AdamW", layout)[0] <= 2 * 4 * MATRICES / SPLIT[layout]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
def test_trust_ratios_send_only_norms(layout, optimizer):
  """A ratio needs two norms and their scales, of 4 bytes each, of at most 70 layers' arrays."""
  assert sent(optimizer, layout)[0] - sent("AdamW", layout)[0] <= 70 * 4 * 4 * 2
