"""SGD, AdamW, LAMB, Muon, masks and ratios: float64 numpy and closed forms."""

import inspect
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import config as cfg
from jaxscale import optim
from jaxscale.errors import ConfigError
from support.errors import config_error
from support.optimizers import optimize, optimize64


def numpy_sgd(w, grads, rates, m, wd, nesterov, inside=False, fix=0):
  v = np.zeros_like(w)
  for t, (g, lr) in enumerate(zip(grads, rates, strict=True)):
    g = g + wd * w if w.ndim > 1 else g
    if inside:  # the velocity holds the rate
      v = (m * lr / rates[t - 1] if 0 < t < fix else m) * v + lr * g
      w = w - (m * v + lr * g if nesterov else v)
    else:
      v = m * v + g
      w = w - lr * (g + m * v if nesterov else v)
  return w


def numpy_adam(w, grads, rates, b1, b2, eps, wd, phi=None, correct=True):
  """`phi` (low, high): LAMB."""
  mean, var = np.zeros_like(w), np.zeros_like(w)
  for t, (g, lr) in enumerate(zip(grads, rates, strict=True), 1):
    mean, var = b1 * mean + (1 - b1) * g, b2 * var + (1 - b2) * g * g
    c1, c2 = (1 - b1**t, 1 - b2**t) if correct else (1, 1)
    r = (mean / c1) / (np.sqrt(var / c2) + eps)
    ratio = 1.0
    if w.ndim > 1:
      r = r + wd * w
      if phi:
        top, bottom = min(max(np.linalg.norm(w), phi[0]), phi[1]), np.linalg.norm(r)
        ratio = top / bottom if top > 0 and bottom > 0 else 1.0
    w = w - lr * ratio * r
  return w


RATES = [0.03, 0.09, 0.17, 0.08, 0.02]
INF = np.inf


def rate(step):
  return jnp.array(RATES)[step]


def sgd_of(m, nesterov, **more):
  return lambda w, g: numpy_sgd(w, g, RATES, m, 0.01, nesterov, **more)


def adam_of(eps, wd, b1=0.9, b2=0.999, **more):
  return lambda w, g: numpy_adam(w, g, RATES, b1, b2, eps, wd, **more)


SGD, AS_RELEASED = optim.sgd, dict(weight_decay=1.5, bias_correction=False)
REFERENCES = {  # maker, options, reference
  "sgd": (optim.sgd, {}, sgd_of(0.9, True)),
  "sgd heavy ball": (optim.sgd, dict(nesterov=False, momentum=0.8), sgd_of(0.8, False)),
  "caffe": (SGD, dict(nesterov=False, rate_in_velocity=True), sgd_of(0.9, False, inside=True)),
  "sgd corrected 3": (SGD, dict(momentum_correction=3), sgd_of(0.9, True, inside=True, fix=3)),
  # eq. 9 and 10 of arXiv:1706.02677
  "sgd corrected is sgd": (optim.sgd, dict(momentum_correction=True), sgd_of(0.9, True)),
  "adamw": (optim.adamw, dict(weight_decay=0.1), adam_of(1e-8, 0.1)),
  "lamb": (optim.lamb, dict(weight_decay=0.1), adam_of(1e-6, 0.1, phi=(0, INF))),
  "lamb clipped below": (
    optim.lamb,
    dict(b1=0.8, b2=0.95, eps=1e-3, phi_min=7.0),
    adam_of(1e-3, 0.01, 0.8, 0.95, phi=(7, INF)),
  ),
  "lamb clipped above": (optim.lamb, dict(phi_max=2.0), adam_of(1e-6, 0.01, phi=(0, 2))),
  "lamb as released": (optim.lamb, AS_RELEASED, adam_of(1e-6, 1.5, phi=(0, INF), correct=False)),
}


