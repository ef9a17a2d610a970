"""muP and CompleteP: tables by hand, coordinate checks, one step in float64, refusals."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from jaxscale import config as cfg
from jaxscale import data, optim
from jaxscale.errors import ConfigError
from jaxscale.experiment import build
from jaxscale.experiment.model import as_functions, make_model, parametrized
from jaxscale.experiment.optimizer import make_optimizer
from jaxscale.models.stack import stack_logits
from jaxscale.optim.tree_paths import path_name
from support.configs import small_config

TEXT = data.TextInfo("words", 60, 8)
BASE = {"width": 16, "num_layers": 2, "hidden": 32}


def transformer(width, num_layers, **fields):
  sizes = dict(width=width, num_layers=num_layers, hidden=2 * width, num_heads=4)
  return cfg.Transformer(**sizes, **fields)


def text_config(width, num_layers, parametrization, optimizer=None, clip_norm=None, **fields):
  optimizer = optimizer or cfg.AdamW(lr=0.01, weight_decay=0.1)
  model, words = transformer(width, num_layers, **fields), cfg.Text(sequence_length=8)
  parts = dict(model=model, data=words, optimizer=optimizer, clip_norm=clip_norm)
  return small_config(parametrization=parametrization, **parts)


def model_and_factors(config, info=TEXT):
  return parametrized(config, info, make_model(config, info))


def factors_of(config, info=TEXT):
  return model_and_factors(config, info)[1]


def leaves_of(tree):
  return {path_name(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


# Width 16 -> 64, depth 2 -> 8, heads of 4 -> 16: m = L = 4, and the scale of queries is 1/2.
# (kind, init, rate, decay, eps) of stored values, from table 1 of arXiv:2505.01618 by hand.
TABLE = {
  "embed/table": ("input", 1, 1, 1, 1),
  "layers/q/kernel": ("hidden", 1 / 4, 1 / 8, 8, 1 / 8),
  "layers/k/kernel": ("hidden", 1 / 2, 1 / 4, 4, 1 / 16),
  "layers/v/kernel": ("hidden", 1 / 2, 1 / 4, 4, 1 / 16),
  "layers/o/kernel": ("hidden", 1 / 8, 1 / 16, 16, 1 / 4),
  "layers/gate/kernel": ("hidden", 1 / 2, 1 / 4, 4, 1 / 16),
  "layers/up/kernel": ("hidden", 1 / 2, 1 / 4, 4, 1 / 16),
  "layers/down/kernel": ("hidden", 1 / 8, 1 / 16, 16, 1 / 4),
  "layers/attn_norm/scale": ("vector", 1, 1, 1, 1 / 16),
  "layers/mlp_norm/scale": ("vector", 1, 1, 1, 1 / 16),
  "head/norm/scale": ("vector", 1, 1, 1, 1),
  "head/kernel": ("output", 1 / 4, 1 / 4, 4, 4),
}


def table(config, info=TEXT, rule="adam"):
  factors = factors_of(config, info)
  return {path: (f.kind, *np.round(f.stored(rule), 9)) for path, f in factors.items()}


def test_complete_p_has_the_table_of_the_paper():
  assert table(text_config(64, 8, cfg.CompleteP(base=BASE))) == TABLE


def test_mup_has_no_terms_of_the_depth():
  wide = table(text_config(64, 8, cfg.MuP(base=BASE)))
  flat = table(text_config(64, 2, cfg.CompleteP(base=BASE)))
  assert wide == flat
  assert wide["layers/o/kernel"] == ("hidden", 1 / 2, 1 / 4, 4, 1 / 4)


def test_alpha_one_half_raises_no_decay_with_the_depth():
  found = table(text_config(64, 8, cfg.CompleteP(base=BASE, alpha=0.5)))
  assert found["layers/k/kernel"] == ("hidden", 1 / 2, 1 / 8, 4, 1 / 8)
  assert found["layers/o/kernel"] == ("hidden", 1 / 4, 1 / 16, 8, 1 / 4)
  assert found["layers/attn_norm/scale"] == ("vector", 1, 1 / 2, 1, 1 / 2 / 4)


def test_a_tied_head_has_its_multiplier_in_the_norm():
  found = table(text_config(64, 2, cfg.MuP(base=BASE), tied=True))
  assert found["embed/table"] == ("input", 1, 1, 1, 1)
  assert found["head/norm/scale"] == ("vector", 1 / 4, 1 / 4, 4, 4)


def test_normalized_queries_have_the_scale_of_attention_in_their_norm():
  found = table(text_config(64, 2, cfg.MuP(base=BASE), qk_norm=True))
  assert found["layers/q/kernel"] == found["layers/k/kernel"]
  assert found["layers/q_norm/scale"] == ("vector", 1 / 2, 1 / 2, 2, 1 / 2)
  assert found["layers/k_norm/scale"] == ("vector", 1, 1, 1, 1 / 4)


@pytest.mark.parametrize(("adjust", "rate"), [("original", 1), ("match_rms_adamw", 1 / 2)])
def test_muon_keeps_the_spectral_norm_of_updates(adjust, rate):
  muon = cfg.Muon(lr=0.01, adjust=adjust)
  found = table(text_config(64, 8, cfg.CompleteP(base=BASE), muon))
  assert found["layers/k/kernel"] == ("hidden", 1 / 2, rate, 1 / rate, 1 / 16)
  assert found["layers/o/kernel"] == ("hidden", 1 / 8, rate / 4, 4 / rate, 1 / 4)
  assert {path: found[path] for path in TABLE if path[:4] in "embehead"} == {
    path: row for path, row in TABLE.items() if path[:4] in "embehead"
  }


def test_sgd_has_the_rates_of_the_package_mup():
  found = table(text_config(64, 2, cfg.MuP(base=BASE), cfg.SGD(lr=0.1)), rule="sgd")
  assert found["embed/table"][1:4] == (1, 4, 1 / 4)
  assert found["layers/k/kernel"][1:4] == (1 / 2, 1, 1)
  assert found["head/norm/scale"][1:4] == (1, 4, 1 / 4)
  # MuSGD multiplies the rate by m, and the forward pass by 1 / m: stored values get m / m^2.
  assert found["head/kernel"][1:4] == (1 / 4, 1 / 4, 4)


def test_vit_scales_its_own_initialization_once():
  vit = cfg.ViT(patch=4, width=64, num_layers=4, num_heads=4)
  wide = small_config(model=vit, optimizer=cfg.AdamW(lr=0.01))
  wide = dataclasses.replace(
    wide, parametrization=cfg.CompleteP(base={"width": 16, "num_layers": 2})
  )
  info = data.digits("test").info
  found = table(wide, info)
  assert found["embed/patch/kernel"] == found["embed/position"] == ("input", 1, 1, 1, 1)
  assert found["layers/o/kernel"] == ("hidden", 1 / 4, 1 / 8, 8, 1 / 4)
  assert found["layers/o/bias"] == ("vector", 1 / 2, 1 / 2, 2, 1 / 4)
  assert found["head/kernel"] == ("output", 1 / 4, 1 / 4, 4, 4)
  assert found["head/bias"] == ("fixed", 1, 1, 1, 1)
  started = leaves_of(model_and_factors(wide, info)[0].init(jax.random.key(0)))
  # Glorot's rule has the factor 1/2 itself.
  bound = np.sqrt(6 / (64 + 64))
  np.testing.assert_allclose(np.std(started["layers/k/kernel"]) * 3**0.5, bound, rtol=0.05)


def rms(x):
  return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


@pytest.mark.parametrize("tied", [False, True])
def test_initial_values_are_those_of_the_base_times_the_factors(tied):
  config = text_config(64, 8, cfg.CompleteP(base=BASE), tied=tied)
  small = text_config(16, 2, cfg.Standard(), tied=tied)
  key = jax.random.key(3)
  found, base = (leaves_of(model_and_factors(c)[0].init(key)) for c in (config, small))
  for path, factors in factors_of(config).items():
    np.testing.assert_allclose(rms(found[path]), rms(base[path]) * factors.stored()[0], rtol=1e-5)


def test_nothing_changes_at_the_sizes_of_the_base():
  config = text_config(16, 2, cfg.CompleteP(base=BASE))
  plain = dataclasses.replace(config, parametrization=cfg.Standard())
  key = jax.random.key(3)
  models = [model_and_factors(c)[0] for c in (config, plain)]
  for a, b in zip(*(jax.tree.leaves(m.init(key)) for m in models), strict=True):
    np.testing.assert_array_equal(a, b)
  assert all(f.stored() == (1, 1, 1, 1) for f in factors_of(config).values())


def test_one_step_of_adamw_is_that_of_multipliers_in_the_forward_pass():
  """In float64: parameters v with the multipliers c in the forward pass, w = c v."""
  config = text_config(64, 8, cfg.CompleteP(base=BASE), clip_norm=0.5)
  model, factors = model_and_factors(config)
  params = as_functions(model).init(jax.random.key(0))[0]
  rng = np.random.default_rng(0)
  grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 1e-3, params)
  tx = make_optimizer(config, lambda step: 0.01, 0, None, factors)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  found, raw, w = leaves_of(updates), leaves_of(grads), leaves_of(params)
  inner = {path: g.astype(float) * factors[path].multiplier for path, g in raw.items()}
  norm = np.sqrt(sum(np.sum(g * g) for g in inner.values()))
  for path, f in factors.items():
    g, v = inner[path] * min(1, 0.5 / norm), w[path] / f.multiplier
    step = g / (np.abs(g) + 1e-8 * f.eps)
    step += 0.1 * f.decay * v * (not path.endswith("scale"))
    wanted = -0.01 * f.rate * step * f.multiplier
    np.testing.assert_allclose(found[path], wanted, rtol=2e-5, atol=1e-9)


def coordinates(width, depth, parametrization, steps=4, lr=0.02, optimizer=None):
  """Return the mean sizes of the last hidden state's change and of the logits after steps."""
  optimizer = optimizer or cfg.AdamW(lr=lr, weight_decay=0.0)
  config = text_config(width, depth, parametrization, optimizer)
  stack, factors = model_and_factors(config)
  params = stack.init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (8, 9), 0, 60)
  batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
  tx = make_optimizer(config, lambda step: lr, 0, None, factors)

  def loss(params):
    logits = stack_logits(stack, params, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

  @jax.jit
  def step(params, state):
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  before, state = stack_logits(stack, params, batch), tx.init(params)
  for _ in range(steps):
    params, state = step(params, state)
  return rms(stack_logits(stack, params, batch) - before)


OF_MUON = cfg.Muon(lr=0.02)


@pytest.mark.parametrize("optimizer", [None, OF_MUON], ids=["adamw", "muon"])
def test_changes_of_the_outputs_do_not_depend_on_width_and_depth(optimizer):
  sizes = [(16, 2), (64, 2), (64, 8)]
  base = cfg.CompleteP(base=BASE)
  scaled = [coordinates(*size, base, optimizer=optimizer) for size in sizes]
  standard = [coordinates(*size, cfg.Standard(), optimizer=optimizer) for size in sizes]
  assert max(scaled) < 1.5 * min(scaled)
  assert max(standard) > 2 * min(standard)


class Net(cfg.Model):
  """A model of a user, with two hidden layers of Flax."""

  width: int = 16

  def build(self, context):
    sizes, layers = (self.width, 2 * self.width), []
    for size in sizes:
      layers += [nn.Dense(size), nn.relu]
    return nn.Sequential([lambda x: x.reshape(len(x), -1), *layers, nn.Dense(10)])


def test_shapes_decide_about_a_model_of_ones_own():
  config = small_config(
    model=Net(width=64), optimizer=cfg.AdamW(lr=0.01), parametrization=cfg.MuP(base={"width": 16})
  )
  info = data.digits("test").info
  found = table(config, info)
  assert found["layers_1/kernel"] == ("input", 1, 1, 1, 1)
  assert found["layers_3/kernel"] == ("hidden", 1 / 2, 1 / 4, 4, 1 / 4)
  assert found["layers_3/bias"] == ("vector", 1, 1, 1, 1)
  assert found["layers_5/kernel"] == ("output", 1 / 4, 1 / 4, 4, 4)
  assert found["layers_5/bias"] == ("fixed", 1, 1, 1, 1)


def test_kernels_of_equinox_are_transposed():
  leaves = {"a/weight": optim.Leaf((128, 64), (32, 16)), "b/weight": optim.Leaf((9, 64), (9, 16))}
  found = optim.mup(leaves, "adam", outputs="^b/", out_first=True)
  assert [f.kind for f in found.values()] == ["hidden", "output"]
  assert found["b/weight"].multiplier == 1 / 4
  with pytest.raises(ConfigError, match=r"MuP\.outputs is not set"):
    optim.mup(leaves, "adam", out_first=True)


class Rated(cfg.AdamW):
  update_rule = "lion"


def returning(factors):
  return type("Own", (cfg.Parametrization,), {"build": lambda self, context: factors})()


REFUSED = [
  (dict(optimizer=Rated(lr=0.1)), "has no rule for Rated"),
  (
    dict(parametrization=returning({"head/kernel": 0.5})),
    "maps 'head/kernel' to 0.5; return a dict from",
  ),
  (dict(parametrization=returning({"haed": optim.LeafFactors()})), "maps 'haed' to LeafFactors"),
  (dict(optimizer=cfg.LAMB(lr=0.1)), "has no rule for LAMB; use AdamW, Muon or SGD"),
  (dict(optimizer=cfg.LARS(lr=0.1)), "has no rule for LARS"),
  (dict(optimizer=cfg.SGD(lr=0.1)), "has no rule for SGD and another number of layers"),
  (dict(adapter=cfg.LoRA()), "has no rule for LoRA"),
  (dict(parametrization=cfg.MuP(base={"widht": 16})), "widht"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_has_no_rule_is_refused(fields, message):
  config = text_config(64, 8, cfg.CompleteP(base=BASE))
  with pytest.raises(ConfigError, match=message):
    factors_of(dataclasses.replace(config, **fields))


PATTERNS = [(cfg.CompleteP, "branch_ends", "^layer/o/"), (cfg.MuP, "outputs", "^haed/")]


@pytest.mark.parametrize(("kind", "name", "pattern"), PATTERNS)
def test_a_pattern_without_a_parameter_is_refused(kind, name, pattern):
  """It would train without the multipliers of the ends of branches, or of outputs."""
  config = text_config(64, 8, kind(base=BASE, **{name: pattern}))
  message = rf"{kind.__name__}\.{name}=.* matches no parameter; paths are"
  with pytest.raises(ConfigError, match=message):
    build.experiment(config)


def test_a_base_of_another_structure_is_refused():
  base = cfg.MuP(base={"pool": "mean"})
  vit = dict(model=cfg.ViT(patch=4, width=16, num_heads=4), optimizer=cfg.AdamW(lr=0.01))
  with pytest.raises(ConfigError, match=r"MuP\.base gives .* e\.g\. embed/class_token; change"):
    factors_of(small_config(**vit, parametrization=base), data.digits("test").info)
