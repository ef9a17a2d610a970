"""Optimizers of models whose layers are stacked: what a config makes of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import config as cfg
from jaxscale import data, optim
from jaxscale.experiment.model import make_model
from jaxscale.experiment.optimizer import make_optimizer
from jaxscale.optim.orthogonalized import MuonState
from jaxscale.optim.tree_paths import path_name
from support.cases import all_slow_except
from support.configs import small_config
from support.optimizers import optimize, optimize64

RATES = dict(lr=0.1, weight_decay=0.1)
OPTIMIZERS = {
  kind.__name__.lower(): kind(**RATES)
  for kind in (cfg.SGD, cfg.LARS, cfg.AdamW, cfg.LAMB, cfg.Muon, cfg.SOAP)
}
OPTIMIZERS["sgd, corrected"] = cfg.SGD(**RATES, nesterov=False, momentum_correction="always")
OPTIMIZERS["larc"] = cfg.LARS(**RATES, variant="larc_clip")
MODELS = {
  "transformer": cfg.Transformer(num_layers=3, width=16, num_heads=4, hidden=24, qk_norm=True),
  "vit": cfg.ViT(patch=4, width=16, num_layers=3, num_heads=2),
}


def config(model, optimizer):
  """Return a config with a model and an optimizer, given as settings or by name."""
  chosen = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
  shown = cfg.Text(sequence_length=8) if model == "transformer" else cfg.Digits()
  return small_config(model=MODELS[model], data=shown, optimizer=chosen, batch_size=8)


@functools.cache
def start(model):
  """Parameters of which none is 0."""
  info = data.TextInfo("words", 60, 8)
  if model == "vit":
    info = data.digits("test").info
  stack = make_model(config(model, "sgd"), info)
  return jax.tree.map(lambda x: x + 0.5, stack.init(jax.random.key(0)))


def made(model, optimizer):
  tx = make_optimizer(config(model, optimizer), lambda step: 0.1, 0, None)
  return tx._replace(update=jax.jit(tx.update))


@pytest.mark.parametrize("model", all_slow_except(MODELS, "transformer"))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_scales_and_biases_of_stacked_layers_do_not_decay(model, optimizer):
  params = start(model)
  still = jax.tree.map(jnp.zeros_like, params)
  (_, after), _ = optimize(made(model, optimizer), params, [still, still])
  before, leaves = jax.tree.leaves_with_path(params), jax.tree.leaves(after)
  stay, decay = set(), set()
  for (path, w), new in zip(before, leaves, strict=True):
    stays, name = np.array_equal(w, new), path_name(path)
    (stay if stays else decay).add(name)
    if not stays:
      np.testing.assert_allclose(new / w, (new / w).ravel()[0], rtol=1e-5)
      assert 0.5 < (new / w).ravel()[0] < 0.999
  kernels = {name for name in stay | decay if name.endswith(("kernel", "/table"))}
  assert decay == kernels | ({"embed/position"} if model == "vit" else set())
  assert "layers/attn_norm/scale" in stay and "head/norm/scale" in stay


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "soap"])
def test_included_parameters_decay_and_no_others(name):
  params = start("vit")
  still = jax.tree.map(jnp.zeros_like, params)

  def decayed(include):
    chosen = dataclasses.replace(OPTIMIZERS[name], include=include)
    tx = make_optimizer(config("vit", chosen), lambda step: 0.1)
    updates, _ = jax.jit(tx.update)(still, tx.init(params), params)
    return {path_name(p) for p, u in jax.tree.leaves_with_path(updates) if u.any()}

  kernels = decayed("kernels")
  assert "embed/position" in kernels and "layers/q/kernel" in kernels
  assert decayed("timm") == kernels - {"embed/position"}
  assert decayed("^layers/.*kernel$") == {n for n in kernels if n[:6] == "layers"}
  everything = {path_name(p) for p, _ in jax.tree.leaves_with_path(params)}
  assert decayed("all") == (kernels if name in ("muon", "soap") else everything)


def test_the_rate_of_what_adamw_moves():
  """Muon.adam_lr is its peak where Muon's is lr; both follow one schedule."""
  chosen = dataclasses.replace(OPTIMIZERS["muon"], weight_decay=0.0)
  params = start("transformer")
  moved = {}
  for adam_lr in (None, 0.3):
    of = config("transformer", dataclasses.replace(chosen, adam_lr=adam_lr))
    tx = make_optimizer(of, lambda step: 0.05)
    moved[adam_lr], _ = jax.jit(tx.update)(params, tx.init(params), params)
  same, own = moved[None], moved[0.3]
  np.testing.assert_allclose(own["embed"]["table"], 3 * same["embed"]["table"], 1e-5)
  of_muon, as_before = (tree["layers"]["q"]["kernel"] for tree in (own, same))
  np.testing.assert_array_equal(of_muon, as_before)