def random_layers():
  rng = np.random.default_rng(0)
  shapes = {"matrix": (5, 7), "bias": (7,), "conv": (3, 3, 4, 2), "zero": (4, 3)}
  draw = lambda: {name: rng.standard_normal(shape) for name, shape in shapes.items()}  # noqa: E731
  params, *grads = (draw() for _ in range(6))
  params["zero"] *= 0
  return params, grads


@pytest.mark.parametrize("name", REFERENCES)
def test_against_numpy(name):
  make, options, reference = REFERENCES[name]
  options = (dict(weight_decay=0.01) if make is optim.sgd else {}) | options
  params, grads = random_layers()
  got = optimize64(make(rate, **options), params, grads)
  for layer, w in params.items():
    wanted = reference(w, [g[layer] for g in grads])
    np.testing.assert_allclose(got[layer], wanted, rtol=1e-10, err_msg=layer)


def test_float32_moments_of_a_constant_gradient():
  """m_hat = g and v_hat = g^2 at every step: each update is the rate itself."""
  w, g = jnp.zeros(3), jnp.array([1e-3, 1.0, -1e3])
  tx = optim.adamw(1.0, eps=0.0)
  update, state = jax.jit(tx.update), tx.init(w)
  for _ in range(30):
    moved, state = update(g, state, w)
    np.testing.assert_allclose(moved, -np.sign(g), rtol=2e-6)


@pytest.mark.parametrize("make", [optim.lamb, optim.adamw, optim.sgd, optim.muon, optim.soap])
def test_bfloat16_parameters_stay_so(make):
  w = {"kernel": jnp.ones((4, 4), jnp.bfloat16), "bias": jnp.ones(4, jnp.bfloat16)}
  tx = make(0.5)
  updates, state = tx.update(jax.tree.map(lambda x: x / 4, w), tx.init(w), w)
  assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
  moments = [x for x in jax.tree.leaves(state) if x.size > 3 and x.ndim]
  assert moments and {x.dtype for x in moments} == {jnp.dtype(jnp.float32)}
  # A second moment in bfloat16 would not move: 0.999 rounds to 1.
  if make is optim.lamb:
    np.testing.assert_allclose(optax.tree.get(state, "nu")["bias"], 0.001 / 16, rtol=1e-6)


MAKERS = [optim.lars, optim.lamb, optim.sgd, optim.adamw, optim.muon, optim.soap]


@pytest.mark.parametrize("make", MAKERS)
def test_the_state_keeps_its_types(make):
  """Else the second step would compile again, and a checkpoint would not fit."""
  params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
  tx = make(optim.warmup_cosine(0.1, 2, 8))
  state = tx.init(params)
  _, after = jax.jit(tx.update)(params, state, params)
  describe = lambda t: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), t)  # noqa: E731
  assert jax.tree.structure(state) == jax.tree.structure(after)
  assert describe(state) == describe(after)


def test_masks():
  params = {"a": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "scale": jnp.ones(())}
  assert optim.kernels(params) == {"a": {"kernel": True, "bias": False}, "scale": False}
  mask = optim.matching(r"^a/")(params)
  assert mask == {"a": {"kernel": True, "bias": True}, "scale": False}
  # An excluded leaf moves by the bare rate: no ratio, no decay.
  grads = jax.tree.map(jnp.ones_like, params)
  for make in (optim.lars, optim.lamb):
    (after,), _ = optimize(make(0.5, weight_decay=0.1), params, [grads])
    np.testing.assert_allclose(after["a"]["bias"], [0.5, 0.5], rtol=1e-5)


def test_trust_ratios_are_read_out_of_any_state():
  params = {
    "head": {"kernel": 2 * jnp.ones((4, 4)), "bias": jnp.ones(4)},
    "scan": {"kernel": jnp.ones((3, 2, 2)) * jnp.array([1.0, 2, 4])[:, None, None]},
  }
  grads = jax.tree.map(jnp.ones_like, params)
  stacked = optim.matching("^scan/")
  # |w| / |g| is 2 in the head, and 1, 2, 4 in the scan; without decay eta times it.
  lars = optim.lars(0.1, weight_decay=0.0, trust_coefficient=0.25, stacked=stacked)
  # LAMB's first r is 1 everywhere: the same without eta.
  lamb = optim.lamb(0.1, weight_decay=0.0, eps=0.0, stacked=stacked)
  for tx, eta in ((lars, 0.25), (lamb, 1.0)):
    chained = optax.chain(optax.clip_by_global_norm(1e9), tx, optax.identity())
    before = optim.trust_ratios(chained.init(params))
    np.testing.assert_array_equal(before["scan/kernel"], [1, 1, 1])
    _, state = jax.jit(chained.update)(grads, chained.init(params), params)
    ratios = optim.trust_ratios(state)
    assert set(ratios) == {"head/kernel", "scan/kernel"}  # and not head/bias
    np.testing.assert_allclose(ratios["head/kernel"], 2 * eta, rtol=1e-5)
    np.testing.assert_allclose(ratios["scan/kernel"], eta * np.array([1, 2, 4]), rtol=1e-5)
    assert ratios["head/kernel"].dtype == jnp.float32
    only_head = optax.masked(tx, {"head": True, "scan": False})
    _, state = only_head.update(grads, only_head.init(params), params)
    assert set(optim.trust_ratios(state)) == {"head/kernel"}
  assert optim.trust_ratios(optim.sgd(0.1).init(params)) == {}


def by_layers(learning_rate):
  decay = optim.layerwise_rate_decay(0.5, ["matrix", "bias", "conv", "zero"])
  return optax.chain(optim.adamw(learning_rate), decay)


INJECTED = {
  **{f"lars {v}": (optim.lars, {"variant": v}) for v in get_args(optim.LarsVariant)},
  "lars corrected": (optim.lars, {"momentum_correction": 3}),
  "lars of no decay": (optim.lars, {"variant": "timm", "weight_decay": 0.0}),
  "lamb": (optim.lamb, {"phi_max": 2.0}),
  "lamb timm": (optim.lamb, {"variant": "timm"}),
  "lamb timm without decay": (optim.lamb, {"variant": "timm", "weight_decay": 0.0}),
  "adamw": (optim.adamw, {"weight_decay": 1.0}),
  "sgd": (optim.sgd, {"weight_decay": 1.0}),
  "sgd corrected": (optim.sgd, {"momentum_correction": 3}),
  "muon": (optim.muon, {"weight_decay": 1.0}),
  "muon torch": (optim.muon, {"variant": "torch"}),
  "soap": (optim.soap, {"precondition_frequency": 2, "max_precond_dim": 8}),
  "masked": (optim.lars, {"mask": "^(matrix|bias)$"}),
  "momentum": (optim.scale_by_rate_and_momentum, {"momentum_correction": 3}),
  "by layers": (by_layers, {}),
}


EAGER = "lars paper", "lamb", "muon"


def injected(make, *static):
  """Return the optimizer with injected numbers, except those that decide shapes."""
  decides = {"max_precond_dim"} & {*inspect.signature(make).parameters}
  return optax.inject_hyperparams(make, static_args=(*static, *decides))


@pytest.mark.parametrize(
  "name, jitted", [(n, True) for n in INJECTED] + [(n, False) for n in EAGER]
)
def test_inject_hyperparams_changes_no_update(name, jitted):
  make, options = INJECTED[name]
  params, grads = jax.tree.map(jnp.float32, random_layers())

  def last(tx):
    update = jax.jit(tx.update) if jitted else tx.update
    return optimize(optax.GradientTransformation(tx.init, update), params, grads)[0][-1]

  wanted = last(make(learning_rate=rate, **options))
  got = last(injected(make)(learning_rate=rate, **options))
  atol = 1e-5 if name == "soap" else 1e-6  # Eigenvectors amplify rounding.
  for layer, w in wanted.items():
    np.testing.assert_allclose(got[layer], w, rtol=1e-5, atol=atol, err_msg=layer)