STACKED = optim.matching("^scan/")
LARS = dict(weight_decay=0.1, trust_coefficient=0.05)
VARIANTS = ("paper", "optax", "larc_clip", "tf_contrib")
EACH = {
  **{f"lars {v}": functools.partial(optim.lars, variant=v, **LARS) for v in VARIANTS},
  "lamb": optim.lamb,
  "muon": optim.muon,
  "soap": functools.partial(optim.soap, precondition_frequency=2),
  "sgd": functools.partial(optim.sgd, weight_decay=0.3),
  "adamw": functools.partial(optim.adamw, weight_decay=0.3),
}


@pytest.mark.parametrize("name", EACH)
def test_stacked_layers_move_as_each_would(name):
  """Each layer moves as a leaf of its own; stacked biases are still biases."""
  sizes = np.array([1.0, 100.0, 1e-3])[:, None, None]  # far from one ratio for all
  params, *grads = (
    {"scan": {"kernel": rng.normal(size=(3, 4, 5)) * sizes, "bias": rng.normal(size=(3, 4))}}
    for rng in map(np.random.default_rng, range(4))
  )
  make = EACH[name]
  together = optimize64(make(0.1, stacked=STACKED), params, grads)["scan"]
  for i in range(3):
    one, *each = jax.tree.map(lambda x, i=i: x[i], [params, *grads])
    for leaf, w in optimize64(make(0.1), one, each)["scan"].items():
      np.testing.assert_allclose(together[leaf][i], w, rtol=1e-9)
  ratios = optim.trust_ratios(make(0.1, stacked=STACKED).init(jnp_tree(params)))
  has_ratios = name.startswith(("lars", "lamb"))
  shapes = {path: ratio.shape for path, ratio in ratios.items()}
  assert shapes == ({"scan/kernel": (3,)} if has_ratios else {})


def jnp_tree(tree):
  return jax.tree.map(lambda x: jnp.array(x, jnp.float32), tree)


def muon_part(params):
  """Return the parameters that have velocities of the config's Muon."""
  tx = make_optimizer(config("transformer", "muon"), lambda step: 0.1, 0, None)
  is_muon = lambda node: isinstance(node, MuonState)  # noqa: E731
  found = jax.tree.leaves(tx.init(params), is_leaf=is_muon)
  (state,) = (node for node in found if is_muon(node))
  return {path_name(path) for path, _ in jax.tree.leaves_with_path(state.mu)}


@pytest.mark.parametrize("model", MODELS)
def test_muon_has_the_layers_and_nothing_outside(model):
  names = {path_name(p) for p, _ in jax.tree.leaves_with_path(start(model))}
  inside = {n for n in names if n.startswith("layers/") and n.endswith("kernel")}
  assert len(inside) >= 6 and muon_part(start(model)) == inside


def test_embeddings_and_head_move_by_adamw():
  """With Nesterov's look-ahead, as Muon's own part, and with decay."""
  params = start("transformer")
  rngs = map(np.random.default_rng, (1, 2))
  draw = lambda x, rng: rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
  grads = [jax.tree.map(functools.partial(draw, rng=rng), params) for rng in rngs]
  found = optimize64(made("transformer", "muon"), params, grads)
  adam = optax.adamw(0.1, weight_decay=0.1, nesterov=True)
  with jax.numpy_dtype_promotion("standard"):
    wanted = optimize64(adam, params, grads)
  for part, name in (("embed", "table"), ("head", "kernel")):
    np.testing.assert_allclose(found[part][name], wanted[part][name], rtol=1e-5)
  apart = found["layers"]["q"]["kernel"] - wanted["layers"]["q"]["kernel"]
  assert np.abs(apart).max() > 1e-2


def test_without_a_rule_muon_has_every_kernel():
  """A model of convolutions has no rule: its optimizer is as it was."""
  tx = make_optimizer(small_config(optimizer=OPTIMIZERS["muon"]), lambda step: 0.1, 0, None)
  params = {"head": {"kernel": jnp.ones((4, 4))}, "bias": jnp.ones(4)}
  one = optim.muon(0.1, weight_decay=0.1)
  (found,), _ = optimize(tx, params, [params])
  (wanted,), _ = optimize(one, params, [params])
  jax.tree.map(np.testing.assert_array_equal, found, wanted)