DECAY = optim.add_decayed_weights
HEAVY_BALL, NESTEROV = optax.trace(0.9), optax.trace(0.9, nesterov=True)
BY_RATE, RATIO = optax.scale_by_learning_rate(rate), optim.scale_by_lars_ratio
COMPOSED = {  # an optimizer, and the chain that it stands for
  "sgd": (optim.sgd(rate, weight_decay=0.1), (DECAY(0.1), NESTEROV, BY_RATE)),
  "lars": (optim.lars(rate), (RATIO(), optim.scale_by_rate_and_momentum(rate))),
  "lars torch": (optim.lars(rate, variant="torch"), (RATIO(), HEAVY_BALL, BY_RATE)),
  "lars tf_contrib": (optim.lars(rate, variant="tf_contrib"), (RATIO(inner=HEAVY_BALL), BY_RATE)),
  "larc_clip": (optim.lars(rate, variant="larc_clip"), (RATIO(limit=rate), HEAVY_BALL, BY_RATE)),
  "lamb": (
    optim.lamb(rate),
    (optim.scale_by_adam(0.9, 0.999, 1e-6), DECAY(1e-2), optim.scale_by_trust_ratio(), BY_RATE),
  ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_an_optimizer_is_a_chain_of_parts(name):
  tx, parts = COMPOSED[name]
  params, grads = jax.tree.map(jnp.float32, random_layers())
  composed = optax.chain(optax.identity(), *parts)
  wanted, got = optimize(tx, params, grads)[0], optimize(composed, params, grads)[0]
  jax.tree.map(np.testing.assert_array_equal, got, wanted)


PARTS = {
  "lars ratio": (RATIO, {"weight_decay": 0.1}),
  "lars ratio with a limit": (RATIO, {"limit": rate}),
  "trust ratio": (optim.scale_by_trust_ratio, {"phi_max": 0.5}),
  "adam": (optim.scale_by_adam, {"b1": 0.8, "b2": 0.9, "eps": 1e-6}),
  "momentum": (optim.scale_by_rate_and_momentum, {"learning_rate": rate}),
  "muon": (optim.scale_by_muon, {"momentum": 0.8}),
  "soap": (optim.scale_by_soap, {"b1": 0.8, "precondition_frequency": 2, "max_precond_dim": 8}),
  "decay": (optim.add_decayed_weights, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_can_be_injected_and_masked(name):
  make, options = PARTS[name]
  params, grads = jax.tree.map(jnp.float32, random_layers())
  masked = {"matrix": True, "bias": False, "conv": True, "zero": False}
  of_mask = {n: params[n] for n, flag in masked.items() if flag}
  alone, _ = optimize(make(**options), of_mask, [{n: g[n] for n in of_mask} for g in grads])
  for tx in (make(**options), injected(make)(**options)):
    got, _ = optimize(optax.masked(tx, masked), params, grads)
    for layer, w in alone[-1].items():
      np.testing.assert_allclose(got[-1][layer], w, rtol=1e-5, atol=1e-5)
    for layer in ("bias", "zero"):  # what is masked passes as it is
      wanted = params[layer] + sum(g[layer] for g in grads)
      np.testing.assert_allclose(got[-1][layer], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["mask", "stacked"])
def test_a_mask_that_was_called_as_a_schedule_is_refused(make, name):
  params, _ = jax.tree.map(jnp.float32, random_layers())
  options = {"learning_rate": 0.1, name: optim.matching("^conv$")}
  with pytest.raises(ConfigError, match=r"add static_args=\('mask', 'stacked'\)"):
    optimize(injected(make)(**options), params, [params])
  static = injected(make, "mask", "stacked")
  optimize(static(**options), params, [params])


def without_params(tx):
  tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


MISTAKES = [
  (lambda: optim.lamb(0.1, phi_min=2, phi_max=1), "phi_min=2 with phi_max=1"),
  (lambda: optim.sgd(0.1, momentum_correction=5, rate_in_velocity=False), "=5 requires a velocity"),
  (lambda: optim.layerwise_rate_decay(0, ["x"]), "0 < decay <= 1"),
  (lambda: optim.layerwise_rate_decay(1.5, ["x"]), "0 < decay <= 1"),
  (
    lambda: optim.scale_learning_rate(0.1, 8, 4, "cube"),
    "'cube' is unknown; use one of none, linear, sqrt",
  ),
  *((lambda make=make: without_params(make(0.1)), "params=None: call") for make in MAKERS),
  (lambda: optim.soap(0.1, max_precond_dim=jnp.int32(9)), "add static_args=.'max_precond_dim'"),
]


@pytest.mark.parametrize("make, line", MISTAKES)
def test_mistakes_are_reported(make, line):
  with pytest.raises(ValueError, match=line):
    make()


@pytest.mark.parametrize("correct", [True, False])
def test_lamb_without_a_gradient_stands_still(correct):
  """|r| is 0: the ratio is 1 and nothing is NaN, then or later."""
  w = {"kernel": jnp.ones((2, 3)), "zero": jnp.zeros((2, 3)), "bias": jnp.ones(3)}
  still, one = jax.tree.map(jnp.zeros_like, w), jax.tree.map(jnp.ones_like, w)
  tx = optim.lamb(0.5, weight_decay=0.0, bias_correction=correct)
  (after, moved), _ = optimize(tx, w, [still, one])
  jax.tree.map(np.testing.assert_array_equal, after, w)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(moved))
  _, state = tx.update(still, tx.init(w), w)
  np.testing.assert_array_equal(list(optim.trust_ratios(state).values()), [1, 1])
  # A kernel of 0 that has a gradient: |w| is 0, so r moves it by the bare rate.
  _, state = tx.update(one, tx.init(w), w)
  ratios = optim.trust_ratios(state)
  assert ratios["zero"] == 1 and ratios["kernel"] != 1


MUON = {  # the variant of PyTorch is in test_torch_optimizers.py
  "defaults": {},
  "heavy ball": dict(nesterov=False, momentum=0.8, weight_decay=0.2),
  "jordan's size": dict(adjust="original", ns_steps=3, eps=0.1, weight_decay=0.3),
  "adam's own": dict(adam_rate_factor=2.0, b1=0.7, b2=0.9),
  "coefficients": dict(ns_coeffs=(2.0, -1.5, 0.5), ns_steps=7),
}
THEIRS = dict(momentum="beta", b1="adam_b1", b2="adam_b2")


def optax_muon(adjust="match_rms_adamw", adam_rate_factor=1.0, **options):
  """Muon of optax by the names of ours."""
  options = {THEIRS.get(name, name): value for name, value in options.items()}
  options["adam_learning_rate"] = lambda step: adam_rate_factor * rate(step)
  rms = None if adjust == "original" else 0.2
  return optax.contrib.muon(rate, consistent_rms=rms, **options)


def optimize_standard(tx, params, grads):
  with jax.numpy_dtype_promotion("standard"):
    return optimize64(tx, params, grads)


@pytest.mark.parametrize("name", MUON)
def test_muon_is_that_of_optax(name):
  params, grads = random_layers()
  flat = {n: w.reshape(-1, w.shape[-1]) if w.ndim > 1 else w for n, w in params.items()}
  grads = [{n: g[n].reshape(w.shape) for n, w in flat.items()} for g in grads]
  wanted = optimize_standard(optax_muon(**MUON[name]), flat, grads)
  ours = optim.muon(rate, **MUON[name])
  for layer, got in optimize64(ours, flat, grads).items():
    np.testing.assert_allclose(got, wanted[layer], rtol=1e-9, err_msg=layer)


def test_what_muon_has_not_moves_by_adamw():
  params, grads = random_layers()
  adam = optimize_standard(optax.adamw(rate, weight_decay=0.0, nesterov=True), params, grads)
  whole, same = (optimize64(optim.muon(rate, **m), params, grads) for m in ({}, {"mask": None}))
  jax.tree.map(np.testing.assert_array_equal, whole, same)
  mask = optim.matching("^(matrix|bias)$")
  got = optimize64(optim.muon(rate, mask=mask, weight_decay=0.0), params, grads)
  for layer, w in got.items():
    wanted = whole if layer == "matrix" else adam
    np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, err_msg=layer)
  flat = {n: w.reshape(-1, w.shape[-1]) if w.ndim > 1 else w for n, w in params.items()}
  grads = [{n: g[n].reshape(w.shape) for n, w in flat.items()} for g in grads]
  np.testing.assert_allclose(  # a convolution is a matrix of its last dim
    whole["conv"].reshape(-1, 2), optimize64(optim.muon(rate), flat, grads)["conv"], rtol=1e-9
  )


def test_layerwise_rate_decay():
  params = {name: {"w": jnp.ones(2)} for name in ("stem", "block_0", "block_1", "head")}
  order = ["^stem", "^block_0", "^block_1", "^head"]
  tx = optim.layerwise_rate_decay(0.5, order)
  scaled, _ = tx.update(params, tx.init(params))
  got = {name: float(scaled[name]["w"][0]) for name in params}
  assert got == {"stem": 0.125, "block_0": 0.25, "block_1": 0.5, "head": 1.0}
  with pytest.raises(ValueError, match=r"order=.*: head/w matches none;"):
    optim.layerwise_rate_decay(0.5, order[:3]).init(params)
  with pytest.raises(ValueError, match=r"order=.*: block_0/w matches \['\^block_0', 'block'"):
    optim.layerwise_rate_decay(0.5, ["^stem", "^block_0", "block", "head"]).init(params)


def test_scaling_rules():
  # Goyal et al.: 0.1 at 256 is 3.2 at 8192.
  assert optim.scale_learning_rate(0.1, 8192, 256, "linear") == pytest.approx(3.2)
  # You et al. (arXiv:1904.00962): 4/(100 * 2^3) at 512 is 4/100 at 32K.
  assert optim.scale_learning_rate(0.005, 32768, 512, "sqrt") == pytest.approx(0.04)
  assert optim.scale_learning_rate(0.1, 1024, 256, "none") == 0.1


NOT_OPTIMIZERS = [
  (optax.adam(1e-3), "Optax.make=.* is not a function; give a function of the learn"),
  ("adam", "Optax.make=str is not a function; give a function of the learning rate"),
  (lambda: optax.adam(1e-3), "Optax.make failed with TypeError: .*; give a function of"),
  (lambda rate: rate, "Optax.make returned function instead of an optax transformation; give"),
]


@pytest.mark.parametrize("make, line", NOT_OPTIMIZERS)
def test_an_optimizer_that_is_none_is_one_line(make, line):
  with config_error(match=line):
    optim.Optax(make=make, lr=0.1).build(lambda step: 0.1, cfg.OptimizerContext())


FAILING = {
  "init of Optax.make failed with ValueError: .*'b'.*; give a transf": lambda rate: (
    optax.multi_transform({"a": optax.sgd(rate)}, lambda _: {"w": "b"})
  ),
  "update of Optax.make failed with KeyError: 'no such'; give a transformation": lambda rate: (
    optax.stateless(lambda updates, params: updates["no such"])
  ),
}


@pytest.mark.parametrize("line, make", FAILING.items())
def test_a_transformation_that_fails_is_one_line(make, line):
  made = optim.Optax(make=make, lr=0.1).build(lambda step: 0.1, cfg.OptimizerContext())
  params = {"w": np.ones(3, np.float32)}
  with config_error(match=line):
    made.update(params, made.init(params), params)
